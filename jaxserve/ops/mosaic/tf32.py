"""Products of f32 matrices on the tensor core, nearly as exact as f32 (relative error of a term 2^-21).

Every number is split into its tf32 rounding and the rest, itself cut by the tensor core; of the four
products of the parts the smallest is left out. A step is 16 × 8 times 8 × 8; lane 4g+t holds of a: rows g and
g+8 of column t, then of column t+4; of b: rows t and t+4 of column g; of c: columns 2t, 2t+1 of row g, then
of row g+8.

Because a sum does not care about the order of its terms, 16 terms may be dealt to two steps as four
consecutive ones a lane (`quad_steps`): rows of memory are then read 16 bytes at a time.
"""

from jaxserve import ptx
from jaxserve.ptx import Register, Registers

Split = tuple[Register, Register]


def split(x: Register) -> Split:
    """x as a tf32 number and what is left of it."""
    high = ((x.as_i32() + 0x1000) & 0xFFFFE000).as_f32()
    return high, x - high


def split_all(values: Registers) -> list[Split]:
    return [split(x) for x in values]


def multiply_add(c: Registers, a: list[Split], b: list[Split]) -> Registers:
    """c + a @ b.   a: 4 numbers a lane, b: 2, c: 4"""
    (a_high, a_low), (b_high, b_low) = (list(zip(*x, strict=True)) for x in (a, b))
    c = ptx.mma_tf32(c, a_low, b_high)
    c = ptx.mma_tf32(c, a_high, b_low)
    return ptx.mma_tf32(c, a_high, b_high)


def quad_steps(upper: list[Split], lower: list[Split]) -> list[list[Split]]:
    """The operands a of two steps, from four consecutive terms of row g and of row g+8."""
    return [[upper[i], lower[i], upper[i + 1], lower[i + 1]] for i in (0, 2)]
