"""What `jaxserve.ptx` computes within a lane or a warp, in numpy, for any number of warps at once."""

import numpy as np

from jaxserve import ptx
from tests.emulated_register import Register, rounded_to_bf16

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def halves(register) -> np.ndarray:
    """A pair of halves a lane: [lanes, 2] f16."""
    return np.ascontiguousarray(register.lanes).view(np.float16).reshape(-1, 2)


def bfloats(register) -> np.ndarray:
    """[lanes, 2] f32"""
    words = register.lanes[:, None] << np.array([16, 0], np.uint32) & np.uint32(0xFFFF0000)
    return words.view(np.float32)


def _like(register, lanes):
    return type(register)(lanes)


def _pair(register, pairs):
    with np.errstate(over="ignore"):
        return _like(register, np.ascontiguousarray(pairs, np.float16).view(np.uint32)[:, 0])


def _lanes(x, register):
    """Of a register, or of a constant beside one."""
    return x if isinstance(x, Register) else _like(register, np.full_like(register.lanes, x, np.uint32))


def _by_warp(register):
    return register.lanes.reshape(-1, 32)


# ---- values


def select(predicate, a, b):
    return _like(a, np.where(predicate.lanes, a.lanes, b.lanes))


def both(a, b):
    return _like(a, a.lanes & b.lanes)


def held(values):
    return values


def and_or(word, mask, other):
    return (word & mask) | other


def choose_bytes(a, b, selector):
    b, selector = (_lanes(v, a) for v in (b, selector))
    source = np.stack([a.lanes, b.lanes], 1).view(np.uint8)
    nibbles = selector.lanes[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    assert (nibbles < 8).all(), "bit 3 of a selector replicates a sign"
    return _like(a, np.take_along_axis(source, nibbles.astype(np.int64), 1).view(np.uint32)[:, 0])


# ---- f32


def fma(a, b, c):
    with np.errstate(all="ignore"):
        return _like(a, (a.lanes.astype(np.float64) * b.lanes + c.lanes).astype(np.float32))


def minimum(a, b):
    return _like(a, np.minimum(a.lanes, b.lanes))


def maximum(a, b):
    return _like(a, np.fmax(a.lanes, b.lanes))


def absolute(a):
    return _like(a, np.abs(a.lanes))


def exp2(a):
    with np.errstate(all="ignore"):
        return _like(a, np.exp2(a.lanes))


def reciprocal(a):
    with np.errstate(all="ignore"):
        return _like(a, np.float32(1) / a.lanes)


def reciprocal_root(a):
    with np.errstate(all="ignore"):
        return _like(a, np.float32(1) / np.sqrt(a.lanes))


# ---- pairs of 16 bits


def unpack_f16x2(word):
    return [_like(word, half.astype(np.float32)) for half in halves(word).T]


def pack_f16x2(low, high):
    return _pair(low, np.stack([low.lanes, high.lanes], 1))


def unpack_bf16x2(word):
    return [_like(word, half.copy()) for half in bfloats(word).T]


def pack_bf16x2(low, high):
    return _like(low, rounded_to_bf16(low.lanes, high.lanes))


def splat_f16x2(pair, which):
    return _pair(pair, halves(pair)[:, [which, which]])


def maximum_f16x2(a, b):
    return _pair(a, np.maximum(halves(a), halves(b)))


def absolute_f16x2(a):
    return _pair(a, np.abs(halves(a)))


def multiply_f16x2(a, b):
    with np.errstate(all="ignore"):
        return _pair(a, halves(a) * halves(_lanes(b, a)))


def subtract_f16x2(a, b):
    with np.errstate(all="ignore"):
        return _pair(a, halves(a) - halves(_lanes(b, a)))


def fma_f16x2(a, b, c):
    with np.errstate(all="ignore"):
        a64, b64, c64 = (halves(v).astype(np.float64) for v in (a, b, c))
        return _pair(a, a64 * b64 + c64)


def _of_u16x2(operation, a, b):
    words = (np.ascontiguousarray(v.lanes).view(np.uint16) for v in (a, _lanes(b, a)))
    return _like(a, operation(*words).view(np.uint32))


def minimum_u16x2(a, b):
    return _of_u16x2(np.minimum, a, b)


def maximum_u16x2(a, b):
    return _of_u16x2(np.maximum, a, b)


# ---- across the lanes of a warp


def shuffle_xor(value, distance):
    return _like(value, _by_warp(value)[:, LANES ^ distance].reshape(-1))


def transpose_8x8(value):
    return _pair(value, halves(value).reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, 2))


def operand_a(registers, of="f16") -> np.ndarray:
    """Operand A of mma in its place: f64 [warps, 16, 8 or 16]."""
    pairs = halves if of == "f16" else bfloats
    out = np.empty((len(registers[0].lanes) // 32, 16, 4 * len(registers)))
    for i, register in enumerate(registers):
        for p in range(2):
            out[:, G + 8 * (i % 2), 8 * (i // 2) + 2 * T + p] = pairs(register)[:, p].reshape(-1, 32)
    return out


def operand_b(registers, of="f16") -> np.ndarray:
    """Operand B: f64 [warps, 8 or 16, 8]."""
    pairs = halves if of == "f16" else bfloats
    out = np.empty((len(registers[0].lanes) // 32, 8 * len(registers), 8))
    for i, register in enumerate(registers):
        for p in range(2):
            out[:, 8 * i + 2 * T + p, G] = pairs(register)[:, p].reshape(-1, 32)
    return out


def accumulated(c, product):
    """Accumulators of mma, four for every 8 columns, plus a product f64 [warps, 16, n], rounded once."""
    out = []
    for i, register in enumerate(c):
        column, half = divmod(i, 4)
        term = product[:, G + 8 * (half // 2), 8 * column + 2 * T + half % 2].reshape(-1)
        with np.errstate(all="ignore"):
            out.append(_like(register, (register.lanes + term).astype(np.float32)))
    return out


def mma(c, a, b, of="f16"):
    """c + a @ b with exact products, summed in f64 and rounded once."""
    with np.errstate(all="ignore"):
        return accumulated(c, operand_a(a, of) @ operand_b(b, of))


def mma_tf32(c, a, b):
    """c + a @ b with the low bits of a and b cut off, summed in f64 and rounded once."""

    def dealt(registers):
        words = np.stack([r.lanes.reshape(-1, 8, 4) for r in registers], 1)
        return (words.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)

    a, b = dealt(a), dealt(b)  # [warps, registers, g, t]
    left = a.reshape(-1, 2, 2, 8, 4).transpose(0, 2, 3, 1, 4).reshape(-1, 16, 8)
    return accumulated(c, left @ b.transpose(0, 1, 3, 2).reshape(-1, 8, 8))


FUNCTIONS = {name: value for name, value in globals().items() if callable(value) and hasattr(ptx, name)}
