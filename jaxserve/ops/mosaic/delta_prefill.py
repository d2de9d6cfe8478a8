"""The gated delta rule over many tokens in two launches, on Mosaic GPU (Hopper): `ops.delta.delta_chunked`
with the work within chunks done for all of them at once, and one kernel that carries the states through.
"""

import functools

import chex
import jax
import jax.numpy as jnp

from jaxserve.ops.mosaic import delta_carry, delta_chunks
from jaxserve.ops.mosaic.delta_chunks import CHUNK, DIM, WARPS
from jaxserve.ops.mosaic.launch import launch, scratch


def supported(key_dim: int, value_dim: int) -> bool:
    """Whether the kernels take heads of these dimensions."""
    return key_dim == value_dim == DIM


@functools.partial(jax.jit, static_argnames="grouped")
def prefill_delta(
    state: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    count: jax.Array,
    *,
    grouped: bool,
) -> tuple[jax.Array, jax.Array]:
    """state: f32 [B, Hv, 128, 128] (values × keys), q, k: f32 [B, T, Hk, 128] l2-normalised, q scaled, v: f32
    [B, T, Hv, 128], g (log-decay), beta: f32 [B, T, Hv], count: i32 [B] valid leading tokens, 0 ≤ count ≤ T
    → o f32 [B, T, Hv, 128], the state after the last valid token.

    grouped: value head h reads key head h // (Hv/Hk), else h % Hk. What lies past `count` does not matter: o
    is zero there. A row without valid tokens keeps its state bit for bit.
    """
    (batch, length, key_heads, dim), heads = k.shape, v.shape[2]
    if not supported(dim, v.shape[3]):
        raise ValueError(f"heads of {v.shape[3]} × {dim}: the delta kernels take {DIM} × {DIM}")
    if heads % key_heads:
        raise ValueError(f"{heads} value heads are not a multiple of {key_heads} key heads")
    chex.assert_shape(state, (batch, heads, DIM, DIM))
    chex.assert_equal_shape([q, k])
    chex.assert_shape(v, (batch, length, heads, DIM))
    chex.assert_shape([g, beta], (batch, length, heads))
    chex.assert_shape(count, (batch,))
    chex.assert_type([state, q, k, v, g, beta, count], [jnp.float32] * 6 + [jnp.int32])
    chunks = -(-length // CHUNK)
    shape, f32 = (batch, length, key_heads, heads), functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    of_chunk = (batch, heads, chunks)
    _, solved = launch(
        functools.partial(delta_chunks.program, shape, grouped),
        (),
        (q, k, v, g, beta, count),
        name=f"delta_chunks_k{key_heads}_v{heads}_t{length}",
        blocks=batch * heads * chunks,
        warps=WARPS,
        out_types=[
            f32((*of_chunk, CHUNK, DIM)),
            f32((*of_chunk, CHUNK, DIM)),
            f32((*of_chunk, CHUNK, CHUNK)),
            f32((*of_chunk, 2, CHUNK)),
        ],
        scratch_types=[scratch(delta_chunks.SHARED_WORDS, jnp.float32)],
    )
    _, (out, state) = launch(
        functools.partial(delta_carry.program, shape, grouped),
        (),
        (state, q, k, count, *solved),
        name=f"delta_carry_k{key_heads}_v{heads}_t{length}",
        blocks=batch * heads * (DIM // delta_carry.SLICE),
        warps=WARPS,
        out_types=[f32(v.shape), f32(state.shape)],
        scratch_types=[scratch(delta_carry.SHARED_WORDS, jnp.float32)],
    )
    return out, state
