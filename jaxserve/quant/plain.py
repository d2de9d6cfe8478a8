"""x @ W.T in plain XLA, for every form of a matrix: the reference beside which faster kernels stand.

| matrix | up to FEW_ROWS rows | more rows |
|---|---|---|
| packed, "rows" (GPU) | decode, multiply, reduce in one kernel, f32 | dequantise to bf16, `dot` |
| packed, "columns" (CPU) | dequantise to f32 tile by tile, `dot` | the same |
| float32 | `dot`, precision HIGHEST | the same |
| float16, bfloat16 on GPU | multiply, reduce in one kernel, f32 | bf16 `dot` |
| float16, bfloat16 on CPU | convert to f32 tile by tile, `dot` | the same |

The few-row form reads packed planes and writes the result, nothing else. Dequantising costs a temporary: on
GPU one matrix in bf16, on CPU at most TILE_ELEMENTS in f32.
"""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.quant.formats import FORMATS
from jaxserve.quant.matrix import Matrix, dequantise, is_packed, take
from jaxserve.quant.packed import Packed
from jaxserve.quant.tiled import Tiled

# On an H200 [18944, 3584] Q4_K takes 71 us for 1 row, 104 for 4; dequantised 276 for any number up to 128.
FEW_ROWS = 8
TILE_ELEMENTS = 1 << 20  # 4 MiB in f32 stay in a CPU's cache: [49152, 576] Q8_0 takes 11 ms, in one piece 44
GROUP_TILE = 64  # rows of one expert multiplied at a time; on CPU, decoding costs as much as 10 rows
SIGNALLING_NAN = 0x7F800001  # no arithmetic yields it


def matmul(x: jax.Array, w: Matrix) -> jax.Array:
    """x @ w.T in f32.   x: [..., K], w: [N, K] → f32 [..., N]"""
    n, k = w.shape
    chex.assert_shape(x, (..., k))
    return _product(x.reshape(-1, k).astype(jnp.float32), w, _after).reshape(*x.shape[:-1], n)


def expert_matmul(x: jax.Array, w: Matrix, index: jax.Array) -> jax.Array:
    """Each row times its own expert; only the chosen experts are read.

    x: [P, K], w: [X, N, K], index: i32 [P] → f32 [P, N]
    """
    x = x.astype(jnp.float32)
    if isinstance(w, Tiled):
        return _reduce(x, take(w, index).dequantised(jnp.float32))
    if not isinstance(w, Packed) or w.layout == "rows":
        return _reduce(x, take(w, index))

    def one_row(i, expert, out):
        y = _product(lax.dynamic_slice_in_dim(x, i, 1), expert, _at_once)
        return lax.dynamic_update_slice_in_dim(out, y, i, 0)

    out = jnp.zeros((x.shape[0], w.shape[1]), jnp.float32)
    return _for_each(x.shape[0], lambda i: _expert(w, index[i]), one_row, out)


