#!/usr/bin/env python3
"""Loads models, generates, and reports what a decoded token costs: one table row and one JSON object per
model.

    python tools/bench_models.py qwen2.5-1.5b qwen3.5-4b --out results.json      # synthetic, at real shapes
    python tools/bench_models.py ~/.cache/jaxserve/models/smollm2.gguf --out results.json

A preset of `synthetic_model.py` is written to --folder first. Reported per model: load time, decode and
prefill tok/s (medians), GB/s of weights read and its percentage of the device's measured copy rate, graph
launches, updates and kernels per token from a profiler trace, bytes of temporaries of the largest decode
program, and the greedy tokens of a fixed prompt (to compare machines).
"""

import argparse
import contextlib
import datetime
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax

import jaxserve
import synthetic_model
from jaxserve.bandwidth import measured_copy_bandwidth
from jaxserve.cli.bench import decode_speed, prompt_speed, read_per_token
from jaxserve.cli.console import versions
from jaxserve.cli.flags import made_up_prompt
from jaxserve.trace.report import columns
from synthetic.architectures import PRESETS, parameters

TRACED_STEPS = 50
GREEDY_PROMPT = list(range(200, 232))
GREEDY_TOKENS = 64


def measure(path: Path, args: argparse.Namespace, bandwidth: float) -> dict:
    """Everything about one model file."""
    start = time.perf_counter()
    with jaxserve.Engine.load(path, context=args.context, weights=args.weights, slots=args.slots) as engine:
        loaded = time.perf_counter() - start
        engine.generate(GREEDY_PROMPT, jaxserve.SamplingParams(max_tokens=2, ignore_eos=True))
        first = time.perf_counter() - start
        greedy = engine.generate(
            GREEDY_PROMPT, jaxserve.SamplingParams(max_tokens=GREEDY_TOKENS, ignore_eos=True)
        )
        decode = [decode_speed(engine, args.generate, 0, seed) for seed in range(args.repetitions + 1)][1:]
        prefill = {
            size: [prompt_speed(engine, size, 0, seed) for seed in range(args.repetitions + 1)][1:]
            for size in args.prompts
            if size < engine.context
        }
        with tempfile.TemporaryDirectory() as folder, engine.trace(folder) as report:
            engine.generate(
                made_up_prompt(engine.config.vocab_size, 64, 2),
                jaxserve.SamplingParams(max_tokens=TRACED_STEPS + 1, ignore_eos=True),
            )
        read = read_per_token(engine, str(path))
        speed = statistics.median(decode)
        programs = engine.program_memory()
        trace = report.as_dict()
        return {
            "file_bytes": path.stat().st_size,
            "architecture": engine.config.architecture,
            "load_s": loaded,
            "load_to_first_token_s": first,
            "weights_bytes": engine.weights_nbytes,
            "state_bytes": engine.state_nbytes,
            "decode_tok_s": speed,
            "decode_runs": decode,
            "gb_per_s": read * speed / 1e9,
            "percent_of_copy": 100 * read * speed / bandwidth,
            "prefill_tok_s": {size: statistics.median(runs) for size, runs in prefill.items()},
            "per_step": trace["per_step"],
            "layers": trace["layers"],
            "top_kernels": trace["top_kernels"],
            "temporaries_bytes": {
                name: sizes["temporaries"] for name, sizes in programs.items() if name.startswith("decode")
            },
            "greedy_tokens": greedy.tokens,
            "context": engine.context,
            "slots": engine.slots,
            "programs": len(engine.programs),
        }


def main() -> None:
    """Measure every model named on the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", help=f"a GGUF file, or one of {', '.join(PRESETS)}")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="for synthetic models"
    )
    parser.add_argument("--quant", default="Q4_K_M")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--slots", type=int, default=1)
    parser.add_argument("--generate", type=int, default=256)
    parser.add_argument("--prompts", type=int, nargs="*", default=[100, 512])
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
    for name in args.models:
        path = Path(name)
        if name in PRESETS:
            path = args.folder / f"{name}-{args.quant}.gguf"
            start = time.perf_counter()
            if not path.exists():
                synthetic_model.write(path, parameters(name), args.quant)
            print(f"{path}: written in {time.perf_counter() - start:.0f} s", flush=True)
        try:
            result["models"][path.stem] = measure(path, args, bandwidth)
        except Exception as error:  # the other models are still worth their time
            result["models"][path.stem] = {"error": f"{type(error).__name__}: {error}"}
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
        if name in PRESETS:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(table(result), flush=True)


def table(result: dict) -> str:
    """The figures for people."""
    rows = []
    for name, m in result["models"].items():
        if "error" in m:
            rows.append((name, m["error"][:60], *[""] * 7))
            continue
        step = m["per_step"]
        rows.append(
            (
                name,
                f"{m['decode_tok_s']:,.1f}",
                f"{m['gb_per_s']:,.0f}",
                f"{m['percent_of_copy']:.1f} %",
                " ".join(f"{size}: {speed:,.0f}" for size, speed in m["prefill_tok_s"].items()),
                *(f"{step[k]}" for k in ("graph_launches", "updates", "kernels")),
                f"{m['load_to_first_token_s']:.1f}",
            )
        )
    head = ("model", "tok/s", "GB/s", "of copy", "prefill tok/s", "launches", "updates", "kernels", "load s")
    return f"{result['device']}, copy {result['copy_gb_per_s']:,.0f} GB/s\n" + columns(head, rows)


if __name__ == "__main__":
    main()
