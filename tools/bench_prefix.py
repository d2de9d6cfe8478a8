#!/usr/bin/env python3
"""Times to the first token by route, and with reuse against without, in one process.

    python tools/bench_prefix.py smollm2.gguf --out prefix.json
    python tools/bench_prefix.py hybrid.gguf --lengths 2000 --checkpoints 128,256,512,1024

First table, per prompt length: the median time from the call until the first id is there when nothing is
held (cold), a slot holds the prompt (resident), the second of two samples gets a copy of the first one's row,
which counts both (copied), other prompts took the slots (restored), and a slot holds all but the last 16
tokens (partial). The routes run in turn, so that drift meets all alike; "missed" counts requests that took
another route than the one meant. On an accelerator restored bytes per second stand beside the rate at which
pinned memory is copied to the device.

Second table: pairs of requests, one to an engine with residency and host tier, one to an engine without, on
an idle host and with every core kept busy. A pair's prompt is new; the engine with reuse sees it twice: as a
miss, which pays for the bookkeeping, and as a hit. Ratios are medians over the pairs, of the time to the
first token and of the whole call.

--checkpoints: instead, what the recurrent checkpoints of a long prompt cost, by the tokens between them.

The last line is JSON.
"""

import argparse
import contextlib
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

import jaxserve
from jaxserve.bandwidth import measured_upload_bandwidth
from jaxserve.cli.console import versions
from jaxserve.trace.report import columns

TAIL = 16  # new tokens of the partial route
TOKENS = 4  # that a call of the second table generates
SLOTS = 2  # one to copy from, one to copy to
SPIN_UP_S = 1.0  # until the processes that keep the cores busy run
EXPECTED = {  # column → routes it may take; a hit also leaves nothing to prefill
    "cold": ("prefill",),
    "resident": ("resident",),
    "copied": ("copied",),
    "restored": ("restored",),
    "partial": ("resident", "restored"),
}
HITS = ("resident", "copied", "restored")


class Timed(NamedTuple):
    """One call."""

    first_s: float  # until the first id was there
    whole_s: float
    done: jaxserve.Completion


class Prompts:
    """Prompts of random tokens. No two share a prefix: their first tokens differ."""

    def __init__(self, vocabulary: int):
        self._vocabulary, self._rng = vocabulary, np.random.default_rng(0)
        self._first = itertools.cycle(self._rng.permutation(vocabulary).tolist())

    def new(self, length: int) -> list[int]:
        """The next prompt."""
        return [next(self._first), *self._rng.integers(0, self._vocabulary, length - 1).tolist()]


def timed(engine: jaxserve.Engine, prompt: list[int], tokens: int = 1) -> Timed:
    """Generate against the clock. After one token a row still stands at its prompt's end."""
    start, times = time.perf_counter(), []
    params = jaxserve.SamplingParams(max_tokens=tokens, ignore_eos=True)
    done = engine.generate(prompt, params, on_token=lambda _: times.append(time.perf_counter() - start))
    return Timed(times[0], time.perf_counter() - start, done)


def copied(engine: jaxserve.Engine, prompt: list[int]) -> Timed:
    """The second of two samples of a prompt that a slot holds."""
    params = jaxserve.SamplingParams(max_tokens=1, ignore_eos=True)
    start = time.perf_counter()
    done = engine.generate_n(prompt, params, n=2)[1]
    return Timed(done.timings.first_token_s, time.perf_counter() - start, done)


