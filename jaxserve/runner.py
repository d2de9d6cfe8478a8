"""Owns every device buffer and every compiled program; knows slots and tokens, not requests.

All programs are compiled when a runner is made. Afterwards its methods only call them: nothing traces,
nothing compiles, and the state keeps its addresses because every call donates it.
"""

import functools
import itertools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from jaxserve import sampling, snapshot, step
from jaxserve.buckets import SCORE_CHUNK, Buckets
from jaxserve.config import ModelConfig
from jaxserve.models.mixers import follows_real_length
from jaxserve.models.weights import Weights, step_nbytes
from jaxserve.params import SamplingParams
from jaxserve.sampling import Options
from jaxserve.state import abstract_memory, abstract_state, init_memory, init_state, joined, part

Progress = Callable[[str, int, int], None]
TOUCHED = step.TOUCHED | snapshot.TOUCHED
IDLE_OPTIONS = sampling.options(SamplingParams(), seed=0, vocab_size=1)


class Mail:
    """A mailbox on its way to the host."""

    def __init__(self, array: jax.Array):
        self._array, self._value = array, None
        array.copy_to_host_async()

    def read(self) -> np.ndarray:
        """i32 [slots, width]; waits for the device the first time. A true copy: the mailbox is donated again
        later.
        """
        if self._value is None:
            self._value, self._array = np.array(self._array), None
        return self._value


