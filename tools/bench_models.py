#!/usr/bin/env python3
"""Loads models and measures what they cost: decode alone, deep and in batches, prompts, a trace's counts.

    python tools/bench_models.py qwen2.5-1.5b qwen3.5-4b --out results.json      # synthetic, at real shapes
    python tools/bench_models.py smollm2.gguf --out results.json --sections decode prompts trace
    python tools/bench_models.py qwen2.5-7b --out results.json --sections batch --batches 1 8 64

A preset of `synthetic_model.py` is written to --folder first. Decode reads every weight once a step: GB/s is
the bytes a step has to move (weights, and the cache as far as it is filled) times its speed, `of copy` what
part that is of a copy's on the device. Every speed is the median of --repetitions runs.

Two engines at most are loaded for a model: one of one slot (decode, depths, prompts, dispatch, trace), one of
as many slots as the largest batch. Only programs that the chosen sections run are compiled. The JSON file is
written again after every section, and a section that fails leaves its error there and the others alone.
"""

import argparse
import contextlib
import dataclasses
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import jax

import jaxserve
import synthetic_model
from jaxserve import runner
from jaxserve.bandwidth import measured_copy_bandwidth
from jaxserve.cli.console import versions
from jaxserve.cli.flags import made_up_prompt
from jaxserve.cli.measure import DecodeRun, decode_runs, host_dispatch_s, prompt_runs, tokens_needed, traffic
from jaxserve.trace.report import columns
from synthetic.architectures import PRESETS, parameters

TRACED_STEPS = 50
GREEDY_PROMPT = list(range(200, 232))
GREEDY_TOKENS = 64
BATCH = "batch"  # the section that needs an engine of many slots


@dataclasses.dataclass
class Bench:
    """A loaded engine and what its sections need to know."""

    engine: jaxserve.Engine
    path: Path
    args: argparse.Namespace
    bandwidth: float  # bytes per second of a copy

    def decoded(self, rows: int, depth: int) -> dict:
        """Speed of `rows` rows behind prompts of `depth` tokens."""
        args = self.args
        runs = decode_runs(self.engine, args.generate, repetitions=args.repetitions, rows=rows, depth=depth)
        length = depth + args.generate * args.repetitions / 2
        nbytes = sum(traffic(self.engine, self.path, rows=rows, length=length).values())
        return speed(runs, nbytes, self.bandwidth)


def speed(runs: Sequence[DecodeRun], nbytes: float, bandwidth: float) -> dict:
    """Medians of some runs whose steps move `nbytes` each."""
    step = statistics.median(run.step_s for run in runs)
    return {
        "tok_s": statistics.median(run.tokens_per_s for run in runs),
        "step_ms": 1e3 * step,
        "runs": [run.tokens_per_s for run in runs],
        "gb_per_s": nbytes / step / 1e9,
        "percent_of_copy": 100 * nbytes / step / bandwidth,
    }


# ---- sections: what goes into the JSON object under their name


def decode(bench: Bench) -> dict:
    """Batch 1 behind one token, and the greedy tokens of a fixed prompt (to compare machines)."""
    params = jaxserve.SamplingParams(max_tokens=GREEDY_TOKENS, ignore_eos=True)
    greedy = bench.engine.generate(GREEDY_PROMPT, params)
    return bench.decoded(1, 1) | {"greedy_tokens": greedy.tokens}


def depths(bench: Bench) -> dict:
    """Batch 1 behind longer prompts."""
    return {depth: bench.decoded(1, depth) for depth in bench.args.depths}


def prompts(bench: Bench) -> dict:
    """Prompts of several lengths: tokens per second, and the time to the first token."""
    found = {}
    for size in bench.args.prompts:
        runs = prompt_runs(bench.engine, size, repetitions=bench.args.repetitions)
        found[size] = {
            "tok_s": statistics.median(run.tokens_per_s for run in runs),
            "first_token_ms": 1e3 * statistics.median(run.first_token_s for run in runs),
        }
    return found


def dispatch(bench: Bench) -> dict:
    """Host time to hand over a step, without a profiler, and what the programs hold beside the state."""
    memory = bench.engine.program_memory()
    temporaries = {name: sizes["temporaries"] for name, sizes in memory.items()}
    steps = [size for name, size in temporaries.items() if name.startswith("decode")]
    return {
        "host_dispatch_ms": 1e3 * host_dispatch_s(bench.engine),
        "temporaries_bytes": temporaries,
        "temporaries_percent_of_weights": 100 * max(steps) / bench.engine.weights_nbytes,
    }


