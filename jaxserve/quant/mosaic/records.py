"""The packed form the decode kernel reads: a record per tile of 16 rows × 256 columns, in tensor-core order.

A matrix is one u32 array [N/16, ceil(K/256), words]. A record is a whole tile: its codes, its scales, its
row scales, 2 to 4 KB in one piece, so that one bulk copy fetches it and every lane of a warp finds its
operands with 16-byte loads. Nothing is requantised: `unpack` gives gguf-py's float32 bit for bit.

Lane 4g+t of a warp owns rows g and g+8 and, of every 16 columns, columns 4t … 4t+3: a dot product does not
care about the order of its terms, so slot 8h+2t+p of mma step s (16 steps a tile) holds column 16s + 4t +
2h + p. A lane's 128 codes are numbered [s, r, h, p], r the row half. A block of 16 columns, the smallest
that shares a scale in any format, is then one mma.

    record := codes   [chunk][lane][4 words]     where each bit of a code lies: `places`
              scales  [g][t][r][b][q]            of group 8b + 2t + q; u8 or f16; b: groups of 16 columns only
              rows    [g][r][c]                  c f16 numbers a row: the scale of scales, and that of mins
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, COLUMNS, LANES, LANE_CODES = 16, 256, 32, 128
CHUNK_CODES = 1 << 22  # packed at a time: a temporary of up to 16 u32 a code, 256 MiB

FLOATS = ("float32", "float16", "bfloat16")  # types of activations, and of decoded weights
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # e2m1, doubled

Parts = tuple[
    jax.Array, list[jax.Array], list[jax.Array]
]  # codes [n, K], scales [n, groups] each, rows [n, K/256] each


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one ggml type lies in a record."""

    block: int  # columns of a ggml block
    nbytes: int  # bytes of a ggml block
    group: int  # columns that share a scale
    take: Callable[[jax.Array], Parts]  # ggml blocks u8 [n, blocks, nbytes] → codes, scales, rows
    places: np.ndarray  # [128, bits of a code] i32: bit of the lane's words that holds this bit of this code
    scales: tuple[np.dtype, ...]  # one entry per array of scales
    rows: int  # f16 numbers a row
    value: Callable[..., jax.Array]  # code, *scales, *rows (code integer, the rest f32) → f32

    @property
    def lane_words(self) -> int:
        return self.places.size // 32

    @property
    def scale_offsets(self) -> list[int]:
        """Byte offset of every scale section, then of the row section, then the record's size."""
        sizes = [ROWS * COLUMNS // self.group * dtype.itemsize for dtype in self.scales] + [
            ROWS * 2 * self.rows
        ]
        return [int(o) for o in np.cumsum([self.lane_words * 4 * LANES, *sizes])]

    @property
    def words(self) -> int:
        return self.scale_offsets[-1] // 4

    def check(self, k: int) -> None:
        if k % self.block:
            raise ValueError(f"{k} columns are not a multiple of the type's block of {self.block}")


# ---- places: s, r, h, p of each of a lane's codes → the bit of its words where the code begins

_S, _R, _H, _P = (axis.reshape(-1) for axis in np.indices((16, 2, 2, 2)))


def _pairs(word, bit):
    """Two columns that meet in one register (p = 0, 1) lie 16 bits apart: one mask takes both."""
    return 32 * word + np.asarray(bit) + 16 * _P


def _places(*parts: tuple[int, np.ndarray]) -> np.ndarray:
    """(bits, first bit) of each run of a code's bits, the lowest first → places."""
    return np.concatenate([start[:, None] + np.arange(bits) for bits, start in parts], 1).astype(np.int32)


