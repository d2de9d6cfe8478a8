"""Which tensors an architecture needs, and their shapes: one row each, in letters."""

import dataclasses
import re
import warnings
from collections.abc import Iterator

from gguf import GGMLQuantizationType

from jaxserve.config import ModelConfig
from jaxserve.errors import InvalidGGUF, UnsupportedModel, UnsupportedTensorType
from jaxserve.gguf.metadata import Keys
from jaxserve.gguf.reader import GGUFFile, Tensor

OPTIONAL = "optional"
VECTOR_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
BLOCK = re.compile(r"blk\.(\d+)\.")
# Known and unused: rope_freqs but for llama, attn_rot_embd of very old files, the cls.* head of rerankers.
UNUSED = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\..*|cls\..*")
NAMES_SHOWN = 5


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor. `unless`: "" it must be there, OPTIONAL it may be missing, else what replaces it."""

    name: str
    shape: str  # numpy order, letters of `_dimensions`
    unless: str = ""


MODEL = (
    Row("token_embd.weight", "V E"),
    Row("output_norm.weight", "E"),
    Row("output.weight", "V E", OPTIONAL),
    Row("output.bias", "V", OPTIONAL),
)
ATTENTION = (
    Row("attn_qkv.weight", "Q+2·KV E", OPTIONAL),
    Row("attn_qkv.bias", "Q+2·KV", OPTIONAL),
    Row("attn_q.weight", "Q E", "attn_qkv.weight"),
    Row("attn_q.bias", "Q", OPTIONAL),
    Row("attn_k.weight", "KV E", "attn_qkv.weight"),
    Row("attn_k.bias", "KV", OPTIONAL),
    Row("attn_v.weight", "KV E", "attn_qkv.weight"),
    Row("attn_v.bias", "KV", OPTIONAL),
    Row("attn_output.weight", "E Hq·D"),
    Row("attn_output.bias", "E", OPTIONAL),
)
NORMED_ATTENTION = (*ATTENTION, Row("attn_q_norm.weight", "D"), Row("attn_k_norm.weight", "D"))
DELTA = (
    Row("ssm_conv1d.weight", "C W"),
    Row("ssm_dt.bias", "Hv"),
    Row("ssm_a", "Hv"),
    Row("ssm_norm.weight", "Dv"),
    Row("ssm_out.weight", "E Hv·Dv"),
)
DELTA_QWEN35 = (
    Row("attn_qkv.weight", "C E"),
    Row("attn_gate.weight", "Hv·Dv E"),
    Row("ssm_alpha.weight", "Hv E"),
    Row("ssm_beta.weight", "Hv E"),
    *DELTA,
)
DELTA_QWEN3NEXT = (
    Row("ssm_in.weight", "C+Hv·Dv E", OPTIONAL),  # legacy files: q, k, v and z in one
    Row("attn_qkv.weight", "C E", "ssm_in.weight"),
    Row("attn_gate.weight", "Hv·Dv E", "ssm_in.weight"),
    Row("ssm_ba.weight", "2·Hv E"),
    *DELTA,
)
DENSE = (
    Row("ffn_gate.weight", "F E"),
    Row("ffn_gate.bias", "F", OPTIONAL),
    Row("ffn_up.weight", "F E"),
    Row("ffn_up.bias", "F", OPTIONAL),
    Row("ffn_down.weight", "E F"),
    Row("ffn_down.bias", "E", OPTIONAL),
)
EXPERTS = (
    Row("ffn_gate_inp.weight", "X E"),
    Row("ffn_gate_up_exps.weight", "X 2·Fe E", OPTIONAL),
    Row("ffn_gate_exps.weight", "X Fe E", "ffn_gate_up_exps.weight"),
    Row("ffn_up_exps.weight", "X Fe E", "ffn_gate_up_exps.weight"),
    Row("ffn_down_exps.weight", "X E Fe"),
)
SHARED_EXPERT = (
    Row("ffn_gate_inp_shexp.weight", "E"),
    Row("ffn_gate_shexp.weight", "Fs E"),
    Row("ffn_up_shexp.weight", "Fs E"),
    Row("ffn_down_shexp.weight", "E Fs"),
)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The rows of an architecture's blocks: every block's norms, then those of its kind."""

    norms: tuple[str, ...]
    attention: tuple[Row, ...] = ATTENTION
    delta: tuple[Row, ...] = ()


