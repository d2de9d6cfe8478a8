"""A record's weights as numbers in a lane's registers: exact f32 for decoding, f16 pairs for the tensor core.

Codes and scales come from products.py, both exact in f16. A weight is

    factor · code + offset        factor = d · scale, offset = −(dmin · min), +min, or nothing

and per 16 columns a lane holds columns 4t … 4t+3 of rows g and g+8.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve import ptx
from jaxserve.ptx import Register, Registers, select
from jaxserve.quant.mosaic.products import BYTE_PAIRS, PRODUCTS, Lane
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS

Pair = Callable[[int, int], Register]  # (row half, group // 2) → the f16 numbers of two groups
# Tensor-core weights are w · 2^TENSOR_SHIFT: |w| from 1e-6 to 1,000 are normal f16 numbers.
TENSOR_SHIFT = dict.fromkeys(LAYOUTS, 6) | {"MXFP4": -4, "F16": 0, "BF16": 0}


def check_records(records: jax.Array, type_name: str, k: int) -> None:
    """Raises ValueError unless these are records u32 [(X,) N/16, ceil(K/256), words] of an N × K matrix."""
    if type_name not in LAYOUTS:
        raise ValueError(
            f"type {type_name} has no record form; the types that have one are {', '.join(LAYOUTS)}"
        )
    LAYOUTS[type_name].check(k)
    if records.dtype != jnp.uint32 or records.shape[-2:] != (-(-k // COLUMNS), LAYOUTS[type_name].words):
        raise ValueError(
            f"records {records.dtype}{records.shape} are not a {type_name} matrix of {k} columns: expected "
            f"uint32 [..., {-(-k // COLUMNS)}, {LAYOUTS[type_name].words}]"
        )


def _pairs(read: Callable, type_name: str, record: Register, k: Lane, offset: int) -> Pair:
    """One section of scales of rows g and g+8, loaded as needed; `read` gives a lane its own share."""
    layout = LAYOUTS[type_name]
    lane_bytes = ROWS * COLUMNS // layout.group * layout.scales[0].itemsize // 32
    row = k._replace(lane=k.g * 4)  # the first of the four lanes that share these rows
    of_lane = functools.cache(lambda t: read(record, row, offset + t * lane_bytes))
    return lambda r, pair: of_lane(pair % 4)[pair // 4 * 2 + r]


def _rows(type_name: str, record: Register, k: Lane) -> Registers:
    """Words of the row section: (d of row g, d of row g+8), or (d, dmin) of each."""
    count = LAYOUTS[type_name].rows
    return k.load(record, k.g * (4 * count), LAYOUTS[type_name].scale_offsets[-2], count)


def _mins_offset(type_name: str) -> int:
    layout = LAYOUTS[type_name]  # Q2_K's mins are the other halves of the scales' bytes
    return layout.scale_offsets[len(layout.scales) - 1]


# ---- exact: f32, in ggml's order of operations (multiplications and additions are never contracted)


def exact_weights(
    type_name: str, record: Register, k: Lane, is_lower: Register | None = None
) -> Iterator[list[Registers]]:
    """Per step, for each row, four columns in f32. Equal to `records.unpack` bit for bit.

    The rows are g and g+8, or with `is_lower` only the one that it chooses: g+8 where it holds.
    """

    def rows(of_g, of_g8):
        if is_lower is None:
            return [of_g, of_g8]
        return [[select(is_lower, b, a) for a, b in zip(of_g, of_g8, strict=True)]]

    product, layout = PRODUCTS[type_name], LAYOUTS[type_name]
    unpack = ptx.unpack_bf16x2 if type_name == "BF16" else ptx.unpack_f16x2
    numbers = _exact_numbers(type_name, record, k)
    for quarter, steps in enumerate(product.codes(record, k)):
        for s, fragment in enumerate(steps):
            group = (4 * quarter + s) * 16 // layout.group
            halves = [numbers(r, group) for r in range(2)]
            values = []
            for codes, (factors, offsets) in zip(
                rows(fragment[0::2], fragment[1::2]),
                zip(*(rows(*parts) for parts in zip(*halves, strict=True)), strict=True),
                strict=True,
            ):
                values.append(
                    [
                        _exact(code, product.bias[s], factors, offsets, layout.rows == 2)
                        for pair in codes
                        for code in unpack(pair)
                    ]
                )
            yield values


def _exact(code, bias, factors, offsets, is_subtracted):
    if not factors:
        return code
    value = code + float(0 - bias)  # adding 0 too: MXFP4 has a code for -0, which ggml reads as 0
    for factor in factors:
        value = value * factor
    for offset in offsets:
        value = value - offset if is_subtracted else value + offset
    return value


def _exact_numbers(type_name, record, k) -> Callable[[int, int], tuple[Registers, Registers]]:
    """(row half, group) → factors to multiply a code by in turn, and what is added or subtracted then."""
    product, layout = PRODUCTS[type_name], LAYOUTS[type_name]
    if product.scales is None:
        return lambda r, group: ([], [])
    if type_name == "MXFP4":
        return _exponent_factors(record, k)
    scales = _pairs(product.scales, type_name, record, k, layout.scale_offsets[0])
    mins = product.mins and _pairs(product.mins, type_name, record, k, _mins_offset(type_name))
    words = _rows(type_name, record, k) if layout.rows else []
    if layout.rows == 1:
        d, low_d = ptx.unpack_f16x2(words[0]), None
    elif layout.rows == 2:
        d, low_d = zip(*(ptx.unpack_f16x2(w) for w in words), strict=True)

    def number(pairs, r, group):
        return ptx.unpack_f16x2(pairs(r, group // 2))[group % 2]

    def numbers(r, group):
        factor = number(scales, r, group)
        offsets = [number(mins, r, group)] if mins else []
        if layout.rows:
            factor, offsets = d[r] * factor, [low_d[r] * low for low in offsets]
        return [factor], offsets

    return numbers


def _exponent_factors(record, k):
    """MXFP4's codes are value · 2^-14: times 2^(e − 113), as two factors that are normal f32 numbers."""
    offset = LAYOUTS["MXFP4"].scale_offsets[0]
    words = [k.load(record, k.g * 16, offset + 4 * t, 1)[0] for t in range(4)]

    def numbers(r, group):
        exponent = words[group // 2] >> 8 * (2 * r + group % 2) & 0xFF
        half = exponent >> 1
        return [((half + 71) << 23).as_f32(), ((exponent - half + 70) << 23).as_f32()], []

    return numbers


# ---- for the tensor core: f16 pairs, each weight rounded twice (its factor, then the weight)


def tensor_weights(type_name: str, record: Register, k: Lane, first: int = 0) -> Iterator[Registers]:
    """Operand A of each step from `first` on: weights · 2^TENSOR_SHIFT in f16 (BF16 as they are).

    A code's bias is taken away before the factor is multiplied in: exact, and nothing overflows on the way.
    """
    product, layout = PRODUCTS[type_name], LAYOUTS[type_name]
    numbers = _tensor_numbers(type_name, record, k)
    for quarter, steps in enumerate(product.codes(record, k)):
        for s in range(max(0, first - 4 * quarter), 4):
            if product.scales is None:
                yield list(steps[s])
                continue
            halves = [numbers(r, (4 * quarter + s) * 16 // layout.group) for r in range(2)]
            yield [_weight(pair, product.bias[s], *halves[i % 2]) for i, pair in enumerate(steps[s])]


def _weight(pair, bias, factor, offset):
    code = ptx.subtract_f16x2(pair, _both_halves(bias)) if bias else pair
    return ptx.multiply_f16x2(code, factor) if offset is None else ptx.fma_f16x2(code, factor, offset)


def _both_halves(value: float) -> int:
    return int(np.float16(value).view(np.uint16)) * 0x10001


def _tensor_numbers(type_name, record, k) -> Callable[[int, int], tuple[Register, Register | None]]:
    """(row half, group) → factor and offset, in both halves of a register."""
    product, layout = PRODUCTS[type_name], LAYOUTS[type_name]
    if product.scales is None:
        return lambda r, group: (None, None)
    shift = _both_halves(2.0 ** TENSOR_SHIFT[type_name])
    read = _exponents if type_name == "MXFP4" else product.scales
    scales = _pairs(read, type_name, record, k, layout.scale_offsets[0])
    mins = product.mins and _pairs(product.mins, type_name, record, k, _mins_offset(type_name))
    words = [ptx.multiply_f16x2(w, shift) for w in _rows(type_name, record, k)] if layout.rows else []
    if layout.rows == 1:
        d = [ptx.splat_f16x2(words[0], r) for r in range(2)]
    elif layout.rows == 2:
        d, low_d = ([ptx.splat_f16x2(w, i) for w in words] for i in range(2))
        low_d = [w ^ 0x80008000 for w in low_d]

    @functools.cache
    def factors(r, pair):
        if type_name == "MXFP4":
            return scales(r, pair)
        return ptx.multiply_f16x2(scales(r, pair), d[r] if layout.rows else shift)

    @functools.cache
    def offsets(r, pair):
        return ptx.multiply_f16x2(mins(r, pair), low_d[r] if layout.rows else shift)

    @functools.cache
    def numbers(r, group):
        factor = ptx.splat_f16x2(factors(r, group // 2), group % 2)
        return factor, ptx.splat_f16x2(offsets(r, group // 2), group % 2) if mins else None

    return numbers


def _exponents(record, k, offset):
    """MXFP4's codes are value · 2^-14: the factor 2^(e − 127 + 14 + shift), at most f16's 2^15."""
    (word,) = k.load(record, k.lane * 4, offset, 1)
    lowest = 127 - 14 - TENSOR_SHIFT["MXFP4"] - 15  # its factor has exponent field 0
    pairs = [ptx.choose_bytes(word, 0, selector) for selector in BYTE_PAIRS]
    return [
        ptx.minimum_u16x2(ptx.maximum_u16x2(pair, lowest * 0x10001) - lowest * 0x10001, 30 * 0x10001) << 10
        for pair in pairs
    ]