def grouped_matmul(x: jax.Array, w: Matrix, group_sizes: jax.Array) -> jax.Array:
    """Rows sorted by expert, `group_sizes` of them for each, GROUP_TILE rows of one expert at a time.

    `lax.ragged_dot` multiplies every row with every expert and needs them all dequantised: for 2048 rows and
    64 experts [1536, 2048] on an H200 1.7 ms and 970 MB of temporaries, this 2.8 ms and one expert.
    x: [T, K], w: [X, N, K], group_sizes: i32 [X], adding up to T → f32 [T, N]
    """
    x = x.astype(jnp.float32)
    count, experts = x.shape[0], w.shape[0]
    row_ends = jnp.cumsum(group_sizes)
    tiles = -(-group_sizes // GROUP_TILE)
    tile_ends = jnp.cumsum(tiles)
    most_tiles = count // GROUP_TILE + min(experts, count)  # what the least even split into groups needs
    tile = jnp.arange(most_tiles)
    expert = jnp.minimum(jnp.searchsorted(tile_ends, tile, side="right"), experts - 1)
    first = (row_ends - group_sizes)[expert] + (tile - (tile_ends - tiles)[expert]) * GROUP_TILE

    def one_tile(i, w, out):
        place = first[i] + jnp.arange(GROUP_TILE)
        y = _product(jnp.take(x, place, 0, mode="clip"), w, _at_once)
        return out.at[jnp.where(place < row_ends[expert[i]], place, count)].set(y, mode="drop")

    out = jnp.zeros((count, w.shape[1]), jnp.float32)
    return _for_each(most_tiles, lambda i: _expert(w, expert[i]), one_tile, out)


def _expert(w, index):
    """Entry `index` of a stack [X, N, K]."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, keepdims=False), w)


def _for_each(count, fetch, use, out):
    """out = use(i, fetch(i), out) for every i < count, in a loop that fetches one ahead.

    XLA on CPU would fuse a fetch with the decoding that follows, which then takes 10 times as long; what the
    loop carries it has to write out.
    """

    def step(i, carry):
        out, fetched = carry
        return use(i, fetched, out), fetch(i + 1)

    return lax.fori_loop(0, count, step, (out, fetch(0)))[0]


def _product(x, w, when):
    """x @ w.T, `when` being _after or _at_once.   x: f32 [T, K], w: [N, K]"""
    forms = {"rows": _reduced_or_bf16, "columns": _tiled}
    if isinstance(w, Tiled):
        w = when(x, w).dequantised(jnp.float32)
    if isinstance(w, Packed):
        return forms[w.layout](x, w, when)
    if w.dtype == jnp.float32:
        return _dot(x, w, 1)
    return lax.platform_dependent(
        x, w, cpu=partial(_tiled, when=when), default=partial(_reduced_or_bf16, when=when)
    )


def _reduced_or_bf16(x, w, when):
    if x.shape[0] <= FEW_ROWS:
        return jnp.stack([_reduce(row, w) for row in x])
    w = dequantise(when(x, w), jnp.bfloat16)
    x = x.astype(jnp.bfloat16)
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _reduce(x, w):
    """Σ_k w[..., n, k] · x[..., k] as one fused multiply-reduce.   x: f32 [..., K], w: [..., N, K]"""
    if not isinstance(w, Packed):
        return jnp.sum(w.astype(jnp.float32) * x[..., None, :], -1)
    x = x.reshape(*x.shape[:-1], 1, -1, *FORMATS[w.type].axes, 1)  # R, U, J, P, L, M, C, as the planes
    # the parts are added before the reduction: one reduction, one pass over the bytes
    products = sum(part * x[..., i : i + 1, :, :, :] for i, part in enumerate(w.parts()))
    return jnp.sum(products, (-6, -5, -4, -3, -2, -1))


def _tiled(x, w, when):
    """x @ w.T in f32, decoding at most TILE_ELEMENTS of w at a time.   x: f32 [T, K]"""
    n, k = w.shape
    size = max(1, TILE_ELEMENTS // k)
    axis = w.row_axis if is_packed(w) else -2
    if n <= size:
        return _dequantised_dot(x, when(x, w))

    def start(i):
        return jnp.minimum(i * size, n - size)  # the last tile overlaps its neighbour

    def tile(i):
        return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start(i), size, axis), w)

    def one_tile(i, w, out):
        return lax.dynamic_update_slice_in_dim(out, _dequantised_dot(x, w), start(i), 1)

    return _for_each(-(-n // size), tile, one_tile, jnp.zeros((x.shape[0], n), jnp.float32))


def _dequantised_dot(x, w):
    # contracted as it lies in memory: given [N, K], XLA decodes anew inside the dot's inner loop
    if isinstance(w, Packed):
        return _dot(x, w.dequantised_columns(jnp.float32), 0)
    return _dot(x, w.astype(jnp.float32), 1)


def _dot(x, w, axis):
    """Σ_k x[t, k] · w[..k..], k being axis `axis` of w; f32 all through."""
    return lax.dot_general(x, w, (((1,), (axis,)), ((), ())), precision=lax.Precision.HIGHEST)


def _after(x, w):
    """w, made to look as if it depended on x, so that it is decoded only when x is there.

    XLA otherwise decodes every matrix of a program first: for a token through SmolLM2's layers 424 MB of
    temporaries and 300 ms instead of 7 MB and 35 ms. XLA on CPU drops `optimization_barrier` before it orders
    the program.
    """
    never = lax.bitcast_convert_type(x[0, 0], jnp.int32) == SIGNALLING_NAN
    clear = lambda leaf: jnp.where(never, jnp.zeros((), leaf.dtype), leaf)  # noqa: E731
    if not isinstance(w, Packed):
        return jax.tree.map(clear, w)
    *codes, scales = w.planes  # every value needs the scales, and they are few
    return dataclasses.replace(w, planes=(*codes, clear(scales)))


def _at_once(x, w):
    """w as it is: inside a loop the order is given, and `_after` would cost 6 times the decoding on CPU."""
    return w
