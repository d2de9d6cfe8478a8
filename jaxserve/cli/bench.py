"""jaxserve bench MODEL

pp512 computes a prompt of 512 tokens, tg128 decodes 128 tokens one after another, behind --depth tokens that
are in the state already; with --batch several rows decode side by side (tok/s counts all of them). Decode
moves every weight once a step, and each row's cache: GB/s is those bytes times its speed, and the percentage
of what a copy on the same device moves (read + write) is the score.
The last line is one JSON object for programs.

examples:
  jaxserve bench model.gguf
  jaxserve bench model.gguf --prompt 2048 --generate 256 --depth 0,4096,32768 --repetitions 5
  jaxserve bench model.gguf --prompt 0 --batch 1,4,16,64
"""

import argparse
import datetime
import statistics
from collections.abc import Sequence

from jaxserve.bandwidth import measured_copy_bandwidth
from jaxserve.cli import console
from jaxserve.cli.flags import add_size_flags, add_weights_flag, load_engine
from jaxserve.cli.measure import decode_runs, prompt_runs, tokens_needed, traffic
from jaxserve.trace.report import columns


def sizes(text: str) -> list[int]:
    """ "0,4096" -> [0, 4096]"""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected numbers with commas between them, like 0,4096"
        ) from None


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
        "--depth", type=sizes, default=[0], metavar="N,N", help="tokens in the state beforehand (default 0)"
    )
    parser.add_argument(
        "--batch", type=sizes, default=[1], metavar="N,N", help="rows that decode at once (default 1)"
    )
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--json", action="store_true", help="print the JSON object only")
    add_size_flags(parser, context="as many as needed")
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Measures and prints."""
    check(args)
    if args.context is None:
        args.context = context_for(args)
    args.slots = max(args.slots, *args.batch)
    with load_engine(args, prefix_bytes=0) as engine:
        bandwidth = measured_copy_bandwidth(engine.device)
        rows = []
        for depth in args.depth:
            if args.prompt:
                runs = prompt_runs(engine, args.prompt, repetitions=args.repetitions, depth=depth)
                rows.append(row(f"pp{args.prompt}", depth, 1, [each.tokens_per_s for each in runs]))
            for batch in args.batch if args.generate else ():
                runs = decode_runs(
                    engine, args.generate, repetitions=args.repetitions, rows=batch, depth=depth
                )
                length = max(depth, 1) + args.generate * args.repetitions / 2
                moved = traffic(engine, args.model, rows=batch, length=length, kv_dtype=args.kv_dtype)
                speeds = [each.tokens_per_s for each in runs]
                rows.append(
                    row(f"tg{args.generate}", depth, batch, speeds, sum(moved.values()) / batch, bandwidth)
                )
        result = {
            "model": args.model,
            "architecture": engine.config.architecture,
            "weights_bytes": engine.weights_nbytes,
            "state_bytes": engine.state_nbytes,
            "context": engine.context,
            "slots": engine.slots,
            "kv_dtype": args.kv_dtype,
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


def check(args: argparse.Namespace) -> None:
    """Refuse sizes that mean nothing."""
    for name, least in (("prompt", 0), ("generate", 0), ("depth", 0), ("batch", 1), ("repetitions", 1)):
        given = getattr(args, name)
        for value in given if isinstance(given, list) else [given]:
            if value < least:
                raise ValueError(f"{name}={value}: expected {least} ≤ {name}")


def context_for(args: argparse.Namespace) -> int:
    """Tokens the longest measurement needs."""
    depth, batch = max(args.depth), max(args.batch)
    decoded = tokens_needed(depth, args.generate, repetitions=args.repetitions, rows=batch)
    return max(depth + args.prompt + 1, decoded)


def row(
    test: str,
    depth: int,
    batch: int,
    speeds: Sequence[float],
    bytes_per_token: float = 0.0,
    bandwidth: float = 0.0,
) -> dict:
    """One line of the table: mean, median and deviation of the speeds (tokens per second of all rows), and
    bandwidth where bytes are given.
    """
    mean = statistics.fmean(speeds)
    speed = bytes_per_token * mean
    return {
        "test": test,
        "depth": depth,
        "batch": batch,
        "tokens_per_s": mean,
        "median": statistics.median(speeds),
        "std": statistics.stdev(speeds) if len(speeds) > 1 else 0.0,
        "runs": list(speeds),
        "bytes_per_token": bytes_per_token or None,
        "gb_per_s": speed / 1e9 if bytes_per_token else None,
        "percent_of_copy": 100 * speed / bandwidth if bytes_per_token else None,
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
        rows.append((one["test"], one["depth"], one["batch"], speed, *bandwidth))
    lines = [
        f"{result['model']}: {result['architecture']}, {console.mebibytes(result['weights_bytes'])}, "
        f"context {result['context']}; {result['device']} copies {result['copy_gb_per_s']:,.1f} GB/s",
        columns(("test", "depth", "batch", "tok/s", "GB/s", "of copy"), rows),
    ]
    return "\n".join(lines)
