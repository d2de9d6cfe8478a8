#!/usr/bin/env python3
"""Compares a real model with its reference outputs, in plain float32 and in the default mode.

    python tools/correctness.py ~/.cache/jaxserve/models/smollm2.gguf tests/data/smollm2.gen.json --out
    smollm2.json

Teacher forcing: each prompt and its reference continuation are fed, and the logits at the generated positions
compared: argmax where the reference's gap exceeds --margin, the 8 best logits, and (default against float32)
the mean KL divergence over the whole vocabulary. Free running: greedy tokens up to the first difference, and
the reference's gap there.
"""

import argparse
import datetime
import json
from pathlib import Path

import jax
import numpy as np

import jaxserve
from jaxserve.cli.console import versions
from jaxserve.trace.report import columns

MODES = {"float32": {"weights": "float32", "kv_dtype": "float32"}, "default": {}}


def main() -> None:
    """Run both modes over all prompts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("oracle", type=Path)
    parser.add_argument("--margin", type=float, default=0.01, help="gap below which two tokens are a tie")
    parser.add_argument("--weights", default="auto", help="of the default mode")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    prompts = json.loads(args.oracle.read_text())["prompts"]
    forced, results = {}, {}
    for mode, options in (MODES | {"default": {"weights": args.weights}}).items():
        with jaxserve.Engine.load(args.model, context=args.context, **options) as engine:
            rows = []
            for prompt in prompts:
                exact = prompt["exact"]
                logits = engine.logits([*prompt["ids"], *exact["gen"][:-1]])[len(prompt["ids"]) - 1 :]
                row = compare(logits, exact, args.margin) | {"prompt": prompt["name"]}
                if mode == "float32":
                    forced[prompt["name"]] = logits
                else:
                    row["kl"] = kl(forced.pop(prompt["name"]), logits)
                params = jaxserve.SamplingParams(max_tokens=len(exact["gen"]), ignore_eos=True)
                row |= diverges(engine.generate(prompt["ids"], params).tokens, exact)
                rows.append(row)
            results[mode] = rows
    summary = {mode: summarise(rows) for mode, rows in results.items()}
    print(columns(("mode", *next(iter(summary.values()))), [(m, *s.values()) for m, s in summary.items()]))
    report = {
        "model": args.model.name,
        "device": jax.devices()[0].device_kind,
        "margin": args.margin,
        "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "summary": summary,
        "prompts": results,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def compare(logits: np.ndarray, exact: dict, margin: float) -> dict:
    """Argmax agreement where it is no tie, and the largest difference among the reference's 8 best logits."""
    gap, top_id = np.array(exact["gap"]), np.array(exact["top_id"])
    decided = gap > margin
    same = logits.argmax(axis=-1) == top_id[:, 0]
    best = np.array(exact.get("hf_top_val", exact["top_val"]))
    difference = np.abs(np.take_along_axis(logits, top_id, axis=-1) - best)
    return {
        "decided": int(decided.sum()),
        "argmax_equal": int((same & decided).sum()),
        "max_difference": float(difference.max()),
    }


def kl(exact: np.ndarray, logits: np.ndarray) -> float:
    """Mean over positions of KL(exact ‖ logits) in nats, over the whole vocabulary."""
    log_p, log_q = (np.asarray(jax.nn.log_softmax(x.astype(np.float64), axis=-1)) for x in (exact, logits))
    return float((np.exp(log_p) * (log_p - log_q)).sum(axis=-1).mean())


def diverges(tokens: list[int], exact: dict) -> dict:
    """Where the free greedy run leaves the reference, and the reference's gap there."""
    at = next((i for i, (a, b) in enumerate(zip(tokens, exact["gen"], strict=True)) if a != b), None)
    return {"first_difference": at, "gap_there": None if at is None else exact["gap"][at]}


def summarise(rows: list[dict]) -> dict:
    """One line over all prompts."""
    gaps = [row["gap_there"] for row in rows if row["gap_there"] is not None]
    kls = [row["kl"] for row in rows if "kl" in row]
    return {
        "argmax equal": f"{sum(r['argmax_equal'] for r in rows)} of {sum(r['decided'] for r in rows)}",
        "max top-8 difference": f"{max(r['max_difference'] for r in rows):.2g}",
        "mean KL": f"{np.mean(kls):.2g}" if kls else "",
        "worst KL": f"{max(kls):.2g}" if kls else "",
        "greedy equal": f"{sum(r['first_difference'] is None for r in rows)} of {len(rows)}",
        "largest gap at a difference": f"{max(gaps):.3g}" if gaps else "",
    }


if __name__ == "__main__":
    main()
