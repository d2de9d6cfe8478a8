"""Kernels for packed matrices on NVIDIA Hopper GPUs: products of few and of many rows, decoding."""

from jaxserve.quant.mosaic.by_rows import matmul
from jaxserve.quant.mosaic.decode import (
    decode_matmul,
    expert_decode_matmul,
    fits_side_by_side,
    side_by_side_decode_matmul,
    supported,
)
from jaxserve.quant.mosaic.decode_program import MAX_BATCH
from jaxserve.quant.mosaic.dequantise import dequantise, take_rows
from jaxserve.quant.mosaic.records import pack, unpack
from jaxserve.quant.mosaic.wide import grouped_wide_matmul, wide_matmul

__all__ = [
    "MAX_BATCH",
    "decode_matmul",
    "dequantise",
    "expert_decode_matmul",
    "fits_side_by_side",
    "grouped_wide_matmul",
    "matmul",
    "pack",
    "side_by_side_decode_matmul",
    "supported",
    "take_rows",
    "unpack",
    "wide_matmul",
]
