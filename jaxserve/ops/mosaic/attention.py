"""One token of an attention layer in one launch: everything between its projections, on Mosaic GPU (Hopper).

The same as `ops.norm.rms_norm`, `ops.rope.rotate`, `ops.attention.write_tokens`, `attend_tokens` and the
output gate in turn. The cost follows the length of each row, not the capacity of the cache.

Only the cache itself is rounded, products and sums are f32. A row has the same bits on every call and
whatever its neighbours hold; how many they are decides how many blocks may share a long row.
"""

import functools

import jax
import jax.numpy as jnp

from jaxserve.ops import attention as kv
from jaxserve.ops.mosaic.attention_plan import Form, plan, shared
from jaxserve.ops.mosaic.attention_program import program
from jaxserve.ops.mosaic.launch import launch, scratch
from jaxserve.ops.norm import rms_norm
from jaxserve.ops.rope import rotate

MAX_DIM = 256  # a tile of keys and values stays in registers
MAX_SHARED = 16  # query heads of a key head
DTYPES = ("float16", "bfloat16")


def supported(heads: int, kv_heads: int, dim: int, rotary: int, dtype: str) -> bool:
    """Whether the kernel takes heads of these numbers, `rotary` of whose columns turn, and a cache of this
    type.
    """
    return (
        heads % kv_heads == 0
        and heads // kv_heads <= MAX_SHARED
        and dim % 16 == 0
        and 64 <= dim <= MAX_DIM
        and rotary % 8 == 0
        and rotary <= dim
        and (rotary <= 128 or rotary == 256)
        and dtype in DTYPES
    )


STATIC = ("heads", "kv_heads", "dim", "gated", "scale", "window", "interleaved", "eps")