def measure_routes(engine: jaxserve.Engine, length: int, repetitions: int, prompts: Prompts) -> dict:
    """Seconds to the first token per route, and how often another route was taken than the one meant."""
    seconds, missed, rates = {name: [] for name in EXPECTED}, 0, []
    for _ in range(repetitions):
        prompt, partly = prompts.new(length), prompts.new(length)
        turns = [
            ("cold", timed, prompt),
            ("resident", timed, prompt),
            ("copied", copied, prompt),  # both slots hold it now, and the next two prompts take them
            ("cold", timed, prompts.new(length)),
            ("partial", timed, partly),
            ("restored", timed, prompt),
        ]
        for name, run, ids in turns:
            if name == "partial":
                timed(engine, partly[: max(1, length - TAIL)])
            before = engine.stats()["prefix_restored_bytes"]
            first_s, _, done = run(engine, ids)
            seconds[name].append(first_s)
            is_hit = done.cached_tokens == done.prompt_tokens
            missed += done.route not in EXPECTED[name] or (name in HITS and not is_hit)
            if name == "restored":
                rates.append((engine.stats()["prefix_restored_bytes"] - before) / first_s)
    spread = {name: spread_of(values) for name, values in seconds.items()}
    return spread | {"missed": missed, "restored_bytes_per_s": statistics.median(rates)}


def measure_pairs(
    on: jaxserve.Engine, off: jaxserve.Engine, length: int, pairs: int, prompts: Prompts
) -> dict:
    """The engine with reuse against the one without, on the same prompts."""
    off_runs, misses, hits = [], [], []
    for number in range(pairs):
        prompt = prompts.new(length)
        if number % 2:
            off_runs.append(timed(off, prompt, TOKENS))
        misses.append(timed(on, prompt, TOKENS))
        hits.append(timed(on, prompt, TOKENS))
        if not number % 2:
            off_runs.append(timed(off, prompt, TOKENS))
    table = {"pairs": pairs, "missed": sum(hit.done.cached_tokens < length for hit in hits)}
    for name, runs in (("off", off_runs), ("miss", misses), ("hit", hits)):
        table[name] = spread_of([run.first_s for run in runs])
        for part in ("first_s", "whole_s"):
            ratios = [
                getattr(run, part) / getattr(without, part)
                for run, without in zip(runs, off_runs, strict=True)
            ]
            table[name][f"ratio_{part}"] = statistics.median(ratios)
    return table


def measure_checkpoints(
    engine: jaxserve.Engine, length: int, intervals: list[int], repetitions: int, prompts: Prompts
) -> dict:
    """Seconds of a cold prompt by the tokens between its checkpoints, in turn; 0: none inside it."""
    calls = {every: [] for every in (0, *intervals)}
    held = {}
    usual = engine._reuse.every
    for _ in range(repetitions):
        for every, runs in calls.items():
            engine._reuse.every, before = every, engine.stats()["checkpoints"]
            runs.append(timed(engine, prompts.new(length)))
            held[every] = engine.stats()["checkpoints"] - before
    engine._reuse.every = usual
    table = {}
    for every, runs in calls.items():
        table[every] = {"checkpoints": held[every], "first": spread_of([run.first_s for run in runs])}
        for part in ("first_s", "whole_s"):
            pairs = zip(runs, calls[0], strict=True)
            table[every][f"ratio_{part}"] = statistics.median(
                getattr(run, part) / getattr(none, part) for run, none in pairs
            )
    return table


def spread_of(seconds: list[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median_s": statistics.median(seconds), "min_s": min(seconds), "max_s": max(seconds)}


@contextlib.contextmanager
def busy_host() -> Iterator[None]:
    """Keeps every core busy."""
    spin = [sys.executable, "-c", "while True: pass"]
    spinners = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1)]
    try:
        time.sleep(SPIN_UP_S)
        yield
    finally:
        for process in spinners:
            process.kill()
            process.wait()


def show_routes(result: dict) -> str:
    """The first table: milliseconds."""
    upload = result["upload_bytes_per_s"]
    head = ["tokens", *EXPECTED, "missed", *(["restored GB/s", "of the copy rate"] if upload else [])]
    lines = []
    for length, row in result["routes"].items():
        line = [length, *(f"{1e3 * row[name]['median_s']:,.2f}" for name in EXPECTED), row["missed"]]
        rate = row["restored_bytes_per_s"]
        lines.append([*line, *([f"{rate / 1e9:.1f}", f"{rate / upload:.0%}"] if upload else [])])
    return "median ms to the first token\n" + columns(head, lines)


