#!/usr/bin/env python3
"""Loads an engine as many independent users would, and reports what they wait for.

    python tools/load_test.py model.gguf --slots 64 --context 2048
    python tools/load_test.py qwen2.5-7b --slots 64 --mix 128x128@3 1024x64@1 --rate 20 --seconds 30

Requests arrive at random times (Poisson, `--rate` a second) whatever the engine is doing: the load is open, a
slow answer delays no later arrival. A request's time to first token counts from its planned arrival. It is
good if that is within --ttft and no pause between two of its tokens is longer than --gap; goodput is good
requests a second. Without --rate the rate rises until goodput no longer follows, the peak is narrowed down,
and the last run offers 80 % of the best goodput. A request alone comes first, for comparison.

One thread drives everything: between two turns of the engine's loop it submits what is due and notes which
tokens have come out. A table for people, then one JSON object on the last line.
"""

import argparse
import dataclasses
import datetime
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import jaxserve
from bench_models import loaded, model_file
from jaxserve.cli.console import versions
from jaxserve.trace.report import columns
from synthetic.architectures import PRESETS

ALONE_REQUESTS = 5
LOADED_SHARE = 0.8  # of the peak goodput, offered in the last run
KEEPS_UP = 0.9  # of the offered requests are good while the engine keeps up
NARROWING_RUNS = 3
JITTER = 0.5  # lengths are uniform within this share of the mix's, above and below
PERCENTILES = (50, 90, 95, 99)
_CLASS = re.compile(r"(\d+)x(\d+)(?:@(\d+(?:\.\d+)?))?")


@dataclasses.dataclass(frozen=True)
class Shape:
    """One class of requests."""

    prompt: int  # tokens
    output: int  # tokens
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> "Shape":
        """ "128x64@3": 128 prompt tokens, 64 to generate, three times as frequent as a class of weight 1"""
        match = _CLASS.fullmatch(text)
        if match is None or not int(match[1]) or int(match[2]) < 2 or match[3] == "0":
            raise argparse.ArgumentTypeError(
                f"{text!r}: expected PROMPTxOUTPUT or PROMPTxOUTPUT@WEIGHT, like 128x64@3, with 1 ≤ PROMPT, "
                "2 ≤ OUTPUT and 0 < WEIGHT"
            )
        return cls(int(match[1]), int(match[2]), float(match[3] or 1))


@dataclasses.dataclass
class Visit:
    """A request from its planned arrival to its last token. Times are seconds since the run began."""

    at: float
    prompt: list[int]
    output: int
    submitted: float | None = None
    tokens: list[float] = dataclasses.field(default_factory=list)  # when each came out
    finished: bool = False

    @property
    def first_token_s(self) -> float | None:
        """From the planned arrival to the first token."""
        return self.tokens[0] - self.at if self.tokens else None

    @property
    def gaps_s(self) -> list[float]:
        """Between its tokens."""
        return np.diff(self.tokens).tolist()

    def is_good(self, ttft: float, gap: float) -> bool:
        """Whether it finished within the limits, in seconds."""
        in_time = bool(self.tokens) and self.first_token_s <= ttft
        return self.finished and in_time and max(self.gaps_s, default=0.0) <= gap


def arrivals(mix: Sequence[Shape], rate: float, seconds: float, vocab: int, seed: int) -> list[Visit]:
    """Poisson arrivals of `rate` requests a second for `seconds`, in order; equal seeds give equal ones."""
    rng = np.random.default_rng(seed)
    weights = np.array([shape.weight for shape in mix])
    visits, at = [], rng.exponential(1 / rate)
    while at < seconds:
        shape = mix[rng.choice(len(mix), p=weights / weights.sum())]
        prompt, output = (
            max(least, round(length * rng.uniform(1 - JITTER, 1 + JITTER)))
            for least, length in ((1, shape.prompt), (2, shape.output))
        )
        visits.append(Visit(at, rng.integers(0, vocab, prompt).tolist(), output))
        at += rng.exponential(1 / rate)
    return visits


