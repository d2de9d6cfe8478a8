"""Flags that several commands share, and the values made from them."""

import argparse
import dataclasses
import os

import jaxserve
from jaxserve.cli import console
from jaxserve.params import SamplingParams

KV_DTYPES = ("float16", "bfloat16", "float32")
WEIGHTS = ("auto", "packed", "float32")


def token_ids(text: str) -> list[int]:
    """ "1,2,3" -> [1, 2, 3]"""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{text!r}: expected token ids with commas between them, like 1,2,3") from None


def slot_count(text: str) -> int | str:
    """A number, or "auto"."""
    return text if text == "auto" else int(text)


# What a flag of `SamplingParams` says and takes. A field without a row fails the first `jaxserve --help`.
SAMPLING_HELP = {
    "max_tokens": "tokens to generate at most",
    "temperature": "0 is greedy; 1 draws from the model's own distribution",
    "top_k": "draw from the K most likely tokens; 0 is off, 1 is greedy",
    "top_p": "draw from the most likely tokens that make up this probability; 1 is off",
    "min_p": "drop tokens less likely than this fraction of the likeliest; 0 is off",
    "repeat_penalty": "make tokens seen before less likely, by division; 1 is off",
    "repeat_last_n": "tokens back that penalties look at; 0 is off, -1 the whole context",
    "presence_penalty": "subtracted once from tokens seen before; 0 is off",
    "frequency_penalty": "subtracted for every time a token was seen; 0 is off",
    "stop_tokens": "ids that end the generation, with commas between them; may be given again",
    "stop": "a text that ends the generation and is left out; may be given again",
    "ignore_eos": "treat the model's end tokens as ordinary tokens",
    "seed": "the same seed draws the same tokens; without one each run differs",
    "logprobs": "keep this many likeliest tokens and their log-probabilities (shown by --json)",
}
# Fields whose default value does not tell argparse what to do.
SAMPLING_TAKES = {
    "stop_tokens": {"type": token_ids, "action": "extend", "metavar": "IDS"},
    "stop": {"action": "append", "metavar": "TEXT"},
    "ignore_eos": {"action": "store_true"},
    "seed": {"type": int, "metavar": "N"},
}
METAVARS = {int: "N", float: "X"}


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """A flag for every field of `SamplingParams`, with its default."""
    group = parser.add_argument_group("sampling")
    for field in dataclasses.fields(SamplingParams):
        kind, note = type(field.default), SAMPLING_HELP[field.name]
        takes = SAMPLING_TAKES.get(field.name)
        if takes is None:
            takes = {"type": kind, "metavar": METAVARS[kind], "default": field.default}
            note += f" (default {field.default})"
        group.add_argument(_flag(field.name), help=note, **takes)


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The `SamplingParams` of parsed flags; a flag that was not given keeps the field's default."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(SamplingParams)}
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def add_size_flags(
    parser: argparse.ArgumentParser,
    context: str = "4096, or the trained length if less",
    slots: int | str = 1,
) -> None:
    """What decides the size of the state. `context` says in words what is used without --context."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--context", type=int, metavar="N", help=f"tokens a sequence can hold (default: {context})"
    )
    group.add_argument(
        "--slots",
        type=slot_count,
        default=slots,
        metavar="N",
        help=f"sequences held at once; auto: as many as fit, at most 64, on CPU 8 (default {slots})",
    )
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="float16",
        help="type of cached keys and values (default float16)",
    )


def add_weights_flag(parser: argparse.ArgumentParser) -> None:
    """How weights lie on the device."""
    parser.add_argument(
        "--weights",
        choices=WEIGHTS,
        default="auto",
        help="packed keeps the file's quantisation, float32 unpacks it; auto chooses by device (default)",
    )


def load_engine(args: argparse.Namespace, **options: object) -> "jaxserve.Engine":
    """The engine of parsed flags. Says how loading goes, which device is used, and of a GPU left unused."""
    progress = console.Progress()
    try:
        engine = jaxserve.Engine.load(
            args.model,
            context=args.context,
            slots=args.slots,
            kv_dtype=args.kv_dtype,
            weights=args.weights,
            progress=progress,
            **options,
        )
    finally:
        progress.close()
    console.say(
        f"{os.path.basename(args.model)} on {engine.device}: "
        f"weights {console.mebibytes(engine.weights_nbytes)}, state {console.mebibytes(engine.state_nbytes)} "
        f"(context {engine.context}, slots {engine.slots})"
    )
    if warning := console.unused_gpu(engine.device):
        console.say(warning)
    return engine


def made_up_prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    """`length` ids spread over the vocabulary; another seed shares no prefix worth keeping."""
    return [(7919 * (seed * 100_003 + position) + 17 * seed + 1) % vocab_size for position in range(length)]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
