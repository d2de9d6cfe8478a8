"""Which type each matrix of a file gets: the rules of llama-quantize."""

from collections.abc import Callable
from typing import Any, NamedTuple

import gguf
from gguf import GGMLQuantizationType as Type

from synthetic.architectures import Tensor
from synthetic.blocks import FLOATS, LAYOUTS

# layer, number of layers, query heads per kv head -> type, or None for the base
Rule = Callable[[int, int, int], Type | None]


class Mix(NamedTuple):
    """The types of a file: `base` unless the tensor's rule says otherwise."""

    base: Type
    output: Type
    rules: dict[str, Rule] = {}


def _more_bits(qtype: Type) -> Rule:
    """The first and last eighth of the layers, and every third between them."""
    return lambda i, n, gqa: qtype if i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2 else None


def _first_eighth(qtype: Type) -> Rule:
    return lambda i, n, gqa: qtype if i < n // 8 else None


def _grouped(qtype: Type, otherwise: Type | None = None) -> Rule:
    return lambda i, n, gqa: qtype if gqa >= 4 else otherwise


MIXES: dict[str, Mix] = {
    "Q4_K_M": Mix(Type.Q4_K, Type.Q6_K, {"attn_v": _more_bits(Type.Q6_K), "ffn_down": _more_bits(Type.Q6_K)}),
    "Q4_K_S": Mix(Type.Q4_K, Type.Q6_K, {
        "attn_v": lambda i, n, gqa: Type.Q5_K if i < 4 else None, "ffn_down": _first_eighth(Type.Q5_K)}),
    "Q5_K_M": Mix(Type.Q5_K, Type.Q6_K, {"attn_v": _more_bits(Type.Q6_K), "ffn_down": _more_bits(Type.Q6_K)}),
    "Q5_K_S": Mix(Type.Q5_K, Type.Q6_K),
    "Q3_K_M": Mix(Type.Q3_K, Type.Q6_K, {
        "attn_output": lambda i, n, gqa: Type.Q4_K,
        "attn_v": lambda i, n, gqa: Type.Q5_K if i < 2 else Type.Q4_K,
        "ffn_down": lambda i, n, gqa: Type.Q5_K if i < n // 16 else Type.Q4_K}),
    "Q2_K": Mix(Type.Q2_K, Type.Q6_K, {
        "attn_output": lambda i, n, gqa: Type.Q3_K,
        "attn_v": _grouped(Type.Q4_K, otherwise=Type.Q3_K),
        "ffn_down": lambda i, n, gqa: Type.Q3_K}),
    "IQ4_XS": Mix(Type.IQ4_XS, Type.Q6_K, {
        "attn_v": _grouped(Type.Q5_K), "ffn_down": _first_eighth(Type.Q5_K)}),
    "IQ4_NL": Mix(Type.IQ4_NL, Type.Q6_K, {
        "attn_v": _grouped(Type.Q5_K), "ffn_down": _first_eighth(Type.Q5_K)}),
    "MXFP4_MOE": Mix(Type.Q8_0, Type.Q8_0, {"_exps": lambda i, n, gqa: Type.MXFP4}),
    "Q8_0": Mix(Type.Q8_0, Type.Q8_0),
}  # fmt: skip
FALLBACK = {Type.Q4_K: Type.Q5_0, Type.Q5_K: Type.Q5_1, Type.Q6_K: Type.Q8_0, Type.Q2_K: Type.Q4_0,
            Type.Q3_K: Type.Q4_0, Type.TQ1_0: Type.Q4_0, Type.TQ2_0: Type.Q4_0}  # fmt: skip


def mix(quant: str) -> Mix:
    """The mix called `quant`; a plain type stands for that type everywhere and a Q6_K head."""
    if quant in MIXES:
        return MIXES[quant]
    if quant in Type.__members__ and (Type[quant] in LAYOUTS or Type[quant] in FLOATS):
        return Mix(Type[quant], Type[quant] if Type[quant] in FLOATS else Type.Q6_K)
    known = [*MIXES, *(t.name for t in (*FLOATS, *LAYOUTS) if t.name not in MIXES)]
    raise ValueError(f"unknown quant {quant!r}: choose from {', '.join(known)}")


def tensor_type(tensor: Tensor, chosen: Mix, p: dict[str, Any]) -> Type:
    """The type of a matrix in a file of this mix; float32 for everything that is never quantised."""
    if tensor.fill is not None:
        return Type.F32
    parts = tensor.name.split(".")
    qtype = chosen.base
    if tensor.name == "output.weight" or (tensor.name == "token_embd.weight" and p["tied"]):
        qtype = chosen.output
    elif parts[0] == "blk":
        # a fused qkv counts as v; an expert's or a shared expert's down projection as any other
        column = parts[-2].removesuffix("_shexp").replace("attn_qkv", "attn_v")
        rule = chosen.rules.get("_exps") if column.endswith("_exps") else None
        rule = rule or chosen.rules.get(column.removesuffix("_exps"))
        qtype = (rule and rule(int(parts[1]), p["layers"], p["heads"] // p["kv_heads"])) or qtype
    row, block = tensor.shape[-1], gguf.GGML_QUANT_SIZES[qtype][0]
    if row % block:
        qtype = FALLBACK.get(qtype, Type.IQ4_NL)
    return Type.F16 if row % gguf.GGML_QUANT_SIZES[qtype][0] else qtype
