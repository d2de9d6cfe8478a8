"""A matrix in ggml's packing on the device, and everything one can do to it without multiplying."""

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxserve.quant.formats import FORMATS

PLANE_AXES = 7  # R, U, J, P, L, M, C: see formats.py
ROW_AXIS = {"rows": -7, "columns": -1}  # where the N output rows lie, by layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix f32[..., N, K] in the packing of one ggml type; leading axes are experts.

    `layout` "rows" keeps each row's blocks together: what a GPU reduces fast. "columns" puts the N rows
    innermost: on CPU decoding then vectorises over them, 2.5 times as fast as over the 16 bytes of a block.
    """

    planes: tuple[jax.Array, ...]  # each [..., R, U, J, P, L, M, C]
    type: str = dataclasses.field(metadata={"static": True})  # a key of FORMATS
    layout: str = dataclasses.field(metadata={"static": True})  # a key of ROW_AXIS

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K)"""
        shape = self.planes[0].shape
        return *shape[:-PLANE_AXES], shape[-7] * shape[-1], shape[-6] * FORMATS[self.type].block

    def parts(self) -> list[jax.Array]:
        """The decoded values in f32, one array [..., R, U, J, 1, L, M, C] for each index of P."""
        return FORMATS[self.type].decode(*self.planes)


Matrix = Packed | jax.Array


def pack(raw: jax.Array, type: str, layout: str) -> Packed:
    """Takes ggml's bytes u8[..., N, row bytes] apart into planes. Pure: jit it."""
    form = FORMATS[type]
    blocks = raw.reshape(*raw.shape[:-1], -1, form.nbytes)
    planes = form.split(blocks)  # [..., N, U, J, P, L, M]
    if layout == "rows":
        planes = tuple(plane[..., None] for plane in planes)
    else:
        planes = tuple(jnp.moveaxis(plane, -6, -1)[..., None, :, :, :, :, :, :] for plane in planes)
    return Packed(planes, type, layout)


def type_name(w: Matrix) -> str:
    """The ggml type of a packed matrix, the dtype of a plain one."""
    return w.type if isinstance(w, Packed) else str(w.dtype)


def row_axis(w: Matrix) -> int:
    """The axis of every leaf along which the N output rows lie."""
    return ROW_AXIS[w.layout] if isinstance(w, Packed) else -2


def nbytes(w: Matrix) -> int:
    """Bytes on the device."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w))


def dequantise(w: Matrix, dtype=jnp.float32) -> jax.Array:
    """The matrix [..., N, K], exact in f32: equal to gguf-py's `dequantize` bit for bit."""
    if not isinstance(w, Packed):
        return w.astype(dtype)
    if w.layout == "columns":
        return jnp.swapaxes(dequantise_columns(w, dtype), -1, -2)
    return _decode(w, dtype).reshape(w.shape)


def dequantise_columns(w: Packed, dtype=jnp.float32) -> jax.Array:
    """The matrix of a "columns" layout as it lies in memory, [..., K, N]."""
    *lead, n, k = w.shape
    return _decode(w, dtype).reshape(*lead, k, n)


def _decode(w, dtype):
    """[..., R, U, J, P, L, M, C]"""
    return jnp.concatenate([part.astype(dtype) for part in w.parts()], -4)


def take_rows(w: Matrix, ids: jax.Array) -> jax.Array:
    """Rows `ids` i32[...] of a matrix [N, K] as f32 [..., K]: only those rows are read and decoded."""
    chosen = jax.tree.map(lambda leaf: jnp.take(leaf, ids.reshape(-1), row_axis(w), mode="clip"), w)
    return dequantise(chosen).reshape(*ids.shape, -1)


def take(w: Matrix, indices: jax.Array) -> Matrix:
    """Entries of the leading axis (experts) of a stack [X, N, K], not decoded."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, indices, 0, mode="clip"), w)


def rows(w: Matrix, start: int, stop: int) -> Matrix:
    """Rows start ≤ n < stop of [..., N, K]."""
    return jax.tree.map(lambda leaf: jax.lax.slice_in_dim(leaf, start, stop, axis=row_axis(w)), w)


def split_rows(w: Matrix, sizes: Sequence[int]) -> list[Matrix]:
    """Cuts [..., N, K] into matrices of `sizes` rows, as a fused attn_qkv holds them."""
    if sum(sizes) != w.shape[-2]:
        raise ValueError(f"sizes {tuple(sizes)} add up to {sum(sizes)} rows, the matrix has {w.shape[-2]}")
    ends = list(itertools.accumulate(sizes))
    return [rows(w, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def concatenate_rows(matrices: Sequence[Matrix]) -> Matrix:
    """Matrices of one type stacked along N: fused q, k, v or gate, up."""
    kinds = {(type_name(w), w.shape[:-2], w.shape[-1]) for w in matrices}
    if len(kinds) != 1:
        raise ValueError(
            f"concatenate_rows needs one type, one K and equal leading axes, got {sorted(kinds)}"
        )
    axis = row_axis(matrices[0])
    return jax.tree.map(lambda *leaves: jnp.concatenate(leaves, axis), *matrices)
