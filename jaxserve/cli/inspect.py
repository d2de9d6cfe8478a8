"""jaxserve inspect MODEL

Reads the header alone: no weights are loaded, nothing is allocated on a device. "packed" tensors keep ggml's
packing on the device; a type without a packed form becomes a float16 copy. "skipped" ones are not loaded.

The last table is a plan: what a slot takes at a context, and how many slots fit beside the weights.

examples:
  jaxserve inspect model.gguf
  jaxserve inspect model.gguf --context 32768 --slots 8      # does it fit?
  jaxserve inspect model.gguf --context 2048 --slots auto    # what would a job choose?
  jaxserve inspect model.gguf --tensors --metadata --json
"""

import argparse
import dataclasses
from collections import Counter, defaultdict

import jax
import numpy as np

from jaxserve.buckets import Buckets
from jaxserve.capacity import SlotCost, auto_slots, free_memory, plan
from jaxserve.cli import console
from jaxserve.cli.flags import add_size_flags, add_weights_flag
from jaxserve.cli.footprint import Footprint, footprints
from jaxserve.config import ModelConfig
from jaxserve.engine import DEFAULT_CONTEXT
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import GGUFFile, open_gguf
from jaxserve.models.mixers import follows_real_length
from jaxserve.models.weights import resolve_mode
from jaxserve.state import state_nbytes
from jaxserve.trace.report import columns

