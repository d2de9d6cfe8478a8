"""Causal grouped-query attention over a resident KV cache.

The cache of all attention layers is one array [La, slots, Hkv, S, D]; `rank` picks the layer. New keys and
values are written first and read back, so a token attends to the same rounded values whatever chunk it came
in with.
"""

import jax
import jax.numpy as jnp
from jax import lax

KEY_BLOCK = 256  # keys a prefill chunk scores at a time: the full score matrix never exists
HIGHEST = lax.Precision.HIGHEST


def write_tokens(
    cache: jax.Array, new: jax.Array, rank, rows: jax.Array, position: jax.Array, active: jax.Array
) -> jax.Array:
    """One token per row, in place. Inactive rows and positions past the end are dropped.

    cache: [La, slots, Hkv, S, D], new: [B, Hkv, D], rows, position: i32 [B], active: bool [B]
    """
    nowhere = cache.shape[3]
    at = jnp.where(active, position, nowhere)
    return cache.at[rank, rows, :, at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)


def write_chunk(cache: jax.Array, new: jax.Array, rank, slot, start, count) -> jax.Array:
    """The first `count` tokens of a chunk at positions start, start + 1, … of one row, in place; padding and
    positions past the end are dropped.   cache: [La, slots, Hkv, S, D], new: [T, Hkv, D]

    A scatter, not a dynamic_update_slice: that clamps, so it would have to read the old window, and XLA fuses
    this read with the previous layer's write and then keeps both buffers: a copy of the whole cache per
    layer.
    """
    offset = jnp.arange(new.shape[0])
    at = jnp.where(offset < count, start + offset, cache.shape[3])
    return cache.at[rank, slot, :, at].set(new.astype(cache.dtype), mode="drop", unique_indices=True)


def attend_tokens(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    rank,
    rows: jax.Array,
    position: jax.Array,
    *,
    scale: float,
    window: int,
    span: int,
) -> jax.Array:
    """One query per row over the first `span` cached positions.

    q: f32 [B, Hq, D], keys, values: [La, slots, Hkv, S, D], position: i32 [B] of the query itself
    → f32 [B, Hq, D]
    """
    batch, heads, dim = q.shape
    groups = keys.shape[2]
    k, v = (_rows(cache, rank, rows, span).astype(jnp.float32) for cache in (keys, values))
    q = q.reshape(batch, groups, heads // groups, dim) * scale
    scores = jnp.einsum("bhgd,bhsd->bhgs", q, k, precision=HIGHEST)
    at = jnp.arange(span)[None]
    seen = at <= position[:, None]
    if window:
        seen &= at > position[:, None] - window
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhgs,bhsd->bhgd", weights, v, precision=HIGHEST).reshape(batch, heads, dim)


def attend_chunk(
    q: jax.Array, keys: jax.Array, values: jax.Array, rank, slot, start, *, scale: float, window: int
) -> jax.Array:
    """Queries at positions start, start+1, … of one row, over blocks of its cached keys with a running
    softmax.

    q: f32 [T, Hq, D], keys, values: [La, slots, Hkv, S, D] → f32 [T, Hq, D]. Only blocks that some query sees
    are read.
    """
    length, heads, dim = q.shape
    _, _, groups, capacity, _ = keys.shape
    block = min(KEY_BLOCK, capacity)
    q = (q.reshape(length, groups, heads // groups, dim) * scale).transpose(1, 2, 0, 3)  # [Hkv, G, T, D]
    position = start + jnp.arange(length)
    # A loop that read the stacked cache itself would make XLA copy all of it: later layers write to the same
    # buffer.
    row_cache = [
        lax.dynamic_slice(cache, (rank, slot, 0, 0, 0), (1, 1, groups, capacity, dim))[0, 0]
        for cache in (keys, values)
    ]

    def step(i, carry):
        best, total, out = carry
        first = jnp.minimum(i * block, capacity - block)  # the last block is moved back inside the row …
        at = first + jnp.arange(block)
        k, v = (lax.dynamic_slice_in_dim(row, first, block, axis=1).astype(jnp.float32) for row in row_cache)
        seen = (at[None] <= position[:, None]) & (
            at[None] >= i * block
        )  # … and what it repeats is not counted twice
        if window:
            seen &= at[None] > position[:, None] - window
        scores = jnp.einsum("hgtd,hsd->hgts", q, k, precision=HIGHEST)
        scores = jnp.where(seen, scores, -jnp.inf)
        top = jnp.maximum(best, scores.max(axis=-1))
        safe = jnp.where(jnp.isfinite(top), top, 0.0)  # a query that has seen nothing yet
        shrink = jnp.exp(best - safe)
        weights = jnp.exp(scores - safe[..., None])
        out = out * shrink[..., None] + jnp.einsum("hgts,hsd->hgtd", weights, v, precision=HIGHEST)
        return top, total * shrink + weights.sum(axis=-1), out

    last = jnp.minimum(start + length, capacity)
    begin = jnp.maximum(start - window + 1, 0) // block if window else 0
    shape = q.shape[:-1]
    carry = jnp.full(shape, -jnp.inf), jnp.zeros(shape), jnp.zeros(q.shape)
    _, total, out = lax.fori_loop(begin, (last + block - 1) // block, step, carry)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]  # a padded query past the end sees no key
    return out.transpose(2, 0, 1, 3).reshape(length, heads, dim)


def attention_reference(
    q: jax.Array, k: jax.Array, v: jax.Array, start: int, *, scale: float, window: int
) -> jax.Array:
    """The definition: softmax(scale · q kᵀ + mask) v with the whole score matrix.

    q: [T, Hq, D], k, v: [S, Hkv, D] → [T, Hq, D]
    """
    repeat = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x.astype(jnp.float32), repeat, axis=1) for x in (k, v))
    scores = jnp.einsum("thd,shd->hts", q, k, precision=HIGHEST) * scale
    distance = (start + jnp.arange(q.shape[0]))[:, None] - jnp.arange(k.shape[0])[None]
    seen = (distance >= 0) & ((distance < window) if window else True)
    return jnp.einsum(
        "hts,shd->thd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v, precision=HIGHEST
    )


def _rows(cache: jax.Array, rank, rows: jax.Array, span: int) -> jax.Array:
    """cache[rank, rows, :, :span] → [B, Hkv, span, D]. A lone row is sliced: XLA turns a gather into an
    element-wise loop.
    """
    _, _, heads, _, dim = cache.shape
    if rows.shape[0] == 1:
        return lax.dynamic_slice(cache, (rank, rows[0], 0, 0, 0), (1, 1, heads, span, dim))[0]
    return cache[rank, rows, :, :span]