# An inner jit: layers of one shape share one lowering.
@functools.partial(jax.jit, static_argnames=STATIC)
def decode_attention(
    parts: tuple[jax.Array, ...],
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    rope: tuple[jax.Array, jax.Array] | None,
    keys: jax.Array,
    values: jax.Array,
    rank: jax.Array,
    rows: jax.Array,
    position: jax.Array,
    active: jax.Array,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    gated: bool,
    scale: float,
    window: int,
    interleaved: bool,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One token for each row whose lane is active: the caches with its key and value, and what the output
    projection reads, f32 [B, Hq·D].

    parts: f32 [B, n], side by side the projected q, k and v, none of them in two parts; q is twice as wide
    where gated, every head its query, then its gate; bias: f32 [N] to be added; q_norm, k_norm: f32 [D];
    rope: cos and sin, f32 [B, 1, 1, R/2] each; keys, values: [La, slots, Hkv, S, D], updated in place where
    donated; rank: i32 [] the layer; rows: i32 [B] distinct slots (slots itself: a spare lane); position: i32
    [B] of the token; active: bool [B]; window: how many keys a token sees, 0: all.

    A lane that is spare or inactive writes nothing into the caches and puts out zeros. A position past the
    capacity is not written; the token then sees what is there.
    """
    batch = rows.shape[0]
    _, slots, _, capacity, _ = keys.shape
    form = Form(
        plan=plan(batch, heads, kv_heads, capacity),
        slots=slots,
        capacity=capacity,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=keys.dtype.name,
        widths=tuple(part.shape[-1] for part in parts),
        biased=bias is not None,
        normed=q_norm is not None,
        rotary=0 if rope is None else 2 * rope[0].shape[-1],
        interleaved=interleaved,
        gated=gated,
        window=window,
        scale=scale,
        eps=eps,
    )
    _check(form, parts, bias, q_norm, k_norm, rope, keys, values, rank, rows, position, active)
    # one operand fewer to wait for, and layers share it
    slot = jnp.where(active, rows, slots)
    optional = [x for x in (bias, q_norm, k_norm, *(rope or ())) if x is not None]
    cells, p = batch * kv_heads * form.plan.cells, form.plan
    (keys, values), (out,) = launch(
        functools.partial(program, form),
        (keys, values),
        (rank, slot, position, *parts, *optional),
        name=f"decode_attention_{heads}_{kv_heads}_{dim}_b{batch}",
        blocks=cells * p.blocks,
        warps=p.warps,
        cluster=p.blocks,
        out_types=[jax.ShapeDtypeStruct((batch, heads * dim), jnp.float32)],
        scratch_types=[scratch(-(-shared(form).end // 4))],
    )
    return keys, values, out


def _check(form: Form, parts, bias, q_norm, k_norm, rope, keys, values, rank, rows, position, active):
    heads, kv_heads, dim = form.heads, form.kv_heads, form.dim
    if not supported(heads, kv_heads, dim, form.rotary, form.dtype):
        raise ValueError(
            f"{heads} heads over {kv_heads} of {dim} columns ({form.rotary} rotary), {form.dtype} cache: "
            f"the attention kernel takes up to {MAX_SHARED} heads a key head, a multiple of 16 from 64 to "
            f"{MAX_DIM} columns, of which a multiple of 8 up to 128 or all 256 turn, and "
            f"{' or '.join(DTYPES)}"
        )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: both or neither")
    batch, columns = rows.shape[0], sum(count for _, count in form.columns.values())
    cache = (*keys.shape[:2], kv_heads, form.capacity, dim)
    wanted = {
        "keys": (keys, cache, keys.dtype),
        "values": (values, cache, keys.dtype),
        "bias": (bias, (columns,), jnp.float32),
        "q_norm": (q_norm, (dim,), jnp.float32),
        "k_norm": (k_norm, (dim,), jnp.float32),
        "rank": (rank, (), jnp.int32),
        "rows": (rows, (batch,), jnp.int32),
        "position": (position, (batch,), jnp.int32),
        "active": (active, (batch,), jnp.bool_),
    }
    wanted |= {f"parts[{i}]": (p, (batch, p.shape[-1]), jnp.float32) for i, p in enumerate(parts)}
    angles = (batch, 1, 1, form.rotary // 2)
    wanted |= {f"rope[{i}]": (x, angles, jnp.float32) for i, x in enumerate(rope or ())}
    for name, (array, shape, dtype) in wanted.items():
        if array is not None and (array.shape != shape or array.dtype != dtype):
            raise ValueError(f"{name} is {array.dtype}{array.shape}, expected {jnp.dtype(dtype)}{shape}")
    if sum(form.widths) != columns or any(form.place(name) is None for name in form.columns):
        raise ValueError(
            f"parts of {form.widths} columns: expected {form.columns['q'][1]} of q, then "
            f"{form.columns['k'][1]} each of k and v, none of them in two parts"
        )


def decode_attention_reference(
    parts, bias, q_norm, k_norm, rope, keys, values, rank, rows, position, active,
    *, heads, kv_heads, dim, gated, scale, window, interleaved, eps,
):  # fmt: skip
    """decode_attention in plain XLA, over the whole capacity."""
    batch, capacity = rows.shape[0], keys.shape[3]
    x = jnp.concatenate(parts, axis=-1)
    x = (x if bias is None else x + bias).reshape(batch, 1, -1)
    q, k, v = jnp.split(x, [x.shape[-1] - 2 * kv_heads * dim, x.shape[-1] - kv_heads * dim], axis=-1)
    q = q.reshape(batch, 1, heads, -1)
    q, gate = q[..., :dim], q[..., dim:]
    k, v = (y.reshape(batch, 1, kv_heads, dim) for y in (k, v))
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    if rope is not None:
        q, k = (rotate(y, rope, interleaved) for y in (q, k))
    keys, values = (
        kv.write_tokens(cache, new[:, 0], rank, rows, position, active)
        for cache, new in ((keys, k), (values, v))
    )
    out = kv.attend_tokens(
        q[:, 0], keys, values, rank, rows, position, scale=scale, window=window, span=capacity
    )
    out = out * jax.nn.sigmoid(gate[:, 0]) if gated else out
    return keys, values, jnp.where(active[:, None, None], out, 0.0).reshape(batch, heads * dim)
