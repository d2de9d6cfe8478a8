"""The two ways tokens exchange information: attention over the KV cache, and the gated delta net's recurrent
state.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve import hopper, quant
from jaxserve.config import Delta, ModelConfig
from jaxserve.ops import attention as kv
from jaxserve.ops import delta
from jaxserve.ops.activation import gated
from jaxserve.ops.conv import short_conv
from jaxserve.ops.mosaic import attention as attention_kernel
from jaxserve.ops.mosaic import chunk_attention, delta_prefill
from jaxserve.ops.mosaic import delta as delta_kernel
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
    out = side_by_side(tuple(quant.matmul(x, part, norm=norm) for part in parts))
    out = gated(out if bias is None else out + bias, activation)
    return out if residual is None else residual + out


def side_by_side(found: tuple[jax.Array, ...]) -> jax.Array:
    """What the matrices of a projection put out, as one array."""
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=-1)


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
    with jax.named_scope("qkv"):
        qkv = quant.matmuls(x, w["qkv"], quant.Norm(w["attn_norm"], config.norm_eps))
    heads, dim = config.heads, config.head_dim
    if length == 1 and follows_real_length(config, memory.keys.dtype.name):
        keys, values, out = attention_kernel.decode_attention(
            tuple(part[:, 0] for part in qkv), w.get("qkv_bias"), w.get("q_norm"), w.get("k_norm"), rope,
            memory.keys, memory.values, jnp.asarray(rank), span.rows, span.start, span.count > 0,
            heads=heads, kv_heads=config.kv_heads, dim=dim, gated=_is_gated(qkv, config),
            scale=config.attention_scale, window=window, interleaved=config.rope_interleaved,
            eps=config.norm_eps,
        )  # fmt: skip
    else:
        keys, values, out = _attend(w, memory, side_by_side(qkv), span, rope, rank, config, window, reach)
    out = out.reshape(batch, length, heads * dim)
    memory = memory.replace(keys=keys, values=values)
    return memory, project(out, w["attn_out"], w.get("attn_out_bias"), residual=residual)


def follows_real_length(config: ModelConfig, kv_dtype: str) -> bool:
    """Whether decode attention reads the cached positions of a row and no others; else it reads `reach`."""
    shape = config.heads, config.kv_heads, config.head_dim, config.rope_dims
    return _has_kernel(attention_kernel, *shape, kv_dtype)


def _has_kernel(kernel, *shape) -> bool:
    """Whether this device has a kernel of its own for a layer of this shape."""
    return hopper.is_available() and kernel.supported(*shape)


def _is_gated(qkv: tuple[jax.Array, ...], config: ModelConfig) -> bool:
    """Whether every head's query is followed by an output gate."""
    width = sum(part.shape[-1] for part in qkv)
    return width > (config.heads + 2 * config.kv_heads) * config.head_dim


def _attend(w, memory, qkv, span, rope, rank, config: ModelConfig, window: int, reach: int):
    """What lies between the projections, in XLA.   qkv: f32 [B, T, N] → keys, values, f32 [B, T, Hq, D]"""
    batch, length, _ = qkv.shape
    heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
    if "qkv_bias" in w:
        qkv = qkv + w["qkv_bias"]
    q_size = qkv.shape[-1] - 2 * kv_heads * dim
    q, k, v = jnp.split(qkv, [q_size, q_size + kv_heads * dim], axis=-1)
    q = q.reshape(batch, length, heads, -1)
    q, gate = (q[..., :dim], q[..., dim:]) if q.shape[-1] > dim else (q, None)
    k, v = (x.reshape(batch, length, kv_heads, dim) for x in (k, v))
    if "q_norm" in w:
        q, k = rms_norm(q, w["q_norm"], config.norm_eps), rms_norm(k, w["k_norm"], config.norm_eps)
    q, k = (rotate(x, rope, config.rope_interleaved) for x in (q, k))
    attend = _attend_token if length == 1 else _attend_chunk
    keys, values, out = attend(memory, q, k, v, span, rank, config.attention_scale, window, reach)
    return keys, values, out if gate is None else out * jax.nn.sigmoid(gate)


