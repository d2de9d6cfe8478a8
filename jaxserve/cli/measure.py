"""Speeds of a loaded engine: what `jaxserve bench` and the benchmark tools have in common."""

import contextlib
import os
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax

import jaxserve
from jaxserve.buckets import chunk_sizes
from jaxserve.cli.flags import made_up_prompt
from jaxserve.cli.footprint import footprints
from jaxserve.cli.traffic import step_bytes
from jaxserve.gguf.reader import open_gguf
from jaxserve.params import SamplingParams

WARM_UP_TOKENS = 4
SEED_STRIDE = 101  # rows have seeds of their own; a prime, so that small vocabularies tell them apart
DISPATCHES = 20  # fewer than JAX keeps in flight, so that none of them waits for the device
FULL_ROWS = 0.95  # of the rows have to run throughout a measurement


class PromptRun(NamedTuple):
    """One computed prompt."""

    tokens: int
    seconds: float  # of its forward passes
    first_token_s: float  # from the call to the first token

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class DecodeRun(NamedTuple):
    """Some decode steps, one after the other."""

    tokens: int  # of all rows together
    steps: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def step_s(self) -> float:
        return self.seconds / self.steps


def prompt_runs(
    engine: jaxserve.Engine, prompt: int, *, repetitions: int, depth: int = 0, seed: int = 0
) -> list[PromptRun]:
    """Compute `prompt` tokens behind `depth` others, each time another text; the first run warms up.

    A depth needs residency: the tokens before are computed by a request of their own.
    """
    one, runs = SamplingParams(max_tokens=1, ignore_eos=True), []
    for number in range(seed, seed + repetitions + 1):
        ids = made_up_prompt(engine.config.vocab_size, depth + prompt, number)
        if depth:
            engine.generate(ids[:depth], one)
        timings = engine.generate(ids, one).timings
        runs.append(PromptRun(timings.prefilled_tokens, timings.prefill_s, timings.first_token_s))
    return runs[1:]


def decode_runs(
    engine: jaxserve.Engine,
    generate: int,
    *,
    repetitions: int,
    rows: int = 1,
    depth: int = 1,
    seed: int = 0,
) -> list[DecodeRun]:
    """Decode `generate` tokens of `rows` rows at once, each behind a prompt of `depth` tokens of its own.

    The repetitions follow each other in the same generations, once all rows have begun. ValueError if a row
    ends before: the context has to hold `tokens_needed`.
    """
    params = SamplingParams(max_tokens=engine.context, ignore_eos=True)  # until the context is full
    runs = []
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(contextlib.closing(engine.stream(prompt, params)))
            for prompt in _prompts(engine, max(depth, 1), rows, seed)
        ]
        last = streams[-1]  # prompts are computed in order of arrival: it begins when all others run
        try:
            for _ in range(1 + WARM_UP_TOKENS):
                next(last)
            for _ in range(repetitions):
                before, begin = engine.stats(), time.perf_counter()
                for _ in range(generate):
                    next(last)
                seconds, after = time.perf_counter() - begin, engine.stats()
                tokens, steps = (after[name] - before[name] for name in ("tokens", "decode_steps"))
                runs.append(DecodeRun(tokens, steps, seconds))
        except StopIteration:
            runs.append(DecodeRun(0, 1, 1.0))  # refused below
    if any(run.tokens < FULL_ROWS * rows * run.steps for run in runs):
        needed = tokens_needed(depth, generate, repetitions=repetitions, rows=rows)
        raise ValueError(
            f"context={engine.context:,}, slots={engine.slots}: {rows} row(s) of {depth:,} tokens did not "
            f"all run to the end; expected {rows} ≤ slots and {needed:,} ≤ context"
        )
    return runs


def tokens_needed(depth: int, generate: int, *, repetitions: int, rows: int = 1) -> int:
    """The context `decode_runs` needs. Rows that begin early have run on for a step per prompt chunk of the
    later ones, which may all be of the smallest size.
    """
    begun_before = (rows - 1) * -(-max(depth, 1) // chunk_sizes(jax.default_backend())[0])
    return max(depth, 1) + begun_before + WARM_UP_TOKENS + generate * repetitions + 2


def host_dispatch_s(engine: jaxserve.Engine, rows: int = 1) -> float:
    """Seconds the host takes for each decode step it hands to the device: the mean over a few dispatches that
    are not waited for. The rows are idle, which costs the host the same.
    """
    runner = engine._runner
    steps = runner.buckets.steps(runner.buckets.lane(rows))[-1]
    with engine._lock, jax.no_tracing(True):
        jax.block_until_ready(runner.state)
        begin = time.perf_counter()
        for _ in range(DISPATCHES):
            runner.decode([engine.slots] * rows, sampled=False, longest=1, steps=steps)
        seconds = time.perf_counter() - begin
        jax.block_until_ready(runner.state)
    return seconds / (DISPATCHES * steps)


def traffic(
    engine: jaxserve.Engine,
    path: str | os.PathLike,
    *,
    rows: int = 1,
    length: float = 0,
    kv_dtype: str = "float16",
) -> dict[str, float]:
    """`step_bytes` of a file as it lies on the engine's device."""
    tensors = footprints(open_gguf(path).tensors.values(), engine.config, "packed")
    shape = dict(rows=rows, length=length, kv_dtype=kv_dtype, weights_nbytes=engine.weights_nbytes)
    return step_bytes(tensors, engine.config, **shape)


def _prompts(engine: jaxserve.Engine, length: int, rows: int, seed: int) -> Iterator[list[int]]:
    for row in range(rows):
        yield made_up_prompt(engine.config.vocab_size, length, SEED_STRIDE * (seed + 1) + row)
