"""ggml's block formats: one row of `FORMATS` and two short functions each.

A matrix is kept in ggml's own bits, taken apart into a few *planes*. Every plane has the axes

    R, U, J, P, L, M, C

The N output rows are R × C: C = 1 keeps a row's blocks together ("rows"), R = 1 puts the rows innermost
("columns"). Along K, element k is (U, J, P, L, M), U being the block. An axis has size 1 where a plane
does not vary along it, so decoding is broadcasting and nothing else. P counts the elements that share a
byte: they are decoded one *part* at a time, and interleaved only when somebody asks for whole rows.

`split(blocks)` takes u8[..., U, bytes] to planes [..., U, J, P, L, M], the scales last; `decode(*planes)`
gives the P parts in f32, each [..., R, U, J, 1, L, M, C]. Formulas and byte offsets: ggml-quants.c.

Decoding equals ggml's bit for bit however XLA compiles it: an 11-bit half × a scale × a code fits f32's
24 bits in every format, so a fused multiply-add rounds as a multiplication and an addition do.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

Planes = tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Format:
    """How one ggml type is stored in a file and on the device."""

    block: int  # elements of a block
    nbytes: int  # bytes of a block in the file
    axes: tuple[int, int, int, int]  # sizes of J, P, L, M; their product is `block`
    bits: float  # per weight, on the device
    split: Callable[[jax.Array], Planes]
    decode: Callable[..., list[jax.Array]]


def _bytes(blocks, start, axes):
    """The bytes from `start` on, shaped [..., U, *axes]."""
    return blocks[..., start : start + int(np.prod(axes))].reshape(*blocks.shape[:-1], *axes)


def _halves(blocks, start, count):
    """`count` f16 numbers from byte `start` on, along P: [..., U, 1, count, 1, 1]."""
    pairs = blocks[..., start : start + 2 * count].reshape(*blocks.shape[:-1], 1, count, 1, 1, 2)
    return jax.lax.bitcast_convert_type(pairs, jnp.float16)


def _part(plane, index):
    """Entry `index` of axis P, the axis kept."""
    return plane[..., index : index + 1, :, :, :]


def _scale(plane, index=0):
    return _part(plane, index).astype(jnp.float32)


def _nibble(codes, high):
    return codes >> 4 if high else codes & 15


def _lookup(table, codes):
    """table[codes] in f32 for 4-bit codes and 16 int8: four words and a shift. Gathers do not vectorise."""
    words = [jnp.int32(word) for word in np.array(table, np.int8).view(np.int32)]
    codes = codes.astype(jnp.int32)
    low, high = (jnp.where(codes & 4 != 0, words[i + 1], words[i]) for i in (0, 2))
    word = jnp.where(codes & 8 != 0, high, low)
    return ((word << (24 - 8 * (codes & 3))) >> 24).astype(jnp.float32)


# ---- blocks of 32: byte j holds element j in its low nibble, element j + 16 in its high one


def _split_q4_0(blocks):
    return _bytes(blocks, 2, (1, 1, 1, 16)), _halves(blocks, 0, 1)


def _decode_q4_0(codes, d):
    return [_scale(d) * (_nibble(codes, p).astype(jnp.float32) - 8) for p in range(2)]


def _split_q4_1(blocks):
    return _bytes(blocks, 4, (1, 1, 1, 16)), _halves(blocks, 0, 2)


def _decode_q4_1(codes, d):
    return [_scale(d, 0) * _nibble(codes, p).astype(jnp.float32) + _scale(d, 1) for p in range(2)]


def _split_q5_0(blocks):
    return _bytes(blocks, 6, (1, 1, 2, 8)), _bytes(blocks, 2, (1, 2, 2, 1)), _halves(blocks, 0, 1)


def _split_q5_1(blocks):
    return _bytes(blocks, 8, (1, 1, 2, 8)), _bytes(blocks, 4, (1, 2, 2, 1)), _halves(blocks, 0, 2)


def _five_bits(codes, high, p):
    """Bit 4 of element (P, L, M) is bit M of byte (P, L) of `high`."""
    bit = (_part(high, p) >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    return (_nibble(codes, p) | bit << 4).astype(jnp.float32)


def _decode_q5_0(codes, high, d):
    return [_scale(d) * (_five_bits(codes, high, p) - 16) for p in range(2)]


def _decode_q5_1(codes, high, d):
    return [_scale(d, 0) * _five_bits(codes, high, p) + _scale(d, 1) for p in range(2)]


def _split_q8_0(blocks):
    codes = jax.lax.bitcast_convert_type(_bytes(blocks, 2, (1, 1, 1, 32)), jnp.int8)
    return codes, _halves(blocks, 0, 1)


def _decode_q8_0(codes, d):
    return [_scale(d) * codes.astype(jnp.float32)]


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def _decode_iq4_nl(codes, d):
    return [_scale(d) * _lookup(IQ4_VALUES, _nibble(codes, p)) for p in range(2)]


def _split_mxfp4(blocks):
    return _bytes(blocks, 1, (1, 1, 1, 16)), _bytes(blocks, 0, (1, 1, 1, 1))


MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled


def _decode_mxfp4(codes, exponent):
    return [_mxfp4(_lookup(MXFP4_VALUES, _nibble(codes, p)), exponent.astype(jnp.int32)) for p in range(2)]


def _mxfp4(value, exponent):
    """value · 2^(exponent − 128), as two factors that are normal f32 numbers for every byte."""
    half = exponent >> 1
    low, high = (jax.lax.bitcast_convert_type((e + 63) << 23, jnp.float32) for e in (half, exponent - half))
    # results below 2^-126 are subnormal, which XLA on CPU flushes to 0: put their bits together
    count = value.astype(jnp.int32)
    bits = jnp.abs(count) << (21 + jnp.minimum(exponent, 1))
    tiny = jax.lax.bitcast_convert_type(bits | (count & jnp.int32(-(2**31))), jnp.float32)
    return jnp.where((exponent < 2) & (bits < 2**23), tiny, value * low * high)


# ---- blocks of 256, two levels of scales


def _unpack_scales(packed):
    """Q4_K's and Q5_K's 12 bytes: eight 6-bit scales and eight 6-bit mins, as bytes [..., J=4, P=4, 1, 1].

    P holds (scale, scale, min, min) of the two sub-blocks of 32 that share bytes.
    """
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = jnp.concatenate([low & 63, (high & 15) | (low >> 6) << 4], -1)
    mins = jnp.concatenate([mid & 63, (high >> 4) | (mid >> 6) << 4], -1)
    pairs = [a.reshape(*a.shape[:-1], 4, 2) for a in (scales, mins)]
    return jnp.concatenate(pairs, -1)[..., None, None]


def _split_q4_k(blocks):
    return _bytes(blocks, 16, (4, 1, 1, 32)), _unpack_scales(blocks[..., 4:16]), _halves(blocks, 0, 2)


def _affine_k(code, scales, d, p):
    scale, low = _scale(d, 0) * _scale(scales, p), _scale(d, 1) * _scale(scales, 2 + p)
    return scale * code.astype(jnp.float32) - low


def _decode_q4_k(codes, scales, d):
    return [_affine_k(_nibble(codes, p), scales, d, p) for p in range(2)]


def _split_q5_k(blocks):
    high = _bytes(blocks, 16, (1, 1, 1, 32))
    return _bytes(blocks, 48, (4, 1, 1, 32)), high, _unpack_scales(blocks[..., 4:16]), _halves(blocks, 0, 2)


def _along_j(values):
    """Per-J constants, shaped to broadcast against J, P, L, M, C."""
    return np.array(values, np.uint8).reshape(-1, 1, 1, 1, 1)


def _decode_q5_k(codes, high, scales, d):
    bits = [(high >> _along_j([p, 2 + p, 4 + p, 6 + p])) & 1 for p in range(2)]
    return [_affine_k(_nibble(codes, p) | bits[p] << 4, scales, d, p) for p in range(2)]


def _split_q6_k(blocks):
    low, high = _bytes(blocks, 0, (2, 2, 2, 16)), _bytes(blocks, 128, (2, 1, 2, 16))
    scales = jax.lax.bitcast_convert_type(_bytes(blocks, 192, (2, 4, 2, 1)), jnp.int8)
    return low, high, scales, _halves(blocks, 208, 1)


def _decode_q6_k(low, high, scales, d):
    codes = [_nibble(_part(low, p % 2), p // 2) | ((high >> 2 * p) & 3) << 4 for p in range(4)]
    return [(_scale(d) * _scale(scales, p)) * (codes[p].astype(jnp.float32) - 32) for p in range(4)]


def _split_q2_k(blocks):
    return _bytes(blocks, 16, (2, 1, 2, 16)), _bytes(blocks, 0, (2, 4, 2, 1)), _halves(blocks, 80, 2)


def _decode_q2_k(codes, scales, d):
    values = []
    for p in range(4):
        scale = _scale(d, 0) * (_part(scales, p) & 15).astype(jnp.float32)
        low = _scale(d, 1) * (_part(scales, p) >> 4).astype(jnp.float32)
        values.append(scale * ((codes >> 2 * p) & 3).astype(jnp.float32) - low)
    return values


def _split_q3_k(blocks):
    codes, mask = _bytes(blocks, 32, (2, 1, 2, 16)), _bytes(blocks, 0, (1, 1, 2, 16))
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    low = jnp.concatenate([low & 15, low >> 4], -1)
    high = jnp.concatenate([(high >> shift) & 3 for shift in (0, 2, 4, 6)], -1)
    scales = ((low | high << 4).astype(jnp.int8) - 32).reshape(*blocks.shape[:-1], 2, 4, 2, 1)
    return codes, mask, scales, _halves(blocks, 108, 1)


def _decode_q3_k(codes, mask, scales, d):
    values = []
    for p in range(4):
        # bit 2 of q + 4: ggml subtracts 4 where it is not set
        code = (codes >> 2 * p) & 3 | ((mask >> _along_j([p, 4 + p])) & 1) << 2
        values.append((_scale(d) * _scale(scales, p)) * (code.astype(jnp.float32) - 4))
    return values


def _split_iq4_xs(blocks):
    low = blocks[..., 4:8, None] >> np.array([0, 4], np.uint8) & 15
    high = blocks[..., 2:4, None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    shape = (*blocks.shape[:-1], 8, 1, 1, 1)
    scales = (low.reshape(shape) | high.reshape(shape) << 4).astype(jnp.int8) - 32
    return _bytes(blocks, 8, (8, 1, 1, 16)), scales, _halves(blocks, 0, 1)


def _decode_iq4_xs(codes, scales, d):
    return [(_scale(d) * _scale(scales)) * _lookup(IQ4_VALUES, _nibble(codes, p)) for p in range(2)]


FORMATS = {
    "Q4_0": Format(32, 18, (1, 2, 1, 16), 4.5, _split_q4_0, _decode_q4_0),
    "Q4_1": Format(32, 20, (1, 2, 1, 16), 5.0, _split_q4_1, _decode_q4_1),
    "Q5_0": Format(32, 22, (1, 2, 2, 8), 5.5, _split_q5_0, _decode_q5_0),
    "Q5_1": Format(32, 24, (1, 2, 2, 8), 6.0, _split_q5_1, _decode_q5_1),
    "Q8_0": Format(32, 34, (1, 1, 1, 32), 8.5, _split_q8_0, _decode_q8_0),
    "IQ4_NL": Format(32, 18, (1, 2, 1, 16), 4.5, _split_q4_0, _decode_iq4_nl),
    "MXFP4": Format(32, 17, (1, 2, 1, 16), 4.25, _split_mxfp4, _decode_mxfp4),
    "Q2_K": Format(256, 84, (2, 4, 2, 16), 2.625, _split_q2_k, _decode_q2_k),
    "Q3_K": Format(256, 110, (2, 4, 2, 16), 3.5625, _split_q3_k, _decode_q3_k),  # 6-bit scales in a byte each
    "Q4_K": Format(256, 144, (4, 2, 1, 32), 4.625, _split_q4_k, _decode_q4_k),  # 6-bit scales in a byte each
    "Q5_K": Format(256, 176, (4, 2, 1, 32), 5.625, _split_q5_k, _decode_q5_k),  # 6-bit scales in a byte each
    "Q6_K": Format(256, 210, (2, 4, 2, 16), 6.5625, _split_q6_k, _decode_q6_k),
    "IQ4_XS": Format(256, 136, (8, 2, 1, 16), 4.3125, _split_iq4_xs, _decode_iq4_xs),  # scales in a byte each
}
