"""One record times the activations in registers, per ggml type: what a warp does with a tile.

Codes become f16 without a conversion: OR-ed into the mantissa of a power of two they read as 1024 + q, 64 +
q, …, and the sum of these biases is taken away once per tile, through a product of the scales with (bias ·
Σx). Codes, scales and mins are small integers or halves, exact in f16; what f16 cannot hold (the scale of
scales) is applied in f32. So the only error is that of x in f16 (of x in two bf16 halves for BF16
matrices).

    per group  c = mma(codes, x);  s = mma(scales, selector of the group);  acc += s · c
    per tile   acc starts as mma(scales, -bias · Σx);  y = d · acc + mma(mins, Σx)

A tile's fragment order is records.py's: step s multiplies 16 columns; its four operand registers are (row
g, row g+8) of the first half of the slots, then of the second.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from jaxserve.ptx import (
    Register,
    Registers,
    and_or,
    choose_bytes,
    constant,
    fma,
    load_global,
    load_shared,
    mma,
    pinned,
    select,
    subtract_f16x2,
    unpack_f16x2,
    zeros,
)
from jaxserve.quant.mosaic.records import IQ4_VALUES, LAYOUTS

STEPS = 16  # of 16 columns
MAGIC = {4: 0x44004400, 16: 0x4C004C00, 64: 0x54005400, 256: 0x5C005C00, 1024: 0x64006400}  # pairs of f16 2^n
BYTE_PAIRS = (0x5150, 0x5352)  # selectors: bytes 0, 1 or 2, 3, each below byte 1 of the other operand
IQ4_BYTES = [int.from_bytes([v + 128 for v in IQ4_VALUES[i : i + 4]], "little") for i in (0, 4, 8, 12)]
IQ4_PINS = (0x32103210, *IQ4_BYTES)  # a selector that leaves bytes where they are, and the table


class Chunk(NamedTuple):
    """256 columns of up to 8 activation rows, as a lane holds them: operands B of mma."""

    codes: Registers  # 2 registers a step: x in f16, or the high half of x in bf16
    low: Registers  # the rest of x in bf16; empty where nothing is left or f16 is used
    sums: Registers  # Σx of every group as high + low f16 halves; empty where not needed
    bias: Registers  # −bias · Σx, likewise


class Lane(NamedTuple):
    """Where a lane stands, and its constants."""

    lane: Register
    g: Register
    t: Register
    pick: Registers  # operands B that bring column j of an m × 8 operand A to every lane
    pins: Registers  # the type's constants
    load: Callable[
        [Register, Register, int, int], Registers
    ]  # (record, place, offset, words): where records lie


def from_shared(record: Register, place: Register, offset: int, words: int) -> Registers:
    """Words of a record in shared memory."""
    return load_shared(record + place, offset, words)


def from_global(record: Register, place: Register, offset: int, words: int) -> Registers:
    """Words of a record in global memory."""
    return load_global(record + place.widened(), offset, words)


class Fragments(Sequence):
    """Operand A of four steps, four registers each, computed when it is asked for.

    values(step of the quarter, row half, slot half) → a register.
    """

    def __init__(self, values: Callable[[int, int, int], Register]):
        self._step = functools.cache(
            lambda s: (values(s, 0, 0), values(s, 1, 0), values(s, 0, 1), values(s, 1, 1))
        )

    def __len__(self) -> int:
        return 4

    def __getitem__(self, s: int) -> Sequence[Register]:
        if s >= len(self):
            raise IndexError(s)
        return self._step(s)


@dataclasses.dataclass(frozen=True)
class Product:
    """How a type's codes and scales reach the tensor core."""

    codes: Callable[[Register, Lane], Iterator[Fragments]]
    bias: tuple[int, int, int, int]  # what is added to the codes of steps 0 … 3, and so on; 0: nothing
    pins: tuple[int, ...]  # constants that codes and scales want in registers
    scales: (
        Callable[[Register, Lane, int], Registers] | None
    )  # (record, lane, byte offset) → operand A, of 8 or 16 columns
    mins: Callable[[Register, Lane, int], Registers] | None = None
    scale_of: str = "f16"
    factor: float = 1.0  # of the whole product


# ---- codes: (record, lane) → one `Fragments` for each quarter of the tile


def _lane_words(record: Register, k: Lane, chunk: int) -> Registers:
    return k.load(record, k.lane * 16, 512 * chunk, 4)


