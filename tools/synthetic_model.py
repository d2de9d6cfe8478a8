#!/usr/bin/env python3
"""Writes a GGUF file of random weights at a real model's shapes and types, for benchmarks and tests.

    python tools/synthetic_model.py qwen2.5-7b out.gguf
    python tools/synthetic_model.py qwen3.5-4b out.gguf --quant Q8_0 --layers 8 --mtp 1 --set context=4096

Speed depends on shapes, types and the number of bytes, not on what the weights say, so no checkpoint is
needed. Blocks are random bytes under chosen scales (nothing is quantised): every matrix has a standard
deviation of 1/sqrt(K), norms are 1, the head gives logits a deviation of 3, so that nothing overflows and
sampling has something to choose from. The tokenizer encodes and decodes any text; answers are gibberish.
"""

import argparse
import ast
import math
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from synthetic.architectures import ARCHITECTURES, DEFAULTS, PRESETS, Tensor, metadata, parameters, tensors
from synthetic.blocks import pool, pool_blocks
from synthetic.mixes import mix, tensor_type

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level BPE: bytes, pairs of letters, pairs of those, three special."""
    alphabet = [chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))]
    alphabet += [chr(256 + i) for i in range(256 - len(alphabet))]  # GPT-2's stand-ins for the other 68 bytes
    space, letters = "\u0120", "abcdefghijklmnopqrstuvwxyz"
    pairs = [(a, b) for a in space + letters for b in letters]
    quads = ((a + b, c + d) for a, b in pairs for c, d in pairs if c != space)
    wanted = size - len(alphabet) - len(SPECIAL)
    if not 0 <= wanted <= len(pairs) + len(pairs) * 26 * 26:
        raise ValueError(f"vocab={size} is out of range: 259 to 474,000 tokens can be made")
    merges = pairs[:wanted] + [quad for quad, _ in zip(quads, range(wanted - len(pairs)), strict=False)]
    return [*alphabet, *(a + b for a, b in merges), *SPECIAL], [f"{a} {b}" for a, b in merges]


def plan(p: dict[str, Any], quant: str) -> list[tuple[Tensor, Type, int]]:
    """Every tensor with its type and its number of blocks."""
    chosen = mix(quant)
    typed = [(tensor, tensor_type(tensor, chosen, p)) for tensor in tensors(p)]
    return [(t, qtype, math.prod(t.shape) // gguf.GGML_QUANT_SIZES[qtype][0]) for t, qtype in typed]


def write(path: Path, p: dict[str, Any], quant: str = "Q4_K_M", seed: int = 0) -> int:
    """Writes the model of these `parameters`; returns the size of its tensors in bytes.

    Streams: needs the memory of a few pools, whatever the model's size. Equal arguments give equal files.
    """
    planned = plan(p, quant)
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, p["arch"])
    _write_metadata(writer, p, quant)
    for tensor, qtype, count in planned:
        nbytes = count * gguf.GGML_QUANT_SIZES[qtype][1]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), nbytes, qtype)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        nbytes = _write_tensors(writer, planned, seed)
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
        pool.cache_clear()
    return nbytes


def _write_tensors(writer: gguf.GGUFWriter, planned: list[tuple[Tensor, Type, int]], seed: int) -> int:
    out = writer.fout[0]  # the writer's own method wants whole tensors in memory
    writer.write_padding(out, out.tell())
    begin = out.tell()
    largest: dict[Type, int] = {}
    for _, qtype, count in planned:
        largest[qtype] = max(count, largest.get(qtype, 0))
    rng = np.random.default_rng(seed)
    for tensor, qtype, count in planned:
        nbytes = gguf.GGML_QUANT_SIZES[qtype][1]
        if tensor.fill:
            out.write(tensor.fill(rng, tensor.shape).astype("<f4").tobytes())
        else:
            std = tensor.gain / math.sqrt(tensor.shape[-1])
            blocks = pool(qtype, std, pool_blocks(largest[qtype], nbytes), seed)
            start, left = int(rng.integers(len(blocks))), count
            while left:
                window = blocks[start : start + left]
                out.write(window)
                start, left = 0, left - len(window)
        writer.write_padding(out, count * nbytes)
    return out.tell() - begin


def _write_metadata(writer: gguf.GGUFWriter, p: dict[str, Any], quant: str) -> None:
    add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for key, value in metadata(p).items():
        add[type(value)](f"{p['arch']}.{key}", value)
    labels = gguf.LlamaFileType.__members__
    writer.add_file_type(labels.get(f"MOSTLY_{quant}", labels.get(f"ALL_{quant}", labels["GUESSED"])))
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_name(f"synthetic {p['arch']} {quant}")
    tokens, merges = vocabulary(p["vocab"])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([normal] * (len(tokens) - len(SPECIAL)) + [control] * len(SPECIAL))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(len(tokens) - 3)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_pad_token_id(len(tokens) - 3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("preset", choices=PRESETS, metavar="PRESET", help=", ".join(PRESETS))
    parser.add_argument("out", type=Path, metavar="OUT.gguf")
    parser.add_argument("--quant", default="Q4_K_M", help="a mix or a type: Q4_K_M, Q8_0, MXFP4_MOE ...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arch", help=f"override: {', '.join(ARCHITECTURES)}")
    parser.add_argument("--layers", type=int, help="override: decoder layers")
    parser.add_argument("--vocab", type=int, help="override: tokens")
    parser.add_argument("--mtp", type=int, help="override: multi-token-prediction blocks appended")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="KEY=VALUE", help=f"override any of: {', '.join(DEFAULTS)}"
    )
    arguments = parser.parse_args()
    named = {key: getattr(arguments, key) for key in ("arch", "layers", "vocab", "mtp")}
    overrides = {key: value for key, value in named.items() if value is not None}
    try:
        for item in arguments.set:
            key, _, value = item.partition("=")
            overrides[key] = value if key == "arch" else ast.literal_eval(value)
        started = time.perf_counter()
        chosen = parameters(arguments.preset, **overrides)
        nbytes = write(arguments.out, chosen, arguments.quant, arguments.seed)
    except (ValueError, SyntaxError, OSError) as error:
        parser.error(str(error))
    seconds = time.perf_counter() - started
    print(f"{arguments.out}: {nbytes / 1e9:.2f} GB of tensors in {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
