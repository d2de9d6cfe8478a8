"""One warp in numpy: stands in for `jaxserve.ptx`, so that what a kernel computes runs without a GPU.

A register is an array of 32, one entry a lane. Only arithmetic, loads and exchanges between lanes are here:
copies, barriers and stores need a whole launch (`emulated_launch.py`).
"""

import numpy as np

from tests import emulated_arithmetic, emulated_register
from tests.emulated_arithmetic import G, T, select, unpack_bf16x2, unpack_f16x2

__all__ = ["G", "Register", "T", "constant", "install", "memory", "select", "unpack_bf16x2", "unpack_f16x2"]


class Register(emulated_register.Register):
    def __init__(self, lanes):
        super().__init__(np.broadcast_to(lanes, 32))


def constant(x):
    return Register(np.float32(x) if isinstance(x, float) else np.uint32(x))


def zeros(count):
    return [constant(0.0)] * count


def memory(data):
    """A load function over the bytes of an array; addresses are byte offsets."""
    data = np.ascontiguousarray(data).view(np.uint8).reshape(-1)

    def load(address, offset, count):
        at = address.lanes.astype(np.int64) + offset
        assert (at % (4 * count) == 0).all(), "misaligned"
        words = data[at[:, None] + np.arange(4 * count)].view(np.uint32)
        return [Register(words[:, i]) for i in range(count)]

    return load


def install(monkeypatch, *modules):
    """One warp in the place of `jaxserve.ptx` for these modules."""
    own = {"Register": Register, "constant": constant, "pinned": constant, "zeros": zeros}
    emulated_register.install(monkeypatch, emulated_arithmetic.FUNCTIONS | own, modules)
