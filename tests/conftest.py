"""GPU tests run where a GPU is, and are skipped with a reason everywhere else."""

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        skip = pytest.mark.skip(reason=f"needs a GPU, JAX runs on {jax.default_backend()}: tools/test --gpu")
        for item in marked:
            item.add_marker(skip)
