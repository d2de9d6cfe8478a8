"""A delta net layer's token in its plain form, and random layers for it: what the fused kernel must agree
with.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.config import Delta
from jaxserve.ops import delta as ops
from jaxserve.ops.conv import short_conv

EPS = 1e-6
TILED = Delta(conv_width=4, key_heads=2, value_heads=4, key_dim=128, value_dim=128, grouped=False)
GROUPED = Delta(conv_width=4, key_heads=2, value_heads=4, key_dim=128, value_dim=128, grouped=True)
QWEN35 = Delta(conv_width=4, key_heads=16, value_heads=32, key_dim=128, value_dim=128, grouped=False)


def sizes(d: Delta) -> tuple[int, ...]:
    """Columns of the projections: qkv, z, beta, alpha."""
    return d.channels, d.value_heads * d.value_dim, d.value_heads, d.value_heads


def random_layer(d: Delta, seed: int = 0) -> tuple[jax.Array, ...]:
    """conv_weight, decay, decay_bias, norm_gain; some heads forget in a token, some in thousands."""
    rng = np.random.default_rng(seed)
    decay = -np.exp(rng.uniform(np.log(1e-3), np.log(16), d.value_heads))
    arrays = (
        rng.normal(size=(d.channels, d.conv_width)) / 2,
        decay,
        rng.normal(size=d.value_heads),
        rng.uniform(0.5, 2, d.value_dim),
    )
    return tuple(jnp.asarray(a, jnp.float32) for a in arrays)


def random_memory(d: Delta, layers: int, slots: int) -> tuple[jax.Array, jax.Array]:
    """conv, delta: stacks of tails and states."""
    tail, state = jax.random.key(0), jax.random.key(1)
    return (
        jax.random.normal(tail, (layers, slots, d.conv_width - 1, d.channels)),
        jax.random.normal(state, (layers, slots, d.value_heads, d.value_dim, d.key_dim)),
    )


def random_parts(
    d: Delta, batch: int, seed: int, cut: tuple[int, ...] | None = None
) -> tuple[jax.Array, ...]:
    """The projections of a token in parts of `cut` columns (all in one: None)."""
    whole = 2 * jax.random.normal(jax.random.key(seed), (batch, sum(sizes(d))))
    return tuple(jnp.split(whole, np.cumsum(cut)[:-1], axis=1)) if cut else (whole,)


def lanes(rows, start, active, rank=1) -> tuple[jax.Array, ...]:
    """rank, rows, start, active of a step."""
    i32 = functools.partial(jnp.asarray, dtype=jnp.int32)
    return i32(rank), i32(rows), i32(start), jnp.asarray(active, bool)


@functools.partial(jax.jit, static_argnames=("config", "eps"), donate_argnames=("conv", "delta"))
def plain(
    parts, conv_weight, decay, decay_bias, norm_gain, conv, delta, rank, rows, start, active, *, config, eps
):
    """As `ops.mosaic.delta.decode_delta`, from the functions of `ops`."""
    d, batch = config, rows.shape[0]
    u, z, b, a = jnp.split(jnp.concatenate(parts, axis=1), np.cumsum(sizes(d))[:-1], axis=1)
    is_fresh = (start == 0)[:, None, None]
    tail = jnp.where(is_fresh, 0.0, conv.at[rank, rows].get(mode="clip"))
    state = jnp.where(is_fresh[..., None], 0.0, delta.at[rank, rows].get(mode="clip"))
    u, tail = short_conv(u[:, None], tail, conv_weight, jnp.ones(batch, jnp.int32))
    q, k, v = jnp.split(u[:, 0], [d.key_heads * d.key_dim, 2 * d.key_heads * d.key_dim], axis=1)
    q, k = (
        ops.expand_heads(
            ops.l2_normalise(x.reshape(batch, d.key_heads, d.key_dim), eps), d.value_heads, d.grouped
        )
        for x in (q, k)
    )
    v, z = (x.reshape(batch, d.value_heads, d.value_dim) for x in (v, z))
    g, beta = ops.gates(a, b, decay, decay_bias)
    out, state = ops.delta_step(state, q * d.key_dim**-0.5, k, v, jnp.exp(g), beta)
    out = ops.gated_norm(out, z, norm_gain, eps).reshape(batch, -1)
    is_live = active & (rows < delta.shape[1])
    place = jnp.where(is_live, rows, delta.shape[1])
    conv = conv.at[rank, place].set(tail, mode="drop", unique_indices=True)
    delta = delta.at[rank, place].set(state, mode="drop", unique_indices=True)
    return conv, delta, jnp.where(is_live[:, None], out, 0.0)
