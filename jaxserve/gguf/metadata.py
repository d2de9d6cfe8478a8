"""Typed look-up of an architecture's metadata. Every complaint names the file, the key and the value."""

import math
from numbers import Integral, Real
from typing import Any, NoReturn

import gguf
import numpy as np

from jaxserve.errors import InvalidGGUF, UnsupportedModel
from jaxserve.gguf.reader import GGUFFile

MAX_INTEGER = 2**31 - 1


class Keys:
    """The keys `{architecture}.*` of one file, in any width of integer or float. No default: required."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.architecture = self.text(gguf.Keys.General.ARCHITECTURE)

    def invalid(self, key: str, problem: str) -> NoReturn:
        """Raises `InvalidGGUF`."""
        raise InvalidGGUF(f"{self.file.path}: {self.full(key)}: {problem}")

    def unsupported(self, key: str, problem: str) -> NoReturn:
        """Raises `UnsupportedModel`."""
        raise UnsupportedModel(f"{self.file.path}: {self.full(key)}: {problem}")

    def full(self, key: str) -> str:
        """The key as it stands in the file."""
        return key if key.startswith("general.") else f"{self.architecture}.{key}"

    def value(self, key: str, default: Any = None) -> Any:
        """The bare value."""
        found = self.file.metadata.get(self.full(key), default)
        if found is None:
            self.invalid(key, "missing")
        return found

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        """An integer in low … high."""
        return self._integer(key, self.value(key, default), low, high)

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, open_low: bool = True
    ) -> float:
        """A finite number > low, or ≥ low."""
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, Real):
            self.invalid(key, f"{found!r}, expected a number")
        found = float(found)
        if not math.isfinite(found) or found < low or (open_low and found == low):
            self.invalid(key, f"{found}, expected a finite number {'>' if open_low else '≥'} {low:g}")
        return found

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        found = self.value(key, default)
        if not isinstance(found, str):
            self.invalid(key, f"{found!r}, expected a string")
        return found

    def array(self, key: str, low: int, high: int = MAX_INTEGER) -> list[int]:
        """Integers or booleans, `low` … `high` of them."""
        found = self.value(key)
        if not isinstance(found, np.ndarray) or found.dtype.kind not in "iub":
            self.invalid(key, f"{_short(found)}, expected an array of integers")
        if not low <= found.size <= high:
            self.invalid(
                key,
                f"array of {found.size}, expected {low}"
                + (f" … {high}" if high < MAX_INTEGER else " or more"),
            )
        return [int(item) for item in found]

    def uniform(self, key: str, blocks: int, default: int | None = None, *, low: int = 1) -> int:
        """An integer ≥ low: a scalar, or an array of at least `blocks` equal ones."""
        found = self.value(key, default)
        if not isinstance(found, np.ndarray):
            return self._integer(key, found, low, MAX_INTEGER)
        per_layer = self.array(key, blocks)[:blocks]
        if len(set(per_layer)) != 1:
            self.unsupported(key, f"{_short(per_layer)}: layers that differ are not supported")
        return self._integer(key, per_layer[0], low, MAX_INTEGER)

    def _integer(self, key, found, low, high):
        if isinstance(found, bool) or not isinstance(found, Integral):
            self.invalid(key, f"{_short(found)}, expected an integer")
        if not low <= found <= high:
            self.invalid(key, f"{found}, expected {low} … {high}")
        return int(found)


def _short(value: Any) -> str:
    """A value for a message; arrays may be long."""
    text = repr(value.tolist() if isinstance(value, np.ndarray) and value.size < 100 else value)
    return text if len(text) <= 80 else text[:77] + "..."
