"""The short convolution against NumPy, and its tail across calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.conv import short_conv

BATCH, LENGTH, CHANNELS, WIDTH = 2, 9, 5, 4


def reference(u, tail, kernel):
    """silu of Σ_j kernel[c, j] · window[t + j, c] in float64."""
    window = np.concatenate([tail, u], axis=1).astype(np.float64)
    out = np.zeros(u.shape)
    for t in range(u.shape[1]):
        for j in range(kernel.shape[1]):
            out[:, t] += kernel[:, j] * window[:, t + j]
    return out / (1 + np.exp(-out))


@pytest.fixture
def inputs():
    rng = np.random.default_rng(3)
    shapes = (BATCH, LENGTH, CHANNELS), (BATCH, WIDTH - 1, CHANNELS), (CHANNELS, WIDTH)
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def full(batch, length):
    return jnp.full((batch,), length, jnp.int32)


def test_convolution_equals_its_definition(inputs):
    u, tail, kernel = inputs
    out, new_tail = jax.jit(short_conv)(*inputs, full(BATCH, LENGTH))
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, reference(u, tail, kernel), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new_tail, u[:, -(WIDTH - 1) :])


def test_the_newest_sample_meets_the_last_column_of_the_kernel():
    u = jnp.array([[[1.0], [0.0]]])
    kernel = jnp.array([[7.0, 5.0, 3.0, 2.0]])
    out, _ = short_conv(u, jnp.zeros((1, 3, 1)), kernel, full(1, 2))
    np.testing.assert_allclose(out[0, :, 0], jax.nn.silu(jnp.array([2.0, 3.0])), rtol=1e-6)


@pytest.mark.parametrize("lengths", [[9], [1] * 9, [2, 7], [3, 1, 5], [4, 4, 1]])
def test_a_sequence_in_pieces_equals_the_whole(inputs, lengths):
    """The tails bit for bit; an output's last bit depends on which lane of the CPU computed its silu."""
    u, tail, kernel = inputs
    whole, end = short_conv(*inputs, full(BATCH, LENGTH))
    pieces, at = [], 0
    for length in lengths:
        out, tail = short_conv(u[:, at : at + length], tail, kernel, full(BATCH, length))
        pieces.append(out)
        at += length
    np.testing.assert_array_max_ulp(np.concatenate(pieces, axis=1), np.asarray(whole), maxulp=2)
    np.testing.assert_array_equal(tail, end)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, LENGTH])
def test_the_next_tail_ends_at_the_last_valid_row(inputs, count):
    u, tail, kernel = inputs
    counts = jnp.array([count, LENGTH], jnp.int32)  # rows of one call differ
    _, new_tail = short_conv(u, tail, kernel, counts)
    window = np.concatenate([tail, u], axis=1)
    np.testing.assert_array_equal(new_tail[0], window[0, count : count + WIDTH - 1])
    np.testing.assert_array_equal(new_tail[1], u[1, -(WIDTH - 1) :])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_row_without_tokens_keeps_its_tail_bit_for_bit(inputs, dtype):
    u, tail, kernel = inputs
    tail = jnp.asarray(tail).astype(dtype).at[0, 0, 0].set(-0.0)
    _, new_tail = jax.jit(short_conv)(np.full_like(u, np.nan), tail, kernel, full(BATCH, 0))
    assert new_tail.dtype == dtype
    assert np.asarray(new_tail).tobytes() == np.asarray(tail).tobytes()


def test_padding_does_not_reach_valid_outputs(inputs):
    u, tail, kernel = inputs
    clean, _ = short_conv(u, tail, kernel, full(BATCH, 5))
    u[:, 5:] = np.nan
    padded, new_tail = short_conv(u, tail, kernel, full(BATCH, 5))
    np.testing.assert_array_equal(padded[:, :5], clean[:, :5])
    assert np.isfinite(new_tail).all()


def test_half_precision_inputs_are_convolved_in_float32(inputs):
    u, tail, kernel = (jnp.asarray(x, jnp.bfloat16) for x in inputs)
    out, _ = short_conv(u, tail, kernel, full(BATCH, LENGTH))
    exact = reference(*(np.asarray(x, np.float64) for x in (u, tail, kernel)))
    np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-6)
