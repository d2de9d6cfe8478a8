"""The command line: `jaxserve COMMAND …`. Results go to stdout, everything else to stderr."""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from jaxserve.cli import console
from jaxserve.errors import JaxserveError

# command -> what it does; each is a module here with `add_arguments(parser)` and `run(args) -> int`
COMMANDS = {
    "generate": "complete one prompt, or answer it as a chat turn",
    "batch": "answer a file of prompts; a job that was killed goes on where it ended",
    "inspect": "what a GGUF file holds and what it needs on the device; loads no weights",
    "bench": "prompt and decode speed, and how much of the memory bandwidth decode uses",
    "trace": "where a token's time goes: launches, kernels and layers of each decode step",
}
INTERRUPTED = 130  # 128 + SIGINT, as shells report it

EXAMPLES = """\
examples:
  jaxserve generate model.gguf "The capital of France is" --max-tokens 16
  jaxserve generate model.gguf --chat "Tell me a joke." --temperature 0.8 --seed 1
  jaxserve batch model.gguf questions.jsonl answers.jsonl --resume
  jaxserve inspect model.gguf --context 8192 --slots 4
  jaxserve bench model.gguf
  jaxserve trace model.gguf --out trace/

`jaxserve COMMAND --help` says more.
exit status: 0 done, 1 error, 2 wrong usage, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    try:
        args = parser().parse_args(argv)
    except SystemExit as usage:  # argparse has printed help or the mistake
        return usage.code or 0
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_: console.say(f"warning: {message}")
            status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # The reader has gone, which is no fault of ours. Python's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        console.say("interrupted")
        return INTERRUPTED
    except (JaxserveError, ValueError, OSError) as error:
        console.say(f"error: {' '.join(str(error).split())}")
        return 1


def parser() -> argparse.ArgumentParser:
    """The whole command line. Commands are imported here, models and devices only when one runs."""
    whole = argparse.ArgumentParser(
        prog="jaxserve",
        description="Runs GGUF language models with JAX.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    whole.add_argument("--version", action="version", version=f"jaxserve {console.versions()['jaxserve']}")
    commands = whole.add_subparsers(metavar="COMMAND", required=True)
    for name, purpose in COMMANDS.items():
        module = importlib.import_module(f"jaxserve.cli.{name}")
        one = commands.add_parser(
            name,
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            epilog=module.__doc__.split("\n\n", 1)[1],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(one)
        one.set_defaults(run=module.run)
    return whole
