"""What a synthetic model holds: presets of real models, and every architecture's tensors and metadata."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

LOGIT_STD = 3.0

# `rope_factor`: llama3 scaling; `interval`: every n-th layer attends, the others are delta layers (hybrids).
DEFAULTS = dict(
    arch="llama", layers=2, embed=256, ffn=512, heads=4, kv_heads=2, head_dim=64, vocab=512, tied=True,
    context=32768, rope_base=1e6, eps=1e-6, rope_factor=0.0, window=0, experts=0, used=0, expert_ffn=0,
    shared_ffn=0, interval=4, conv=4, key_heads=0, value_heads=0, delta_dim=128, mtp=0,
)  # fmt: skip
# The published configuration of each release (its `config.json`).
_QWEN35 = dict(head_dim=256, vocab=248320, context=262144, rope_base=1e7, key_heads=16, value_heads=32)
PRESETS: dict[str, dict[str, Any]] = {
    "qwen2.5-1.5b": dict(arch="qwen2", layers=28, embed=1536, ffn=8960, heads=12, kv_heads=2, head_dim=128,
                         vocab=151936),
    "qwen2.5-7b": dict(arch="qwen2", layers=28, embed=3584, ffn=18944, heads=28, kv_heads=4, head_dim=128,
                       vocab=152064, tied=False),
    "llama-3.2-1b": dict(arch="llama", layers=16, embed=2048, ffn=8192, heads=32, kv_heads=8, head_dim=64,
                         vocab=128256, context=131072, rope_base=5e5, eps=1e-5, rope_factor=32.0),
    "llama-3.1-8b": dict(arch="llama", layers=32, embed=4096, ffn=14336, heads=32, kv_heads=8, head_dim=128,
                         vocab=128256, tied=False, context=131072, rope_base=5e5, eps=1e-5, rope_factor=8.0),
    "qwen3-4b": dict(arch="qwen3", layers=36, embed=2560, ffn=9728, heads=32, kv_heads=8, head_dim=128,
                     vocab=151936, context=40960),
    "gemma3-1b": dict(arch="gemma3", layers=26, embed=1152, ffn=6912, heads=4, kv_heads=1, head_dim=256,
                      vocab=262144, window=512),
    "qwen3.5-0.8b": dict(_QWEN35, arch="qwen35", layers=24, embed=1024, ffn=3584, heads=8, kv_heads=2,
                         value_heads=16),
    "qwen3.5-4b": dict(_QWEN35, arch="qwen35", layers=32, embed=2560, ffn=9216, heads=16, kv_heads=4),
    "qwen3.5-9b": dict(_QWEN35, arch="qwen35", layers=32, embed=4096, ffn=12288, heads=16, kv_heads=4,
                       tied=False),
    "qwen3.5-27b": dict(_QWEN35, arch="qwen35", layers=64, embed=5120, ffn=17408, heads=24, kv_heads=4,
                        value_heads=48, tied=False),
    "qwen3.5-35b-a3b": dict(_QWEN35, arch="qwen35moe", layers=40, embed=2048, heads=16, kv_heads=2,
                            experts=256, used=8, expert_ffn=512, shared_ffn=512, tied=False),
    "qwen3-30b-a3b": dict(arch="qwen3moe", layers=48, embed=2048, ffn=6144, heads=32, kv_heads=4,
                          head_dim=128, vocab=151936, context=40960, experts=128, used=8, expert_ffn=768,
                          tied=False),
}  # fmt: skip

HYBRID = ("qwen35", "qwen35moe", "qwen3next")
QK_NORMS = ("qwen3", "qwen3moe", "gemma3", *HYBRID)
ARCHITECTURES = ("llama", "qwen2", *QK_NORMS)


def parameters(preset: str, **overrides: Any) -> dict[str, Any]:
    """The preset's configuration with some values replaced."""
    if preset not in PRESETS:
        raise ValueError(f"no preset {preset!r}: choose from {', '.join(PRESETS)}")
    if unknown := overrides.keys() - DEFAULTS.keys():
        raise ValueError(f"unknown parameter {', '.join(sorted(unknown))}: choose from {', '.join(DEFAULTS)}")
    p = DEFAULTS | PRESETS[preset] | overrides
    if p["arch"] not in ARCHITECTURES:
        raise ValueError(f"unknown architecture {p['arch']!r}: choose from {', '.join(ARCHITECTURES)}")
    if p["mtp"] and p["arch"] not in HYBRID[:2]:
        raise ValueError(f"{p['arch']} files have no mtp blocks: only {', '.join(HYBRID[:2])} do")
    return p


