"""The header of a GGUF file, versions 2 and 3: a strict parser of bytes nobody vouches for.

Every length is checked against what is left of the file before anything is allocated, and every complaint
names the file, the field and the value. Field order and rules are those of llama.cpp's `gguf.cpp`.
"""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from jaxserve.errors import InvalidGGUF, UnsupportedTensorType

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_NAME_BYTES = 63
MAX_SIGNED = 2**63 - 1
MAX_ENTRIES = 2**15  # key-values, and tensors: the largest models have some 2,000 tensors
MAX_STRINGS = 2**21  # in the whole header: a 262k vocabulary has 262k tokens and 515k merges
MAX_STRING_BYTES = 2**26  # in the whole header
KEY_VALUE_BYTES = 13  # the least one takes: empty key, type, one byte
TENSOR_INFO_BYTES = 24

# `struct` letters, which numpy reads too
SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
U32, U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `start` counts from the beginning of the file, `shape` is in numpy's order."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    row_bytes: int
    start: int

    @property
    def nbytes(self) -> int:
        """Bytes of the payload, padding not included."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclasses.dataclass(frozen=True)
class Header:
    """A parsed header. Numbers are Python scalars, strings `str`, arrays `np.ndarray` or `list[str]`."""

    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]


def parse_header(path: Path, data: np.ndarray, *, tensors: bool = True) -> Header:
    """The header at the start of a file.   data: [file size] u8. tensors=False stops before the tensor table.

    Strings are decoded as UTF-8 with "surrogateescape": `text.encode("utf-8", "surrogateescape")` gives the
    exact bytes back, whatever they were. Numeric arrays are read-only views of `data`.
    """
    cursor = _Cursor(path, data)
    version, n_tensors, n_kv = _preamble(cursor)
    metadata = _metadata(cursor, n_kv)
    alignment = metadata.get(gguf.Keys.General.ALIGNMENT, DEFAULT_ALIGNMENT)
    infos = _tensors(cursor, n_tensors, alignment) if tensors else []
    return Header(version, alignment, metadata, infos)


class _Cursor:
    """Reads little-endian values one after another, never past the end."""

    def __init__(self, path: Path, data: np.ndarray):
        self.path, self.data, self.view = path, data, memoryview(data)
        self.at, self.size = 0, data.size
        self.strings, self.string_bytes = 0, 0  # read so far

    def fail(self, field: str, problem: str) -> NoReturn:
        raise InvalidGGUF(f"{self.path}: {field}: {problem}")

    @property
    def left(self) -> int:
        return self.size - self.at

    def need(self, field: str, nbytes: int) -> None:
        if nbytes > self.left:
            self.fail(
                field, f"needs {nbytes:,} bytes at offset {self.at:,}, the file ends after {self.left:,}"
            )

    def scalar(self, field: str, layout: struct.Struct) -> Any:
        self.need(field, layout.size)
        (value,) = layout.unpack_from(self.view, self.at)
        self.at += layout.size
        return value

    def string(self, field: str) -> str:
        return self.string_list(field, 1)[0]

    def string_list(self, field: str, count: int) -> list[str]:
        """`count` strings. One loop without calls of our own: vocabularies have hundreds of thousands."""
        self.strings += count
        if self.strings > MAX_STRINGS:
            self.fail(field, f"{count:,} strings, the limit for a header is {MAX_STRINGS:,}")
        texts, view, at, size, unpack = [], self.view, self.at, self.size, U64.unpack_from
        left = MAX_STRING_BYTES - self.string_bytes
        for _ in range(count):
            start = at + 8
            if start > size:
                self.fail(field, f"string length at offset {at:,} is past the end of the file")
            (length,) = unpack(view, at)
            at = start + length
            if at > size:
                self.fail(
                    field,
                    f"string length {length:,} at offset {start - 8:,}, the file ends after {size - start:,}",
                )
            left -= length
            if left < 0:
                self.fail(
                    field, f"string length {length:,}, the limit for all of a header is {MAX_STRING_BYTES:,}"
                )
            texts.append(str(view[start:at], "utf-8", "surrogateescape"))
        self.at, self.string_bytes = at, MAX_STRING_BYTES - left
        return texts

    def numbers(self, field: str, letter: str, count: int) -> np.ndarray:
        dtype = np.dtype("<" + letter)
        self.need(field, count * dtype.itemsize)
        raw = self.data[self.at : self.at + count * dtype.itemsize]
        self.at += raw.size
        return raw != 0 if letter == "?" else raw.view(dtype)  # any byte but 0 is true


def _preamble(cursor: _Cursor) -> tuple[int, int, int]:
    magic = bytes(cursor.data[:4])
    if magic != b"GGUF":
        cursor.fail("magic", f"{magic!r}, expected b'GGUF': not a GGUF file")
    cursor.at = 4
    version = cursor.scalar("version", U32)
    if version and version & 0xFFFF == 0:
        cursor.fail(
            "version", f"{version:#010x}: big-endian GGUF files are not supported, convert to little-endian"
        )
    if version not in VERSIONS:
        cursor.fail("version", f"{version}, expected 2 or 3")
    n_tensors = cursor.scalar("n_tensors", U64)
    n_kv = cursor.scalar("n_kv", U64)
    for field, count, least in (("n_tensors", n_tensors, TENSOR_INFO_BYTES), ("n_kv", n_kv, KEY_VALUE_BYTES)):
        limit = min(MAX_ENTRIES, cursor.left // least)
        if count > limit:
            cursor.fail(field, f"{count:,}, at most {limit:,} in a file of {cursor.size:,} bytes")
    return version, n_tensors, n_kv


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata = {}
    for index in range(count):
        key = cursor.string(f"key {index}")
        if not key:
            cursor.fail(f"key {index}", "is empty")
        if key in metadata:
            cursor.fail(_quoted(key), f"duplicate key, also key {list(metadata).index(key)}")
        kind = _value_type(cursor, f"type of {_quoted(key)}")
        metadata[key] = _value(cursor, _quoted(key), kind)
        if key == gguf.Keys.General.ALIGNMENT:
            _check_alignment(cursor, kind, metadata[key])
    return metadata


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 80 else text[:77] + "...")


def _value_type(cursor: _Cursor, field: str) -> GGUFValueType:
    kind = cursor.scalar(field, U32)
    try:
        return GGUFValueType(kind)
    except ValueError:
        cursor.fail(field, f"value type {kind}, expected 0 … {max(GGUFValueType)}")


def _value(cursor: _Cursor, field: str, kind: GGUFValueType) -> Any:
    if kind is GGUFValueType.STRING:
        return cursor.string(field)
    if kind is not GGUFValueType.ARRAY:
        return cursor.scalar(field, struct.Struct("<" + SCALARS[kind]))
    element = _value_type(cursor, f"element type of {field}")
    if element is GGUFValueType.ARRAY:
        cursor.fail(field, "nested array: arrays of arrays are not allowed")
    count = cursor.scalar(f"array length of {field}", U64)
    least = 8 if element is GGUFValueType.STRING else struct.calcsize("<" + SCALARS[element])
    if count * least > cursor.left:
        cursor.fail(field, f"array length {count:,} × {least} bytes, the file ends after {cursor.left:,}")
    if element is GGUFValueType.STRING:
        return cursor.string_list(field, count)
    return cursor.numbers(field, SCALARS[element], count)


def _check_alignment(cursor: _Cursor, kind: GGUFValueType, value: Any) -> None:
    if kind is not GGUFValueType.UINT32:
        cursor.fail(gguf.Keys.General.ALIGNMENT, f"{value!r} of type {kind.name}, expected UINT32")
    if value == 0 or value & (value - 1):
        cursor.fail(gguf.Keys.General.ALIGNMENT, f"{value}, expected a power of two")


def _tensors(cursor: _Cursor, count: int, alignment: int) -> list[TensorInfo]:
    rows, names, expected = [], set(), 0
    for index in range(count):
        name = cursor.string(f"name of tensor {index}")
        if len(name.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            cursor.fail(f"name of tensor {index}", f"{_quoted(name)}, the limit is {MAX_NAME_BYTES} bytes")
        if name in names:
            cursor.fail(f"name of tensor {index}", f"duplicate tensor {name!r}")
        names.add(name)
        shape = _shape(cursor, name)
        kind, row_bytes = _row(cursor, name, shape)
        offset = cursor.scalar(f"tensor {name!r} offset", U64)
        if offset != expected:  # one rule forbids overlap, gaps, another order and misalignment
            cursor.fail(
                f"tensor {name!r} offset", f"{offset}, expected {expected}: the end of the tensor before it"
            )
        rows.append((name, shape, kind, row_bytes, offset))
        expected += _padded(math.prod(shape[:-1]) * row_bytes, alignment)
    data_start = _padded(cursor.at, alignment)
    tensors = [TensorInfo(*row, start=data_start + offset) for *row, offset in rows]
    for tensor in tensors:  # the padding behind the last one may be missing
        if tensor.start + tensor.nbytes > cursor.size:
            cursor.fail(
                f"tensor {tensor.name!r} data",
                f"ends at {tensor.start + tensor.nbytes:,}, the file is cut short at {cursor.size:,}",
            )
    return tensors


def _padded(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


def _shape(cursor: _Cursor, name: str) -> tuple[int, ...]:
    """Dims in numpy's order; no dims at all is one element."""
    field = f"tensor {name!r} n_dims"
    n_dims = cursor.scalar(field, U32)
    if n_dims > MAX_DIMS:
        cursor.fail(field, f"{n_dims}, the limit is {MAX_DIMS}")
    dims = [cursor.scalar(f"tensor {name!r} dims", U64) for _ in range(n_dims)]
    if 0 in dims:
        cursor.fail(f"tensor {name!r} dims", f"{dims}: a dim is 0")
    if math.prod(dims) > MAX_SIGNED:
        cursor.fail(f"tensor {name!r} dims", f"{dims}: their product passes 2^63")
    return tuple(reversed(dims)) or (1,)


def _row(cursor: _Cursor, name: str, shape: tuple[int, ...]) -> tuple[GGMLQuantizationType, int]:
    """The ggml type of a tensor and the bytes of one row."""
    number = cursor.scalar(f"tensor {name!r} type", U32)
    try:
        kind = GGMLQuantizationType(number)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    except (ValueError, KeyError):
        raise UnsupportedTensorType(
            f"{cursor.path}: tensor {name!r} type: ggml type {number} is unknown or retired"
        ) from None
    if shape[-1] % block:
        cursor.fail(f"tensor {name!r} dims", f"rows of {shape[-1]}, {kind.name} needs a multiple of {block}")
    row_bytes = shape[-1] // block * block_bytes
    if math.prod(shape[:-1]) * row_bytes > MAX_SIGNED:
        cursor.fail(f"tensor {name!r} dims", f"{list(reversed(shape))} of {kind.name}: its bytes pass 2^63")
    return kind, row_bytes
