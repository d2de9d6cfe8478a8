"""One warp in numpy: stands in for `jaxserve.ptx`, so that what a kernel computes runs without a
GPU.

A register is an array of 32, one entry a lane. Only arithmetic, loads and exchanges between lanes are here:
copies, barriers and stores belong to the GPU tests.
"""

import numpy as np

from tests import emulated_register

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


class Register(emulated_register.Register):
    def __init__(self, lanes):
        super().__init__(np.broadcast_to(lanes, 32))


def _halves(register):
    """A pair of halves a lane: [32, 2] f16."""
    return np.ascontiguousarray(register.lanes).view(np.float16).reshape(32, 2)


def _pair(halves):
    return Register(np.ascontiguousarray(halves, np.float16).view(np.uint32)[:, 0])


def _bfloats(register):
    words = register.lanes[:, None] << np.array([16, 0], np.uint32) & np.uint32(0xFFFF0000)
    return words.view(np.float32)


def constant(x):
    return Register(np.float32(x) if isinstance(x, float) else np.uint32(x))


def zeros(count):
    return [constant(0.0)] * count


def pinned(bits):
    return constant(bits)


def select(predicate, a, b):
    return Register(np.where(predicate.lanes, a.lanes, b.lanes))


def memory(data):
    """A load function over the bytes of an array; addresses are byte offsets."""
    data = np.ascontiguousarray(data).view(np.uint8).reshape(-1)

    def load(address, offset, count):
        at = address.lanes.astype(np.int64) + offset
        assert (at % (4 * count) == 0).all(), "misaligned"
        words = data[at[:, None] + np.arange(4 * count)].view(np.uint32)
        return [Register(words[:, i]) for i in range(count)]

    return load


def shuffle_xor(value, distance):
    return Register(value.lanes[LANES ^ distance])


def transpose_8x8(value):
    return _pair(_halves(value).reshape(8, 8).T.reshape(32, 2))


def fma(a, b, c):
    return Register((a.lanes.astype(np.float64) * b.lanes + c.lanes).astype(np.float32))


def maximum(a, b):
    return Register(np.maximum(a.lanes, b.lanes))


def absolute(a):
    return Register(np.abs(a.lanes))


def maximum_f16x2(a, b):
    return _pair(np.maximum(_halves(a), _halves(b)))


def absolute_f16x2(a):
    return _pair(np.abs(_halves(a)))


def multiply_f16x2(a, b):
    return _pair(_halves(a) * _halves(b if isinstance(b, Register) else constant(b)))


def subtract_f16x2(a, b):
    return _pair(_halves(a) - _halves(b if isinstance(b, Register) else constant(b)))


def fma_f16x2(a, b, c):
    a, b, c = (_halves(v).astype(np.float64) for v in (a, b, c))
    return _pair(a * b + c)


def _u16(register):
    return np.ascontiguousarray(register.lanes).view(np.uint16)


def minimum_u16x2(a, b):
    return Register(np.minimum(_u16(a), _u16(constant(b))).view(np.uint32))


def maximum_u16x2(a, b):
    return Register(np.maximum(_u16(a), _u16(constant(b))).view(np.uint32))


def splat_f16x2(pair, which):
    return _pair(_halves(pair)[:, [which, which]])


def unpack_f16x2(word):
    return [Register(half.astype(np.float32)) for half in _halves(word).T]


def pack_f16x2(low, high):
    return _pair(np.stack([low.lanes, high.lanes], 1))


def unpack_bf16x2(word):
    return [Register(half) for half in _bfloats(word).T]


def pack_bf16x2(low, high):
    return Register(emulated_register.rounded_to_bf16(low.lanes, high.lanes))


def and_or(word, mask, other):
    return (word & mask) | other


def choose_bytes(a, b, selector):
    b, selector = (v if isinstance(v, Register) else constant(v) for v in (b, selector))
    source = np.stack([a.lanes, b.lanes], 1).view(np.uint8)
    nibbles = selector.lanes[:, None] >> np.arange(0, 16, 4, dtype=np.uint32) & 15
    assert (nibbles < 8).all(), "bit 3 of a selector replicates a sign"
    return Register(np.take_along_axis(source, nibbles.astype(np.int64), 1).view(np.uint32)[:, 0])


def mma(c, a, b, of="f16"):
    """c + a @ b with exact products, summed in f64 and rounded once."""
    halves = {
        "f16": lambda r: _halves(r).astype(np.float64),
        "bf16": lambda r: _bfloats(r).astype(np.float64),
    }[of]
    depth = 4 * len(a)
    left, right, total = np.empty((16, depth)), np.empty((depth, 8)), np.empty((16, 8))
    for i, register in enumerate(a):
        for p in range(2):
            left[G + 8 * (i % 2), 8 * (i // 2) + 2 * T + p] = halves(register)[:, p]
    for i, register in enumerate(b):
        for p in range(2):
            right[8 * i + 2 * T + p, G] = halves(register)[:, p]
    product = left @ right
    for i, register in enumerate(c):
        total[G + 8 * (i // 2), 2 * T + i % 2] = register.lanes
    total = (total + product).astype(np.float32)
    return [Register(total[G + 8 * (i // 2), 2 * T + i % 2]) for i in range(4)]


def install(monkeypatch, *modules):
    """One warp in the place of `jaxserve.ptx` for these modules."""
    functions = {name: value for name, value in globals().items() if not name.startswith("_")}
    emulated_register.install(monkeypatch, functions, modules)
