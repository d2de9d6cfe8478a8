"""Prefill attention's kernel in JAX's interpreter, against the plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops import attention
from jaxserve.ops.mosaic import chunk_attention
from tests.test_chunk_attention_gpu import inputs

interpreted_pallas = pytest.importorskip(
    "tests.interpreted_pallas", exc_type=ImportError
)  # not public in JAX

CASES = {  # length, heads, kv heads, dim, capacity, start, window
    "the first chunk": (64, 2, 1, 64, 256, 0, 0),
    "a chunk that begins inside a block of keys": (128, 2, 1, 64, 256, 70, 0),
    "several blocks": (64, 6, 2, 128, 1024, 900, 0),
    "a sliding window": (256, 2, 1, 128, 1024, 700, 100),
    "wide heads": (64, 2, 2, 256, 512, 300, 0),
    "to the end of the context": (128, 2, 1, 128, 512, 384, 0),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_chunk_attends_as_in_the_plain_form(case, monkeypatch):
    *shape, start, window = case
    q, keys, values = inputs(*shape, "float16")
    place, static = (np.int32(1), np.int32(2), np.int32(start)), dict(scale=shape[3] ** -0.5, window=window)
    assert chunk_attention.supported(shape[3], shape[0], "float16")
    interpreted_pallas.install(monkeypatch, chunk_attention)
    got = chunk_attention.attend_chunk.__wrapped__(q, keys, values, *place, **static)
    want = attention.attend_chunk(q, keys, values, *place, **static)
    assert jnp.linalg.norm(got - want) < 1e-3 * jnp.linalg.norm(want)