Fill = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


class Tensor(NamedTuple):
    """One tensor of the file: a matrix of random blocks, or a float32 tensor that `fill` draws."""

    name: str
    shape: tuple[int, ...]  # numpy order: a weight is (N, K), a stack of experts (count, N, K)
    fill: Fill | None = None
    gain: float = 1.0  # of a matrix's standard deviation, over 1/sqrt(K)


def _ones(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.ones(shape)


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """A tied head would recognise the embedding it started from and repeat the last token for ever: random
    signs on the way hide it and change no magnitude."""
    return rng.choice([-1.0, 1.0], shape)


def _small(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return 0.1 * rng.standard_normal(shape)


def _fan_in(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape) / math.sqrt(shape[-1])


def _decay(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """-exp(A_log): the softplus beside it is about 0.7, so heads remember for one to 500 tokens."""
    return -np.exp(rng.uniform(np.log(0.003), 0.0, shape))


def _llama3_divisors(p: dict[str, Any]) -> Fill:
    """Frequency divisors of llama3 scaling: 1 for short waves, `rope_factor` for long, smooth between."""
    dims, factor = p["head_dim"], p["rope_factor"]
    wavelength = 2 * np.pi * p["rope_base"] ** (np.arange(0, dims, 2) / dims)
    low, high, original_context = 1.0, 4.0, 8192
    smooth = np.clip((original_context / wavelength - low) / (high - low), 0.0, 1.0)
    return lambda rng, shape: 1.0 / ((1.0 - smooth) / factor + smooth)


def tensors(p: dict[str, Any]) -> Iterator[Tensor]:
    """Every tensor of the model, in file order."""
    embed, vocab = p["embed"], p["vocab"]
    yield Tensor("token_embd.weight", (vocab, embed), gain=LOGIT_STD)
    for i in range(p["layers"] + p["mtp"]):
        for tensor in _layer(p, i):
            yield tensor._replace(name=f"blk.{i}.{tensor.name}")
    yield Tensor("output_norm.weight", (embed,), _signs)
    if not p["tied"]:
        yield Tensor("output.weight", (vocab, embed), gain=LOGIT_STD)
    if p["arch"] == "llama" and p["rope_factor"]:
        yield Tensor("rope_freqs.weight", (p["head_dim"] // 2,), _llama3_divisors(p))


def _layer(p: dict[str, Any], i: int) -> Iterator[Tensor]:
    arch, embed = p["arch"], p["embed"]
    is_extra = i >= p["layers"]  # a multi-token-prediction block
    yield Tensor("attn_norm.weight", (embed,), _ones)
    is_delta = arch in HYBRID and not is_extra and (i + 1) % p["interval"] != 0
    yield from _delta(p) if is_delta else _attention(p)
    if arch in ("gemma3", *HYBRID):
        yield Tensor("post_attention_norm.weight", (embed,), _ones)
    if arch not in HYBRID:
        yield Tensor("ffn_norm.weight", (embed,), _ones)
    if p["experts"]:
        yield Tensor("ffn_gate_inp.weight", (p["experts"], embed), _fan_in)
        yield from _ffn(embed, p["expert_ffn"] or p["ffn"], "_exps", (p["experts"],))
    else:
        yield from _ffn(embed, p["ffn"])
    if p["shared_ffn"]:
        yield Tensor("ffn_gate_inp_shexp.weight", (1, embed), _fan_in)
        yield from _ffn(embed, p["shared_ffn"], "_shexp")
    if arch == "gemma3":
        yield Tensor("post_ffw_norm.weight", (embed,), _ones)
    if is_extra:
        yield Tensor("nextn.eh_proj.weight", (embed, 2 * embed))
        for name in ("enorm", "hnorm", "shared_head_norm"):
            yield Tensor(f"nextn.{name}.weight", (embed,), _ones)


def _attention(p: dict[str, Any]) -> Iterator[Tensor]:
    embed, head = p["embed"], p["head_dim"]
    queries = p["heads"] * head
    gated = 2 if p["arch"] in HYBRID else 1  # query and output gate in one tensor
    for name, rows in (("q", gated * queries), ("k", p["kv_heads"] * head), ("v", p["kv_heads"] * head)):
        yield Tensor(f"attn_{name}.weight", (rows, embed))
        if p["arch"] == "qwen2":
            yield Tensor(f"attn_{name}.bias", (rows,), _small)
    if p["arch"] in QK_NORMS:
        yield Tensor("attn_q_norm.weight", (head,), _ones)
        yield Tensor("attn_k_norm.weight", (head,), _ones)
    yield Tensor("attn_output.weight", (embed, queries))


def _delta(p: dict[str, Any]) -> Iterator[Tensor]:
    embed, heads = p["embed"], p["value_heads"]
    values = heads * p["delta_dim"]
    channels = 2 * p["key_heads"] * p["delta_dim"] + values
    yield Tensor("attn_qkv.weight", (channels, embed))
    yield Tensor("attn_gate.weight", (values, embed))
    yield Tensor("ssm_conv1d.weight", (channels, p["conv"]), _fan_in)
    if p["arch"] == "qwen3next":
        yield Tensor("ssm_ba.weight", (2 * heads, embed))
    else:
        yield Tensor("ssm_alpha.weight", (heads, embed))
        yield Tensor("ssm_beta.weight", (heads, embed))
    yield Tensor("ssm_dt.bias", (heads,), _small)
    yield Tensor("ssm_a", (heads,), _decay)
    yield Tensor("ssm_norm.weight", (p["delta_dim"],), _ones)
    yield Tensor("ssm_out.weight", (embed, values))


def _ffn(embed: int, ffn: int, suffix: str = "", stack: tuple[int, ...] = ()) -> Iterator[Tensor]:
    yield Tensor(f"ffn_gate{suffix}.weight", (*stack, ffn, embed))
    yield Tensor(f"ffn_up{suffix}.weight", (*stack, ffn, embed))
    yield Tensor(f"ffn_down{suffix}.weight", (*stack, embed, ffn))


def metadata(p: dict[str, Any]) -> dict[str, Any]:
    """The architecture's keys, without its prefix: int, float and list stand for u32, f32 and i32[]."""
    keys = {
        "context_length": p["context"],
        "embedding_length": p["embed"],
        "block_count": p["layers"] + p["mtp"],
        "feed_forward_length": p["ffn"],
        "attention.head_count": p["heads"],
        "attention.head_count_kv": p["kv_heads"],
        "attention.key_length": p["head_dim"],
        "attention.value_length": p["head_dim"],
        "attention.layer_norm_rms_epsilon": float(p["eps"]),
        "rope.freq_base": float(p["rope_base"]),
        "rope.dimension_count": p["head_dim"],
        "vocab_size": p["vocab"],
    }
    if p["window"]:
        keys |= {"attention.sliding_window": p["window"], "rope.freq_base_swa": 10000.0}
    if p["experts"]:
        keys |= {"expert_count": p["experts"], "expert_used_count": p["used"]}
        keys |= {"expert_feed_forward_length": p["expert_ffn"] or p["ffn"]}
    if p["shared_ffn"]:
        keys |= {"expert_shared_feed_forward_length": p["shared_ffn"]}
    if p["arch"] in HYBRID:
        pairs = p["head_dim"] // 8  # a quarter of the head rotates
        keys |= {
            "rope.dimension_count": 2 * pairs,
            "full_attention_interval": p["interval"],
            "ssm.conv_kernel": p["conv"],
            "ssm.state_size": p["delta_dim"],
            "ssm.group_count": p["key_heads"],
            "ssm.time_step_rank": p["value_heads"],
            "ssm.inner_size": p["value_heads"] * p["delta_dim"],
        }
        if p["arch"] != "qwen3next":
            keys |= {"rope.dimension_sections": [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3, 0]}
    if p["mtp"]:
        keys |= {"nextn_predict_layers": p["mtp"]}
    return keys
