"""What a model is, apart from its weights: static, hashable, part of every compiled program's identity."""

import dataclasses

FULL = 0  # a window of 0 tokens: the layer sees the whole context


@dataclasses.dataclass(frozen=True)
class Layer:
    """One decoder layer. `rank` is its index among the layers of its `kind`: the row of the stacked state."""

    kind: str  # "attention" | "delta"
    rank: int
    window: int = FULL  # tokens a query sees, itself included; FULL = all
    rope: str = "global"  # which frequency table of `Weights.rope` rotates q and k
    experts: bool = False  # mixture-of-experts FFN instead of a dense one


@dataclasses.dataclass(frozen=True)
class Delta:
    """Gated DeltaNet dimensions (qwen35, qwen3next)."""

    conv_width: int  # W
    key_heads: int
    value_heads: int  # Hv, a multiple of key_heads
    key_dim: int  # Dk
    value_dim: int  # Dv
    grouped: bool  # value head h reads key head h // (Hv/key_heads) (qwen3next), else h % key_heads (qwen35)

    @property
    def channels(self) -> int:
        """C: convolved channels, all q heads then all k heads then all v heads."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim


@dataclasses.dataclass(frozen=True)
class Experts:
    """Mixture-of-experts dimensions."""

    count: int
    used: int
    shared: bool  # a shared expert beside the routed ones


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters read from GGUF metadata. Letters as in docs/design.md."""

    architecture: str
    vocab_size: int  # V
    embed_size: int  # E
    context_length: int  # tokens the model was trained for
    layers: tuple[Layer, ...]
    heads: int  # Hq
    kv_heads: int  # Hkv
    head_dim: int  # D
    rope_dims: int  # leading dims of a head that rotate
    rope_interleaved: bool  # pairs (2j, 2j+1) instead of (j, j + rope_dims/2)
    norm_eps: float
    attention_scale: float
    rope_magnitude: float = 1.0  # yarn's factor on cos and sin
    embed_scale: float = 1.0
    logit_softcap: float = 0.0  # 0 = off
    activation: str = "silu"  # "silu" | "gelu"
    delta: Delta | None = None
    experts: Experts | None = None

    def layers_of(self, kind: str) -> int:
        """How many layers are of `kind`: La for "attention", Lr for "delta"."""
        return sum(layer.kind == kind for layer in self.layers)
