"""GGUF files, memory-mapped: metadata, and tensors whose bytes are read from disk only when they are used."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.errors import InvalidGGUF
from jaxserve.gguf.header import Header, TensorInfo, parse_header
from jaxserve.gguf.split import check_parts, part_paths

SAMPLE_BYTES = 4096
SAMPLES = 16  # of each tensor larger than SAMPLES × SAMPLE_BYTES; smaller ones are hashed whole


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor as it lies in the file."""

    name: str
    shape: tuple[int, ...]  # numpy order: the reverse of the file's; a weight is (out, in)
    type: gguf.GGMLQuantizationType
    raw: np.ndarray  # [*shape[:-1], row_bytes] u8, read-only view of the mapped file


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """An opened file, or a whole split set. `header.parse_header` says how tokens keep their bytes."""

    path: Path
    version: int
    alignment: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding not included."""
        return sum(tensor.raw.nbytes for tensor in self.tensors.values())

    def fingerprint(self) -> str:
        """Identity of the model for keys of saved state: hyper-parameters, tensor table, samples of tensors.

        The same model split in parts has the same one. Reads at most 64 KiB of each tensor.
        """
        architecture = self.metadata.get(gguf.Keys.General.ARCHITECTURE)
        digest = hashlib.blake2b(digest_size=16)
        for key in sorted(key for key in self.metadata if key.startswith(f"{architecture}.")):
            value = self.metadata[key]
            _feed(digest, key, value.tolist() if isinstance(value, np.ndarray) else value)
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            _feed(digest, name, tensor.shape, int(tensor.type))
            for piece in _samples(tensor.raw.reshape(-1)):
                digest.update(piece)
        return digest.hexdigest()


def open_gguf(path: str | Path, *, tensors: bool = True) -> GGUFFile:
    """Maps a GGUF file, or the split set it is a part of, and validates every byte of its header.

    tensors=False reads the metadata alone, of a split set from its first part. Malformed bytes raise
    `InvalidGGUF`, an unknown ggml type `UnsupportedTensorType`, an absent file or part `FileNotFoundError`.
    """
    path = Path(path)
    data, header = _open(path, tensors)
    paths = part_paths(path, header)
    if paths == [path]:
        return GGUFFile(
            path, header.version, header.alignment, header.metadata, _tensors(data, header.tensors)
        )
    if not tensors:
        _, first = _open(paths[0], tensors)
        return GGUFFile(path, first.version, first.alignment, first.metadata, {})
    parts = [_open(part, tensors) for part in paths]
    headers = [header for _, header in parts]
    check_parts(paths, headers)
    merged = {}
    for data, header in parts:
        merged |= _tensors(data, header.tensors)
    return GGUFFile(path, headers[0].version, headers[0].alignment, headers[0].metadata, merged)


def _open(path: Path, tensors: bool) -> tuple[np.ndarray, Header]:
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name the .gguf file")
    if path.stat().st_size == 0:  # which cannot be mapped
        raise InvalidGGUF(f"{path}: magic: the file is empty")
    data = np.asarray(np.memmap(path, np.uint8, "r"))
    return data, parse_header(path, data, tensors=tensors)


def _tensors(data: np.ndarray, infos: list[TensorInfo]) -> dict[str, Tensor]:
    return {
        info.name: Tensor(
            info.name,
            info.shape,
            info.type,
            data[info.start : info.start + info.nbytes].reshape(*info.shape[:-1], info.row_bytes),
        )
        for info in infos
    }


def _feed(digest, *fields) -> None:
    """Adds fields so that no two lists of fields read the same."""
    digest.update(repr(fields).encode() + b"\n")


def _samples(raw: np.ndarray) -> list[np.ndarray]:
    """Evenly spread pieces of a tensor's bytes, the ends included; all of a small one.   raw: [nbytes] u8"""
    if raw.size <= SAMPLES * SAMPLE_BYTES:
        return [raw]
    starts = np.linspace(0, raw.size - SAMPLE_BYTES, SAMPLES).astype(np.int64)
    return [raw[start : start + SAMPLE_BYTES] for start in starts]