def trace(bench: Bench) -> dict:
    """Counts and layer kinds of decode and of the prompt before it, from a profiler trace."""
    engine, prompt_tokens = bench.engine, 64
    params = jaxserve.SamplingParams(max_tokens=TRACED_STEPS + 1, ignore_eos=True)
    with tempfile.TemporaryDirectory() as folder, engine.trace(folder) as report:
        engine.generate(made_up_prompt(engine.config.vocab_size, prompt_tokens, seed=77), params)
    moved = traffic(engine, bench.path, length=prompt_tokens + TRACED_STEPS / 2)
    report.add_traffic(moved, bench.bandwidth)
    shown = report.as_dict()
    kept = ("per_step", "layers", "top_kernels", "programs", "whole", "note")
    prefill = {name: shown["prefill"][name] for name in ("steps", "per_step", "layers", "top_kernels")}
    return {name: shown[name] for name in kept} | {"prefill": prefill}


def batch(bench: Bench) -> dict:
    """Rows side by side, each behind a prompt of its own."""
    return {rows: bench.decoded(rows, bench.args.batch_prompt) for rows in bench.args.batches}


SECTIONS = {one.__name__: one for one in (decode, depths, prompts, dispatch, trace, batch)}


# ---- engines


@contextlib.contextmanager
def only_greedy(lanes: Sequence[int] | None = None) -> Iterator[None]:
    """Engines loaded in the block have no program that draws at random and, if given, these lanes alone:
    compiling is what takes longest.
    """
    buckets, lowerings = runner.Buckets.of, runner.Runner._lowerings

    def few_buckets(*args, **options):
        usual = buckets(*args, **options)
        return usual if lanes is None else dataclasses.replace(usual, lanes=tuple(sorted(lanes)))

    def few_lowerings(self):
        found = lowerings(self)
        return {name: lower for name, lower in found.items() if name[0] != "decode" or not name[-1]}

    with (
        mock.patch.object(runner.Buckets, "of", few_buckets),
        mock.patch.object(runner.Runner, "_lowerings", few_lowerings),
    ):
        yield


@contextlib.contextmanager
def loaded(
    path: Path, weights: str, *, context: int, slots: int, lanes: Sequence[int] | None = None
) -> Iterator[tuple[jaxserve.Engine, dict]]:
    """(an engine that keeps nothing of a prompt and draws greedily, what loading it took)."""
    start = time.perf_counter()
    with (
        only_greedy(lanes),
        jaxserve.Engine.load(
            path, context=context, slots=slots, weights=weights, residency=False, prefix_bytes=0
        ) as engine,
    ):
        took = time.perf_counter() - start
        engine.generate(GREEDY_PROMPT, jaxserve.SamplingParams(max_tokens=1, ignore_eos=True))
        first = time.perf_counter() - start
        yield engine, {"load_s": took, "load_to_first_token_s": first, "programs": len(engine.programs)}


def contexts(args: argparse.Namespace) -> tuple[int, int]:
    """Tokens that the engine of one slot and that of the batches need for the chosen sections."""
    needed = lambda depth, rows=1: tokens_needed(  # noqa: E731
        depth, args.generate, repetitions=args.repetitions, rows=rows
    )
    alone = [len(GREEDY_PROMPT) + GREEDY_TOKENS, needed(1)]
    alone += [size + 1 for size in args.prompts if "prompts" in args.sections]
    alone += [needed(depth) for depth in args.depths if "depths" in args.sections]
    return max(alone), needed(args.batch_prompt, max(args.batches))


def measure(path: Path, args: argparse.Namespace, bandwidth: float, save: Callable[[dict], None]) -> dict:
    """All chosen sections of one model file; `save` is called with what there is after each."""
    found = {"file_bytes": path.stat().st_size}
    context_alone, context_batch = contexts(args)
    parts = [
        ([name for name in args.sections if name != BATCH], [1], context_alone, "alone"),
        ([name for name in args.sections if name == BATCH], args.batches, context_batch, "batched"),
    ]
    for sections, lanes, context, label in parts:
        if not sections:
            continue
        with (
            guarded(found, label),
            loaded(path, args.weights, context=context, slots=max(lanes), lanes=lanes) as (engine, loading),
        ):
            found[label] = loading | {
                "context": engine.context,
                "slots": engine.slots,
                "state_bytes": engine.state_nbytes,
            }
            found |= {"architecture": engine.config.architecture, "weights_bytes": engine.weights_nbytes}
            bench = Bench(engine, path, args, bandwidth)
            for name in sections:
                with guarded(found, name):
                    found[name] = SECTIONS[name](bench)
                save(found)
        save(found)
    return found