def show_pairs(result: dict) -> str:
    """The second table: milliseconds and ratios."""
    head = ("host", "tokens", "off", "miss", "hit", "miss / off", "whole call", "hit / off", "whole call")
    lines = []
    for host, rows in result["pairs"].items():
        for length, row in rows.items():
            times = [f"{1e3 * row[name]['median_s']:,.2f}" for name in ("off", "miss", "hit")]
            ratios = [row[run][f"ratio_{part}"] for run in ("miss", "hit") for part in ("first_s", "whole_s")]
            lines.append((host, length, *times, *(f"{ratio:.3f}" for ratio in ratios)))
    return "median ms to the first token, and median ratios of pairs\n" + columns(head, lines)


def show_checkpoints(result: dict) -> str:
    """The third table."""
    head = ("tokens between", "checkpoints", "first token, ms", "against none", "whole call")
    lines = [
        (
            every or "none",
            row["checkpoints"],
            f"{1e3 * row['first']['median_s']:,.2f}",
            f"{row['ratio_first_s']:.3f}",
            f"{row['ratio_whole_s']:.3f}",
        )
        for every, row in result["checkpoints"].items()
    ]
    return "what checkpoints cost a cold prompt\n" + columns(head, lines)


def main() -> None:
    numbers = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--lengths", type=numbers, default=[1, 16, 100, 600, 4000], metavar="N,N,…")
    parser.add_argument("--repetitions", type=int, default=10, help="of every route")
    parser.add_argument("--pairs", type=int, default=30, help="of requests with and without reuse; 0: none")
    parser.add_argument("--hosts", type=lambda text: text.split(","), default=["idle", "busy"])
    parser.add_argument("--checkpoints", type=numbers, metavar="N,N,…", help="intervals to compare instead")
    parser.add_argument("--context", type=int, help="default: what the longest prompt needs")
    parser.add_argument("--kv-dtype", default="float16")
    parser.add_argument("--out", type=Path, help="a file for the JSON, too")
    args = parser.parse_args()
    if unknown := set(args.hosts) - {"idle", "busy"}:
        parser.error(f"--hosts {', '.join(sorted(unknown))}: choose from idle, busy")
    warnings.filterwarnings("ignore", message="context=")
    device = jax.devices()[0]
    context = args.context or max(64, max(args.lengths) + TAIL)
    shape = {"context": context, "kv_dtype": args.kv_dtype, "slots": SLOTS}
    with jaxserve.Engine.load(args.model, **shape) as on:
        result = {
            "model": Path(args.model).name,
            "device": device.device_kind,
            "cores": os.cpu_count(),
            "versions": versions(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "context": context,
            "upload_bytes_per_s": measured_upload_bandwidth(device),
        }
        prompts = Prompts(on.config.vocab_size)
        measure_routes(on, max(args.lengths), 1, prompts)  # everything has run once
        if args.checkpoints:
            length = max(args.lengths)
            table = measure_checkpoints(on, length, args.checkpoints, args.repetitions, prompts)
            result |= {"checkpoint_bytes": on._reuse.tier.index.recurrent_bytes, "checkpoints": table}
            print(show_checkpoints(result), flush=True)
        else:
            result["routes"] = {n: measure_routes(on, n, args.repetitions, prompts) for n in args.lengths}
            print(show_routes(result), flush=True)
        if args.pairs and not args.checkpoints:
            result["pairs"] = {}
            with jaxserve.Engine.load(args.model, residency=False, prefix_bytes=0, **shape) as off:
                timed(off, prompts.new(max(args.lengths)))
                for host in args.hosts:
                    with busy_host() if host == "busy" else contextlib.nullcontext():
                        result["pairs"][host] = {
                            n: measure_pairs(on, off, n, args.pairs, prompts) for n in args.lengths
                        }
            print(show_pairs(result), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
