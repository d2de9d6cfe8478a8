"""A file of saved state: arrays in safetensors, a JSON header in its metadata, and a digest over every byte.

The file is written beside its destination and moved there whole. Nothing in it is believed before the digest
agrees.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxserve.errors import InvalidState

VERSION = 1
DIGEST_BYTES = 32
READ_BYTES = 1 << 20
UNSIGNED = "0" * (2 * DIGEST_BYTES)  # stands in the file while the digest is taken
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # not every version of the library knows it: stored as its bits


class Entry(NamedTuple):
    """Some arrays and what is to be known about them (JSON)."""

    about: dict[str, Any]
    arrays: dict[str, np.ndarray]


def save(path: str | os.PathLike, header: dict[str, Any], entries: Iterable[Entry]) -> None:
    """Write entries. `header`: what a reader must agree with (model, kv dtype, …); plain JSON values."""
    path = Path(path)
    arrays, about, bits = {}, [], []
    for number, entry in enumerate(entries):
        about.append(entry.about)
        for name, array in entry.arrays.items():
            name, array = f"{number}.{name}", np.ascontiguousarray(array)
            if array.dtype == BFLOAT16:
                bits.append(name)
                array = array.view(np.uint16)
            arrays[name] = array
    contents = json.dumps({"header": header, "entries": about, "bfloat16": bits})
    metadata = {"version": str(VERSION), "digest": UNSIGNED, "contents": contents}
    handle, unfinished = tempfile.mkstemp(prefix=path.name, suffix=".unfinished", dir=path.parent)
    os.close(handle)
    try:
        save_file(arrays, unfinished, metadata=metadata)
        _sign(unfinished)
        os.replace(unfinished, path)
    except BaseException:
        os.unlink(unfinished)
        raise


def load(path: str | os.PathLike, expected: dict[str, Any]) -> list[Entry]:
    """Read entries back. `InvalidState`: a byte is not what was written, or the header is not `expected`."""
    path = Path(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check(path, metadata, expected)
            contents = json.loads(metadata["contents"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InvalidState(f"{path} is not a saved state, or was cut short: {error}") from error
    for name in contents["bfloat16"]:
        arrays[name] = arrays[name].view(BFLOAT16)
    entries = [Entry(about, {}) for about in contents["entries"]]
    for name, array in arrays.items():
        number, _, name = name.partition(".")
        entries[int(number)].arrays[name] = array
    return entries


def _check(path: Path, metadata: dict[str, str], expected: dict[str, Any]) -> None:
    if "digest" not in metadata:
        raise InvalidState(f"{path} is not a saved state: it has no digest")
    if metadata.get("version") != str(VERSION):
        found = metadata.get("version")
        raise InvalidState(f"{path} has format version {found}, this jaxserve reads {VERSION}: save it again")
    place, digest = _digest(path, metadata["digest"])
    if place is None or digest != metadata["digest"]:
        raise InvalidState(f"{path} is damaged: its digest does not agree with its contents")
    header = json.loads(metadata["contents"])["header"]
    for key in sorted(expected.keys() | header.keys()):
        if header.get(key) != expected.get(key):
            was, wanted = header.get(key), expected.get(key)
            raise InvalidState(f"{path} was saved with {key}={was!r}, this engine has {key}={wanted!r}")


def _sign(path: str) -> None:
    """Put the digest of the unsigned file into it."""
    place, digest = _digest(path, UNSIGNED)
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(digest.encode())
        file.flush()
        os.fsync(file.fileno())


def _digest(path: str | os.PathLike, written: str) -> tuple[int | None, str]:
    """(place of the written digest in the file, digest of the file as if none were written yet)."""
    signature = b'"digest":"%s"'
    hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with open(path, "rb") as file:
        size = file.read(8)
        head = file.read(int.from_bytes(size, "little"))
        place = head.find(signature % written.encode())
        if place < 0:
            return None, ""
        hasher.update(size + head.replace(signature % written.encode(), signature % UNSIGNED.encode(), 1))
        while chunk := file.read(READ_BYTES):
            hasher.update(chunk)
    return 8 + place + signature.index(b"%"), hasher.hexdigest()