@contextlib.contextmanager
def guarded(found: dict, name: str) -> Iterator[None]:
    """An error is reported in place of the figures: what follows is still worth its time."""
    try:
        yield
    except Exception as error:
        found[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {found[name]['error']}", flush=True)


@contextlib.contextmanager
def model_file(name: str, folder: Path, quant: str) -> Iterator[Path]:
    """The path of a model: a file as it is, a preset as a synthetic file that is removed afterwards."""
    if name not in PRESETS:
        yield Path(name)
        return
    path = folder / f"{name}-{quant}.gguf"
    start = time.perf_counter()
    if not path.exists():
        synthetic_model.write(path, parameters(name), quant)
    print(f"{path}: written in {time.perf_counter() - start:.0f} s", flush=True)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def main() -> None:
    """Measure every model named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help=f"a GGUF file, or one of {', '.join(PRESETS)}")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="for synthetic models"
    )
    parser.add_argument("--quant", default="Q4_K_M", help="of synthetic models (default Q4_K_M)")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--generate", type=int, default=128, help="tokens of each run (default 128)")
    parser.add_argument("--depths", type=int, nargs="+", default=[4096], help="default 4096")
    parser.add_argument("--prompts", type=int, nargs="+", default=[100, 512, 4096])
    parser.add_argument("--batches", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--batch-prompt", type=int, default=128, help="tokens of each row (default 128)")
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    device = jax.devices()[0]
    bandwidth = measured_copy_bandwidth(device)
    result = {
        "device": device.device_kind,
        "copy_gb_per_s": bandwidth / 1e9,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "quant": args.quant,
        "models": {},
    }

    def save(stem: str, found: dict) -> None:
        result["models"][stem] = found
        args.out.write_text(json.dumps(result, indent=1) + "\n")

    for name in args.models:
        with guarded(result["models"], name), model_file(name, args.folder, args.quant) as path:
            found = measure(path, args, bandwidth, lambda found, stem=path.stem: save(stem, found))
            print(f"{path.stem}\n{table(found)}\n", flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


def table(found: dict) -> str:
    """The figures of one model for people. What failed is left out: its error was printed."""
    present = {name: found[name] for name in SECTIONS if "error" not in found.get(name, {"error": ""})}
    rows = []
    if "decode" in present:
        rows.append(("decode", *_speed_cells(present["decode"])))
    for name, what in (("depths", "decode at depth {}"), ("batch", "decode of {} rows")):
        rows += [(what.format(at), *_speed_cells(one)) for at, one in present.get(name, {}).items()]
    for size, one in present.get("prompts", {}).items():
        rows.append((f"prompt of {size}", f"{one['tok_s']:,.0f}", f"{one['first_token_ms']:,.2f}", "", ""))
    lines = [columns(("", "tok/s", "ms", "GB/s", "of copy"), rows)] if rows else []
    if "dispatch" in present:
        lines.append(
            f"host dispatch {present['dispatch']['host_dispatch_ms']:.3f} ms, temporaries "
            f"{present['dispatch']['temporaries_percent_of_weights']:.2f} % of the weights"
        )
    if "trace" in present:
        step = present["trace"]["per_step"]
        names = ("graph_launches", "updates", "evictions", "kernels", "device_copies", "busy_ms", "gap_ms")
        lines.append(", ".join(f"{name.replace('_', ' ')} {_plain(step[name])}" for name in names))
        layers = present["trace"]["layers"]
        lines.append(", ".join(f"{row['kind']} {row['ms_per_step']:.3f} ms" for row in layers))
    for label in ("alone", "batched"):
        if loading := found.get(label):
            lines.append(", ".join(f"{name} {_plain(value)}" for name, value in loading.items()))
    return "\n".join(lines)


def _speed_cells(one: dict) -> tuple[str, ...]:
    return (
        f"{one['tok_s']:,.1f}",
        f"{one['step_ms']:.3f}",
        f"{one['gb_per_s']:,.0f}",
        f"{one['percent_of_copy']:.1f} %",
    )


def _plain(value: object) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