class Driver:
    """Steps an engine between arrivals: it has no thread of its own, without a driver nothing moves."""

    def __init__(self, engine: jaxserve.Engine):
        self.engine = engine

    def start(self, visit: Visit) -> jaxserve.Stream:
        """Submit a request; returns at once."""
        return self.engine.stream(
            visit.prompt, jaxserve.SamplingParams(max_tokens=visit.output, ignore_eos=True)
        )

    def step(self, stream: jaxserve.Stream) -> None:
        """One turn of the loop for everyone, on behalf of one of them: some prefill, one decode step."""
        self.engine._turn(stream._request, lambda: False)

    def progress(self, stream: jaxserve.Stream) -> tuple[int, bool]:
        """(tokens that have come out, whether it is over); looks without stepping."""
        return len(stream._request.tokens), stream._request.done


def run(driver: Driver, visits: Sequence[Visit], drain: float) -> float:
    """Play the arrivals; `drain` seconds after the last one, whatever still runs is cancelled.

    Fills in the visits and returns the seconds it took.
    """
    begin = time.perf_counter()
    now = lambda: time.perf_counter() - begin  # noqa: E731
    waiting, open_ = list(reversed(visits)), []
    end = (visits[-1].at if visits else 0.0) + drain
    while (waiting or open_) and now() < end:
        while waiting and waiting[-1].at <= now():
            visit = waiting.pop()
            open_.append((visit, driver.start(visit)))
            visit.submitted = now()
        if not open_:
            time.sleep(max(0.0, waiting[-1].at - now()))
            continue
        driver.step(open_[0][1])
        at = now()
        for visit, stream in open_:
            count, visit.finished = driver.progress(stream)
            visit.tokens += [at] * (count - len(visit.tokens))
        for _, stream in (done for done in open_ if done[0].finished):
            list(stream)  # buffered: this steps nobody
        open_ = [(visit, stream) for visit, stream in open_ if not visit.finished]
    for _, stream in open_:
        stream.close()
    return now()


def summary(visits: Sequence[Visit], seconds: float, *, rate: float | None, ttft: float, gap: float) -> dict:
    """What one run says; `seconds` is how long requests arrived. Times in milliseconds."""
    firsts = [visit.first_token_s for visit in visits if visit.tokens]
    gaps = [each for visit in visits for each in visit.gaps_s]
    late = [visit.submitted - visit.at for visit in visits if visit.submitted is not None]
    good = sum(visit.is_good(ttft, gap) for visit in visits)
    return {
        "rate": rate,
        "requests": len(visits),
        "finished": sum(visit.finished for visit in visits),
        "good": good,
        "goodput": good / seconds,
        "tokens_per_s": sum(len(visit.tokens) for visit in visits) / seconds,
        "ttft_ms": percentiles(firsts),
        "gap_ms": percentiles(gaps),
        "submitted_late_ms": percentiles(late),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float | None]:
    """{"p50": …} in milliseconds; None where there is nothing to rank."""
    if not seconds:
        return {f"p{p}": None for p in PERCENTILES}
    return {f"p{p}": 1e3 * float(np.percentile(seconds, p)) for p in PERCENTILES}


def sweep(measure: Callable[[float], dict], start: float, runs: int = NARROWING_RUNS) -> list[dict]:
    """Runs at rising rates until goodput falls behind, then between the last two rates.

    The best goodput of all runs is the peak. Rates double, so `start` should be one that is easily served.
    """
    done = [measure(start)]
    while _keeps_up(done[-1]):
        done.append(measure(2 * done[-1]["rate"]))
    low = max((one["rate"] for one in done if _keeps_up(one)), default=0.0)
    high = done[-1]["rate"]
    for _ in range(runs):
        done.append(measure((low + high) / 2))
        low, high = (done[-1]["rate"], high) if _keeps_up(done[-1]) else (low, done[-1]["rate"])
    return done


def _keeps_up(one: dict) -> bool:
    return one["good"] >= KEEPS_UP * one["requests"] and one["requests"] > 0


