"""The engine: a model on a device, and the calls that use it."""

import contextlib
import dataclasses
import itertools
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxserve import sampling, saved
from jaxserve.cache import enable_compilation_cache
from jaxserve.config import ModelConfig
from jaxserve.errors import ContextLimitExceeded, JaxserveError, OutOfMemory, UnsupportedModel
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import GGUFFile, open_gguf
from jaxserve.host_tier import HostTier
from jaxserve.models.weights import free_host_memory, load_weights, resolve_mode
from jaxserve.params import SamplingParams
from jaxserve.request import Request
from jaxserve.results import Completion, Piece
from jaxserve.reuse import Reuse
from jaxserve.runner import Progress, Runner
from jaxserve.scheduler import Scheduler
from jaxserve.session import Session
from jaxserve.state import nbytes, state_nbytes
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
        slots: int = 1,
        kv_dtype: str = "float16",
        weights: str = "auto",
        residency: bool = True,
        prefix_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> "Engine":
        """Load a GGUF file and compile everything a request needs.

        context: tokens a sequence may have (default: 4,096, or what the model was trained for);
        slots: sequences in flight; kv_dtype: "float16", "bfloat16" or "float32";
        weights: "auto", "packed" or "float32" (`load_weights`);
        residency: a prompt may begin with what a slot still remembers (JAXSERVE_RESIDENCY=0 switches it off);
        prefix_bytes: host memory for prefixes that should outlive their slot (default: an eighth of what is
        free, at most 4 GiB; 0: none);
        progress(stage, done, total): called while weights arrive and programs compile.
        """
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype={kv_dtype!r}: expected one of {', '.join(KV_DTYPES)}")
        _check_size("slots", slots)
        if not isinstance(residency, bool):
            raise TypeError(f"residency={residency!r}: expected True or False")
        residency = residency and os.environ.get(RESIDENCY_VARIABLE) != "0"
        if prefix_bytes is None:
            prefix_bytes = min(MAX_PREFIX_BYTES, free_host_memory() // 8)
        _check_size("prefix_bytes", prefix_bytes, least=0)
        file = open_gguf(path)
        config = read_config(file)
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
        _check_memory(file, config, weights, slots=slots, context=context, kv_dtype=kv_dtype)
        loaded, config = load_weights(file, weights=weights, progress=progress)
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
                progress=progress,
            )
            if reserved:
                reserved.result()
        recurrent = config.layers_of("delta") > 0
        return cls(file, runner, Reuse(runner, tier=tier, residency=residency, recurrent=recurrent))

    def __init__(self, file: GGUFFile, runner: Runner, reuse: Reuse):
        self.file, self.config, self._runner, self._reuse = file, runner.config, runner, reuse
        self.context, self.slots = runner.context, runner.slots
        self.device = jax.devices()[0]
        self.weights_nbytes = nbytes(runner.weights)
        self.state_nbytes = nbytes(runner.state)
        self.programs = [_program_name(name) for name in runner.programs]
        self._log = PhaseLog()
        self._scheduler = Scheduler(runner, self._log, reuse)
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._tokenizer: Tokenizer | UnsupportedModel | None = None

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
        if self._tokenizer is None:
            from jaxserve.text.tokenizer import Tokenizer  # text libraries load only when text is used

            try:
                self._tokenizer = Tokenizer.from_metadata(self.file.metadata)
            except UnsupportedModel as error:
                self._tokenizer = error
        if isinstance(self._tokenizer, UnsupportedModel):
            raise self._tokenizer
        return self._tokenizer

    # -- generation

    def generate(
        self,
        prompt: str | Sequence[int] | np.ndarray,
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

    def stream(
        self, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams | None = None
    ) -> "Stream":
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

    def generate_n(
        self, prompt: str | Sequence[int] | np.ndarray, params: SamplingParams | None = None, *, n: int
    ) -> list[Completion]:
        """`n` independent samples of one prompt, which is computed once.

        Sample i is drawn with seed (params.seed + i) mod 2⁶⁴: `generate` with that seed gives the same. Free
        slots get a copy of the prompt's state; where there are none, a sample begins when one ends, from what
        the slot and the host tier hold.
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
        ids = self._check_prompt(token_ids)
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
            if tier is None:
                raise ValueError("prefix_bytes=0: there is no host tier to load into")
            tier.add(saved.load(path, self._saved_header()))

    def _saved_header(self) -> dict[str, str]:
        return {"model": self.file.fingerprint(), "kv_dtype": self._runner.kv_dtype}

    def trace(self, directory: str | os.PathLike) -> contextlib.AbstractContextManager:
        """Record a profiler trace of what runs in the `with` block; yields a report, filled at its end."""
        from jaxserve.trace import record

        return record(directory, hlo=self._open()._runner.decode_texts)

    def program_memory(self) -> dict[str, dict[str, int]]:
        """Per compiled program the bytes of its temporaries and of the donated state it updates in place."""
        memory = self._open()._runner.program_memory()
        return {_program_name(name): sizes for name, sizes in memory.items()}

    # -- the way of a request

    def _submit(self, prompt, params: SamplingParams | None, *, borders: Sequence[int] = ()) -> Request:
        request = self._request(prompt, params, borders)
        with self._lock:
            self._open()._scheduler.submit(request)
        return request

    def _request(self, prompt, params: SamplingParams | None, borders: Sequence[int] = ()) -> Request:
        """Refuses all that can be refused. `borders`: lengths of the prompt at which a message ends."""
        called = time.perf_counter()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params={params!r}: expected a SamplingParams")
        if isinstance(prompt, str):
            if not prompt:
                raise ValueError("the prompt is empty: pass some text")
            prompt = self.tokenizer.encode(prompt)
        ids = self._check_prompt(prompt)
        tokenizer = self._text_or_none(required=bool(params.stop))
        seed = secrets.randbits(64) if params.seed is None else params.seed
        end_ids = tokenizer.end_ids if tokenizer else self._end_ids_without_tokenizer()
        options = sampling.options(params, end_ids=end_ids, seed=seed, vocab_size=self.config.vocab_size)
        limit = min(params.max_tokens, self.context - len(ids) + 1)
        text = TextStream(tokenizer, params.stop) if tokenizer else None
        number = next(self._numbers)
        return Request(number, ids, params, options, limit, text, called=called, borders=borders)

    def _pieces(self, request: Request) -> Iterator[Piece]:
        """What comes out of a request, stepping the engine while there is nothing to hand over."""
        while True:
            done = request.done  # asked first: another thread may be adding the last pieces
            while request.pieces:
                yield request.pieces.popleft()
            if done:
                break
            with self._lock:
                if not request.pieces and not request.done:
                    with jax.no_tracing(True):  # everything was compiled in `load`
                        self._open()._scheduler.step(request)
        if request.failure is not None:
            raise request.failure
        self._flush()

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

    def _check_prompt(self, prompt) -> list[int]:
        """Ids as Python ints, refused before any device work when they cannot be served."""
        if isinstance(prompt, (str, bytes)):
            raise TypeError(f"the prompt is {type(prompt).__name__}: expected a sequence of token ids")
        ids = np.asarray(prompt)
        if ids.ndim != 1:
            raise TypeError(f"the prompt has shape {ids.shape}: expected one sequence of token ids")
        if ids.size == 0:
            raise ValueError("the prompt is empty: pass at least one token id")
        if ids.dtype.kind in "fO" and all(isinstance(i, int) for i in prompt):  # one is beyond 64 bits
            ids = np.array(prompt, object)
        elif not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"the prompt holds {ids.dtype}: expected integer token ids")
        wrong = (ids < 0) | (ids >= self.config.vocab_size)
        if wrong.any():
            at = int(wrong.argmax())
            raise ValueError(
                f"token id {ids[at]} at position {at} is outside the vocabulary: "
                f"expected 0 ≤ id < {self.config.vocab_size:,}"
            )
        if ids.size > self.context:
            raise ContextLimitExceeded(ids.size, self.context)
        return ids.tolist()

    def _text_or_none(self, *, required: bool):
        """The tokenizer, or None where the file has none and ids are enough."""
        try:
            return self.tokenizer
        except JaxserveError:
            if required:
                raise
            return None

    def _end_ids_without_tokenizer(self) -> list[int]:
        ids = (self.file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
        return [i for i in ids if i is not None and 0 <= i < self.config.vocab_size]


class Stream:
    """An iterator of pieces. `completion` is there once it has ended, also after `close`."""

    def __init__(self, engine: Engine, request: Request):
        self._engine, self._request = engine, request
        self._pieces = engine._pieces(request)
        self._delivered = 0
        self.completion: Completion | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        if self.completion is not None:
            raise StopIteration
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.completion = self._request.completion()
            raise
        except BaseException:
            if self._request.failure is None:
                self.close()
            else:
                self.completion = self._request.completion()
            raise
        self._delivered += piece.token is not None
        return piece

    def close(self) -> None:
        """Cancel: the slot is free at once, and the completion holds what was delivered."""
        if self.completion is None:
            self._pieces.close()
            self._engine._cancel(self._request, self._delivered)
            self.completion = self._request.completion()

    def __del__(self):
        self._request.abandoned = True  # no lock here: the collector may run inside a step


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


def _check_memory(file: GGUFFile, config: ModelConfig, weights: str, **shape) -> None:
    """Refuse before anything is allocated what cannot fit."""
    if resolve_mode(weights, file) == "packed":
        needed = file.nbytes
    else:
        needed = 4 * sum(int(np.prod(tensor.shape)) for tensor in file.tensors.values())
    needed += state_nbytes(config, **shape)
    stats = jax.devices()[0].memory_stats() or {}
    on_device = "bytes_limit" in stats
    available = stats["bytes_limit"] - stats["bytes_in_use"] if on_device else free_host_memory()
    if needed > available:
        raise OutOfMemory(needed, available)


def _program_name(name) -> str:
    return name if isinstance(name, str) else " ".join(map(str, name))
