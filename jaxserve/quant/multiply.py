"""x @ W.T and what stands around it in a decoder, in the fastest form the device has.

| matrix | rows of x | form |
|---|---|---|
| tiled (Hopper) | 1 … 8 | one decode kernel: norm, product, activation, residual |
| tiled (Hopper) | more | `mosaic.matmul`: tensor cores, or dequantise and a library product |
| everything else | any | `plain`, between operations that XLA fuses as it can |
"""

from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxserve import hopper
from jaxserve.ops.activation import gated
from jaxserve.ops.norm import rms_norm
from jaxserve.quant import mosaic, plain
from jaxserve.quant.matrix import Matrix
from jaxserve.quant.tiled import Tiled


class Norm(NamedTuple):
    """`rms_norm(x, gain, eps)`, to be taken on the way into a product."""

    gain: jax.Array  # f32 [K]
    eps: float


def matmul(
    x: jax.Array,
    w: Matrix,
    *,
    norm: Norm | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """residual + norm(x) @ w.T in f32.   x: [..., K], w: [N, K] → f32 [..., N]

    activation (a key of ACTIVATIONS): w holds gate rows, then as many up rows; the product becomes
    activation(gate) · up, f32 [..., N/2]. residual: of the result's shape.
    """
    (n, k), lead = w.shape, x.shape[:-1]
    chex.assert_shape(x, (*lead, k))
    out = n if activation is None else n // 2
    flat = x.reshape(-1, k).astype(jnp.float32)
    flat_residual = None if residual is None else residual.reshape(-1, out)
    if isinstance(w, Tiled) and hopper.is_available() and flat.shape[0] <= mosaic.MAX_BATCH:
        around = {} if norm is None else dict(gain=norm.gain, eps=norm.eps)
        y = mosaic.decode_matmul(
            flat, w.records, w.type, k, **around, activation=activation, residual=flat_residual
        )
        return y.reshape(*lead, out)
    if norm is not None:
        flat = rms_norm(flat, norm.gain, norm.eps)
    y = gated(_product(flat, w), activation)
    return (y if residual is None else flat_residual + y).reshape(*lead, out)


def matmuls(x: jax.Array, parts: Sequence[Matrix], norm: Norm) -> tuple[jax.Array, ...]:
    """norm(x) @ w.T for matrices [n, K] that read the same x: f32 [..., n] each, or one array side by side.

    x: [..., K]. Few rows and tiles of several types take one launch.
    """
    k, lead = parts[0].shape[-1], x.shape[:-1]
    flat = x.reshape(-1, k).astype(jnp.float32)
    types = tuple(w.type for w in parts if isinstance(w, Tiled))
    if (
        hopper.is_available()
        and len(parts) == len(types) > 1
        and flat.shape[0] <= mosaic.MAX_BATCH
        and mosaic.fits_side_by_side(k, types)
    ):
        records = tuple(w.records for w in parts)
        y = mosaic.side_by_side_decode_matmul(flat, records, types, k, gain=norm.gain, eps=norm.eps)
        return (y.reshape(*lead, -1),)
    return tuple(matmul(x, w, norm=norm) for w in parts)


def _product(x: jax.Array, w: Matrix) -> jax.Array:
    if isinstance(w, Tiled) and hopper.is_available():
        return mosaic.matmul(x, w.records, w.type, w.columns)
    return plain.matmul(x, w)


def expert_matmul(x: jax.Array, w: Matrix, index: jax.Array, *, activation: str | None = None) -> jax.Array:
    """Each row times its own expert; only the chosen experts are read.   `activation` as in `matmul`.

    x: [P, K], w: [X, N, K], index: i32 [P] → f32 [P, N]
    """
    if isinstance(w, Tiled) and hopper.is_available():
        return mosaic.expert_decode_matmul(
            x.astype(jnp.float32), w.records, index, w.type, w.columns, activation=activation
        )
    return gated(plain.expert_matmul(x, w, index), activation)


def grouped_matmul(
    x: jax.Array,
    w: Matrix,
    group_sizes: jax.Array,
    *,
    index: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """Rows sorted by expert, `group_sizes` of them for each.   `activation` as in `matmul`.

    x: [T, K], w: [X, N, K], group_sizes: i32 [X], adding up to T → f32 [T, N]
    index i32 [P]: the rows are x[index] instead, and there are P of them.
    """
    x = x.astype(jnp.float32)
    if isinstance(w, Tiled) and hopper.is_available():
        y = mosaic.grouped_wide_matmul(x, group_sizes, w.records, w.type, w.columns, index=index)
        return gated(y, activation)
    x = x if index is None else jnp.take(x, index, axis=0)
    return gated(plain.grouped_matmul(x, w, group_sizes), activation)
