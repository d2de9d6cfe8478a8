"""What the commands print, and where: messages and progress to stderr, results to stdout."""

import dataclasses
import glob
import json
import os
import re
import sys
from pathlib import Path

import jax
import jaxlib

import jaxserve

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
NVIDIA_DEVICES = "/dev/nvidia[0-9]*"


def say(message: str) -> None:
    """One line to stderr."""
    print(f"jaxserve: {message}", file=sys.stderr, flush=True)


def show(text: str, end: str = "\n") -> None:
    """A result to stdout, at once: a reader at the other end of a pipe sees it as it comes."""
    print(text, end=end, flush=True)


def show_json(value: object) -> None:
    """One JSON object on a line of its own. Dataclasses become objects."""
    show(json.dumps(value, default=_plain, ensure_ascii=False))


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.item() if hasattr(value, "item") else str(value)


def mebibytes(nbytes: float) -> str:
    """ "1,234.5 MiB" """
    return f"{nbytes / 2**20:,.1f} MiB"


class Progress:
    """Says how far loading is: one line that updates itself on a terminal, else a line per stage."""

    def __init__(self):
        self._stage, self._percent = "", -1

    def __call__(self, stage: str, done: int, total: int) -> None:
        percent = 100 * done // max(total, 1)
        if (stage, percent) == (self._stage, self._percent):
            return
        if sys.stderr.isatty():
            print(f"\r\x1b[Kjaxserve: {stage} {percent} %", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            say(stage)
        self._stage, self._percent = stage, percent

    def close(self) -> None:
        """Leaves the terminal's line clean."""
        if self._stage and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def unused_gpu(device: jax.Device) -> str | None:
    """A warning when this machine has a GPU that the engine does not use, with the remedy."""
    if (
        device.platform == "cpu"
        and glob.glob(NVIDIA_DEVICES)
        and "cpu" not in os.environ.get("JAX_PLATFORMS", "")
    ):
        return (
            "warning: this machine has an NVIDIA GPU that JAX does not see: "
            "install jaxserve[cuda12] or jaxserve[cuda13]"
        )
    others = len(jax.devices(device.platform)) - 1
    if device.platform != "cpu" and others:
        return f"warning: {others} more {device.platform} device(s) stay unused, CUDA_VISIBLE_DEVICES chooses"
    return None


def versions() -> dict[str, str | None]:
    """Versions a measurement depends on; the driver's is None where there is no NVIDIA GPU."""
    found = {package.__name__: package.__version__ for package in (jaxserve, jax, jaxlib)}
    return found | {"driver": _driver()}


def _driver() -> str | None:
    """The NVIDIA driver's version."""
    try:
        found = re.search(r"\b\d+\.\d+(\.\d+)?\b", NVIDIA_DRIVER.read_text())
    except OSError:
        return None
    return found[0] if found else None
