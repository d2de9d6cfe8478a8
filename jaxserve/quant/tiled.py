"""A matrix as records of 16 × 256 weights, as the Hopper kernels multiply it (`mosaic/records.py`)."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxserve import hopper
from jaxserve.quant import mosaic
from jaxserve.quant.mosaic.records import LAYOUTS, ROWS


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiled:
    """A matrix f32 [..., N, K] in the packing of one ggml type; leading axes are experts."""

    records: jax.Array  # u32 [..., N/16, ceil(K/256), words]
    type: str = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})  # K

    row_axis = -3  # tiles of rows lie here

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., N, K)"""
        *lead, tiles, _, _ = self.records.shape
        return *lead, tiles * ROWS, self.columns

    def dequantised(self, dtype) -> jax.Array:
        """[..., N, K]"""
        if hopper.is_available():
            return mosaic.dequantise(self.records, self.type, self.columns, dtype)
        return mosaic.unpack(self.type, self.records, self.columns).astype(dtype)

    def taken_rows(self, ids: jax.Array) -> jax.Array:
        """f32 [len(ids), K]"""
        if hopper.is_available():
            return mosaic.take_rows(self.records, self.type, self.columns, ids)
        chosen = self.records[ids // ROWS]
        rows = mosaic.unpack(self.type, chosen[:, None], self.columns)  # [ids, 16, K]
        return rows[jnp.arange(len(ids)), ids % ROWS]


def tile(raw: jax.Array, type: str) -> Tiled:
    """Packs ggml's bytes u8 [..., N, row bytes] into records, on the device."""
    layout = LAYOUTS[type]
    return Tiled(mosaic.pack(type, raw), type, raw.shape[-1] // layout.nbytes * layout.block)
