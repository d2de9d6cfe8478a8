"""jaxserve trace MODEL --out DIR

Runs one prefill and some decode steps under the profiler, prints what a step cost and writes DIR/report.json.
The trace itself lies under DIR/plugins/profile and opens in XProf, TensorBoard or Perfetto. On a GPU look for
1 graph launch a step and 0 updates, records and evictions. The last line is the report as
one JSON object; report.json has every step as well.

A graph hides which layer its kernels belong to. --named first takes a second trace, in DIR/named, with graphs
off: its names are right, its timings are not.

examples:
  jaxserve trace model.gguf --out trace/
  jaxserve trace model.gguf --out trace/ --steps 200 --named
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from jaxserve.cli import console
from jaxserve.cli.flags import add_size_flags, add_weights_flag, load_engine, made_up_prompt
from jaxserve.params import SamplingParams
from jaxserve.trace.profiler import writable_folder

PROMPT_TOKENS = 64
WARM_UP_TOKENS = 16
WITHOUT_GRAPHS = "--xla_gpu_enable_command_buffer="


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jaxserve trace`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any part of a split one")
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to write to")
    parser.add_argument("--prompt", metavar="TEXT", help=f"the prompt (default: {PROMPT_TOKENS} made-up ids)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="tokens to decode (default 50)")
    parser.add_argument(
        "--named", action="store_true", help="also a trace with graphs off, for the names of layers"
    )
    add_size_flags(parser)
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Traces one request."""
    if args.steps < 2:
        raise ValueError(f"steps={args.steps}: expected 2 ≤ steps, a steady step is one that another follows")
    folder = writable_folder(args.out)
    named = (
        trace_named(args) if args.named else None
    )  # first: this process must not hold the device meanwhile
    with load_engine(args) as engine:
        params = SamplingParams(
            max_tokens=args.steps + 1, ignore_eos=True
        )  # the first token comes out of the prefill
        warm_up = made_up_prompt(engine.config.vocab_size, PROMPT_TOKENS, seed=1)
        engine.generate(warm_up, SamplingParams(max_tokens=WARM_UP_TOKENS, ignore_eos=True))
        prompt = args.prompt or made_up_prompt(engine.config.vocab_size, PROMPT_TOKENS, seed=2)
        with engine.trace(folder) as report:
            engine.generate(prompt, params)
    console.show(report.table())
    result = report.as_dict() | {"model": args.model, "versions": console.versions(), "named": named}
    (folder / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    console.show_json({name: value for name, value in result.items() if name != "each_step"})
    return 0


def trace_named(args: argparse.Namespace) -> dict:
    """Runs this command again with graphs off and returns its report. XLA reads its flags once, at start."""
    command = [sys.executable, "-m", "jaxserve", "trace", args.model, "--out", str(Path(args.out) / "named")]
    for name in ("steps", "context", "slots", "kv_dtype", "weights", "prompt"):
        if (value := getattr(args, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    flags = f"{os.environ.get('XLA_FLAGS', '')} {WITHOUT_GRAPHS}".strip()
    done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise OSError(f"the trace with graphs off failed with exit status {done.returncode}")
    table, _, last = done.stdout.rstrip("\n").rpartition("\n")
    console.show(f"graphs off, for names only:\n{table}\n")
    return json.loads(last)
