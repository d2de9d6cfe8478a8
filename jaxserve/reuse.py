"""Between the loop and the tiers: what slots remember, how a prompt's state comes about, what is kept.

A row that a request has left remembers its tokens (residency) until another request takes the slot. What
should outlive that goes to the host tier. Nothing is stored between a request's tokens, except the recurrent
checkpoints of a long prompt, which exist only while it is fed: the logits at the end of a prompt are copied
on the device, and stored with the rest once the request is over.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from jaxserve.host_tier import HostTier, Rows
from jaxserve.prefix import Holding, Plan, checkpoint_lengths, plan
from jaxserve.request import Request
from jaxserve.saved import Entry
from jaxserve.snapshot import End

CHECKPOINT_TOKENS = 512
"""Tokens between the recurrent checkpoints of a long prompt: the largest prefill chunk, so that none costs a
call of its own. One holds a row's recurrent state: 53 MB in Qwen3.5-4B, as much as its attention layers keep
of 1,600 tokens."""

UNLIMITED = 2**62  # bytes
OFF = "prefix reuse is switched off"


@dataclasses.dataclass(frozen=True)
class Kept:
    """What was copied on the device at the end of a prompt: `Rows` that offer it instead of the row's own."""

    rows: Rows
    length: int
    end: End

    def read_block(self, slot: int, start: int) -> jax.Array:
        """Blocks are still in the row, which only grew."""
        return self.rows.read_block(slot, start)

    def read_end(self, slot: int) -> End:
        """As it was at the end of the prompt."""
        return self.end


@dataclasses.dataclass(frozen=True)
class Leftover:
    """What a finished request left in its slot, not yet in the host tier."""

    slot: int
    tokens: np.ndarray  # i32, the row stands for them
    exact: bool
    kept: Kept | None


