"""GGUF metadata → `ModelConfig` and rotary frequencies. Keys, defaults and formulas are llama.cpp's."""

import dataclasses
import math

import gguf
import numpy as np

from jaxserve.config import FULL, Delta, Experts, Layer, ModelConfig
from jaxserve.errors import InvalidGGUF, UnsupportedModel
from jaxserve.gguf.metadata import Keys
from jaxserve.gguf.reader import GGUFFile

MAX_LAYERS = 512
MAX_EXPERTS = 512
MAX_HEAD_DIM = 2**14
BETA_FAST, BETA_SLOW = 32, 1  # yarn's; llama.cpp reads no others for these architectures
GEMMA3_27B_LAYERS = 62  # the one size whose attention scale is not 1/√D, known by nothing else
TOKENS = gguf.Keys.Tokenizer.LIST


@dataclasses.dataclass(frozen=True)
class Family:
    """What the name of an architecture alone decides."""

    experts: str = "none"  # "none" | "optional" | "required"
    hybrid: bool = False  # Gated DeltaNet layers beside attention
    grouped: bool = False  # its value heads are grouped by key head, not tiled
    sections: bool = False  # pairs of rotary dims share four position streams
    next_token: bool = False  # may carry extra blocks that draft the next token
    shared: bool = False  # may have a shared expert


FAMILIES = {
    "llama": Family(experts="optional"),
    "qwen2": Family(),
    "qwen3": Family(),
    "qwen3moe": Family(experts="required"),
    "gemma3": Family(),
    "qwen35": Family(hybrid=True, sections=True, next_token=True),
    "qwen35moe": Family(hybrid=True, sections=True, next_token=True, experts="required", shared=True),
    "qwen3next": Family(hybrid=True, grouped=True, experts="required", shared=True),
}