_EVEN = _S % 2  # of two steps, low nibbles serve the even one and high nibbles the odd one
_STEP4, _QUAD = _S % 4, _S // 4
_EIGHTH = 4 * (_S // 2 % 2) + 2 * _R + _H
_NIBBLE = (4, _pairs(2 * (_S // 2) + _R, 4 * (_EVEN + 2 * _H)))
_NIBBLE_IN_ORDER = (
    4,
    32 * (2 * (_S // 2) + _R) + 4 * (4 * _EVEN + 2 * _H + _P),
)  # four codes select bytes at once
_CRUMB = (2, _pairs(2 * _QUAD + _R, 2 * (_STEP4 + 4 * _H)))
_FIFTH_BIT = (1, _pairs(16 + _QUAD, _EIGHTH + 4 * (_EIGHTH >= 4) + 4 * _EVEN))
_FIFTH_AND_SIXTH = (2, _pairs(16 + _S // 2, np.array([0, 2, 8, 10])[2 * _R + _H] + 4 * _EVEN))
_THIRD_BIT = (1, _pairs(8 + _QUAD, np.array([0, 1, 8, 9])[2 * _R + _H] + 2 * _STEP4))
_BYTE = (8, 32 * (2 * _S + _R) + 8 * (2 * _H + _P))
_HALF = (16, _pairs(4 * _S + 2 * _H + _R, 0))
_MAGNITUDE = (3, _pairs(2 * (_S // 2) + _R, np.array([9, 6, 3, 0])[2 * _EVEN + _H]))
_SIGN = (1, _pairs(2 * (_S // 2) + _R, np.array([15, 12, 14, 13])[2 * _EVEN + _H]))

_FIVE_BITS = _places(_NIBBLE, _FIFTH_BIT)

# ---- ggml blocks → codes, scales, rows (byte offsets are ggml's structs)


def _halves(blocks, *offsets):
    return [lax.bitcast_convert_type(blocks[..., o : o + 2], jnp.float16) for o in offsets]


def _row_major(codes):
    """[n, blocks, …] → [n, K]"""
    return codes.reshape(codes.shape[0], -1)


def _split(values, width):
    """u8 [..., m] → [..., 8/width, m]: the low bits of every byte first, then the next."""
    shifts = jnp.arange(0, 8, width, dtype=jnp.uint8)[:, None]
    return values[..., None, :] >> shifts & jnp.uint8(2**width - 1)


def _bits(values):
    """u8 [..., m] → [..., 8m], the lowest bit of every byte first."""
    bits = values[..., None] >> jnp.arange(8, dtype=jnp.uint8) & 1
    return bits.reshape(*values.shape[:-1], -1)


def _nibbles(blocks, start):
    """Element j in the low nibble of byte j, element j + 16 in the high one: [..., 32]."""
    return _split(blocks[..., start : start + 16], 4).reshape(*blocks.shape[:-1], 32)


def _take_nibbles(blocks, start, numbers):
    return _row_major(_nibbles(blocks, start)), _halves(blocks, *numbers), []


def _take_five_bits(blocks, start, numbers):
    codes = _nibbles(blocks, start) | _bits(blocks[..., start - 4 : start]) << 4
    return _row_major(codes), _halves(blocks, *numbers), []


def _take_q8_0(blocks):
    return _row_major(blocks[..., 2:] ^ 128), _halves(blocks, 0), []


def _take_mxfp4(blocks):
    return _row_major(_nibbles(blocks, 1)), [blocks[..., 0]], []


def _take_iq4_xs(blocks):
    low = jnp.swapaxes(_split(blocks[..., 4:8], 4), -1, -2)  # [n, blocks, 4, 2]
    high = jnp.swapaxes(_split(blocks[..., 2:4], 2), -1, -2)  # [n, blocks, 2, 4]
    shape = (*blocks.shape[:-1], 8)
    codes = _split(blocks[..., 8:].reshape(*blocks.shape[:-1], 8, 16), 4)
    return _row_major(codes), [_row_major(low.reshape(shape) | high.reshape(shape) << 4)], _halves(blocks, 0)


def _six_bit_pairs(packed):
    """Q4_K's and Q5_K's 12 bytes → eight scales and eight mins."""
    low, mid, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scales = jnp.concatenate([low & 63, (high & 15) | low >> 6 << 4], -1)
    return [_row_major(scales), _row_major(jnp.concatenate([mid & 63, high >> 4 | mid >> 6 << 4], -1))]


def _take_q4_k(blocks):
    codes = _split(blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 32), 4)
    return _row_major(codes), _six_bit_pairs(blocks[..., 4:16]), _halves(blocks, 0, 2)


def _take_q5_k(blocks):
    low = _split(blocks[..., 48:].reshape(*blocks.shape[:-1], 4, 32), 4)
    high = _split(blocks[..., 16:48], 1).reshape(low.shape)
    return _row_major(low | high << 4), _six_bit_pairs(blocks[..., 4:16]), _halves(blocks, 0, 2)


def _take_q6_k(blocks):
    low = _split(blocks[..., :128].reshape(*blocks.shape[:-1], 2, 64), 4)  # [n, blocks, 2, 2, 64] = (h, g, l)
    high = _split(blocks[..., 128:192].reshape(*blocks.shape[:-1], 2, 32), 2)
    codes = low.reshape(*blocks.shape[:-1], 2, 4, 32) | high << 4
    return _row_major(codes), [_row_major(blocks[..., 192:208] ^ 128)], _halves(blocks, 208)


def _take_q2_k(blocks):
    codes = _split(blocks[..., 16:80].reshape(*blocks.shape[:-1], 2, 32), 2)
    return _row_major(codes), [_row_major(blocks[..., :16])], _halves(blocks, 80, 82)


def _take_q3_k(blocks):
    low = _split(blocks[..., 32:96].reshape(*blocks.shape[:-1], 2, 32), 2)
    high = _split(blocks[..., :32], 1).reshape(low.shape)
    low_scales = _split(blocks[..., 96:104], 4).reshape(*blocks.shape[:-1], 16)
    high_scales = _split(blocks[..., 104:108], 2).reshape(*blocks.shape[:-1], 16)
    return _row_major(low | high << 2), [_row_major(low_scales | high_scales << 4)], _halves(blocks, 108)


def _take_halves(blocks):
    return _row_major(lax.bitcast_convert_type(blocks.reshape(*blocks.shape[:-1], -1, 2), jnp.uint16)), [], []


# ---- values, in ggml's order of operations


def _float(code, zero=0):
    return (code.astype(jnp.int32) - zero).astype(jnp.float32)


def _looked_up(table, code):
    return jnp.asarray(table, jnp.float32)[code.astype(jnp.int32)]


def _affine(code, scale, low, d, low_d):
    return (d * scale) * _float(code) - low_d * low


def _value_q2_k(code, both, d, low_d):
    byte = both.astype(jnp.uint8)
    return _affine(code, _float(byte & 15), _float(byte >> 4), d, low_d)


def _value_mxfp4(code, exponent):
    """value · 2^(exponent − 128), as two factors that are normal f32 numbers for every byte."""
    exponent, value = exponent.astype(jnp.int32), _looked_up(MXFP4_VALUES, code)
    half = exponent >> 1
    low, high = (lax.bitcast_convert_type((e + 63) << 23, jnp.float32) for e in (half, exponent - half))
    # results below 2^-126 are subnormal, which XLA on CPU flushes to 0: put their bits together
    count = value.astype(jnp.int32)
    bits = jnp.abs(count) << (21 + jnp.minimum(exponent, 1))
    tiny = lax.bitcast_convert_type(bits | (count & jnp.int32(-(2**31))), jnp.float32)
    return jnp.where((exponent < 2) & (bits < 2**23), tiny, value * low * high)


def _float_from_bits(dtype):
    return lambda code: lax.bitcast_convert_type(code, dtype).astype(jnp.float32)


U8, F16 = np.dtype(np.uint8), np.dtype(np.float16)


LAYOUTS = {
    "Q4_0": Layout(
        32, 18, 32, partial(_take_nibbles, start=2, numbers=(0,)), _places(_NIBBLE), (F16,), 0,
        lambda q, d: d * _float(q, 8),
    ),
    "Q4_1": Layout(
        32, 20, 32, partial(_take_nibbles, start=4, numbers=(0, 2)), _places(_NIBBLE), (F16, F16), 0,
        lambda q, d, m: d * _float(q) + m,
    ),
    "Q5_0": Layout(
        32, 22, 32, partial(_take_five_bits, start=6, numbers=(0,)), _FIVE_BITS, (F16,), 0,
        lambda q, d: d * _float(q, 16),
    ),
    "Q5_1": Layout(
        32, 24, 32, partial(_take_five_bits, start=8, numbers=(0, 2)), _FIVE_BITS, (F16, F16), 0,
        lambda q, d, m: d * _float(q) + m,
    ),
    "Q8_0": Layout(32, 34, 32, _take_q8_0, _places(_BYTE), (F16,), 0, lambda q, d: d * _float(q, 128)),
    "IQ4_NL": Layout(
        32, 18, 32, partial(_take_nibbles, start=2, numbers=(0,)), _places(_NIBBLE_IN_ORDER), (F16,), 0,
        lambda q, d: d * _looked_up(IQ4_VALUES, q),
    ),
    "MXFP4": Layout(32, 17, 32, _take_mxfp4, _places(_MAGNITUDE, _SIGN), (U8,), 0, _value_mxfp4),
    "Q2_K": Layout(256, 84, 16, _take_q2_k, _places(_CRUMB), (U8,), 2, _value_q2_k),
    "Q3_K": Layout(
        256, 110, 16, _take_q3_k, _places(_CRUMB, _THIRD_BIT), (U8,), 1,
        lambda q, scale, d: (d * (scale - 32)) * _float(q, 4),
    ),
    "Q4_K": Layout(256, 144, 32, _take_q4_k, _places(_NIBBLE), (U8, U8), 2, _affine),
    "Q5_K": Layout(256, 176, 32, _take_q5_k, _FIVE_BITS, (U8, U8), 2, _affine),
    "Q6_K": Layout(
        256, 210, 16, _take_q6_k, _places(_NIBBLE, _FIFTH_AND_SIXTH), (U8,), 1,
        lambda q, scale, d: (d * (scale - 128)) * _float(q, 32),
    ),
    "IQ4_XS": Layout(
        256, 136, 32, _take_iq4_xs, _places(_NIBBLE_IN_ORDER), (U8,), 1,
        lambda q, scale, d: (d * (scale - 32)) * _looked_up(IQ4_VALUES, q),
    ),
    "F16": Layout(32, 64, 32, _take_halves, _places(_HALF), (), 0, _float_from_bits(jnp.float16)),
    "BF16": Layout(32, 64, 32, _take_halves, _places(_HALF), (), 0, _float_from_bits(jnp.bfloat16)),
}  # fmt: skip


# ---- records


def _words(values):
    """[..., m] u8 or f16 → u32 [..., m · itemsize / 4], little-endian."""
    return lax.bitcast_convert_type(
        values.reshape(*values.shape[:-1], -1, 4 // values.dtype.itemsize), jnp.uint32
    )


def _bytes(words, dtype):
    """The inverse of `_words`."""
    values = lax.bitcast_convert_type(words, dtype)
    return values.reshape(*words.shape[:-1], -1)


def _code_words(layout, codes):
    """[16, K] → u32 [K/256, words of codes]"""
    u = codes.shape[1] // COLUMNS
    # r, g, u, s, t, h, p → u, g, t, (s, r, h, p)
    lanes = codes.reshape(2, 8, u, 16, 4, 2, 2).transpose(2, 1, 4, 3, 0, 5, 6).reshape(u, LANES, LANE_CODES)
    owner, bit = np.divmod(np.argsort(layout.places.reshape(-1)), layout.places.shape[1])
    bits = (lanes[..., owner].astype(jnp.uint32) >> bit.astype(np.uint32)) & 1
    bits = bits.reshape(u, LANES, layout.lane_words, 32) << np.arange(32, dtype=np.uint32)
    words = bits.sum(-1, dtype=jnp.uint32).reshape(u, LANES, layout.lane_words // 4, 4)
    return words.transpose(0, 2, 1, 3).reshape(u, -1)


def _codes_of(layout, words):
    """The inverse of `_code_words`."""
    u, bits = words.shape[0], layout.places.shape[1]
    lanes = words.reshape(u, layout.lane_words // 4, LANES, 4).transpose(0, 2, 1, 3).reshape(u, LANES, -1)
    word, shift = np.divmod(layout.places, 32)
    spread = (lanes[..., word] >> shift.astype(np.uint32) & 1) << np.arange(bits, dtype=np.uint32)
    codes = spread.sum(-1, dtype=jnp.uint32).astype(jnp.uint16 if bits > 8 else jnp.uint8)
    codes = codes.reshape(u, 8, 4, 16, 2, 2, 2).transpose(4, 1, 0, 3, 2, 5, 6)
    return codes.reshape(ROWS, u * COLUMNS)


def _scale_words(layout, scales):
    """[16, K/group] → u32 [K/256, words]:  r, g, u, b, t, q → u, g, t, r, b, q"""
    u = scales.shape[1] * layout.group // COLUMNS
    return _words(scales.reshape(2, 8, u, -1, 4, 2).transpose(2, 1, 4, 0, 3, 5).reshape(u, -1))


def _scales_of(layout, words, dtype):
    u = words.shape[0]
    return _bytes(words, dtype).reshape(u, 8, 4, 2, -1, 2).transpose(3, 1, 0, 4, 2, 5).reshape(ROWS, -1)


def _row_words(rows):
    """f16 [16, K/256, c] → u32 [K/256, words]:  r, g, u, c → u, g, r, c"""
    u = rows.shape[1]
    return _words(rows.reshape(2, 8, u, -1).transpose(2, 1, 0, 3).reshape(u, -1))


def _rows_of(words):
    u = words.shape[0]
    return _bytes(words, jnp.float16).reshape(u, 8, 2, -1).transpose(2, 1, 0, 3).reshape(ROWS, u, -1)


def _pack_tile_row(layout, raw):
    """u8 [16, row bytes] → u32 [ceil(K/256), words]"""
    blocks = raw.reshape(ROWS, -1, layout.nbytes)
    # zero bytes past the last column are weights of 0 in every type
    blocks = jnp.pad(blocks, ((0, 0), (0, -blocks.shape[1] % (COLUMNS // layout.block)), (0, 0)))
    codes, scales, rows = layout.take(blocks)
    sections = [_code_words(layout, codes), *(_scale_words(layout, s) for s in scales)]
    if rows:
        sections.append(_row_words(jnp.stack(rows, -1)))
    return jnp.concatenate(sections, -1)


def _unpack_tile_row(layout, records):
    """u32 [ceil(K/256), words] → f32 [16, K rounded up to 256]"""
    offsets = [o // 4 for o in layout.scale_offsets]
    codes = _codes_of(layout, records[:, : offsets[0]]).reshape(ROWS, -1, layout.group)
    numbers = [
        _scales_of(layout, records[:, begin:end], dtype).astype(jnp.float32)[..., None]
        for begin, end, dtype in zip(offsets, offsets[1:], layout.scales, strict=False)
    ]
    if layout.rows:
        rows = jnp.repeat(_rows_of(records[:, offsets[-2] :]), COLUMNS // layout.group, 1).astype(jnp.float32)
        numbers += [rows[..., c : c + 1] for c in range(layout.rows)]
    return layout.value(codes, *numbers).reshape(ROWS, -1)


def _layout(type_name: str) -> Layout:
    if type_name not in LAYOUTS:
        raise ValueError(
            f"type {type_name} has no record form; the types that have one are {', '.join(LAYOUTS)}"
        )
    return LAYOUTS[type_name]


@partial(jax.jit, static_argnums=0)
def pack(type_name: str, raw: jax.Array) -> jax.Array:
    """ggml's bytes u8 [(X,) N, row bytes] → records u32 [(X,) N/16, ceil(K/256), words], on the device."""
    layout = _layout(type_name)
    *stack, n, nbytes = raw.shape
    if n % ROWS or nbytes % layout.nbytes:
        raise ValueError(
            f"{n} rows of {nbytes} bytes: {type_name} records need a multiple of {ROWS} rows "
            f"and of {layout.nbytes} bytes"
        )
    k = nbytes // layout.nbytes * layout.block
    batch = max(1, CHUNK_CODES // (ROWS * k))
    records = lax.map(partial(_pack_tile_row, layout), raw.reshape(-1, ROWS, nbytes), batch_size=batch)
    return records.reshape(*stack, n // ROWS, *records.shape[1:])


@partial(jax.jit, static_argnums=(0, 2))
def unpack(type_name: str, records: jax.Array, k: int) -> jax.Array:
    """Records → f32 [N, K] (or [X, N, K]), equal to gguf-py's decoding. The reference; not fast."""
    layout = _layout(type_name)
    *stack, tiles, u, words = records.shape
    batch = max(1, CHUNK_CODES // (ROWS * COLUMNS * u))
    values = lax.map(partial(_unpack_tile_row, layout), records.reshape(-1, u, words), batch_size=batch)
    return values.reshape(*stack, tiles * ROWS, u * COLUMNS)[..., :k]
