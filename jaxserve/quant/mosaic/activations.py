"""Activations as a warp keeps them: 256 columns of up to 8 rows, in registers, as operand B of mma.

Each row's chunk is multiplied by the power of two that brings its largest value into [0.5, 1), undone in f32
on the results: f16 neither overflows nor starves small values, whatever the activations' type. BF16 matrices
take x as two bf16 halves instead, 16 bits of every value.
"""

import jax.numpy as jnp

from jaxserve import ptx
from jaxserve.ptx import Register, Registers, constant, select
from jaxserve.quant.mosaic.products import PRODUCTS, STEPS, Chunk, Lane
from jaxserve.quant.mosaic.records import LAYOUTS

ONES = 0x3C003C00  # two f16
# Exponent fields of f32 between which a chunk's factor and its inverse are numbers of the activations' type.
SMALLEST = {"float32": 16 << 23, "bfloat16": 16 << 23, "float16": 111 << 23}  # f16's largest factor is 2^15
LARGEST = 252 << 23

Pairs = list[Registers]  # f32, two columns each


def load_chunk(
    type_name: str,
    address: Register,
    gain: Register | None,
    dtype: jnp.dtype,
    columns: int,
    is_whole: Register,
    k: Lane,
) -> tuple[Chunk, Register | None, Register | None]:
    """This lane's share of a chunk, the factor that undoes its scaling (None: not scaled), and Σx² of the
    share where the chunk is multiplied by a norm's gain (None: it is not).

    address: of column 4t of a row's chunk; gain: of the same column of an f32 [K], for f32 activations.
    Columns from `columns` on exist only where `is_whole`; elsewhere they are zeros.
    """
    words, squares = [], [constant(0.0)] * 4
    for step in range(STEPS):
        here = _load(address, step, dtype, columns, is_whole)
        if gain is not None:
            here, gains = (
                [w.as_f32() for w in ws] for ws in (here, _load(gain, step, dtype, columns, is_whole))
            )
            squares = [ptx.fma(w, w, s) for w, s in zip(here, squares, strict=True)]
            here = [(w * g).as_i32() for w, g in zip(here, gains, strict=True)]
        words += here
    total = None if gain is None else _reduce(squares, lambda a, b: a + b)
    if type_name == "BF16":
        return Chunk(*_bf16_halves(words, dtype), [], []), None, total
    codes, inverse = _scaled_f16(words, dtype)
    return Chunk(codes, [], *_sums(type_name, codes, k)), inverse, total


def _load(address, step, dtype, columns, is_whole) -> Registers:
    """Four columns: two words of 16-bit floats, or four of f32."""
    offset, count = 16 * step * dtype.itemsize, dtype.itemsize
    if 16 * step < columns:
        return ptx.load_global(address, offset, count)
    at = select(is_whole, address + offset, address)
    return [select(is_whole, w, constant(0)) for w in ptx.load_global(at, 0, count)]


def _f32_pairs(words, dtype) -> Pairs:
    if dtype == jnp.float32:
        return [[a.as_f32(), b.as_f32()] for a, b in zip(words[::2], words[1::2], strict=True)]
    return [(ptx.unpack_f16x2 if dtype == jnp.float16 else ptx.unpack_bf16x2)(w) for w in words]


# ---- into the tensor core's types


def _bf16_halves(words, dtype) -> tuple[Registers, Registers]:
    """High and low halves; bf16 activations have no low one."""
    if dtype == jnp.bfloat16:
        return words, []
    pairs = _f32_pairs(words, dtype)
    high = [ptx.pack_bf16x2(*pair) for pair in pairs]
    return high, [
        ptx.pack_bf16x2(*_rest(pair, ptx.unpack_bf16x2(h))) for pair, h in zip(pairs, high, strict=True)
    ]


def _rest(pair, rounded):
    return [a - b for a, b in zip(pair, rounded, strict=True)]


def _scaled_f16(words, dtype) -> tuple[Registers, Register]:
    if dtype == jnp.float16:
        largest = _reduce([ptx.absolute_f16x2(w) for w in words], ptx.maximum_f16x2)
        factor, inverse = _power_of_two(ptx.maximum(*ptx.unpack_f16x2(largest)), dtype)
        factors = ptx.pack_f16x2(factor, factor)
        return [ptx.multiply_f16x2(w, factors) for w in words], inverse
    pairs = _f32_pairs(words, dtype)
    largest = _reduce([ptx.absolute(a) for pair in pairs for a in pair], ptx.maximum)
    factor, inverse = _power_of_two(largest, dtype)
    return [ptx.pack_f16x2(a * factor, b * factor) for a, b in pairs], inverse


def _reduce(values, operation):
    while len(values) > 1:
        values = [operation(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _power_of_two(largest, dtype) -> tuple[Register, Register]:
    """The factor that brings the largest of the row's four lanes into [0.5, 1), and its inverse, f32."""
    for distance in (1, 2):
        largest = ptx.maximum(largest, ptx.shuffle_xor(largest.as_i32(), distance).as_f32())
    low, exponent = SMALLEST[dtype.name], largest.as_i32() & 0x7F800000
    exponent = select(exponent >= LARGEST, constant(LARGEST), exponent)
    exponent = select(exponent < low, constant(low), exponent)
    return (constant(253 << 23) - exponent).as_f32(), (exponent + (1 << 23)).as_f32()


# ---- sums of groups


def _sums(type_name, codes, k) -> tuple[Registers, Registers]:
    """Operands B [group][column] of Σx and of −bias · Σx, for the types that need them."""
    product = PRODUCTS[type_name]
    if not any(product.bias):
        return [], []
    if LAYOUTS[type_name].group == 16:
        sums = _step_sums(codes, k, lambda step: divmod(step, 8))
        factor = _lane_constant(product.bias, k.g)
        biased = [[v * factor for v in part] for part in sums]
    else:
        even, odd = _step_sums(codes, k, lambda step: divmod(step, 2)[::-1])
        sums = [[a + b for a, b in zip(even, odd, strict=True)]]
        first, second = (constant(-float(b)) for b in product.bias[:2])
        biased = [[ptx.fma(a, first, b * second) for a, b in zip(even, odd, strict=True)]]
    return _operand(sums) if product.mins else [], _operand(biased)


def _step_sums(codes, k, place) -> list[Registers]:
    """Sums of columns 2t, 2t+1 over a step's 16 rows: place(step) is (entry, g of the lanes that keep it).

    Of the rounded values, so that a bias cancels exactly. With ones for A each row of the product is the sum.
    """
    kept = [ptx.zeros(2), ptx.zeros(2)]
    for step in range(STEPS):
        c = ptx.mma(ptx.zeros(4), [constant(ONES)] * 4, codes[2 * step : 2 * step + 2])
        entry, g = place(step)
        kept[entry] = [select(k.g.equals(g), c[i], kept[entry][i]) for i in range(2)]
    return kept


def _operand(sums: Pairs) -> Registers:
    """f32 [8 groups][column] each → operands B [column][group]: all high f16 halves, then all low ones."""
    high = [ptx.pack_f16x2(*pair) for pair in sums]
    low = [ptx.pack_f16x2(*_rest(pair, ptx.unpack_f16x2(h))) for pair, h in zip(sums, high, strict=True)]
    return [ptx.transpose_8x8(w) for w in high + low]


def _lane_constant(values, g) -> Register:
    """−values[g % 4] as f32."""
    pairs = [
        select((g & 1).equals(0), constant(-float(a)), constant(-float(b)))
        for a, b in zip(values[::2], values[1::2], strict=True)
    ]
    return select((g & 2).equals(0), *pairs)
