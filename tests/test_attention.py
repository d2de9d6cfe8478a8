"""Attention over the resident cache: writes land where they should, and both read forms equal the
definition.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.attention import attend_chunk, attend_tokens, attention_reference, write_chunk, write_tokens

LAYERS, SLOTS, KV, CAPACITY, DIM, HEADS = 2, 3, 2, 700, 8, 4


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def cache(seed):
    return normal(seed, LAYERS, SLOTS, KV, CAPACITY, DIM)


@pytest.mark.parametrize(
    "start, count", [(0, 5), (0, 16), (3, 16), (690, 10), (690, 16), (684, 16), (699, 1), (8, 0)]
)
def test_a_chunk_lands_at_its_positions_and_touches_nothing_else(start, count):
    before, new = cache(0), normal(1, 16, KV, DIM)
    after = write_chunk(before, new, np.int32(1), np.int32(2), np.int32(start), np.int32(count))
    expected = np.array(before)
    fits = min(count, CAPACITY - start)
    expected[1, 2, :, start : start + fits] = np.array(new)[:fits].transpose(1, 0, 2)
    np.testing.assert_array_equal(after, expected)


def test_tokens_of_inactive_rows_and_past_the_end_are_dropped():
    before, new = cache(0), normal(1, 3, KV, DIM)
    rows, position = jnp.array([2, 0, 1]), jnp.array([4, 5, CAPACITY])
    after = write_tokens(before, new, 1, rows, position, jnp.array([True, False, True]))
    expected = np.array(before)
    expected[1, 2, :, 4] = new[0]
    np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("window", [0, 7, 600])
@pytest.mark.parametrize("start, length", [(0, 40), (500, 40), (660, 40)])
def test_a_chunk_attends_as_the_definition_says(start, length, window):
    keys, values, q = cache(0), cache(1), normal(2, length, HEADS, DIM)
    place = (np.int32(1), np.int32(2), np.int32(start))
    out = jax.jit(attend_chunk, static_argnames=("scale", "window"))(
        q, keys, values, *place, scale=0.3, window=window
    )
    end = start + length
    k, v = (np.array(c)[1, 2, :, :end].transpose(1, 0, 2) for c in (keys, values))
    np.testing.assert_allclose(out, attention_reference(q, k, v, start, scale=0.3, window=window), atol=2e-6)


@pytest.mark.parametrize("window", [0, 1, 7])
@pytest.mark.parametrize("rows", [[1], [2, 0, 1]])
def test_single_tokens_attend_as_the_definition_says(rows, window):
    keys, values = cache(0), cache(1)
    position = np.array([0, 300, 511])[: len(rows)]
    q = normal(2, len(rows), HEADS, DIM)
    out = attend_tokens(
        q, keys, values, 1, jnp.array(rows), jnp.array(position), scale=0.3, window=window, span=512
    )
    for i, (row, at) in enumerate(zip(rows, position, strict=True)):
        k, v = (np.array(c)[1, row, :, : at + 1].transpose(1, 0, 2) for c in (keys, values))
        expected = attention_reference(q[i : i + 1], k, v, at, scale=0.3, window=window)[0]
        np.testing.assert_allclose(out[i], expected, atol=2e-6)


def test_what_lies_beyond_a_row_never_matters():
    keys, values, q = cache(0), cache(1), normal(2, 4, HEADS, DIM)
    stale = [c.at[1, 2, :, 54:].set(9.0) for c in (keys, values)]
    attend = jax.jit(attend_chunk, static_argnames=("scale", "window"))
    clean = attend(q, keys, values, 1, 2, 50, scale=0.3, window=0)
    np.testing.assert_array_equal(attend(q, *stale, 1, 2, 50, scale=0.3, window=0), clean)