ARCHITECTURES = {
    "llama": Blocks(("attn_norm", "ffn_norm")),
    "qwen2": Blocks(("attn_norm", "ffn_norm")),
    "qwen3": Blocks(("attn_norm", "ffn_norm"), NORMED_ATTENTION),
    "qwen3moe": Blocks(("attn_norm", "ffn_norm"), NORMED_ATTENTION),
    "gemma3": Blocks(("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"), NORMED_ATTENTION),
    "qwen35": Blocks(("attn_norm", "post_attention_norm"), NORMED_ATTENTION, DELTA_QWEN35),
    "qwen35moe": Blocks(("attn_norm", "post_attention_norm"), NORMED_ATTENTION, DELTA_QWEN35),
    "qwen3next": Blocks(("attn_norm", "post_attention_norm"), NORMED_ATTENTION, DELTA_QWEN3NEXT),
}


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Raises unless every tensor of the architecture is there in the expected shape; warns of unknown ones.

    Blocks behind the last layer (those that draft the next token) are not looked at.
    """
    sizes = _dimensions(file, config)
    known = set()
    for prefix, rows in _rows(config):
        for row in rows:
            name = prefix + row.name
            known.add(name)
            if name in file.tensors:
                _check(file, file.tensors[name], row.shape, sizes)
            elif not row.unless or (row.unless != OPTIONAL and prefix + row.unless not in file.tensors):
                instead = f" (or {prefix + row.unless!r})" if row.unless else ""
                raise InvalidGGUF(
                    f"{file.path}: tensor {name!r}{instead}: missing, expected shape {row.shape}"
                )
    _report_unknown(file, config, known)


def _rows(config: ModelConfig) -> Iterator[tuple[str, tuple[Row, ...]]]:
    """Prefix and rows, for the model and for each of its layers."""
    blocks = ARCHITECTURES[config.architecture]
    yield "", MODEL + ((Row("rope_freqs.weight", "R/2", OPTIONAL),) if config.architecture == "llama" else ())
    norms = tuple(Row(f"{name}.weight", "E") for name in blocks.norms)
    for index, layer in enumerate(config.layers):
        feed_forward = EXPERTS if layer.experts else DENSE
        if config.experts and config.experts.shared:
            feed_forward += SHARED_EXPERT
        mixer = blocks.delta if layer.kind == "delta" else blocks.attention
        yield f"blk.{index}.", norms + mixer + feed_forward


def _dimensions(file: GGUFFile, config: ModelConfig) -> dict[str, int]:
    """What the letters of the shapes stand for."""
    heads = config.heads * config.head_dim
    gated = bool(ARCHITECTURES[config.architecture].delta)  # every q head is followed by its gate
    q, kv = heads * (1 + gated), config.kv_heads * config.head_dim
    sizes = {
        "V": config.vocab_size,
        "E": config.embed_size,
        "D": config.head_dim,
        "R/2": config.rope_dims // 2,
    }
    sizes |= {"Hq·D": heads, "Q": q, "KV": kv, "Q+2·KV": q + 2 * kv}
    if delta := config.delta:
        hv, inner = delta.value_heads, delta.value_heads * delta.value_dim
        sizes |= {"W": delta.conv_width, "Hv": hv, "2·Hv": 2 * hv, "Dv": delta.value_dim, "Hv·Dv": inner}
        sizes |= {"C": delta.channels, "C+Hv·Dv": delta.channels + inner}
    return sizes | _feed_forward(Keys(file), config)


def _feed_forward(keys: Keys, config: ModelConfig) -> dict[str, int]:
    blocks, experts = len(config.layers), config.experts
    if experts is None:
        return {"F": keys.uniform("feed_forward_length", blocks)}
    if config.architecture == "llama":  # has no key of its own for the width of experts
        dense = width = keys.uniform("feed_forward_length", blocks)
    else:
        dense = keys.uniform("feed_forward_length", blocks, 0, low=0)
        width = keys.integer("expert_feed_forward_length", dense // experts.used or None)
    sizes = {"X": experts.count, "Fe": width, "2·Fe": 2 * width}
    if experts.shared:
        sizes["Fs"] = keys.integer("expert_shared_feed_forward_length", dense or None)
    return sizes


def _check(file: GGUFFile, tensor: Tensor, letters: str, sizes: dict[str, int]) -> None:
    expected = tuple(sizes[letter] for letter in letters.split())
    if _trimmed(tensor.shape) != _trimmed(expected):
        raise InvalidGGUF(
            f"{file.path}: tensor {tensor.name!r}: shape {tensor.shape}, expected {expected} ({letters})"
        )
    if len(expected) == 1 and tensor.type not in VECTOR_TYPES:
        allowed = ", ".join(kind.name for kind in VECTOR_TYPES)
        raise UnsupportedTensorType(
            f"{file.path}: tensor {tensor.name!r}: a vector of {tensor.type.name}, expected {allowed}"
        )


def _trimmed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without leading 1s: in the file they are trailing ones, equal to absent dims."""
    return _trimmed(shape[1:]) if shape[:1] == (1,) else shape


def _report_unknown(file: GGUFFile, config: ModelConfig, known: set[str]) -> None:
    blocks = {
        name: BLOCK.match(name) for name in file.tensors if name not in known and not UNUSED.fullmatch(name)
    }
    unknown = [name for name, block in blocks.items() if not block or int(block[1]) < len(config.layers)]
    for name in unknown:
        if name.endswith((".scale", ".input_scale")):  # ignoring it would silently give wrong products
            raise UnsupportedModel(
                f"{file.path}: tensor {name!r}: weights with a separate scale are not supported"
            )
    if unknown:
        shown = ", ".join(unknown[:NAMES_SHOWN]) + (", …" if len(unknown) > NAMES_SHOWN else "")
        warnings.warn(
            f"{file.path}: {len(unknown)} tensors are not of {config.architecture} and ignored: {shown}",
            stacklevel=3,
        )