def load(driver: Driver, args: argparse.Namespace) -> dict:
    """A request alone, the sweep (or the one rate asked for), and 80 % of the peak."""
    limits = dict(ttft=args.ttft, gap=args.gap)
    vocab = driver.engine.config.vocab_size
    seeds = iter(range(args.seed, 2**31))

    def measure(rate: float) -> dict:
        visits = arrivals(args.mix, rate, args.seconds, vocab, next(seeds))
        run(driver, visits, args.drain)
        one = summary(visits, args.seconds, rate=rate, **limits)
        print(row_text(one), flush=True)
        return one

    alone = [
        Visit(0.0, visit.prompt, visit.output)
        for visit in arrivals(args.mix, 1.0, 10.0 * ALONE_REQUESTS, vocab, next(seeds))[:ALONE_REQUESTS]
    ]
    took = sum(run(driver, [visit], args.drain) for visit in alone)
    result = {"alone": summary(alone, took, rate=None, **limits)}
    print(row_text(result["alone"]), flush=True)
    if args.rate:
        return result | {"runs": [measure(args.rate)]}
    result["runs"] = sweep(measure, args.start)
    result["peak_goodput"] = max(one["goodput"] for one in result["runs"])
    if result["peak_goodput"]:
        result["at_80_percent"] = measure(LOADED_SHARE * result["peak_goodput"])
        alone, loaded_ = (result[name]["gap_ms"]["p95"] for name in ("alone", "at_80_percent"))
        result["gap_p95_over_alone"] = loaded_ / alone if loaded_ and alone else None
    return result


HEAD = ("rate", "requests", "good", "goodput", "tok/s")
HEAD += ("TTFT ms p50", "p95", "p99", "gap ms p50", "p95", "p99")


def row(one: dict) -> tuple[str, ...]:
    """A run as cells of the table."""
    shown = lambda value, digits=1: "n/a" if value is None else f"{value:,.{digits}f}"  # noqa: E731
    times = [shown(one[name][p]) for name in ("ttft_ms", "gap_ms") for p in ("p50", "p95", "p99")]
    rate = "alone" if one["rate"] is None else shown(one["rate"], 2)
    counts = (f"{one['requests']}", f"{one['good']}")
    return (rate, *counts, shown(one["goodput"], 2), shown(one["tokens_per_s"], 0), *times)


def row_text(one: dict) -> str:
    """A run on one line, as it ends."""
    return ", ".join(f"{name} {cell}" for name, cell in zip(HEAD, row(one), strict=True))


def table(result: dict) -> str:
    """All runs for people."""
    runs = [result["alone"], *result["runs"], *filter(None, [result.get("at_80_percent")])]
    lines = [columns(HEAD, map(row, runs))]
    if "peak_goodput" in result:
        lines.append(f"peak goodput {result['peak_goodput']:.2f} requests/s")
    if ratio := result.get("gap_p95_over_alone"):
        lines.append(f"at 80 % of it the p95 gap is {ratio:.2f} × that of a request alone")
    return "\n".join(lines)


def main() -> None:
    """Parse, load, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("model", help=f"a GGUF file, or one of {', '.join(PRESETS)}")
    add("--mix", type=Shape.parse, nargs="+", default=[Shape(128, 128)], metavar="PxO[@W]",
        help="prompt and output tokens of each class, and its weight (default 128x128)")  # fmt: skip
    add("--slots", type=int, default=64)
    add("--context", type=int, default=2048)
    add("--weights", default="auto")
    add("--quant", default="Q4_K_M", help="of a synthetic model (default Q4_K_M)")
    add("--folder", type=Path, default=Path(tempfile.gettempdir()), help="for synthetic models")
    add("--rate", type=float, help="requests a second: this rate only, no sweep")
    add("--start", type=float, default=1.0, help="the sweep's first rate (default 1)")
    add("--seconds", type=float, default=20.0, help="of arrivals in each run (default 20)")
    add("--drain", type=float, default=10.0, help="seconds after them until a run is cut off (default 10)")
    add("--ttft", type=float, default=1.0, help="seconds to the first token of a good request (default 1)")
    add("--gap", type=float, default=0.05, help="seconds between its tokens at most (default 0.05)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="a file for the JSON object")
    args = parser.parse_args()
    longest = max(shape.prompt + shape.output for shape in args.mix) * (1 + JITTER)
    if longest > args.context:
        parser.error(f"--context {args.context}: the mix has sequences of up to {longest:,.0f} tokens")
    with (
        model_file(args.model, args.folder, args.quant) as path,
        loaded(path, args.weights, context=args.context, slots=args.slots) as (engine, loading),
    ):
        result = load(Driver(engine), args) | {
            "model": args.model,
            "loading": loading,
            "slots": args.slots,
            "context": args.context,
            "mix": [dataclasses.asdict(shape) for shape in args.mix],
            "limits_s": {"ttft": args.ttft, "gap": args.gap},
            "seed": args.seed,
            "device": engine.device.device_kind,
            "versions": versions(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result), flush=True)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
