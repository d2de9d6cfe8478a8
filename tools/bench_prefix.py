#!/usr/bin/env python3
"""Times to the first token by route, every route against itself in one process.

    python tools/bench_prefix.py --model smollm2.gguf --lengths 1,16,100,600 --repetitions 10

Per prompt length: cold (nothing is held), resident (the slot holds the prompt), restored (another prompt took
the slot) and partial (the slot holds all but the last 16 tokens), one after the other in turn, so that drift
meets all alike; first on an idle host, then with every core kept busy. The last line is JSON.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Iterator

import jax
import numpy as np

import jaxserve

TAIL = 16  # new tokens of the partial route
ROUTES = ("cold", "resident", "restored", "partial")


def prompts(length: int, vocabulary: int, seed: int) -> tuple[list[int], list[int]]:
    """A prompt and another of the same length that shares all but its tail."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, vocabulary, length).tolist()
    return prompt, prompt[: max(1, length - TAIL)] + rng.integers(0, vocabulary, min(TAIL, length)).tolist()


def first_token(engine: jaxserve.Engine, prompt: list[int]) -> tuple[float, jaxserve.Completion]:
    """Seconds from the call until the first id is there, and the completion of two tokens."""
    start, times = time.perf_counter(), []
    params = jaxserve.SamplingParams(max_tokens=2, ignore_eos=True)
    done = engine.generate(prompt, params, on_token=lambda _: times.append(time.perf_counter() - start))
    return times[0], done


def measure(
    engine: jaxserve.Engine, off: jaxserve.Engine, length: int, repetitions: int, seeds: Iterator[int]
) -> dict:
    """Median and extreme seconds per route, and how often a warm route was not the one meant."""
    seconds, missed = {name: [] for name in (*ROUTES, "off")}, 0
    vocabulary = engine.config.vocab_size
    for _ in range(repetitions):
        prompt, similar = prompts(length, vocabulary, next(seeds))
        other, _ = prompts(length, vocabulary, next(seeds))
        turns = [("cold", prompt), ("resident", prompt), ("partial", similar), ("cold", other)]
        for name, ids in (*turns, ("restored", prompt), ("off", prompt)):
            taken, done = first_token(off if name == "off" else engine, ids)
            seconds[name].append(taken)
            missed += name in ("resident", "restored") and (
                done.route != name or done.cached_tokens < done.prompt_tokens
            )
    return {
        **{
            name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
            for name, v in seconds.items()
        },
        "missed": missed,
    }


def _spin() -> None:
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--lengths", default="1,16,100,600", help="prompt lengths, comma-separated")
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--context", type=int, help="default: what the longest prompt needs")
    parser.add_argument("--kv-dtype", default="float16")
    parser.add_argument("--idle-only", action="store_true", help="leave the busy host out")
    args = parser.parse_args()
    lengths = [int(length) for length in args.lengths.split(",")]
    context = args.context or max(64, max(lengths) + TAIL)
    warnings.filterwarnings("ignore", message="context=")
    seeds = itertools.count()  # no prompt comes twice by itself
    shape = {"context": context, "kv_dtype": args.kv_dtype}
    with (
        jaxserve.Engine.load(args.model, **shape) as engine,
        jaxserve.Engine.load(args.model, residency=False, prefix_bytes=0, **shape) as off,
    ):
        measure(engine, off, lengths[-1], 1, seeds)  # everything has run once
        results = {}
        for host in ("idle",) if args.idle_only else ("idle", "busy"):
            spinners = []
            if host == "busy":
                fork = multiprocessing.get_context("spawn")
                spinners = [fork.Process(target=_spin, daemon=True) for _ in range(os.cpu_count() or 1)]
                for process in spinners:
                    process.start()
            try:
                print(f"{host} host, {jax.devices()[0].device_kind}: median ms to the first token")
                print(f"{'tokens':>8}" + "".join(f"{name:>10}" for name in (*ROUTES, "off", "missed")))
                for length in lengths:
                    row = results[f"{host} {length}"] = measure(engine, off, length, args.repetitions, seeds)
                    cells = "".join(f"{1e3 * row[name]['median']:>10.2f}" for name in (*ROUTES, "off"))
                    print(f"{length:>8}{cells}{row['missed']:>10}", flush=True)
            finally:
                for process in spinners:
                    process.terminate()
        print(json.dumps({"model": args.model, "context": context, "results": results}))


if __name__ == "__main__":
    main()