def _shifted(word: Register, left: int) -> Register:
    return word << left if left > 0 else word >> -left if left < 0 else word


def _twice(bits: int) -> int:
    """A mask for both halves of a register."""
    return bits | bits << 16


_JRH = [(j, r, h) for j in range(2) for r in range(2) for h in range(2)]  # pair of steps, row half, slot half


def _nibble_codes(plane_bits: int):
    """Low nibbles read as 1024 + q in even steps, high ones as 64 + q in odd; a plane's bits go above."""

    def codes(record: Register, k: Lane) -> Iterator[Fragments]:
        planes = _planes(record, k, plane_bits)
        for quarter in range(4):
            words = _lane_words(record, k, quarter)
            yield _nibble_fragments(words, next(planes, None), plane_bits, k.pins)

    return codes


def _nibble_fragments(words, plane, plane_bits, pins):
    pairs = {(j, r, h): _shifted(words[2 * j + r], -8 * h) for j, r, h in _JRH}

    def value(s, r, h):
        j, odd = divmod(s, 2)
        pair = and_or(pairs[j, r, h], _twice(0xF0 if odd else 0xF), pins[odd])
        if plane is None:
            return pair
        return and_or(plane[j, r, h], _twice((2**plane_bits - 1) << (8 if odd else 4)), pair)

    return Fragments(value)


def _planes(record: Register, k: Lane, bits: int) -> Iterator[dict]:
    """(j, r, h) → a register whose bits 4 … belong to the even step and bits 8 … to the odd one, per quarter.

    The starts are those of `records`' places.
    """
    if bits == 1:
        for word in _lane_words(record, k, 4):
            yield {
                key: _shifted(word, 4 - b) for key, b in zip(_JRH, (0, 1, 2, 3, 8, 9, 10, 11), strict=True)
            }
    if bits == 2:
        for chunk in (4, 5):
            words = _lane_words(record, k, chunk)
            for pair in (words[:2], words[2:]):
                yield {
                    key: _shifted(pair[key[0]], 4 - b) for key, b in zip(_JRH, (0, 2, 8, 10) * 2, strict=True)
                }


def _crumb_codes(has_plane: bool):
    """Two bits, read as 1024, 256, 64 and 16 + q in steps 0 … 3; a plane's bit goes above them."""

    def codes(record: Register, k: Lane) -> Iterator[Fragments]:
        planes = _lane_words(record, k, 2) if has_plane else [None] * 4
        for half in range(2):
            words = _lane_words(record, k, half)
            for pair, plane in zip((words[:2], words[2:]), planes[2 * half :], strict=False):
                yield _crumb_fragments(pair, plane, k.pins)

    return codes


def _crumb_fragments(words, plane, pins):
    pairs = {(r, h): _shifted(words[r], -8 * h) for r in range(2) for h in range(2)}
    if plane is not None:
        plane = {key: _shifted(plane, 2 - b) for key, b in zip(pairs, (0, 1, 8, 9), strict=True)}

    def value(s, r, h):
        pair = and_or(pairs[r, h], _twice(3 << 2 * s), pins[s])
        return pair if plane is None else and_or(plane[r, h], _twice(4 << 2 * s), pair)

    return Fragments(value)


def _byte_codes(record: Register, k: Lane) -> Iterator[Fragments]:
    """u8, read as 1024 + q."""
    (magic,) = k.pins
    for quarter in range(4):
        words = [w for chunk in range(2) for w in _lane_words(record, k, 2 * quarter + chunk)]
        yield Fragments(lambda s, r, h, words=words: choose_bytes(words[2 * s + r], magic, BYTE_PAIRS[h]))


