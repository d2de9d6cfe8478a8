"""Random quantised blocks of a given deviation: random bytes under chosen scales, nothing is quantised."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

POOL_BYTES = 64 << 20  # random blocks of one type; every tensor is a window that runs round this pool
FLOATS = {Type.F32: np.float32, Type.F16: np.float16, Type.BF16: np.float32}


class Layout(NamedTuple):
    """Where a block keeps its scale, and how random codes are centred on zero."""

    scale: int  # byte offset of the float16 scale d
    minimum: int | None = None  # byte offset of the float16 minimum ...
    ratio: float = 0.0  # ... which is this times d
    signed: bool = False  # the codes lean to one side: half of the blocks get a negative d
    prepare: Callable[[np.ndarray], None] = lambda blocks: None  # sets sub-block scales in place


def _prepare_k4(blocks: np.ndarray) -> None:
    """Q4_K, Q5_K: six-bit scales from 24 to 55, each sub-block's minimum equal to its scale."""
    scales = 24 + (blocks[:, 4:12] & 31)
    low, high = scales[:, :4], scales[:, 4:]
    blocks[:, 4:8] = blocks[:, 8:12] = low | (high >> 4) << 6
    blocks[:, 12:16] = (high & 15) * 17


def _prepare_q2(blocks: np.ndarray) -> None:
    """Q2_K: four-bit scales from 8 to 15, each minimum equal to its scale."""
    blocks[:, :16] = (8 | blocks[:, :16] & 7) * 17


def _prepare_q6(blocks: np.ndarray) -> None:
    """Q6_K: signed scales from 32 to 63 in magnitude."""
    scales = blocks[:, 192:208].view(np.int8)
    scales[:] = np.where(scales < 0, -1, 1) * (32 + (scales & 31))


LAYOUTS: dict[Type, Layout] = {
    Type.Q4_0: Layout(0, signed=True),
    Type.Q4_1: Layout(0, minimum=2, ratio=-7.5),
    Type.Q5_0: Layout(0, signed=True),
    Type.Q5_1: Layout(0, minimum=2, ratio=-15.5),
    Type.Q8_0: Layout(0),
    Type.Q2_K: Layout(80, minimum=82, ratio=1.5, prepare=_prepare_q2),
    Type.Q3_K: Layout(108, signed=True),
    Type.Q4_K: Layout(0, minimum=2, ratio=7.5, prepare=_prepare_k4),
    Type.Q5_K: Layout(0, minimum=2, ratio=15.5, prepare=_prepare_k4),
    Type.Q6_K: Layout(208, prepare=_prepare_q6),
    Type.IQ4_NL: Layout(0, signed=True),
    Type.IQ4_XS: Layout(0, signed=True),
    Type.TQ1_0: Layout(52, signed=True),
    Type.TQ2_0: Layout(64, signed=True),
    Type.IQ2_XXS: Layout(0),
    Type.IQ2_XS: Layout(0),
    Type.IQ2_S: Layout(0),
    Type.IQ3_XXS: Layout(0),
    Type.IQ3_S: Layout(0),
    Type.IQ1_S: Layout(0, signed=True),
    Type.MXFP4: Layout(0),
}


@lru_cache(maxsize=8)
def pool(qtype: Type, std: float, count: int, seed: int) -> np.ndarray:
    """`count` blocks (values, for a float type) of mean 0 and deviation `std`: u8 [count, nbytes]"""
    rng = np.random.default_rng((seed, int(qtype)))
    if qtype in FLOATS:
        values = (std * rng.standard_normal(count, np.float32)).astype(FLOATS[qtype])
        return gguf.quants.quantize(values, qtype).view(np.uint8).reshape(count, -1)
    nbytes = gguf.GGML_QUANT_SIZES[qtype][1]
    blocks = np.frombuffer(bytearray(rng.bytes(count * nbytes)), np.uint8).reshape(count, nbytes)
    if qtype == Type.MXFP4:
        blocks[:, 0] = _exponents(std, rng.random(count))
        return blocks
    layout = LAYOUTS[qtype]
    layout.prepare(blocks)
    scales = rng.uniform(0.8, 1.2, count)
    if layout.signed:
        scales *= rng.choice([-1.0, 1.0], count)
    sample = blocks[:16384].copy()
    _set_scales(sample, layout, scales[:16384])
    _set_scales(blocks, layout, scales * (std / gguf.quants.dequantize(sample, qtype).std()))
    return blocks


def _set_scales(blocks: np.ndarray, layout: Layout, scales: np.ndarray) -> None:
    for offset, value in ((layout.scale, scales), (layout.minimum, layout.ratio * scales)):
        if offset is not None:
            blocks[:, offset : offset + 2] = value.astype("<f2")[:, None].view(np.uint8)


def _exponents(std: float, uniform: np.ndarray) -> np.ndarray:
    """MXFP4 scales are powers of two: two neighbours, mixed so that the mean square comes out right."""
    octaves, mantissa = divmod(math.log2(std / math.sqrt(34.25)), 1)  # 34.25: mean square of the 16 codes
    return 128 + int(octaves) + (uniform < (4**mantissa - 1) / 3)


def pool_blocks(limit: int, nbytes: int) -> int:
    """How many blocks a pool has: POOL_BYTES of them, or `limit`, the largest tensor's, if that is fewer.

    The number is prime: where a tensor runs round the pool, its rows begin at other blocks each time, so no
    two rows (two tokens of the head, say) are equal.
    """
    number = max(4096, min(limit, POOL_BYTES // nbytes))
    while any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number += 1
    return number