def read_config(file: GGUFFile) -> ModelConfig:
    """The model's hyper-parameters, all checked. Needs the tensors' shapes, not their bytes."""
    keys = Keys(file)
    family = FAMILIES.get(keys.architecture)
    if family is None:
        keys.unsupported("general.architecture", f"{keys.architecture!r}, supported: {', '.join(FAMILIES)}")
    _check_is_model(file)
    blocks = keys.integer("block_count", high=MAX_LAYERS)
    count = blocks - (
        keys.integer("nextn_predict_layers", 0, low=0, high=blocks - 1) if family.next_token else 0
    )
    embed = keys.integer("embedding_length")
    heads = keys.uniform("attention.head_count", blocks)
    kv_heads = keys.uniform("attention.head_count_kv", blocks, heads)
    if heads % kv_heads:
        keys.invalid("attention.head_count_kv", f"{kv_heads}, expected a divisor of the {heads} query heads")
    head_dim = _head_dim(keys, embed, heads)
    is_gemma = keys.architecture == "gemma3"
    experts = _experts(keys, family)
    return ModelConfig(
        architecture=keys.architecture,
        vocab_size=_vocab_size(file, embed),
        embed_size=embed,
        context_length=keys.integer("context_length"),
        layers=_layers(keys, family, blocks, count, experts is not None),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dims=_rope_dims(keys, head_dim),
        rope_interleaved=keys.architecture == "llama",
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        attention_scale=(embed // heads if is_gemma and count == GEMMA3_27B_LAYERS else head_dim) ** -0.5,
        rope_magnitude=_rope_magnitude(keys),
        embed_scale=embed**0.5 if is_gemma else 1.0,
        logit_softcap=keys.number("final_logit_softcapping", 0.0, open_low=False) if is_gemma else 0.0,
        activation="gelu" if is_gemma else "silu",
        delta=_delta(keys, family) if family.hybrid else None,
        experts=experts,
    )


def _check_is_model(file: GGUFFile) -> None:
    if not file.tensors:
        raise UnsupportedModel(
            f"{file.path}: a vocabulary-only file: it has no tensors, only its tokenizer can be used"
        )
    if "blk.0.attn_norm.weight" not in file.tensors and any(".nextn." in name for name in file.tensors):
        raise UnsupportedModel(
            f"{file.path}: an MTP-only companion file, without the model itself: load the main file"
        )


def _vocab_size(file: GGUFFile, embed: int) -> int:
    """Rows of the embedding, which the tokenizer must match if the file has one."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise InvalidGGUF(f"{file.path}: tensor 'token_embd.weight': missing")
    if len(table.shape) != 2 or table.shape[1] != embed:
        raise InvalidGGUF(
            f"{file.path}: tensor 'token_embd.weight': shape {table.shape}, expected (vocabulary, {embed})"
        )
    tokens = file.metadata.get(TOKENS)
    if tokens is not None and not isinstance(tokens, list):
        raise InvalidGGUF(f"{file.path}: {TOKENS}: expected an array of strings")
    if tokens is not None and len(tokens) != table.shape[0]:
        raise InvalidGGUF(
            f"{file.path}: {TOKENS}: {len(tokens)} tokens, but token_embd.weight has {table.shape[0]} rows"
        )
    return table.shape[0]


def _head_dim(keys: Keys, embed: int, heads: int) -> int:
    default = embed // heads
    if default == 0:
        keys.invalid("attention.head_count", f"{heads}, more than the embedding_length {embed}")
    key = keys.integer("attention.key_length", default, high=MAX_HEAD_DIM)
    value = keys.integer("attention.value_length", default, high=MAX_HEAD_DIM)
    if key != value:
        keys.unsupported(
            "attention.value_length", f"{value}, but key_length is {key}: unequal ones are not supported"
        )
    return key


def _rope_dims(keys: Keys, head_dim: int) -> int:
    dims = keys.integer("rope.dimension_count", head_dim, high=head_dim)
    if dims % 2:
        keys.invalid("rope.dimension_count", f"{dims}, expected an even number")
    if keys.architecture == "llama" and dims != head_dim:
        keys.invalid("rope.dimension_count", f"{dims}, llama rotates whole heads: expected {head_dim}")
    return dims


def _layers(keys: Keys, family: Family, blocks: int, count: int, experts: bool) -> tuple[Layer, ...]:
    kinds, windows = ["attention"] * count, [FULL] * count
    if family.hybrid:
        kinds = ["delta" if delta else "attention" for delta in _recurrent(keys, blocks)[:count]]
    window = keys.integer("attention.sliding_window", 0, low=0) if keys.architecture == "gemma3" else FULL
    if window:
        pattern = keys.integer("attention.sliding_window_pattern", 6, low=0)
        windows = [window if pattern == 0 or i % pattern < pattern - 1 else FULL for i in range(count)]
    return tuple(
        Layer(kind, kinds[:i].count(kind), windows[i], "local" if windows[i] else "global", experts)
        for i, kind in enumerate(kinds)
    )


def _recurrent(keys: Keys, blocks: int) -> list[bool]:
    """Which blocks are Gated DeltaNet. The mask, where there is one, overrules the interval."""
    interval = keys.integer("full_attention_interval", 4)
    if keys.full("attention.recurrent_layers") in keys.file.metadata:
        return [bool(recurrent) for recurrent in keys.array("attention.recurrent_layers", blocks)]
    return [(i + 1) % interval != 0 for i in range(blocks)]


def _delta(keys: Keys, family: Family) -> Delta:
    key_heads = keys.integer("ssm.group_count")
    value_heads = keys.integer("ssm.time_step_rank")
    dim = keys.integer("ssm.state_size", high=MAX_HEAD_DIM)
    inner = keys.integer("ssm.inner_size")
    if value_heads % key_heads:
        keys.invalid("ssm.time_step_rank", f"{value_heads}, expected a multiple of the {key_heads} key heads")
    if inner != value_heads * dim:
        keys.invalid("ssm.inner_size", f"{inner}, expected time_step_rank × state_size = {value_heads * dim}")
    return Delta(
        conv_width=keys.integer("ssm.conv_kernel", low=2),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=dim,
        value_dim=dim,
        grouped=family.grouped,
    )


def _experts(keys: Keys, family: Family) -> Experts | None:
    if family.experts == "none":
        return None
    if family.experts == "required":
        count = keys.integer("expert_count", high=MAX_EXPERTS)
    else:
        count = keys.integer("expert_count", 0, low=0, high=MAX_EXPERTS)
    if count == 0:
        return None
    used = keys.integer("expert_used_count", high=count)
    return Experts(count, used, family.shared and "blk.0.ffn_gate_shexp.weight" in keys.file.tensors)


# -- rotary frequencies


def rope_frequencies(file: GGUFFile, config: ModelConfig) -> dict[str, np.ndarray]:
    """Angle per position of every rotated pair, by the names `Layer.rope` uses: f32 [rope_dims/2].

    base^(−2j/n) / divisor_j, then linear or yarn scaling, computed in f64. "local" (gemma3's sliding layers)
    has a base of its own and no scaling.
    """
    keys = Keys(file)
    plain = _powers(keys, "rope.freq_base", config) / _divisors(file, config)
    tables = {"global": _scaled(keys, plain, config) * _rotates(keys, config)}
    if any(layer.rope == "local" for layer in config.layers):
        tables["local"] = _powers(keys, "rope.freq_base_swa", config)
    return {name: table.astype(np.float32) for name, table in tables.items()}


def _powers(keys: Keys, key: str, config: ModelConfig) -> np.ndarray:
    base = keys.number(key, 10000.0)
    return base ** -(np.arange(0, config.rope_dims, 2, dtype=np.float64) / config.rope_dims)


def _divisors(file: GGUFFile, config: ModelConfig) -> np.ndarray:
    """llama3's per-pair divisors, which the converter has worked out.   → f64 [rope_dims/2]"""
    name, pairs = "rope_freqs.weight", config.rope_dims // 2
    tensor = file.tensors.get(name)
    if config.architecture != "llama" or tensor is None:
        return np.ones(pairs)
    divisors = gguf.quants.dequantize(np.array(tensor.raw), tensor.type).astype(np.float64).reshape(-1)
    if divisors.size != pairs:
        raise InvalidGGUF(f"{file.path}: tensor {name!r}: {divisors.size} values, expected {pairs}")
    if not (np.isfinite(divisors).all() and (divisors > 0).all()):
        raise InvalidGGUF(f"{file.path}: tensor {name!r}: {divisors.tolist()}, expected finite numbers > 0")
    return divisors


def _scaling(keys: Keys) -> tuple[str, float]:
    """The kind of scaling and its factor ≥ 0; a factor of 1 changes nothing."""
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        keys.unsupported("rope.scaling.type", f"{kind!r}, supported: none, linear, yarn")
    if kind == "yarn" and keys.architecture == "gemma3":
        keys.unsupported("rope.scaling.type", "'yarn', gemma3 supports none and linear")
    factor = keys.number("rope.scaling.factor", 0.0, open_low=False)
    factor = (
        factor or keys.number("rope.scale_linear", 0.0, open_low=False) or 1.0
    )  # 0 is absent, as in llama.cpp
    return kind, 1.0 if kind == "none" else factor


def _rope_magnitude(keys: Keys) -> float:
    """What cos and sin are multiplied by: (1 + 0.1·ln factor) under yarn, times attn_factor."""
    kind, factor = _scaling(keys)
    yarn = 1 + 0.1 * math.log(factor) if kind == "yarn" and factor > 1 else 1.0
    return yarn * keys.number("rope.scaling.attn_factor", 1.0)


def _scaled(keys: Keys, plain: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Linear scaling divides all pairs; yarn leaves fast ones, divides slow ones, blends between."""
    kind, factor = _scaling(keys)
    if kind != "yarn":
        return plain / factor
    base = keys.number("rope.freq_base", 10000.0, low=1.0)
    trained = keys.integer("rope.scaling.original_context_length", config.context_length)
    pair_turning = lambda turns: (  # noqa: E731  the pair that turns so often within the trained length
        config.rope_dims * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(base))
    )
    low = max(0, math.floor(pair_turning(BETA_FAST)))
    high = min(config.rope_dims - 1, math.ceil(pair_turning(BETA_SLOW)))
    slow = np.clip((np.arange(plain.size) - low) / max(0.001, high - low), 0, 1)
    return plain / factor * slow + plain * (1 - slow)


def _rotates(keys: Keys, config: ModelConfig) -> np.ndarray:
    """1 for pairs that follow the text position, 0 for those of the fourth stream, where text stands at 0.

    Pair j has sector s = j mod Σ sections; its stream is s mod 3 if s < 3·sections[s mod 3], else the last.
    """
    pair = np.arange(config.rope_dims // 2)
    name = "rope.dimension_sections"
    if not FAMILIES[config.architecture].sections or keys.full(name) not in keys.file.metadata:
        return np.ones(pair.size)
    sections = keys.array(name, 3, 4)
    if min(sections) < 0 or sum(sections) == 0:
        keys.invalid(name, f"{sections}, expected numbers ≥ 0, not all of them 0")
    sector = pair % sum(sections)
    return (sector < 3 * np.array(sections)[sector % 3]).astype(np.float64)
