"""Decode kernels for packed matrices on NVIDIA Hopper GPUs: 1 … 8 rows at the speed of memory."""

from jaxserve.quant.mosaic.decode import MAX_BATCH, decode_matmul, expert_decode_matmul, supported
from jaxserve.quant.mosaic.records import pack, unpack

__all__ = ["MAX_BATCH", "decode_matmul", "expert_decode_matmul", "pack", "supported", "unpack"]
