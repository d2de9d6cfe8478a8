"""What one can do to a matrix without multiplying, whatever its form on the device."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.quant.packed import Packed
from jaxserve.quant.tiled import Tiled

Matrix = Packed | Tiled | jax.Array  # f32 [..., N, K] in some packing, or a float array


def is_packed(w: Matrix) -> bool:
    """Whether a matrix keeps ggml's packing."""
    return isinstance(w, Packed | Tiled)


def type_name(w: Matrix) -> str:
    """The ggml type of a packed matrix, the dtype of a plain one."""
    return w.type if is_packed(w) else str(w.dtype)


def nbytes(w: Matrix) -> int:
    """Bytes on the device."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w))


def dequantise(w: Matrix, dtype=jnp.float32) -> jax.Array:
    """The matrix [..., N, K], exact in f32: equal to gguf-py's `dequantize` bit for bit."""
    return w.dequantised(dtype) if is_packed(w) else w.astype(dtype)


def take_rows(w: Matrix, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32[...] of a matrix [N, K] as f32 [..., K]: only those rows are read and decoded."""
    flat = ids.reshape(-1)
    rows = w.taken_rows(flat) if is_packed(w) else jnp.take(w, flat, 0, mode="clip").astype(jnp.float32)
    return rows.reshape(*ids.shape, -1)


def take(w: Matrix, indices: jax.Array) -> Matrix:
    """Entries of the leading axis (experts) of a stack [X, N, K], not decoded."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, indices, 0, mode="clip"), w)


def concatenate_rows(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one type stacked along N: fused q, k, v or gate, up."""
    kinds = {(type_name(w), type(w), w.shape[:-2], w.shape[-1]) for w in matrices}
    if len(kinds) != 1:
        names = sorted(f"{form.__name__} {name} {(*lead, 'N', k)}" for name, form, lead, k in kinds)
        raise ValueError(
            f"concatenate_rows needs one type, one K and equal leading axes, got {'; '.join(names)}"
        )
    axis = matrices[0].row_axis if is_packed(matrices[0]) else -2
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *matrices)
