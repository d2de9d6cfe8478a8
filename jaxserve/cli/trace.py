"""jaxserve trace MODEL --out DIR

Runs one prefill and some decode steps under the profiler, prints what a step cost and writes DIR/report.json.
The trace itself lies under DIR/plugins/profile and opens in XProf, TensorBoard or Perfetto. On a GPU look for
1 graph launch a step and 0 updates, records and evictions. Each layer kind shows the bytes it has to move in
a step, its speed and what part that is of a copy's on the same device. The last line is the report as one
JSON object; report.json has every dispatch as well.

Where a graph hides which layer its kernels belong to, a second trace follows, in DIR/named, with graphs off:
its names are right, its timings are not.

examples:
  jaxserve trace model.gguf --out trace/
  jaxserve trace model.gguf --out trace/ --steps 200 --prompt-tokens 4096 --context 8192
  jaxserve trace model.gguf --out trace/ --batch 16 --plot token.svg
"""

import argparse
import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from jaxserve.bandwidth import measured_copy_bandwidth
from jaxserve.cli import console
from jaxserve.cli.flags import add_size_flags, add_weights_flag, load_engine, made_up_prompt
from jaxserve.cli.measure import SEED_STRIDE, host_dispatch_s, traffic
from jaxserve.params import SamplingParams
from jaxserve.results import Completion
from jaxserve.trace.named import graphs_off
from jaxserve.trace.plot import check_plot, plot_token
from jaxserve.trace.profiler import writable_folder
from jaxserve.trace.report import TraceReport

UNTRACED = "without the profiler: {step_ms:.3f} ms a step, host dispatch {host_dispatch_ms:.3f} ms"
PROMPT_TOKENS = 64
WARM_UP_TOKENS = 16
NAMED = "graphs hide {share:.0%} of the kernel time. A second trace with graphs off, for names only: {folder}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jaxserve trace`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any part of a split one")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--prompt", metavar="TEXT", help="the prompt (default: made-up ids)")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"made-up ids of the prompt (default {PROMPT_TOKENS})",
    )
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="tokens to decode (default 50)")
    parser.add_argument(
        "--batch", type=int, default=1, metavar="N", help="rows that decode at once (default 1)"
    )
    parser.add_argument(
        "--named", action="store_true", help="take the trace with graphs off even if no name is hidden"
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw a token's time by layer kind (.svg, .png; needs jaxserve[plot])"
    )
    add_size_flags(parser)
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Traces one request, or several at once."""
    for name, least in (("steps", 2), ("batch", 1), ("prompt_tokens", 1)):
        if getattr(args, name) < least:
            why = ", a steady step is one that another follows" if name == "steps" else ""
            raise ValueError(f"{name}={getattr(args, name)}: expected {least} ≤ {name}{why}")
    folder = writable_folder(args.out)
    if args.plot:
        check_plot(args.plot)
    args.slots = max(args.slots, args.batch)
    with load_engine(args) as engine:
        bandwidth = measured_copy_bandwidth(engine.device)
        generate(engine, args, seed=1, tokens=WARM_UP_TOKENS)
        untraced = {
            "step_ms": step_ms(generate(engine, args, seed=2, tokens=args.steps + 1)),
            "host_dispatch_ms": 1e3 * host_dispatch_s(engine, args.batch),
        }
        with engine.trace(folder) as report:
            done = generate(engine, args, seed=3, tokens=args.steps + 1)  # the first is the prefill's
        length = sum(one.prompt_tokens + len(one.tokens) / 2 for one in done) / len(done)
        moved = traffic(engine, args.model, rows=args.batch, length=length, kv_dtype=args.kv_dtype)
        report.add_traffic(moved, bandwidth)
        console.show(f"{report.table()}\n\n{UNTRACED.format(**untraced)}")
        named = None
        if args.named or report.hides_names:
            note = NAMED.format(share=report.hidden_share, folder=folder / "named")
            named = trace_named(engine, args, folder / "named")
            named.add_traffic(moved, bandwidth)
            console.show(f"\n{note}\n\n{named.table()}")
    result = report.as_dict() | {
        "model": args.model,
        "rows": args.batch,
        "mean_length": length,
        "untraced": untraced,
        "copy_gb_per_s": bandwidth / 1e9,
        "versions": console.versions(),
        "named": named and compact(named.as_dict()),
    }
    (folder / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        plot_token(
            named or report, report.per_step, args.plot, step_ms=untraced["step_ms"], title=title(args)
        )
    console.show_json(compact(result))
    return 0


def generate(engine, args: argparse.Namespace, *, seed: int, tokens: int) -> list[Completion]:
    """Decode `tokens` tokens of every row."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with contextlib.ExitStack() as stack:
        streams = [
            stack.enter_context(contextlib.closing(engine.stream(prompt, params)))
            for prompt in prompts(engine, args, seed)
        ]
        for stream in streams:
            for _ in stream:
                pass
        return [stream.completion for stream in streams]


def step_ms(done: Sequence[Completion]) -> float:
    """Milliseconds of a step in which all rows decode: the last one starts when the others have."""
    timings = done[-1].timings
    return 1e3 * timings.decode_s / timings.decoded_tokens


def title(args: argparse.Namespace) -> str:
    """What a plot shows."""
    return f"{Path(args.model).stem}: a step of {args.batch} row{'s' if args.batch > 1 else ''}"


def prompts(engine, args: argparse.Namespace, seed: int) -> Sequence[str | list[int]]:
    """One for each row: the text given, or ids that no other row and no other call shares."""
    if args.prompt:
        return [args.prompt] * args.batch
    vocab = engine.config.vocab_size
    return [made_up_prompt(vocab, args.prompt_tokens, SEED_STRIDE * seed + row) for row in range(args.batch)]


def trace_named(engine, args: argparse.Namespace, folder: Path) -> TraceReport:
    """The same run again with graphs off."""
    with graphs_off(engine._runner):
        generate(engine, args, seed=4, tokens=WARM_UP_TOKENS)
        with engine.trace(folder) as report:
            generate(engine, args, seed=5, tokens=args.steps + 1)
    return report


def compact(report: dict) -> dict:
    """A report without its longest parts, every single dispatch."""
    short = {name: value for name, value in report.items() if name != "each_dispatch"}
    return short | {
        "prefill": {name: value for name, value in report["prefill"].items() if name != "each_dispatch"}
    }
