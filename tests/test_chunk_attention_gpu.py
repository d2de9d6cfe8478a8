"""Prefill attention on a GPU's tensor cores against the plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops import attention
from jaxserve.ops.mosaic import chunk_attention

pytestmark = pytest.mark.gpu

CASES = {  # length, heads, kv heads, dim, capacity, start, window, cache
    "the first chunk": (512, 12, 2, 128, 2048, 0, 0, "float16"),
    "a later chunk": (512, 28, 4, 128, 4096, 3000, 0, "float16"),
    "a short chunk": (64, 28, 4, 128, 4096, 1111, 0, "float16"),
    "wide heads": (512, 16, 4, 256, 2048, 700, 0, "float16"),
    "narrow heads": (128, 32, 8, 64, 1024, 100, 0, "float16"),
    "a sliding window": (512, 4, 1, 256, 4096, 2500, 512, "float16"),
    "a capacity of no round number": (64, 12, 2, 128, 1000, 900, 0, "bfloat16"),
    "a chunk that sticks out of the context": (128, 12, 2, 128, 1000, 950, 0, "float16"),
}


def inputs(length, heads, kv_heads, dim, capacity, dtype):
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((length, heads, dim)), jnp.float32)
    keys, values = (
        jnp.asarray(rng.standard_normal((2, 3, kv_heads, capacity, dim)), dtype) for _ in range(2)
    )
    return q, keys, values


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_chunk_attends_as_in_the_plain_form(case):
    *shape, start, window, dtype = case
    q, keys, values = inputs(*shape, dtype)
    place, static = (np.int32(1), np.int32(2), np.int32(start)), dict(scale=shape[3] ** -0.5, window=window)
    assert chunk_attention.supported(shape[3], shape[0], dtype)
    got = chunk_attention.attend_chunk(q, keys, values, *place, **static)
    want = attention.attend_chunk(q, keys, values, *place, **static)
    inside = min(shape[0], shape[4] - start)
    error = jnp.linalg.norm(got[:inside] - want[:inside]) / jnp.linalg.norm(want[:inside])
    assert error < (2e-3 if dtype == "float16" else 1e-2)
    again = chunk_attention.attend_chunk(q, keys, values, *place, **static)
    assert (again == got).all()
