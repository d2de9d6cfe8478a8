"""The two ways tokens exchange information: attention over the KV cache, and the gated delta net's recurrent
state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import quant
from jaxserve.config import ModelConfig
from jaxserve.ops import attention as kv
from jaxserve.ops import delta
from jaxserve.ops.conv import short_conv
from jaxserve.ops.norm import rms_norm
from jaxserve.ops.rope import rotate
from jaxserve.state import Memory


class Span(NamedTuple):
    """Where the new tokens of a call belong: row b gets count[b] of its T tokens at positions start[b],
    start[b] + 1, …
    """

    rows: jax.Array  # [B] i32
    start: jax.Array  # [B] i32
    count: jax.Array  # [B] i32   0: an inactive row, nothing is written


def project(
    x: jax.Array,
    parts: tuple,
    bias: jax.Array | None = None,
    *,
    norm: quant.Norm | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """norm(x) @ Wᵀ + bias for the matrices of one projection, outputs side by side; then, where given,
    activation(first half) · second half, + residual.   x: f32 [..., K] → f32 [..., N]
    """
    if len(parts) == 1 and bias is None:
        return quant.matmul(x, parts[0], norm=norm, activation=activation, residual=residual)
    out = jnp.concatenate([quant.matmul(x, part, norm=norm) for part in parts], axis=-1)
    out = quant.gated(out if bias is None else out + bias, activation)
    return out if residual is None else residual + out


def attention(
    w: dict,
    memory: Memory,
    x: jax.Array,
    span: Span,
    rope,
    rank,
    *,
    config: ModelConfig,
    window: int,
    reach: int,
    residual: jax.Array | None,
) -> tuple[Memory, jax.Array]:
    """Normalise, project, rotate, write k and v, attend, project back, add `residual`.

    x, residual: f32 [B, T, E] → memory, f32 [B, T, E]. Where q is twice as wide (qwen35, qwen3next) every
    head holds its query, then its output gate.
    """
    batch, length, _ = x.shape
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    norm = quant.Norm(w["attn_norm"], config.norm_eps)
    with jax.named_scope("qkv"):
        qkv = project(x, w["qkv"], w.get("qkv_bias"), norm=norm)
        q_size = qkv.shape[-1] - 2 * kv_heads * dim
        q, k, v = jnp.split(qkv, [q_size, q_size + kv_heads * dim], axis=-1)
        q = q.reshape(batch, length, heads, -1)
        q, gate = (q[..., :dim], q[..., dim:]) if q.shape[-1] > dim else (q, None)
        k, v = (x.reshape(batch, length, kv_heads, dim) for x in (k, v))
    if "q_norm" in w:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    q, k = (rotate(x, rope, config.rope_interleaved) for x in (q, k))
    memory, out = _attend(
        memory, q, k, v, span, rank, scale=config.attention_scale, window=window, reach=reach
    )
    if gate is not None:
        out = out * jax.nn.sigmoid(gate)
    out = out.reshape(batch, length, heads * dim)
    return memory, project(out, w["attn_out"], w.get("attn_out_bias"), residual=residual)


def _attend(memory: Memory, q, k, v, span: Span, rank, *, scale: float, window: int, reach: int):
    if q.shape[1] == 1:
        place = (rank, span.rows, span.start)
        keys, values = (
            kv.write_tokens(cache, new[:, 0], *place, span.count > 0)
            for cache, new in ((memory.keys, k), (memory.values, v))
        )
        out = kv.attend_tokens(q[:, 0], keys, values, *place, scale=scale, window=window, span=reach)[:, None]
    else:
        row, start = span.rows[0], span.start[0]
        keys, values = (
            kv.write_chunk(cache, new[0], rank, row, start, span.count[0])
            for cache, new in ((memory.keys, k), (memory.values, v))
        )
        out = kv.attend_chunk(q[0], keys, values, rank, row, start, scale=scale, window=window)[None]
    return memory.replace(keys=keys, values=values), out


def delta_net(
    w: dict,
    memory: Memory,
    x: jax.Array,
    span: Span,
    rank,
    *,
    config: ModelConfig,
    residual: jax.Array | None,
) -> tuple[Memory, jax.Array]:
    """Normalise, project, convolve, update the recurrent state, gate, project back, add `residual`.

    x, residual: f32 [B, T, E] → memory, f32 [B, T, E]. A row that starts at position 0 starts from a zero
    state; an inactive row and padding leave theirs as it is.
    """
    d = config.delta
    batch, length, _ = x.shape
    norm = quant.Norm(w["attn_norm"], config.norm_eps)
    sizes = [d.channels, d.value_heads * d.value_dim, d.value_heads]
    projected = project(x, w["delta_in"], norm=norm)
    u, z, b, a = jnp.split(projected, [sum(sizes[:i]) for i in (1, 2, 3)], axis=-1)
    fresh = span.start == 0
    with jax.named_scope("conv"):
        tail = _read(memory.conv, rank, span.rows, fresh)
        u, tail = short_conv(u, tail, w["conv"], span.count)
    key_size = d.key_heads * d.key_dim
    q, k, v = jnp.split(u, [key_size, 2 * key_size], axis=-1)
    q, k = (
        delta.expand_heads(
            delta.l2_normalise(x.reshape(batch, length, d.key_heads, d.key_dim), config.norm_eps),
            d.value_heads,
            d.grouped,
        )
        for x in (q, k)
    )
    q = q * d.key_dim**-0.5
    v = v.reshape(batch, length, d.value_heads, d.value_dim)
    g, beta = delta.gates(a, b, w["decay"], w["decay_bias"])
    state = _read(memory.delta, rank, span.rows, fresh)
    with jax.named_scope("recurrence"):
        if length == 1:
            out, state = delta.delta_step(state, q[:, 0], k[:, 0], v[:, 0], jnp.exp(g[:, 0]), beta[:, 0])
            out = out[:, None]
        else:
            valid = jnp.arange(length) < span.count[:, None]
            out, state = delta.delta_chunked(state, q, k, v, g, beta, valid=valid)
    memory = memory.replace(
        conv=_write(memory.conv, tail, rank, span), delta=_write(memory.delta, state, rank, span)
    )
    out = delta.gated_norm(out, z.reshape(out.shape), w["delta_norm"], config.norm_eps)
    return memory, project(out.reshape(batch, length, -1), w["delta_out"], residual=residual)


def _read(stack: jax.Array, rank, rows: jax.Array, fresh: jax.Array) -> jax.Array:
    """stack[rank, rows], zero where fresh.   [Lr, slots, …] → [B, …]"""
    if rows.shape[0] == 1:
        found = lax.dynamic_slice(stack, (rank, rows[0], *[0] * (stack.ndim - 2)), (1, 1, *stack.shape[2:]))[
            0
        ]
    else:
        found = stack[rank, rows]
    return jnp.where(fresh.reshape(-1, *[1] * (found.ndim - 1)), 0.0, found)


def _write(stack: jax.Array, new: jax.Array, rank, span: Span) -> jax.Array:
    """stack[rank, rows] = new, in place; inactive rows are dropped."""
    rows = jnp.where(span.count > 0, span.rows, stack.shape[1])
    return stack.at[rank, rows].set(new, mode="drop", unique_indices=True)