LONGEST_VALUE = 100
SPECIAL = "_token_id"
SIZES = {
    "chunks": "prefill tokens",
    "reaches": "cached positions a decode step reads",
    "lanes": "decode rows",
    "burst": "decode steps a dispatch, at most",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `jaxserve inspect`."""
    parser.add_argument("model", metavar="MODEL", help="a GGUF file, or any part of a split one")
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--metadata", action="store_true", help="list every metadata key")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_size_flags(parser)
    add_weights_flag(parser)


def run(args: argparse.Namespace) -> int:
    """Prints what the file holds."""
    file = open_gguf(args.model)
    config = read_config(file)
    mode = resolve_mode(args.weights, file)
    context = min(DEFAULT_CONTEXT, config.context_length) if args.context is None else args.context
    tensors = footprints(file.tensors.values(), config, mode)
    weights = sum(tensor.device_bytes for tensor in tensors)
    device = jax.devices()[0]
    free, platform = free_memory(device) - weights, device.platform
    cost = SlotCost(config, args.kv_dtype)
    slots = auto_slots(cost, context, free, platform) if args.slots == "auto" else args.slots
    state = state_nbytes(config, slots=slots, context=context, kv_dtype=args.kv_dtype)
    contexts = sorted({max(1, context // 4), context, max(context, min(4 * context, config.context_length))})
    report = describe(file, config, tensors, mode) | {
        "buckets": dataclasses.asdict(
            Buckets.of(
                context,
                slots,
                platform,
                one_reach=follows_real_length(config, args.kv_dtype),
                step_nbytes=sum(tensor.read_bytes for tensor in tensors),
            )
        ),
        "memory": {
            "context": context,
            "slots": slots,
            "kv_dtype": args.kv_dtype,
            "weights_bytes": weights,
            "state_bytes": state,
            "total_bytes": weights + state,
            "free_bytes": free,
            "slot_fixed_bytes": cost.fixed,
            "slot_token_bytes": cost.token,
            "plan": plan(cost, contexts, free, platform),
        },
    }
    if args.tensors:
        report["tensors"] = [dataclasses.asdict(tensor) for tensor in tensors]
    if args.metadata:
        report["metadata"] = {key: plain(value) for key, value in file.metadata.items()}
    if args.json:
        console.show_json(report)
    else:
        console.show(text(report))
    return 0


def describe(file: GGUFFile, config: ModelConfig, tensors: list[Footprint], mode: str) -> dict:
    """What the file holds, as plain values."""
    return {
        "model": str(file.path),
        "name": plain(file.metadata.get("general.name")),
        "architecture": config.architecture,
        "gguf_version": file.version,
        "trained_context": config.context_length,
        "parameters": sum(int(np.prod(tensor.shape)) for tensor in tensors),
        "vocabulary": config.vocab_size,
        "embedding": config.embed_size,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "experts": dataclasses.asdict(config.experts) if config.experts else None,
        "layers": layers_by_kind(config),
        "weights": mode,
        "types": tensors_by_type(tensors),
        "skipped": [tensor.name for tensor in tensors if tensor.form == "skipped"],
        "tokenizer": tokenizer(file),
    }


def layers_by_kind(config: ModelConfig) -> dict[str, int]:
    """{"attention": 6, "attention, window 512": 30}, and so on for delta layers and experts."""
    return dict(
        Counter(
            layer.kind
            + (f", window {layer.window}" if layer.window else "")
            + (", experts" if layer.experts else "")
            for layer in config.layers
        )
    )


def tensors_by_type(tensors: list[Footprint]) -> list[dict]:
    """A row for each ggml type and form on the device: count, bytes in the file, bytes on the device."""
    rows = defaultdict(lambda: {"count": 0, "file_bytes": 0, "device_bytes": 0})
    for tensor in tensors:
        row = rows[tensor.type, tensor.form]
        row["count"] += 1
        row["file_bytes"] += tensor.file_bytes
        row["device_bytes"] += tensor.device_bytes
    largest_first = sorted(rows.items(), key=lambda item: -item[1]["file_bytes"])
    return [{"type": type, "device": form, **row} for (type, form), row in largest_first]


def tokenizer(file: GGUFFile) -> dict | None:
    """Kind, pre-tokenizer, size, special tokens {name: [id, text]}; None for a file without a tokenizer."""
    prefix = "tokenizer.ggml."
    tokens = file.metadata.get(prefix + "tokens")
    if tokens is None:
        return None
    found = {
        key: value for key, value in file.metadata.items() if key.startswith(prefix) and key.endswith(SPECIAL)
    }
    specials = {key.removeprefix(prefix).removesuffix(SPECIAL): value for key, value in found.items()}
    return {
        "kind": file.metadata.get(prefix + "model"),
        "pre": file.metadata.get(prefix + "pre"),
        "tokens": len(tokens),
        "adds_bos": file.metadata.get(prefix + "add_bos_token"),
        "specials": {name: [id, plain(tokens[id])] for name, id in specials.items() if id < len(tokens)},
        "has_chat_template": "tokenizer.chat_template" in file.metadata,
    }


def plain(value: object) -> object:
    """A metadata value for JSON: arrays become lists, bytes that are no text the replacement character."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list):
        return [plain(item) for item in value]
    return (
        value.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if isinstance(value, str)
        else value
    )


def text(report: dict) -> str:
    """The report for people."""
    mib, memory = console.mebibytes, report["memory"]
    weights, state, total = (mib(memory[f"{part}_bytes"]) for part in ("weights", "state", "total"))
    lines = [f"{report['model']}: {report['name'] or 'unnamed'}, GGUF version {report['gguf_version']}"]
    facts = {
        "architecture": f"{report['architecture']}, {report['parameters'] / 1e6:,.1f} M parameters",
        "trained context": f"{report['trained_context']:,} tokens",
        "vocabulary": f"{report['vocabulary']:,}",
        "embedding": report["embedding"],
        "heads": f"{report['heads']} over {report['kv_heads']} KV heads, of {report['head_dim']}",
        "layers": "; ".join(f"{count} × {kind}" for kind, count in report["layers"].items()),
    }
    if experts := report["experts"]:
        facts["experts"] = f"{experts['used']} of {experts['count']}" + (
            " and a shared one" if experts["shared"] else ""
        )
    facts["tokenizer"] = _tokenizer_text(report["tokenizer"])
    lines += [f"{name:<16} {value}" for name, value in facts.items()]
    rows = [
        (row["type"], row["count"], mib(row["file_bytes"]), row["device"], mib(row["device_bytes"]))
        for row in report["types"]
    ]
    lines += ["", columns(("tensors", "count", "in the file", "on the device as", "taking"), rows)]
    if report["skipped"]:
        lines += [f"not loaded: {len(report['skipped'])} tensors of extra blocks ({report['skipped'][0]} …)"]
    lines += [
        "",
        f"context {memory['context']}, slots {memory['slots']}, {memory['kv_dtype']} cache, on the device:",
        f"  {weights} weights + {state} state = {total}",
        "compiled sizes: "
        + "; ".join(
            f"{SIZES[name]} {', '.join(map(str, np.atleast_1d(sizes)))}"
            for name, sizes in report["buckets"].items()
        ),
        "",
        f"a slot takes {mib(memory['slot_fixed_bytes'])} and {memory['slot_token_bytes'] / 1024:,.1f} KiB "
        f"for each token of its context; {mib(max(0, memory['free_bytes']))} are free beside the weights:",
        columns(
            ("context", "a slot", "slots that fit", "auto"),
            [
                (f"{row['context']:,}", mib(row["slot_bytes"]), row["slots_that_fit"], row["slots_auto"])
                for row in memory["plan"]
            ],
        ),
    ]
    if "tensors" in report:
        rows = [
            (t["name"], t["type"], "×".join(map(str, t["shape"])), t["form"], mib(t["file_bytes"]))
            for t in report["tensors"]
        ]
        lines += ["", columns(("tensor", "type", "shape", "on the device as", "in the file"), rows)]
    if "metadata" in report:
        lines += ["", *(f"{key} = {_short(value)}" for key, value in report["metadata"].items())]
    return "\n".join(lines)


def _tokenizer_text(tokenizer: dict | None) -> str:
    if tokenizer is None:
        return "none: prompts are token ids"
    specials = ", ".join(f"{name} {id} {piece!r}" for name, (id, piece) in tokenizer["specials"].items())
    template = "chat template" if tokenizer["has_chat_template"] else "no chat template"
    return f"{tokenizer['kind']} ({tokenizer['pre']}), {tokenizer['tokens']:,} tokens, {template}; {specials}"


def _short(value: object) -> str:
    if isinstance(value, list):
        shown = ", ".join(repr(item) for item in value[:6])
        return f"[{shown}{', …' if len(value) > 6 else ''}] ({len(value):,})"
    shown = repr(value)
    return shown if len(shown) <= LONGEST_VALUE else shown[:LONGEST_VALUE] + "…"
