"""A register in numpy, an entry a lane: what `jaxserve.ptx.Register` is on a GPU."""

import numpy as np


class Register:
    def __init__(self, lanes):
        self.lanes = lanes

    def _binary(self, other, operation):
        other = other.lanes if isinstance(other, Register) else self.lanes.dtype.type(other)
        with np.errstate(over="ignore", invalid="ignore"):
            return type(self)(operation(self.lanes, other))

    def __add__(self, other):
        return self._binary(other, np.add)

    def __sub__(self, other):
        return self._binary(other, np.subtract)

    def __mul__(self, other):
        return self._binary(other, np.multiply)

    def __and__(self, other):
        return self._binary(other, np.bitwise_and)

    def __or__(self, other):
        return self._binary(other, np.bitwise_or)

    def __xor__(self, other):
        return self._binary(other, np.bitwise_xor)

    def __lshift__(self, other):
        return self._binary(other, np.left_shift)

    def __rshift__(self, other):
        return self._binary(other, np.right_shift)

    def __floordiv__(self, other):
        return self._binary(other, np.floor_divide)

    def __mod__(self, other):
        return self._binary(other, np.remainder)

    def __lt__(self, other):
        return self._binary(other, np.less)

    def __ge__(self, other):
        return self._binary(other, np.greater_equal)

    def equals(self, other):
        return self._binary(other, np.equal)

    def as_f32(self):
        return type(self)(self.lanes.view(np.float32))

    def as_i32(self):
        return type(self)(self.lanes.view(np.uint32))

    def widened(self):
        return type(self)(self.lanes.astype(np.uint64))


def rounded_to_bf16(low, high):
    """Two f32 arrays → the words of their bfloat16 pairs, to nearest even."""
    bits = np.stack([low, high], 1).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint32)
    return rounded[:, 0] | rounded[:, 1] << 16


def install(monkeypatch, functions: dict, modules) -> None:
    """Puts functions in the place of those of `jaxserve.ptx`, wherever a module has one by that name."""
    for module in modules:
        for name, function in functions.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)
