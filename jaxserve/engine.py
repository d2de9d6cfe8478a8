"""The engine: a model on a device, and the calls that use it."""

import contextlib
import dataclasses
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxserve import saved
from jaxserve.batch import Batch, Meter, numbered_rows
from jaxserve.cache import enable_compilation_cache
from jaxserve.capacity import SlotCost, auto_slots, check_memory, free_memory
from jaxserve.errors import JaxserveError
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import GGUFFile, open_gguf
from jaxserve.host_tier import HostTier
from jaxserve.intake import Intake, Prompt
from jaxserve.models.weights import free_host_memory, load_weights
from jaxserve.params import SamplingParams
from jaxserve.reproducible import ReproducibleReuse
from jaxserve.request import Request
from jaxserve.results import Completion, Piece
from jaxserve.reuse import Reuse
from jaxserve.runner import Progress, Runner
from jaxserve.scheduler import Scheduler
from jaxserve.session import Session
from jaxserve.state import nbytes
from jaxserve.stream import Stream
from jaxserve.text.stream import TextStream
from jaxserve.timing import PhaseLog

if TYPE_CHECKING:
    from jaxserve.text.tokenizer import Tokenizer

DEFAULT_CONTEXT = 4096  # tokens, where the model was trained for as many
KV_DTYPES = ("float16", "bfloat16", "float32")
RESIDENCY_VARIABLE = "JAXSERVE_RESIDENCY"  # 0 switches residency off
MAX_PREFIX_BYTES = 4 * 2**30  # of the host tier, unless asked for more
COUNTERS = ("requests", "tokens", "prefill_chunks", "decode_steps", "recoveries")