def _iq4_codes(record: Register, k: Lane) -> Iterator[Fragments]:
    """Table[q] + 128 as bytes, four at a time, read as 1024 + byte."""
    magic, identity, *table = k.pins

    def four(within, which):
        """Both halves of the table are looked up; bit 3 of the code chooses."""
        low, high = choose_bytes(*table[:2], within), choose_bytes(*table[2:], within)
        return choose_bytes(low, high, which)

    for quarter in range(4):
        looked_up = {}
        for i, word in enumerate(_lane_words(record, k, quarter)):
            within, which = word & 0x77777777, and_or(word >> 1, 0x44444444, identity)
            for odd in range(2):
                looked_up[i // 2 * 2 + odd, i % 2] = four(within >> 16 * odd, which >> 16 * odd)
        yield Fragments(lambda s, r, h, bytes_=looked_up: choose_bytes(bytes_[s, r], magic, BYTE_PAIRS[h]))


def _mxfp4_codes(record: Register, k: Lane) -> Iterator[Fragments]:
    """e2m1's bits at the sign, the low exponent bits and the top mantissa bit of an f16: value · 2^-14."""
    for quarter in range(4):
        words = _lane_words(record, k, quarter)

        def value(s, r, h, words=words):
            word = words[s // 2 * 2 + r]
            if s % 2 == 0:
                return _shifted(word, 3 * h) & 0x8E008E00
            return and_or(word << 1 + h, 0x80008000, (word << 6 + 3 * h) & 0x0E000E00)

        yield Fragments(value)


def _half_codes(record: Register, k: Lane) -> Iterator[Fragments]:
    """16-bit floats: already operands."""
    for quarter in range(4):
        words = functools.cache(lambda s, quarter=quarter: _lane_words(record, k, 4 * quarter + s))
        yield Fragments(lambda s, r, h, words=words: words(s)[2 * h + r])


# ---- scales: operand A, rows g and g+8 of groups 2t, 2t+1 (and of 8+2t, 9+2t)


def _half_scales(record: Register, k: Lane, offset: int) -> Registers:
    return k.load(record, k.lane * 8, offset, 2)


def _byte_scales(groups: int, zero: int):
    """u8 − zero, exact in f16."""

    def scales(record: Register, k: Lane, offset: int) -> Registers:
        magic = constant(MAGIC[1024])
        bias = _f16x2(1024 + zero)
        if groups == 8:
            (word,) = k.load(record, k.lane * 4, offset, 1)
            bytes_ = [choose_bytes(word, magic, selector) for selector in BYTE_PAIRS]
        else:
            words = k.load(record, k.lane * 8, offset, 2)
            bytes_ = [choose_bytes(w, magic, selector) for selector in BYTE_PAIRS for w in words]
        return [subtract_f16x2(pair, bias) for pair in bytes_]

    return scales


def _f16x2(value: int) -> int:
    """The bits of two f16 numbers 1024 ≤ value < 2048."""
    return (0x6400 + value - 1024) * 0x10001


def _nibble_scales(high: bool):
    """Q2_K: a byte holds the scale below and the min above."""

    def scales(record: Register, k: Lane, offset: int) -> Registers:
        words = k.load(record, k.lane * 8, offset, 2)
        pairs = [choose_bytes(w, 0, selector) for selector in BYTE_PAIRS for w in words]
        mask, magic = (0x00F000F0, MAGIC[64]) if high else (0x000F000F, MAGIC[1024])
        return [subtract_f16x2(and_or(pair, mask, magic), magic) for pair in pairs]

    return scales


def _exponent_scales(record: Register, k: Lane, offset: int) -> Registers:
    """e8m0 as bf16 2^(e − 127): its exponent field. (2^-127 would be subnormal: it reads as 0.)"""
    (word,) = k.load(record, k.lane * 4, offset, 1)
    return [choose_bytes(word, 0, selector) << 7 for selector in BYTE_PAIRS]


# ---- the types

_NIBBLE = ((1024, 64), (MAGIC[1024], MAGIC[64]))


def _nibble(zero, scales, mins=None, plane_bits=0):
    (low, high), pins = _NIBBLE
    return Product(_nibble_codes(plane_bits), (low + zero, high + zero) * 2, pins, scales, mins)


def _crumb(zero, has_plane, scales, mins=None):
    biases = (1024, 256, 64, 16)
    pins = tuple(MAGIC[b] for b in biases)
    return Product(_crumb_codes(has_plane), tuple(b + zero for b in biases), pins, scales, mins)


def _bytes(codes, scales, *table):
    """Codes that are 1024 + 128 + value."""
    return Product(codes, (1152,) * 4, (MAGIC[1024], *table), scales)


PRODUCTS = {
    "Q4_0": _nibble(8, _half_scales),
    "Q4_1": _nibble(0, _half_scales, _half_scales),
    "Q5_0": _nibble(16, _half_scales, plane_bits=1),
    "Q5_1": _nibble(0, _half_scales, _half_scales, plane_bits=1),
    "Q8_0": _bytes(_byte_codes, _half_scales),
    "IQ4_NL": _bytes(_iq4_codes, _half_scales, *IQ4_PINS),
    "MXFP4": Product(_mxfp4_codes, (0,) * 4, (), _exponent_scales, scale_of="bf16", factor=2.0**14),
    "Q2_K": _crumb(0, False, _nibble_scales(high=False), _nibble_scales(high=True)),
    "Q3_K": _crumb(4, True, _byte_scales(16, 32)),
    "Q4_K": _nibble(0, _byte_scales(8, 0), _byte_scales(8, 0)),
    "Q5_K": _nibble(0, _byte_scales(8, 0), _byte_scales(8, 0), plane_bits=1),
    "Q6_K": _nibble(32, _byte_scales(16, 128), plane_bits=2),
    "IQ4_XS": _bytes(_iq4_codes, _byte_scales(8, 32), *IQ4_PINS),
    "F16": Product(_half_codes, (0,) * 4, (), None),
    "BF16": Product(_half_codes, (0,) * 4, (), None),
}


def lane_constants(type_name: str, lane: Register, load: Callable = from_shared) -> Lane:
    """Everything about a lane that does not change from tile to tile."""
    product, t = PRODUCTS[type_name], lane & 3
    ones = {"f16": 0x3C00, "bf16": 0x3F80}[product.scale_of]
    pick = []
    if product.scales:
        pick = [select(t.equals(j // 2), constant(ones << 16 * (j % 2)), constant(0)) for j in range(8)]
    return Lane(lane, lane >> 2, t, pick, [pinned(bits) for bits in product.pins], load)


def tile_product(type_name: str, record: Register, xs: Chunk, k: Lane) -> Registers:
    """The record at shared address `record` times `xs` → f32 (columns 2t, 2t+1) of row g, then of row g+8."""
    product, layout = PRODUCTS[type_name], LAYOUTS[type_name]
    if product.scales is None:
        return _plain_product(product, record, xs, k, "bf16" if type_name == "BF16" else "f16")
    offsets = layout.scale_offsets
    scales = product.scales(record, k, offsets[0])
    # Q2_K's mins are the other halves of the scales' bytes
    mins = product.mins and product.mins(record, k, offsets[len(layout.scales) - 1])
    acc = _times_sums(zeros(4), scales, xs.bias) if xs.bias else zeros(4)
    if mins and not layout.rows:
        acc = _times_sums(acc, mins, xs.sums)
    per_group = layout.group // 16
    for quarter, codes in enumerate(map(list, product.codes(record, k))):
        for group in range(4 // per_group):
            c = zeros(4)
            for s in range(group * per_group, (group + 1) * per_group):
                step = 4 * quarter + s
                c = mma(c, codes[s], xs.codes[2 * step : 2 * step + 2])
            index = quarter * (4 // per_group) + group
            columns = scales[index // 8 * 2 : index // 8 * 2 + 2]
            scale = mma(
                zeros(4), columns, [k.pick[index % 8]], of=product.scale_of
            )  # to every lane of its row
            acc = [fma(c[i], scale[i & 2], acc[i]) for i in range(4)]
    if product.factor != 1:
        acc = [a * product.factor for a in acc]
    if layout.rows == 1:
        (pair,) = k.load(record, k.g * 4, offsets[-2], 1)
        d = unpack_f16x2(pair)
        acc = [acc[i] * d[i // 2] for i in range(4)]
    if layout.rows == 2:
        words = k.load(record, k.g * 8, offsets[-2], 2)
        m = _times_sums(zeros(4), mins, xs.sums)
        (d, low_d) = zip(*(unpack_f16x2(w) for w in words), strict=True)
        acc = [fma(acc[i], d[i // 2], m[i] * (constant(0.0) - low_d[i // 2])) for i in range(4)]
    return acc


def _times_sums(acc: Registers, scales: Registers, sums: Registers) -> Registers:
    """acc + scales @ (high + low halves of sums). With 8 groups one mma takes both, the scales twice."""
    if len(scales) == 2:
        return mma(acc, (*scales, *scales), sums)
    return mma(mma(acc, scales, sums[:2]), scales, sums[2:])


def _plain_product(product, record, xs, k, of):
    parts = [xs.codes, xs.low] if xs.low else [xs.codes]
    acc = [zeros(4) for _ in range(2)]  # two chains hide the latency of an mma
    for quarter, codes in enumerate(map(list, product.codes(record, k))):
        for s in range(4):
            step = 4 * quarter + s
            for i, part in enumerate(parts):
                chain = i if len(parts) == 2 else s % 2
                acc[chain] = mma(acc[chain], codes[s], part[2 * step : 2 * step + 2], of=of)
    return [a + b for a, b in zip(*acc, strict=True)]
