"""The forward pass: one decoder skeleton that every supported architecture is an instance of.

    x = embed(tokens)
    each layer:  x += mixer(norm(x));  x += ffn(norm(x))
    logits = head(norm(x))

A mixer is attention or a gated delta net, an ffn is dense or a mixture of experts.
What an architecture adds (biases, q/k norms, an output gate, post-norms, experts) shows in the names its
layers hold (`models/weights.py`) and in `ModelConfig`, not in a file of its own: eight copies of one loop
would drift apart.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import quant
from jaxserve.config import Layer, ModelConfig
from jaxserve.models.mixers import Span, attention, delta_net, project
from jaxserve.models.weights import Weights, layer_weights
from jaxserve.ops import moe
from jaxserve.ops.norm import rms_norm
from jaxserve.ops.rope import rope_tables
from jaxserve.state import Memory


def hidden_states(
    weights: Weights, memory: Memory, tokens: jax.Array, span: Span, *, config: ModelConfig, reach: int
) -> tuple[Memory, jax.Array]:
    """Feed tokens and return the residual stream before the output norm.

    tokens: i32 [B, T] with T = 1 (decode) or B = 1 (a chunk of prefill); reach: static, cached positions a
    decode step looks at → memory, f32 [B, T, E]
    """
    with jax.named_scope("embed"):
        x = quant.take_rows(weights.embed, tokens) * config.embed_scale
        positions = span.start[:, None] + jnp.arange(tokens.shape[1])
        rope = {
            name: rope_tables(positions, table, config.rope_magnitude) for name, table in weights.rope.items()
        }
    for index, layer in enumerate(config.layers):
        # `rank` is an array, so that all layers of a kind share one trace; XLA folds it back to a constant.
        parameters = layer_weights(weights, config, index)
        memory, x = _block(
            parameters,
            memory,
            x,
            span,
            rope.get(layer.rope),
            np.int32(layer.rank),
            config=config,
            layer=_shared(layer),
            reach=reach,
        )
    return memory, x


def logits(weights: Weights, x: jax.Array, *, config: ModelConfig) -> jax.Array:
    """Output norm and head.   x: f32 [..., E] → f32 [..., V]"""
    with jax.named_scope("lm_head"):
        out = quant.matmul(x, weights.head, norm=quant.Norm(weights.output_norm, config.norm_eps))
        if weights.output_bias is not None:
            out = out + weights.output_bias
        if config.logit_softcap:
            out = config.logit_softcap * jnp.tanh(out / config.logit_softcap)
        return out


def _shared(layer: Layer) -> Layer:
    return Layer(kind=layer.kind, rank=0, window=layer.window, rope=layer.rope, experts=layer.experts)


def _layer(w, memory, x, span, rope, rank, *, config: ModelConfig, layer: Layer, reach: int):
    # A norm goes into the product that reads it and the residual into the one that ends a branch, unless a
    # post-norm stands between.
    def ended(name, branch):
        if name not in w:
            return branch(x)
        with jax.named_scope("norm"):
            return x + rms_norm(branch(None), w[name], config.norm_eps)

    def mixer(residual):
        nonlocal memory
        if layer.kind == "attention":
            with jax.named_scope("attention"):
                memory, h = attention(
                    w, memory, x, span, rope, rank,
                    config=config, window=layer.window, reach=reach, residual=residual,
                )  # fmt: skip
        else:
            with jax.named_scope("delta"):
                memory, h = delta_net(w, memory, x, span, rank, config=config, residual=residual)
        return h

    def ffn(residual):
        with jax.named_scope("moe" if layer.experts else "mlp"):
            return (_experts if layer.experts else _mlp)(w, x, config, residual)

    x = ended("attn_post_norm", mixer)
    x = ended("ffn_post_norm", ffn)
    return memory, x


_block = jax.jit(_layer, static_argnames=("config", "layer", "reach"))


def _mlp(w: dict, x: jax.Array, config: ModelConfig, residual: jax.Array | None) -> jax.Array:
    norm = quant.Norm(w["ffn_norm"], config.norm_eps)
    h = project(x, w["gate_up"], w.get("gate_up_bias"), norm=norm, activation=config.activation)
    return project(h, w["down"], w.get("down_bias"), residual=residual)


def _experts(w: dict, x: jax.Array, config: ModelConfig, residual: jax.Array | None) -> jax.Array:
    h = rms_norm(x, w["ffn_norm"], config.norm_eps)
    flat = h.reshape(-1, h.shape[-1])
    chosen = moe.route(flat, *w["router"], config.experts.used)
    run = moe.moe_decode if h.shape[1] == 1 else moe.moe_prefill
    out = run(flat, *chosen, w["experts_gate_up"], w["experts_down"], config.activation).reshape(h.shape)
    if config.experts.shared:
        shared = project(project(h, w["shared_gate_up"], activation=config.activation), w["shared_down"])
        gate = jnp.einsum("bte,e->bt", h, w["shared_gate"], precision=jax.lax.Precision.HIGHEST)
        out = out + shared * jax.nn.sigmoid(gate)[..., None]
    return out if residual is None else residual + out