class Reuse:
    """Prefix reuse on one runner: with a tier rows are stored, with residency idle slots are matched."""

    def __init__(
        self, runner, *, tier: HostTier | None = None, residency: bool = False, recurrent: bool = False
    ):
        self.runner, self.tier, self.residency, self.recurrent = runner, tier, residency, recurrent
        self.every = CHECKPOINT_TOKENS
        self.counters = Counter()
        self._clock = itertools.count(1)
        self._leftovers: deque[Leftover] = deque()
        self._holdings = [Holding()] * runner.slots

    @property
    def enabled(self) -> bool:
        """Whether any tier is on."""
        return self.residency or self.tier is not None

    def reset(self) -> None:
        """The state was made anew: forget what slots held, keep what reached the host."""
        self._holdings = [Holding()] * self.runner.slots
        self._leftovers.clear()
        if self.tier is not None:
            self.tier.settle()

    def close(self) -> None:
        """Give the host memory back."""
        self._leftovers.clear()
        if self.tier is not None:
            self.tier.clear()

    # -- before a request runs

    def plan(self, request: Request, slots: Sequence[Request | None], ready: Request | None = None) -> Plan:
        """The cheapest way to a prompt's state. `ready`: a request that has just drawn its first token."""
        holdings = [
            held if other is None else self._busy(other, other is ready)
            for held, other in zip(self._holdings, slots, strict=True)
        ]
        index = None if self.tier is None else self.tier.index
        chosen = plan(request.ids, holdings, index, recurrent=self.recurrent)
        return chosen if self.enabled else chosen._replace(why=OFF)

    def establish(self, request: Request, chosen: Plan) -> None:
        """Bring about what the plan promises, and give the slot the request; on a full hit its first token is
        drawn.
        """
        slot, runner = chosen.slot, self.runner
        self._holdings[slot] = Holding()
        if chosen.source is not None:
            runner.copy_row(chosen.source, slot, chosen.length)
        if chosen.snapshot is not None:
            self.tier.restore(runner, slot, chosen.snapshot, keep=chosen.keep)
        if chosen.full_hit:
            runner.hit(slot, request.options, request.limit, chosen.length, sampled=request.sampled)
        else:
            runner.admit(slot, request.options, request.limit)
        request.stops = self._stops(request, chosen.length)
        self.counters[chosen.route] += 1
        self.counters["full_hits"] += chosen.full_hit
        self.counters["cached_tokens"] += chosen.length

    # -- while its prompt is fed

    def fed(self, request: Request) -> None:
        """A chunk was dispatched: take the checkpoint that is due inside the prompt."""
        at = request.fed
        if at < len(request.prompt) and at in request.stops:
            tokens = request.ids[:at]
            is_new = self.tier.index.checkpoint(tokens) is None
            if self.tier.store(tokens, self.runner, request.slot, logits=False) and is_new:
                request.checkpoints.append(at)
                self.counters["checkpoints"] += 1

    def established(self, request: Request) -> None:
        """The first token was asked for: keep what the next one overwrites."""
        if self.tier is None or request.limit == 1:
            return
        end = self.tier.index.checkpoint(request.ids)
        if end is None or end.logits is None:
            request.kept = Kept(self.runner, len(request.ids), self.runner.read_end(request.slot))

    # -- after it

    def release(self, request: Request, length: int, *, exact: bool) -> None:
        """A request leaves its slot, whose row stands for the first `length` tokens of prompt and answer.

        exact: the row stands right after them, and has the logits there. Only an end that the device knew of
        is exact.
        """
        tokens = np.concatenate([request.ids, np.array(request.tokens, np.int32)])[:length]
        used = next(self._clock)
        if self.residency:
            self._holdings[request.slot] = Holding(tokens, exact, exact, used=used)
        if self.tier is not None:
            self._leftovers.append(Leftover(request.slot, tokens, exact, request.kept))
        request.kept = None

    def abandon(self, request: Request) -> None:
        """A request failed, or was cancelled before its first token: nothing of it may serve anybody."""
        for length in request.checkpoints:
            self.tier.index.forget(request.ids[:length])
            self.counters["checkpoints"] -= 1
        request.checkpoints, request.kept = [], None
        if request.slot is not None:
            self._holdings[request.slot] = Holding()

    def flush(self) -> None:
        """Hand what finished requests left to the host tier: starts copies, waits for none."""
        while self._leftovers:
            left = self._leftovers.popleft()
            if left.exact or not self.recurrent:  # a recurrent row that ran on is good for nothing shorter
                self._store(left.tokens, self.runner, left.slot, logits=left.exact)
            if left.kept is not None:
                self._store(left.tokens[: left.kept.length], left.kept, left.slot, logits=True)

    def export(self) -> Iterator[Entry]:
        """What idle slots and the host tier hold, for a file."""
        runner = self.runner
        held = HostTier(runner.config, kv_dtype=runner.kv_dtype, budget=UNLIMITED)
        if self.tier is not None:
            held.merge(self.tier)
        for slot, holding in enumerate(self._holdings):
            if len(holding.tokens) and (holding.exact or not self.recurrent):
                held.store(holding.tokens, runner, slot, logits=holding.kept_logits)
        return held.export()

    def stats(self) -> dict:
        """Counters since load, and what the host tier holds now."""
        names = ("resident", "copied", "restored", "prefill")
        routes = {name: self.counters[name] for name in names}
        counts = {name: self.counters[name] for name in ("full_hits", "cached_tokens", "checkpoints")}
        held = dict.fromkeys(("bytes", "entries", "evictions", "skipped", "restored_bytes"), 0)
        if self.tier is not None:
            held |= self.tier.stats()
        budget = 0 if self.tier is None else self.tier.index.budget
        tier = {f"prefix_{name}": value for name, value in held.items()}
        return {"routes": routes, **counts, **tier, "prefix_budget": budget}

    def _store(self, tokens: np.ndarray, rows: Rows, slot: int, *, logits: bool) -> None:
        is_new = self.recurrent and self.tier.index.checkpoint(tokens) is None
        if self.tier.store(tokens, rows, slot, logits=logits):
            self.counters["checkpoints"] += is_new

    def _busy(self, request: Request, ready: bool) -> Holding:
        """A running row can be copied from: its prompt as far as it is fed stays as it is."""
        tokens = request.ids[: request.fed] if ready or self.residency else ()
        return Holding(tokens, exact=ready, kept_logits=ready, busy=True)

    def _stops(self, request: Request, start: int) -> tuple[int, ...]:
        """Where the feeding of a prompt pauses, its end last."""
        length = len(request.prompt)
        if not self.recurrent or self.tier is None:
            return (length,)
        return checkpoint_lengths(length, request.borders, self.every, start=start) or (length,)
