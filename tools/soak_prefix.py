#!/usr/bin/env python3
"""Thousands of requests over a few hundred prefixes that do not all fit: does anything grow?

    python tools/soak_prefix.py smollm2.gguf --requests 10000 --prefixes 200

The host tier gets room for --held prefixes. Requests repeat a prefix, cut it, continue it, sample it twice or
are cancelled, all drawn at random. Checked throughout: the bytes of the host tier stay under its budget,
nothing is compiled, and neither the process's memory nor the device's in the second half exceeds that in the
first. On a GPU a profiler trace of the last requests also counts graph updates: those of decode and of
the programs that move rows must be none.

Prints a line per tenth of the requests, a verdict, and as its last line JSON. Exit status 1: something grew.
"""

import argparse
import collections
import datetime
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

import jaxserve
from jaxserve.cli.console import versions
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import open_gguf
from jaxserve.snapshot import BLOCK_TOKENS, snapshot_nbytes
from jaxserve.trace.report import columns

KINDS = ("repeat", "repeat", "cut", "continue", "continue", "samples", "cancel")
MAX_TOKENS = 4
TAIL = 40  # most tokens that a continued prefix gets
LEAK_BYTES = 2**24  # below that the allocator may be to blame
TRACED = 50  # requests
MOVERS = ("decode", "hit", "copy_row", "read_block", "read_end", "write_blocks", "write_end")


class Compilations:
    """Counts what JAX traces or compiles from now on."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _heard(self, event: str, duration: float, **_) -> None:
        self.count += "/jax/core/compile" in event

    def stop(self) -> None:
        """Stop counting."""
        jax.monitoring.unregister_event_duration_listener(self._heard)


def make_prefixes(count: int, longest: int, vocabulary: int, rng: np.random.Generator) -> list[list[int]]:
    """Distinct prefixes of every length up to `longest`; some begin like the one before."""
    prefixes: list[list[int]] = []
    for number in range(count):
        tokens = rng.integers(0, vocabulary, rng.integers(1, longest + 1)).tolist()
        if number % 4 == 3:
            tokens = (prefixes[-1][: len(prefixes[-1]) // 2] + tokens)[:longest]
        prefixes.append(tokens)
    return prefixes


def serve(engine: jaxserve.Engine, prefixes: list[list[int]], rng: np.random.Generator) -> None:
    """One request of a random kind."""
    prompt = prefixes[rng.integers(len(prefixes))]
    kind = KINDS[rng.integers(len(KINDS))]
    greedy = bool(rng.integers(2))
    params = jaxserve.SamplingParams(
        max_tokens=int(rng.integers(1, MAX_TOKENS + 1)), temperature=0.0 if greedy else 1.0, ignore_eos=True
    )
    if kind == "cut":
        prompt = prompt[: int(rng.integers(1, len(prompt) + 1))]
    elif kind == "continue":
        prompt = prompt + rng.integers(0, engine.config.vocab_size, rng.integers(1, TAIL + 1)).tolist()
    if kind == "samples":
        engine.generate_n(prompt, params, n=2)
    elif kind == "cancel":
        with_pieces = engine.stream(prompt, params)
        next(with_pieces)
        with_pieces.close()
    else:
        engine.generate(prompt, params)


def resident_bytes() -> int:
    """Memory of this process, from the kernel."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def soak(
    engine: jaxserve.Engine, prefixes: list[list[int]], requests: int, rng: np.random.Generator
) -> Iterator[dict]:
    """Serve; yields what is held after every tenth. Bytes are the most after any request of it."""
    compilations = Compilations()
    try:
        for number in range(10):
            begin, largest = time.perf_counter(), 0
            for _ in range(requests // 10):
                serve(engine, prefixes, rng)
                largest = max(largest, engine.stats()["prefix_bytes"])
            stats = engine.stats()
            yield {
                "requests": (number + 1) * (requests // 10),
                "prefix_bytes": largest,
                "process_bytes": resident_bytes(),
                "device_bytes": (engine.device.memory_stats() or {}).get("bytes_in_use", 0),
                "compilations": compilations.count,
                "evictions": stats["prefix_evictions"],
                **stats["routes"],
                "seconds": time.perf_counter() - begin,
            }
    finally:
        compilations.stop()


def faults(tenths: list[dict], budget: int) -> list[str]:
    """What grew, in words."""
    found = []
    half = len(tenths) // 2
    most = max(tenth["prefix_bytes"] for tenth in tenths)
    if most > budget:
        found.append(f"the host tier held {most:,} bytes of {budget:,}")
    if compiled := tenths[-1]["compilations"]:
        found.append(f"{compiled} compilations")
    for name in ("process_bytes", "device_bytes"):
        before, after = (max(tenth[name] for tenth in part) for part in (tenths[:half], tenths[half:]))
        if after > before + LEAK_BYTES:
            found.append(f"{name} grew from {before:,} to {after:,}")
    return found


def graph_updates(engine: jaxserve.Engine, prefixes: list[list[int]], rng: np.random.Generator) -> dict:
    """Program → executions and graph updates in a trace of more requests; None on a CPU."""
    with tempfile.TemporaryDirectory() as folder, engine.trace(folder) as report:
        for _ in range(TRACED):
            serve(engine, prefixes, rng)
    return {row["name"]: (row["executions"], row.get("updates")) for row in report.programs}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prefixes", type=int, default=200)
    parser.add_argument("--longest", type=int, default=300, help="tokens of a prefix")
    parser.add_argument("--held", type=int, default=40, help="prefixes that the host tier has room for")
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a file for the JSON, too")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="context=")
    config = read_config(open_gguf(args.model))
    block, recurrent, logits = snapshot_nbytes(config)
    budget = args.held * (-(-args.longest // BLOCK_TOKENS) * block + recurrent + logits)
    rng = np.random.default_rng(args.seed)
    prefixes = make_prefixes(args.prefixes, args.longest, config.vocab_size, rng)
    context = args.longest + TAIL + MAX_TOKENS
    with jaxserve.Engine.load(args.model, context=context, slots=args.slots, prefix_bytes=budget) as engine:
        tenths = []
        for tenth in soak(engine, prefixes, args.requests, rng):
            tenths.append(tenth)
            print(" ".join(f"{name}={value:,.0f}" for name, value in tenth.items()), flush=True)
        found = faults(tenths, budget)
        updates = graph_updates(engine, prefixes, rng)
    moved = collections.Counter({name: updates[name][1] or 0 for name in MOVERS if name in updates})
    found += [f"{count} graph updates of {name}" for name, count in moved.items() if count]
    rows = [(name, runs, count) for name, (runs, count) in updates.items()]
    print(columns((f"program, in {TRACED} requests", "executions", "graph updates"), rows))
    print("; ".join(found) or f"nothing grew in {args.requests:,} requests over {args.prefixes} prefixes")
    result = {
        "model": Path(args.model).name,
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "prefix_budget": budget,
        "tenths": tenths,
        "graph_updates": updates,
        "faults": found,
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
