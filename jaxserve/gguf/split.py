"""Split sets: one model in files `prefix-00001-of-0000N.gguf`, its metadata in the first."""

import re
from pathlib import Path

import gguf

from jaxserve.errors import InvalidGGUF
from jaxserve.gguf.header import Header

NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
NUMBER, COUNT, TENSORS = (
    gguf.Keys.Split.LLM_KV_SPLIT_NO,
    gguf.Keys.Split.LLM_KV_SPLIT_COUNT,
    gguf.Keys.Split.LLM_KV_SPLIT_TENSORS_COUNT,
)


def part_paths(path: Path, header: Header) -> list[Path]:
    """All files of the set that `path` belongs to, in order; `[path]` if it is a whole model."""
    count = header.metadata.get(COUNT, 1)
    if not isinstance(count, int):
        raise InvalidGGUF(f"{path}: {COUNT}: {type(count).__name__}, expected an integer")
    if count <= 1:
        return [path]
    name = NAME.fullmatch(path.name)
    if name is None:
        raise InvalidGGUF(
            f"{path}: {COUNT}: {count!r}, but the name is not like prefix-00001-of-00003.gguf: rename it"
        )
    if int(name["count"]) != count:
        raise InvalidGGUF(f"{path}: {COUNT}: {count!r}, but the name says {int(name['count'])}")
    prefix = name["prefix"]
    paths = [path.with_name(f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf") for number in range(count)]
    for part in paths:
        if not part.exists():
            raise FileNotFoundError(f"{part}: missing, part of the split set of {path.name}")
    return paths


def check_parts(paths: list[Path], headers: list[Header]) -> None:
    """Raises `InvalidGGUF` unless the parts' own counts agree and no tensor comes twice."""
    total = sum(len(header.tensors) for header in headers)
    owner = {}
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        for key, expected in ((COUNT, len(paths)), (NUMBER, index), (TENSORS, total)):
            found = header.metadata.get(key)
            if not isinstance(found, int) or found != expected:
                raise InvalidGGUF(f"{path}: {key}: {found!r}, expected {expected}")
        for tensor in header.tensors:
            if tensor.name in owner:
                raise InvalidGGUF(f"{path}: duplicate tensor {tensor.name!r}, also in {owner[tensor.name]}")
            owner[tensor.name] = path
