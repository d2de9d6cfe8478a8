"""GPU tests are skipped with a reason where no GPU is; a module's programs are released after it.

On CPU most of the suite's time goes into compiling: LLVM's level 1 takes half as long for the same values.
"""

import functools
import gc
import os
import signal
from collections.abc import Iterator

import jax
import pytest

FASTER_COMPILING = "--xla_backend_optimization_level=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FASTER_COMPILING}".strip()


# Files that take a minute or more: begun first, so that no core waits at the end for the other.
LONG = (
    "tiny_models",
    "prefix_reuse",
    "real_models",
    "step",
    "batch_isolation",
    "prefix_interleaved",
    "batch_job",
    "burst",
)


def pytest_configure() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background jobs ignore it


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.stem.removeprefix("test_") not in LONG)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU, JAX runs on {jax.default_backend()}: tools/test --gpu")
        for item in marked:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def release_programs() -> Iterator[None]:
    """Forget cached engines and programs after each module: every XLA:CPU program maps pages of its own, and
    thousands of them run into the kernel's limit of 65,530 maps, where XLA crashes.
    """
    yield
    for cached in gc.get_objects():
        if isinstance(cached, functools._lru_cache_wrapper) and cached.__module__.startswith("tests."):
            cached.cache_clear()
    jax.clear_caches()
    gc.collect()