class Engine:
    """Generates with one model.

    Calls from several threads are served together. There is no background thread: whoever waits for a result
    takes the lock and steps for everyone.
    """

    @classmethod
    def load(
        cls,
        path: str | os.PathLike,
        *,
        context: int | None = None,
        slots: int | str = 1,
        kv_dtype: str = "float16",
        weights: str = "auto",
        residency: bool = True,
        prefix_bytes: int | None = None,
        reproducible: bool = False,
        progress: Progress | None = None,
    ) -> "Engine":
        """Load a GGUF file and compile everything a request needs.

        context: tokens a sequence may have (default: 4,096, or what the model was trained for);
        slots: sequences in flight; "auto": as many as fit, at most 64 (on CPU 8);
        kv_dtype: "float16", "bfloat16" or "float32";
        weights: "auto", "packed" or "float32" (`load_weights`);
        residency: a prompt may begin with what a slot still remembers (JAXSERVE_RESIDENCY=0 switches it off);
        prefix_bytes: host memory for prefixes that should outlive their slot (default: an eighth of what is
        free, at most 4 GiB; 0: none);
        reproducible: a request's answer is the same, bit by bit, whatever runs beside it and whatever is held
        of its prompt. Every decode step then costs what one of all slots costs (`reproducible.py`);
        progress(stage, done, total): called while weights arrive and programs compile.
        """
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype={kv_dtype!r}: expected one of {', '.join(KV_DTYPES)}")
        if slots != "auto":
            _check_size("slots", slots)
        for name, value in (("residency", residency), ("reproducible", reproducible)):
            if not isinstance(value, bool):
                raise TypeError(f"{name}={value!r}: expected True or False")
        residency = residency and os.environ.get(RESIDENCY_VARIABLE) != "0"
        if prefix_bytes is not None:
            _check_size("prefix_bytes", prefix_bytes, least=0)
        file = open_gguf(path)
        config = read_config(file)
        recurrent = config.layers_of("delta") > 0
        if prefix_bytes is None:
            is_useful = recurrent or not reproducible  # else slots hold all that may be shared
            prefix_bytes = min(MAX_PREFIX_BYTES, free_host_memory() // 8) if is_useful else 0
        if context is None:
            context = min(DEFAULT_CONTEXT, config.context_length)
        _check_size("context", context)
        if context > config.context_length:
            warnings.warn(
                f"context={context:,} is above the {config.context_length:,} tokens this model was "
                "trained for: expect nonsense past them",
                stacklevel=2,
            )
        enable_compilation_cache()
        least = 1 if slots == "auto" else slots
        check_memory(file, config, weights, slots=least, context=context, kv_dtype=kv_dtype)
        loaded, config = load_weights(file, weights=weights, progress=progress)
        if slots == "auto":
            device = jax.devices()[0]
            cost = SlotCost(config, kv_dtype)
            slots = auto_slots(cost, context, free_memory(device), device.platform)
        tier = HostTier(config, kv_dtype=kv_dtype, budget=prefix_bytes) if prefix_bytes else None
        with ThreadPoolExecutor(1) as pool:  # memory is pinned while programs compile
            reserved = pool.submit(tier.reserve) if tier else None
            runner = Runner(
                loaded,
                config,
                slots=slots,
                context=context,
                kv_dtype=kv_dtype,
                reuse=residency or tier is not None,
                pinned=reproducible,
                progress=progress,
            )
            if reserved:
                reserved.result()
        kind = ReproducibleReuse if reproducible else Reuse
        return cls(file, runner, kind(runner, tier=tier, residency=residency, recurrent=recurrent))

    def __init__(self, file: GGUFFile, runner: Runner, reuse: Reuse):
        self.file, self.config, self._runner, self._reuse = file, runner.config, runner, reuse
        self.reproducible = isinstance(reuse, ReproducibleReuse)
        self.context, self.slots = runner.context, runner.slots
        self.device = jax.devices()[0]
        self.weights_nbytes = nbytes(runner.weights)
        self.state_nbytes = nbytes(runner.state)
        self.programs = [_program_name(name) for name in runner.programs]
        self._log = PhaseLog()
        self._intake = Intake(file, self.config, self.context)
        self._scheduler = Scheduler(runner, self._log, reuse, reproducible=self.reproducible)
        self._lock = threading.Lock()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Free the device memory. Later calls raise."""
        with self._lock:
            if self._runner is not None:
                self._scheduler.fail(JaxserveError("the engine was closed while this request was running"))
                self._reuse.close()
                self._runner.close()
                self._runner = self._scheduler = self._reuse = None

    # -- text

    @property
    def tokenizer(self) -> "Tokenizer":
        """The file's own tokenizer. Raises UnsupportedModel where the file has none that is known."""
        return self._intake.tokenizer

    # -- generation

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        on_token: Callable[[int], bool | None] | None = None,
    ) -> Completion:
        """Generate from a text or from token ids.

        on_token is called with each id as it arrives, in this thread; returning False stops after that token.
        """
        return self._run(self._submit(prompt, params), on_token)

    def _run(self, request: Request, on_token: Callable[[int], bool | None] | None = None) -> Completion:
        delivered = 0
        try:
            for piece in self._pieces(request):
                if piece.token is None or on_token is None:
                    continue
                delivered += 1
                if on_token(piece.token) is False:
                    self._cancel(request, delivered)
                    break
        except BaseException:
            self._cancel(request, delivered)
            raise
        return request.completion()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Generate piece by piece. Closing or dropping the iterator cancels."""
        return Stream(self, self._submit(prompt, params))

    def chat(
        self,
        messages: Sequence[dict],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[dict] | None = None,
        **template_variables,
    ) -> Completion:
        """Render the messages with the model's chat template and generate the reply.

        Special tokens count only where the template wrote them: what a message's content spells is text.
        """
        prompt = self.tokenizer.encode_chat(messages, tools=tools, **template_variables)
        return self._run(self._submit(prompt.ids, params, borders=prompt.borders))

    def generate_batch(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[Completion]:
        """Completions of many prompts, in their order.

        params: for all of them, or one for each. A prompt that cannot be served becomes a completion with
        `finish_reason` "error" and its reason in `error`; the others are not harmed. progress: a bar on
        stderr; None shows it on a terminal.
        """
        done: dict[int, Completion] = {}
        total = len(prompts) if hasattr(prompts, "__len__") else None
        with Meter(total, shown=progress) as meter:
            for number, completion in self.as_completed(prompts, params):
                done[number] = completion
                meter.count(len(completion.tokens))
        return [done[number] for number in range(len(done))]

    def as_completed(
        self,
        prompts: Iterable[Prompt],
        params: SamplingParams | Iterable[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, Completion]]:
        """(number of the prompt, its completion), as they finish; otherwise as `generate_batch`.

        Prompts are pulled as slots become free: a generator may make millions. Dropping the iterator cancels
        what is in flight.
        """
        return Batch(self._open(), numbered_rows(self, prompts, params))

    def generate_n(self, prompt: Prompt, params: SamplingParams | None = None, *, n: int) -> list[Completion]:
        """`n` independent samples of one prompt, which is computed once.

        Sample i is drawn with seed (params.seed + i) mod 2⁶⁴: `generate` with that seed gives the same. Free
        slots get a copy of the prompt's state; where there are none, a sample begins when one ends, from what
        the slot and the host tier hold. Without a host tier (`prefix_bytes=0`) that is the row that went on:
        the prompt's last token is computed again, with recurrent layers the whole prompt.
        """
        _check_size("n", n)
        params = SamplingParams() if params is None else params
        first, *others = requests = [self._request(prompt, each) for each in _seeded(params, n)]
        first.samples = others
        with self._lock:
            self._open()._scheduler.submit(first)
        try:
            return [self._run(request) for request in requests]
        except BaseException:
            for request in requests:
                if not request.done:
                    self._cancel(request, 0)
            raise

    def session(self, **template_variables) -> Session:
        """A conversation of several turns; the variables go to the chat template."""
        return Session(self._open(), **template_variables)

    def logits(self, token_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Teacher-forced logits f32 [n, V] of every position. Touches no slot."""
        ids = self._intake.check_prompt(token_ids)
        with self._lock:
            return self._open()._runner.logits(ids)

    def stats(self) -> dict:
        """Counters since load."""
        with self._lock:
            scheduler = self._open()._scheduler
            scheduler.reap()
            return {
                **dict.fromkeys(COUNTERS, 0),
                **scheduler.counters,
                "programs": len(self.programs),
                "slots": self.slots,
                "free_slots": scheduler.slots.count(None),
                "waiting": len(scheduler.waiting),
                "weights_bytes": self.weights_nbytes,
                "state_bytes": self.state_nbytes,
                **self._reuse.stats(),
            }

    # -- saved state

    def save_state(self, path: str | os.PathLike) -> None:
        """Write the prefixes that idle slots and the host tier hold. The file appears whole or not at all."""
        with self._lock:
            reuse = self._open()._reuse
            reuse.flush()
            saved.save(path, self._saved_header(), reuse.export())

    def load_state(self, path: str | os.PathLike) -> None:
        """Add the prefixes of a saved state to the host tier, as far as they fit.

        InvalidState: a damaged file, another model or another kv dtype; then nothing changes.
        """
        with self._lock:
            tier = self._open()._reuse.tier
            if self.reproducible:
                raise ValueError("reproducible=True: what another engine computed has other bits")
            if tier is None:
                raise ValueError("prefix_bytes=0: there is no host tier to load into")
            tier.add(saved.load(path, self._saved_header()))

    def _saved_header(self) -> dict[str, str]:
        return {"model": self.file.fingerprint(), "kv_dtype": self._runner.kv_dtype}

    def trace(self, directory: str | os.PathLike) -> contextlib.AbstractContextManager:
        """Record a profiler trace of what runs in the `with` block; yields a report, filled at its end."""
        from jaxserve.trace import record

        runner = self._open()._runner
        runner.ran.clear()
        return record(directory, hlo=runner.program_texts)

    def program_memory(self) -> dict[str, dict[str, int]]:
        """Per compiled program the bytes of its temporaries and of the donated state it updates in place."""
        memory = self._open()._runner.program_memory()
        return {_program_name(name): sizes for name, sizes in memory.items()}

    # -- the way of a request

    def _submit(self, prompt, params: SamplingParams | None, *, borders: Sequence[int] = ()) -> Request:
        request = self._request(prompt, params, borders)
        self._enqueue(request)
        return request

    def _enqueue(self, request: Request) -> None:
        with self._lock:
            self._open()._scheduler.submit(request)

    def _request(self, prompt, params: SamplingParams | None, borders: Sequence[int] = ()) -> Request:
        # where cells are fixed every border makes one: only the first message's, the system prompt's, is kept
        return self._intake.request(prompt, params, borders[:1] if self.reproducible else borders)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        """What comes out of a request, stepping the engine while there is nothing to hand over."""
        while True:
            done = request.done  # asked first: another thread may be adding the last pieces
            while request.pieces:
                yield request.pieces.popleft()
            if done:
                break
            self._turn(request, lambda: request.pieces or request.done)
        if request.failure is not None:
            raise request.failure
        self._flush()

    def _turn(self, caller: Request, is_over: Callable[[], bool]) -> None:
        """Step for everyone, unless what the caller waits for has come meanwhile."""
        with self._lock:
            if not is_over():
                with jax.no_tracing(True):  # everything was compiled in `load`
                    self._open()._scheduler.step(caller)

    def _flush(self) -> None:
        """A result is out: store what it left."""
        with self._lock:
            if self._scheduler is not None:
                with jax.no_tracing(True):
                    self._scheduler.flush()

    def _cancel(self, request: Request, delivered: int) -> None:
        stream = TextStream(self.tokenizer, request.params.stop) if request.text else None
        for token in request.tokens[:delivered] if stream else ():
            stream.push(token)
        with self._lock:
            if self._scheduler is None:
                request.cut(delivered, stream)
            else:
                self._scheduler.cancel(request, delivered, stream)
        self._flush()

    def _open(self) -> "Engine":
        if self._runner is None:
            raise JaxserveError("this engine was closed: load it again")
        return self


def _seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of n samples, each with its own seed."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params={params!r}: expected a SamplingParams")
    if params.seed is None:
        return [params] * n  # every request draws its own
    return [dataclasses.replace(params, seed=(params.seed + i) % 2**64) for i in range(n)]


def _check_size(name: str, value: int, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r}: expected an integer")
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}")


def _program_name(name) -> str:
    return name if isinstance(name, str) else " ".join(map(str, name))
