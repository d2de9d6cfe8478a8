"""jaxserve generate MODEL PROMPT

Prints the text as it comes. The last line on stderr says how fast it went, why it ended, and how the prompt's
state came about: resident, copied, restored or prefill.

examples:
  jaxserve generate model.gguf "Once upon a time" --max-tokens 200 --temperature 0.8
  jaxserve generate model.gguf --chat --system "Answer in one word." "Capital of France?"
  cat question.txt | jaxserve generate model.gguf - --json
  jaxserve generate model.gguf 1,2,3 --tokens --json      # ids in, ids out: needs no tokenizer
"""

import argparse
import contextlib
import os
import sys

from jaxserve import timing
from jaxserve.cli import console
from jaxserve.cli.flags import (
    add_sampling_flags,
    add_size_flags,
    add_weights_flag,
    load_engine,
    sampling_params,
    token_ids,
)
from jaxserve.errors import JaxserveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jaxserve generate`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any part of a split one")
    parser.add_argument("prompt", metavar="PROMPT", help="the text to go on from; - reads stdin")
    parser.add_argument("--tokens", action="store_true", help="PROMPT is token ids, like 1,2,3")
    parser.add_argument(
        "--chat", action="store_true", help="PROMPT is a user's message: use the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before it; implies --chat")
    parser.add_argument(
        "--json", action="store_true", help="print the whole completion as one JSON object, at its end"
    )
    parser.add_argument(
        "--timings",
        action="store_true",
        help=f"a line on stderr per phase, as {timing.TRACE_VARIABLE}=1 does",
    )
    add_sampling_flags(parser)
    add_size_flags(parser)
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Completes the prompt."""
    params = sampling_params(args)
    prompt = read_prompt(args)
    if args.timings:
        os.environ[timing.TRACE_VARIABLE] = "1"
    with load_engine(args) as engine:
        if args.chat or args.system is not None:
            prompt = chat_prompt(engine, prompt, args.system)
        if args.json:
            console.show_json(engine.generate(prompt, params))
            return 0
        spelled = has_tokenizer(engine)
        with contextlib.closing(engine.stream(prompt, params)) as stream:
            for piece in stream:
                console.show(piece.text if spelled else f"{piece.token} ", end="")
        console.show("")
        completion = stream.completion
        console.say(timing.summary_line(completion.timings, completion))
    return 0


def read_prompt(args: argparse.Namespace) -> str | list[int]:
    """The prompt the arguments name: a text, or ids. From stdin it comes less its final newline."""
    if args.tokens and (args.chat or args.system is not None):
        raise ValueError("--tokens are used as they are: leave out --chat and --system")
    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    return token_ids(text) if args.tokens else text


def has_tokenizer(engine) -> bool:
    """Whether pieces have text; without it ids are shown."""
    try:
        return engine.tokenizer is not None
    except JaxserveError:
        return False


def chat_prompt(engine, message: str, system: str | None) -> list[int]:
    """The ids of a conversation of one message. Only the template's own tokens are special in it."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return engine.tokenizer.encode_chat([*messages, {"role": "user", "content": message}]).ids
