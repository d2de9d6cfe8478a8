"""jaxserve batch MODEL IN OUT

Each line of IN is a JSON object: {"id", "prompt" | "prompt_tokens" | "messages", and fields of the sampling
flags}, or a row of an OpenAI batch file (custom_id, url, body). Each is answered by one line of OUT, as soon
as it is done: {"id", "text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "error", "digest"},
or the OpenAI shape. Flags hold for what a row does not set. A row that cannot be served is answered with its
error. "-" is stdin or stdout.

A job that was killed goes on with --resume: finished rows stay as they are, and its answers are those of a
job that was never interrupted. docs/batching.md says how to choose slots and context.

examples:
  jaxserve batch model.gguf questions.jsonl answers.jsonl --max-tokens 256 --temperature 0.7 --seed 1
  jaxserve batch model.gguf questions.jsonl answers.jsonl --resume
  cat questions.jsonl | jaxserve batch model.gguf - - --slots 16 > answers.jsonl
exit status: 1 also where a row of OUT has an error
"""

import argparse
import dataclasses
import os
import sys

from jaxserve.cli import console
from jaxserve.cli.flags import (
    add_sampling_flags,
    add_size_flags,
    add_weights_flag,
    load_engine,
    sampling_params,
)
from jaxserve.errors import EngineError
from jaxserve.gguf.reader import open_gguf
from jaxserve.jobs.job import STANDARD, Job, Summary, answers
from jaxserve.models.weights import resolve_mode
from jaxserve.trace.report import columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jaxserve batch`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any part of a split one")
    parser.add_argument("source", metavar="IN", help="a JSONL file of requests; - reads stdin")
    parser.add_argument("target", metavar="OUT", help="a JSONL file of answers; - writes to stdout")
    parser.add_argument("--resume", action="store_true", help="answer what OUT does not hold yet")
    parser.add_argument("--overwrite", action="store_true", help="OUT may hold something: it is lost")
    parser.add_argument(
        "--ordered", action="store_true", help="answers in the order of IN, not as they are done"
    )
    parser.add_argument(
        "--actors",
        type=int,
        metavar="N",
        help="answer on a Ray cluster with N engines, each on a GPU of its own (needs jaxserve[ray])",
    )
    parser.add_argument("--json", action="store_true", help="the summary as one JSON object on stdout")
    add_sampling_flags(parser)
    add_size_flags(parser, slots="auto")
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the job. 1: a row of the output has an error."""
    defaults = sampling_params(args)
    if args.json and args.target == STANDARD:
        raise ValueError("--json and OUT - would both write to stdout")
    if args.actors is not None and (args.ordered or args.actors < 1):
        raise ValueError(f"--actors {args.actors}: expected 1 or more, without --ordered")
    job = Job(args.source, args.target, defaults, resume=args.resume, overwrite=args.overwrite)
    try:
        if job.left == 0 and args.resume:
            summary = job.nothing_left()
        else:
            choose_as_before(args, job)
            summary = (on_cluster if args.actors else here)(args, job)
    except (KeyboardInterrupt, EngineError):
        if args.target != STANDARD:
            console.say(f"{args.target} holds the finished rows: --resume goes on")
        raise
    if args.json:
        console.show_json(dataclasses.asdict(summary) | {"tokens_per_s": summary.tokens_per_s})
    else:
        print(table(summary), file=sys.stderr)
    return 1 if summary.errors else 0


def here(args: argparse.Namespace, job: Job) -> Summary:
    """The job on one engine of this process."""
    if args.weights == "auto":
        args.weights = resolve_mode("auto", open_gguf(args.model))
    with load_engine(args, reproducible=True) as engine:
        return job.write(answers(engine, job.rows(), weights=args.weights, ordered=args.ordered))


def on_cluster(args: argparse.Namespace, job: Job) -> Summary:
    """The job on a Ray cluster: the one that RAY_ADDRESS names, else one on this machine."""
    try:
        from jaxserve.jobs.cluster import cluster_answers
    except ImportError as error:
        raise ValueError(f"--actors needs Ray: pip install 'jaxserve[ray]' ({error})") from None
    options = {name: getattr(args, name) for name in ("context", "slots", "kv_dtype", "weights")}
    gpus = 0 if "cpu" in os.environ.get("JAX_PLATFORMS", "") else 1
    return job.write(cluster_answers(job, args.model, actors=args.actors, gpus=gpus, **options))


def choose_as_before(args: argparse.Namespace, job: Job) -> None:
    """A resumed job chooses automatically what it chose before."""
    before = job.finished.stamp
    if before is None:
        return
    if args.weights == "auto":
        args.weights = before.weights
    if args.slots == "auto":
        args.slots = before.slots
    if (args.slots, args.weights) != before[1:]:
        console.say(
            f"warning: finished rows were answered with --slots {before.slots} --weights {before.weights}: "
            "with others an answer may differ where two tokens are about equally likely"
        )


def table(summary: Summary) -> str:
    """The summary for people."""
    header = ("rows", "kept", "errors", "prompt tokens", "cached", "tokens", "seconds", "tok/s")
    fields = (summary.rows, summary.kept, summary.errors, summary.prompt_tokens, summary.cached_tokens)
    return columns(header, [(*fields, summary.tokens, summary.seconds, summary.tokens_per_s)])