class Runner:
    """The device side of an engine."""

    def __init__(
        self,
        weights: Weights,
        config: ModelConfig,
        *,
        slots: int,
        context: int,
        kv_dtype: str,
        reuse: bool = False,
        pinned: bool = False,
        progress: Progress | None = None,
    ):
        """reuse: compile also what reads, writes, copies and resumes rows. pinned: one number of lanes."""
        self.weights, self.config = weights, config
        self.slots, self.context, self.kv_dtype = slots, context, kv_dtype
        platform = jax.default_backend()
        self.buckets = Buckets.of(
            context,
            slots,
            platform,
            pinned=pinned,
            one_reach=follows_real_length(config, kv_dtype),
            step_nbytes=step_nbytes(weights, config),
        )
        self._blocks_per_call = snapshot.BLOCKS_PER_CALL.get(platform, 1)
        self.programs = _compile(self._lowerings() | (self._row_lowerings() if reuse else {}), progress)
        init_memory(config, context=context, kv_dtype=kv_dtype)  # compiled here, so that `logits` need not
        self.reset()
        self._warm_up()

    def reset(self) -> None:
        """(Re)allocate the state and the mailboxes; whatever the old ones held is gone."""
        self.state = None
        self.state = init_state(self.config, slots=self.slots, context=self.context, kv_dtype=self.kv_dtype)
        put = lambda wide: jax.device_put(np.zeros((self.slots, step.mailbox_width(wide)), np.int32))  # noqa: E731
        self._mailboxes = {wide: [put(wide), put(wide)] for wide in (False, True)}
        self._mails: dict[bool, list[Mail | None]] = {False: [None, None], True: [None, None]}
        self._rows: dict[tuple[int, ...], jax.Array] = {}
        self.ran = Counter()  # calls of each prefill and decode program since a trace began

    def close(self) -> None:
        """Give the device memory back."""
        for leaf in jax.tree.leaves((self.state, self.weights, self._mailboxes, self._rows)):
            leaf.delete()
        self.state = self.weights = None
        self.programs = {}

    # -- what a request needs, in order

    def admit(self, slot: int, options: Options, limit: int) -> None:
        """Give a slot a request's options and token limit."""
        self._update("admit", np.int32(slot), options, np.int32(limit))

    def hit(self, slot: int, options: Options, limit: int, length: int, *, sampled: bool) -> None:
        """The same, and draw its first token from the logits kept at `length` tokens; `post` then sends the
        mailbox (sampled: the wide one), whatever the number of hits before.
        """
        request = sampling.pack(slot, limit, length, options=options)
        self._mailboxes[sampled][0] = self._update(("hit", sampled), self._vacant(sampled), request)

    def prefill(
        self, slot: int, tokens: Sequence[int], start: int, stop: int, *, size: int | None = None
    ) -> int:
        """Feed the next chunk of `tokens[start:stop]` at position `start`, with the program of `size` tokens.

        With the last of `tokens` the first token is drawn. Returns how many tokens were fed.
        """
        size = self.buckets.chunk(stop - start) if size is None else size
        fed = tokens[start : min(stop, start + size)]
        padded = np.zeros(size, np.int32)
        padded[: len(fed)] = fed
        name = ("prefill", size, start + len(fed) == len(tokens))
        place = (np.int32(x) for x in (slot, start, len(fed)))
        self.state = self.programs[name](self.weights, self.state, padded, *place)
        self.ran[name] += 1
        return len(fed)

    def decode(self, rows: Sequence[int], *, sampled: bool, longest: int, steps: int = 1) -> None:
        """Steps for the given slots; `longest` is the most tokens one of them will have fed."""
        lanes = self.buckets.lane(len(rows))
        key = (*rows, *[self.slots] * (lanes - len(rows)))
        if key not in self._rows:
            self._rows[key] = jax.device_put(np.array(key, np.int32))
        name = ("decode", lanes, self.buckets.reach(longest), steps, sampled)
        self.state = self.programs[name](self.weights, self.state, self._rows[key])
        self.ran[name] += 1

    def peek(self, *, wide: bool) -> Mail:
        """Copy status and drawn tokens (wide: and log-probabilities) into one of two mailboxes, and start it
        on its way.
        """
        box = self.programs["peek", wide](self._vacant(wide), *step.peeked(self.state))
        self._mailboxes[wide][0] = box
        return self.post(wide=wide)

    def post(self, *, wide: bool) -> Mail:
        """Start the mailbox that was filled on its way."""
        boxes, mails = self._mailboxes[wide], self._mails[wide]
        boxes.append(boxes.pop(0))
        mails.append(Mail(boxes[-1]))
        mails.pop(0)
        return mails[-1]

    def _vacant(self, wide: bool) -> jax.Array:
        """The mailbox that is filled next."""
        if self._mails[wide][0] is not None:
            self._mails[wide][0].read()  # before its mailbox is donated again
        return self._mailboxes[wide][0]

    def halt(self, slot: int, length: int) -> None:
        """Freeze a slot; only its first `length` tokens count as fed."""
        self._update("halt", np.int32(slot), np.int32(length))

    # -- rows as values: `host_tier.Rows`

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Make a slot remember the first `length` tokens of another."""
        name = ("copy_row", self.buckets.reach(length))
        self._update(name, np.int32(source), np.int32(target), np.int32(length))

    def read_block(self, slot: int, start: int) -> jax.Array:
        """`snapshot.read_block`"""
        return self.programs["read_block"](self.state, np.int32(slot), np.int32(start))

    def read_end(self, slot: int) -> snapshot.End:
        """`snapshot.read_end`"""
        return self.programs["read_end"](self.state, np.int32(slot))

    def write_blocks(self, slot: int, start: int, count: int, blocks: Sequence[jax.Array]) -> None:
        """`snapshot.write_blocks`, as many in a call as were compiled: the last ones stand in for those that
        are missing.
        """
        size = self._blocks_per_call
        for at in range(0, len(blocks), size):
            group = [*blocks[at : at + size], *[blocks[-1]] * (at + size - len(blocks))]
            done = at * snapshot.BLOCK_TOKENS
            place = (np.int32(x) for x in (slot, start + done, count - done))
            self._update("write_blocks", *place, *group)

    def write_end(self, slot: int, tokens: np.ndarray, end: snapshot.End) -> None:
        """`snapshot.write_end`, with the tokens padded"""
        padded = np.zeros(self.context, np.int32)
        padded[: len(tokens)] = tokens
        self._update("write_end", np.int32(slot), padded, end)

    def _update(self, name, *arguments):
        """Run a program on the fields of the state that it touches. Returns what else comes out of it."""
        touched = self.programs[name](part(self.state, _touched(name)), *arguments)
        touched, rest = touched if isinstance(touched, tuple) else (touched, None)
        self.state = joined(self.state, touched)
        return rest

    # -- no slot

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Teacher-forced logits f32 [n, V], in a memory of their own."""
        memory = init_memory(self.config, context=self.context, kv_dtype=self.kv_dtype)
        size, out = min(SCORE_CHUNK, self.context), []
        for start in range(0, len(tokens), size):
            chunk = tokens[start : start + size]
            padded = np.zeros(size, np.int32)
            padded[: len(chunk)] = chunk
            memory, scores = self.programs["score"](
                self.weights, memory, padded, np.int32(start), np.int32(len(chunk))
            )
            out.append(np.array(scores)[: len(chunk)])
        return np.concatenate(out)

    # -- programs

    def program_memory(self) -> dict:
        """Name → {"temporaries": bytes, "aliased": bytes of donated arguments updated in place}."""
        analyses = {name: program.memory_analysis() for name, program in self.programs.items()}
        return {
            name: {"temporaries": a.temp_size_in_bytes, "aliased": a.alias_size_in_bytes}
            for name, a in analyses.items()
        }

    def program_texts(self) -> dict[str, str]:
        """Phase ("decode", "prefill") → compiled text of its program that ran most often: it says which layer
        a kernel belongs to.
        """
        most = {name[0]: name for name, _ in reversed(self.ran.most_common())}
        return {phase: self.programs[name].as_text() for phase, name in most.items()}

    def lower(self, name: tuple) -> jax.stages.Lowered:
        """A prefill or decode program before compilation."""
        return self._lowerings()[name]()

    def _lowerings(self) -> dict:
        """Name → a thunk that lowers the program."""
        config, i32 = self.config, jax.ShapeDtypeStruct((), np.int32)
        shape = dict(slots=self.slots, context=self.context, kv_dtype=self.kv_dtype)
        state = abstract_state(config, **shape)
        memory = abstract_memory(config, slots=1, context=self.context, kv_dtype=self.kv_dtype)
        options = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state.options)
        ids = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)  # noqa: E731
        table = {
            "admit": lambda: step.admit.lower(part(state, _touched("admit")), i32, options, i32),
            "halt": lambda: step.halt.lower(part(state, _touched("halt")), i32, i32),
            "score": lambda: step.score.lower(
                self.weights, memory, ids(min(SCORE_CHUNK, self.context)), i32, i32, config=config
            ),
        }
        for wide in (False, True):
            table["peek", wide] = functools.partial(
                step.peek.lower, ids(self.slots, step.mailbox_width(wide)), *step.peeked(state)
            )
        for size in self.buckets.chunks:
            for final in (True, False):
                table["prefill", size, final] = functools.partial(
                    step.prefill.lower,
                    self.weights,
                    state,
                    ids(size),
                    i32,
                    i32,
                    i32,
                    config=config,
                    final=final,
                )
        for lanes in self.buckets.lanes:
            for choice in itertools.product(self.buckets.reaches, self.buckets.steps(lanes), (False, True)):
                reach, steps, sampled = choice
                table["decode", lanes, *choice] = functools.partial(
                    step.decode.lower,
                    self.weights,
                    state,
                    ids(lanes),
                    config=config,
                    steps=steps,
                    sampled=sampled,
                    reach=reach,
                )
        return table

    def _row_lowerings(self) -> dict:
        """The same for rows as values, and for what starts from them without a forward pass."""
        state = abstract_state(self.config, slots=self.slots, context=self.context, kv_dtype=self.kv_dtype)
        block = snapshot.abstract_block(self.config, self.kv_dtype)
        end = snapshot.abstract_end(self.config)
        table = snapshot.lowerings(
            state, block, end, reaches=self.buckets.reaches, blocks=self._blocks_per_call
        )
        request = sampling.pack(0, 0, 0, options=IDLE_OPTIONS)
        for sampled in (False, True):
            box = jax.ShapeDtypeStruct((self.slots, step.mailbox_width(sampled)), np.int32)
            name = ("hit", sampled)
            table[name] = functools.partial(
                step.hit.lower, part(state, _touched(name)), box, request, sampled=sampled
            )
        return table

    def _warm_up(self) -> None:
        """Run every step once on idle rows, so that the GPU's graphs are recorded beforehand."""
        if jax.default_backend() == "cpu":
            return
        for name, program in self.programs.items():
            if name[0] == "decode":
                idle = jax.device_put(np.full(name[1], self.slots, np.int32))
                self.state = program(self.weights, self.state, idle)
            elif name[0] == "prefill":
                self.state = program(
                    self.weights, self.state, np.zeros(name[1], np.int32), *[np.int32(0)] * 3
                )
        self._warm_up_rows()
        for wide in (False, True):
            self.peek(wide=wide).read()
        self.halt(0, 0)
        jax.block_until_ready(self.state)

    def _warm_up_rows(self) -> None:
        """The same for rows as values: slot 0, which remembers nothing yet, moves onto itself."""
        if "read_end" in self.programs:
            self.write_end(0, np.zeros(0, np.int32), self.read_end(0))
        if "read_block" in self.programs:
            self.write_blocks(0, 0, 0, [self.read_block(0, 0)])
        for name in self.programs:
            if name[0] == "copy_row":
                self.copy_row(0, 0, name[1])
            elif name[0] == "hit":
                self.hit(0, IDLE_OPTIONS, 0, 0, sampled=name[1])


def _touched(name) -> tuple[str, ...]:
    """The fields of the state that a program touches."""
    return TOUCHED[name] if name in TOUCHED else TOUCHED[name[0]]


def _compile(lowerings: dict, progress: Progress | None) -> dict:
    """Lower one program after the other; XLA compiles them beside each other, outside Python's lock."""
    done, compiled = 0, {}
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        waiting = {
            name: pool.submit(lambda lowered: lowered.compile(), lower()) for name, lower in lowerings.items()
        }
        for name, future in waiting.items():
            compiled[name] = future.result()
            done += 1
            if progress:
                progress("programs", done, len(lowerings))
    return compiled
