"""A matrix in ggml's packing, taken apart into planes: the form that plain XLA multiplies."""

import dataclasses

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

    @property
    def row_axis(self) -> int:
        """The axis of every plane along which the N output rows lie."""
        return ROW_AXIS[self.layout]

    def dequantised(self, dtype) -> jax.Array:
        """[..., N, K]"""
        if self.layout == "columns":
            return jnp.swapaxes(self.dequantised_columns(dtype), -1, -2)
        return self._decoded(dtype).reshape(self.shape)

    def dequantised_columns(self, dtype) -> jax.Array:
        """A "columns" layout as it lies in memory, [..., K, N]."""
        *lead, n, k = self.shape
        return self._decoded(dtype).reshape(*lead, k, n)

    def _decoded(self, dtype):
        """[..., R, U, J, P, L, M, C]"""
        return jnp.concatenate([part.astype(dtype) for part in self.parts()], -4)

    def taken_rows(self, ids: jax.Array) -> jax.Array:
        """f32 [len(ids), K]"""
        chosen = jax.tree.map(lambda plane: jnp.take(plane, ids, self.row_axis, mode="clip"), self)
        return chosen.dequantised(jnp.float32)


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