def _attend_token(memory: Memory, q, k, v, span: Span, rank, scale: float, window: int, reach: int):
    place = (rank, span.rows, span.start)
    keys, values = (
        kv.write_tokens(cache, new[:, 0], *place, span.count > 0)
        for cache, new in ((memory.keys, k), (memory.values, v))
    )
    out = kv.attend_tokens(q[:, 0], keys, values, *place, scale=scale, window=window, span=reach)
    return keys, values, out[:, None]


def _attend_chunk(memory: Memory, q, k, v, span: Span, rank, scale: float, window: int, reach: int):
    row, start = span.rows[0], span.start[0]
    keys, values = (
        kv.write_chunk(cache, new[0], rank, row, start, span.count[0])
        for cache, new in ((memory.keys, k), (memory.values, v))
    )
    form = chunk_attention if _has_kernel(chunk_attention, q.shape[-1], q.shape[1], keys.dtype) else kv
    out = form.attend_chunk(q[0], keys, values, rank, row, start, scale=scale, window=window)
    return keys, values, out[None]


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
    batch, length, _ = x.shape
    projected = quant.matmuls(x, w["delta_in"], quant.Norm(w["attn_norm"], config.norm_eps))
    if length == 1 and _has_kernel(delta_kernel, config.delta):
        conv, state, out = delta_kernel.decode_delta(
            tuple(part[:, 0] for part in projected), w["conv"], w["decay"], w["decay_bias"], w["delta_norm"],
            memory.conv, memory.delta, jnp.asarray(rank), span.rows, span.start, span.count > 0,
            config=config.delta, eps=config.norm_eps,
        )  # fmt: skip
    else:
        conv, state, out = _recur(w, memory, side_by_side(projected), span, rank, config)
    memory = memory.replace(conv=conv, delta=state)
    return memory, project(out.reshape(batch, length, -1), w["delta_out"], residual=residual)


def _recur(w, memory, projected, span: Span, rank, config: ModelConfig):
    """What lies between the projections, in XLA.

    projected: f32 [B, T, N] → conv, delta, f32 [B, T, Hv, Dv]
    """
    d = config.delta
    batch, length, _ = projected.shape
    sizes = [d.channels, d.value_heads * d.value_dim, d.value_heads]
    u, z, b, a = jnp.split(projected, [sum(sizes[:i]) for i in (1, 2, 3)], axis=-1)
    fresh = span.start == 0
    with jax.named_scope("conv"):
        tail = _read(memory.conv, rank, span.rows, fresh)
        u, tail = short_conv(u, tail, w["conv"], span.count)
    key_size = d.key_heads * d.key_dim
    q, k, v = jnp.split(u, [key_size, 2 * key_size], axis=-1)
    q, k = (
        delta.l2_normalise(x.reshape(batch, length, d.key_heads, d.key_dim), config.norm_eps) for x in (q, k)
    )
    q = q * d.key_dim**-0.5
    v = v.reshape(batch, length, d.value_heads, d.value_dim)
    g, beta = delta.gates(a, b, w["decay"], w["decay_bias"])
    state = _read(memory.delta, rank, span.rows, fresh)
    with jax.named_scope("recurrence"):
        if length > 1 and _has_kernel(delta_prefill, d.key_dim, d.value_dim):
            out, state = delta_prefill.prefill_delta(state, q, k, v, g, beta, span.count, grouped=d.grouped)
        else:
            out, state = _recurrence(state, q, k, v, g, beta, span, d)
    out = delta.gated_norm(out, z.reshape(out.shape), w["delta_norm"], config.norm_eps)
    return _write(memory.conv, tail, rank, span), _write(memory.delta, state, rank, span), out


def _recurrence(state, q, k, v, g, beta, span: Span, d: Delta):
    """The delta rule in XLA, one token or a chunk.   → f32 [B, T, Hv, Dv], the state after the last token"""
    q, k = (delta.expand_heads(x, d.value_heads, d.grouped) for x in (q, k))
    if q.shape[1] > 1:
        valid = jnp.arange(q.shape[1]) < span.count[:, None]
        return delta.delta_chunked(state, q, k, v, g, beta, valid=valid)
    out, state = delta.delta_step(state, q[:, 0], k[:, 0], v[:, 0], jnp.exp(g[:, 0]), beta[:, 0])
    return out[:, None], state


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
