"""jaxserve bench MODEL

pp512 computes a prompt of 512 tokens, tg128 decodes 128 tokens one after another; both at batch 1, behind
--depth tokens that are in the state already. Decode reads every weight once per token: GB/s is those bytes
times its speed, and the percentage of what a copy on the same device moves (read + write) is the score.
The last line is one JSON object for programs.

examples:
  jaxserve bench model.gguf
  jaxserve bench model.gguf --prompt 2048 --generate 256 --depth 4096 --repetitions 5
"""

import argparse
import datetime
import statistics

from jaxserve.bandwidth import measured_copy_bandwidth
from jaxserve.cli import console
from jaxserve.cli.flags import add_size_flags, add_weights_flag, load_engine, made_up_prompt
from jaxserve.cli.footprint import footprints
from jaxserve.gguf.reader import open_gguf
from jaxserve.params import SamplingParams
from jaxserve.timing import rate
from jaxserve.trace.report import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jaxserve bench`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any part of a split one")
    parser.add_argument(
        "--prompt", type=int, default=512, metavar="N", help="prompt tokens, 0 for none (default 512)"
    )
    parser.add_argument(
        "--generate", type=int, default=128, metavar="N", help="tokens decoded, 0 for none (default 128)"
    )
    parser.add_argument(
        "--depth", type=int, default=0, metavar="N", help="tokens in the state beforehand (default 0)"
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    add_size_flags(parser, context="as many as needed")
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    for name, least in (("prompt", 0), ("generate", 0), ("depth", 0), ("repetitions", 1)):
        if getattr(args, name) < least:
            raise ValueError(f"{name}={getattr(args, name)}: expected {least} ≤ {name}")
    if args.context is None:
        args.context = args.depth + max(args.prompt, 1) + args.generate + 1
    with load_engine(args) as engine:
        bandwidth = measured_copy_bandwidth(engine.device)
        bytes_per_token = read_per_token(engine, args.model)
        rows = []
        if args.prompt:
            speeds = [
                prompt_speed(engine, args.prompt, args.depth, seed) for seed in range(args.repetitions + 1)
            ]
            rows.append(row(f"pp{args.prompt}", args.depth, speeds[1:]))  # the first run warms up
        if args.generate:
            speeds = [
                decode_speed(engine, args.generate, args.depth, seed) for seed in range(args.repetitions + 1)
            ]
            rows.append(row(f"tg{args.generate}", args.depth, speeds[1:], bytes_per_token, bandwidth))
        result = {
            "model": args.model,
            "architecture": engine.config.architecture,
            "weights_bytes": engine.weights_nbytes,
            "bytes_per_token": bytes_per_token,
            "state_bytes": engine.state_nbytes,
            "context": engine.context,
            "slots": engine.slots,
            "kv_dtype": args.kv_dtype,
            "batch": 1,
            "device": engine.device.device_kind,
            "copy_gb_per_s": bandwidth / 1e9,
            "rows": rows,
            "versions": console.versions(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    if not args.json:
        console.show(table(result))
    console.show_json(result)
    return 0


def read_per_token(engine, path: str) -> int:
    """Bytes of weights that one decoded token reads: not all of the embedding, nor of the experts."""
    tensors = footprints(open_gguf(path).tensors.values(), engine.config, "packed")
    share = sum(tensor.read_bytes for tensor in tensors) / sum(tensor.device_bytes for tensor in tensors)
    return round(engine.weights_nbytes * share)


def prompt_speed(engine, prompt: int, depth: int, seed: int) -> float:
    """Tokens per second of computing `prompt` tokens behind `depth` others."""
    ids = made_up_prompt(engine.config.vocab_size, depth + prompt, seed)
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    if depth:
        engine.generate(ids[:depth], one)
    timings = engine.generate(ids, one).timings
    return rate(timings.prefilled_tokens, timings.prefill_s)


def decode_speed(engine, generate: int, depth: int, seed: int) -> float:
    """Tokens per second of decoding `generate` tokens behind `depth` others, after the prefill's token."""
    ids = made_up_prompt(engine.config.vocab_size, max(depth, 1), seed)
    timings = engine.generate(ids, SamplingParams(max_tokens=generate + 1, ignore_eos=True)).timings
    return rate(timings.decoded_tokens, timings.decode_s)


def row(test: str, depth: int, speeds: list[float], bytes_per_token: int = 0, bandwidth: float = 0.0) -> dict:
    """One line of the table: mean and deviation of the speeds, and bandwidth where bytes are given."""
    mean = statistics.fmean(speeds)
    return {
        "test": test,
        "depth": depth,
        "tokens_per_s": mean,
        "std": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "runs": speeds,
        "gb_per_s": bytes_per_token * mean / 1e9 if bytes_per_token else None,
        "percent_of_copy": 100 * bytes_per_token * mean / bandwidth if bytes_per_token else None,
    }


def table(result: dict) -> str:
    """The result for people."""
    rows = []
    for one in result["rows"]:
        speed = f"{one['tokens_per_s']:,.2f} ± {one['std']:.2f}"
        bandwidth = (
            ("", "")
            if one["gb_per_s"] is None
            else (f"{one['gb_per_s']:,.1f}", f"{one['percent_of_copy']:.1f} %")
        )
        rows.append((one["test"], one["depth"], speed, *bandwidth))
    lines = [
        f"{result['model']}: {result['architecture']}, {console.mebibytes(result['weights_bytes'])}, "
        f"context {result['context']}; {result['device']} copies {result['copy_gb_per_s']:,.1f} GB/s",
        columns(("test", "depth", "tok/s", "GB/s", "of copy"), rows),
    ]
    return "\n".join(lines)
