"""The gated delta rule: one token and chunks against the plain recurrence, in float32 and in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops import delta
from tests import delta_rule
from tests.oracle import relative_error

B, H, DK, DV = 2, 3, 16, 8
chunked = jax.jit(delta.delta_chunked, static_argnames="chunk")
scan = jax.jit(delta.delta_scan_reference)
step = jax.jit(delta.delta_step)


random_inputs = functools.partial(
    delta_rule.random_inputs, batch=B, key_heads=H, heads=H, key_dim=DK, value_dim=DV
)


def float64(state, q, k, v, g, beta):
    """The recurrence in NumPy, with S [Dk, Dv] as the papers write it."""
    s = np.swapaxes(state, -1, -2).astype(np.float64)
    q, k, v = (np.asarray(x, np.float64)[..., None, :] for x in (q, k, v))
    decay, beta = (np.asarray(x, np.float64)[..., None, None] for x in (np.exp(g.astype(np.float64)), beta))
    out = np.empty(v.shape)
    for t in range(q.shape[1]):
        s = decay[:, t] * s
        error = v[:, t] - k[:, t] @ s
        s = s + beta[:, t] * np.swapaxes(k[:, t], -1, -2) * error
        out[:, t] = q[:, t] @ s
    return out[..., 0, :], np.swapaxes(s, -1, -2)


def assert_close(found, exact, bound=2e-6):
    for name, x, y in zip(("out", "state"), found, exact, strict=True):
        assert x.shape == y.shape and x.dtype == jnp.float32, name
        assert relative_error(x, y) < bound, (name, relative_error(x, y))


def test_the_scan_is_the_recurrence():
    inputs = random_inputs(70)
    assert_close(scan(*inputs), float64(*inputs))


def test_steps_equal_the_scan():
    state, *tokens = random_inputs(40)
    out, end = scan(state, *tokens)
    steps = []
    for t in range(40):
        q, k, v, g, beta = (x[:, t] for x in tokens)
        o, state = step(state, q, k, v, np.exp(g), beta)
        steps.append(o)
    assert_close((np.stack(steps, axis=1), state), (out, end))


def test_a_step_with_decay_one_and_beta_zero_keeps_the_state():
    state, q, k, v, _, _ = (x[:, 0] if x.ndim == 4 and i else x for i, x in enumerate(random_inputs(1)))
    _, kept = step(state, q, k, v, np.ones((B, H)), np.zeros((B, H)))
    np.testing.assert_array_equal(kept, state)


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 130, 700])
def test_chunks_equal_the_recurrence_at_any_length(length):
    inputs = random_inputs(length)
    assert_close(chunked(*inputs), float64(*inputs))


@pytest.mark.parametrize("chunk", [1, 32, 128])
def test_the_chunk_size_does_not_change_the_result(chunk):
    inputs = random_inputs(150)
    assert_close(chunked(*inputs, chunk=chunk), scan(*inputs))


@pytest.mark.parametrize("chunk", [0, -64, 48])
def test_a_chunk_size_that_is_no_power_of_two_is_refused(chunk):
    with pytest.raises(ValueError, match=f"chunk={chunk}: expected a power of two"):
        delta.delta_chunked(*random_inputs(5), chunk=chunk)


def test_a_prompt_in_pieces_equals_the_whole():
    state, *tokens = random_inputs(700)
    whole = chunked(state, *tokens)
    pieces = []
    for start in range(0, 700, 65):
        out, state = chunked(state, *(x[:, start : start + 65] for x in tokens))
        pieces.append(out)
    assert_close((np.concatenate(pieces, axis=1), state), whole)


def test_repeated_keys_stay_accurate():
    inputs = random_inputs(256, g=-1e-3, repeated=True)
    assert_close(chunked(*inputs), float64(*inputs))


def test_very_strong_decay_stays_finite_and_accurate():
    rng = np.random.default_rng(1)
    g = np.where(rng.uniform(size=(B, 256, H)) < 0.5, -1e4, -1e-3)
    inputs = random_inputs(256, g=g)
    for form in (scan, chunked):
        assert_close(form(*inputs), float64(*inputs))


def test_weak_decay_after_a_strongly_decayed_past_keeps_its_precision():
    g = np.full((B, 64, H), -0.3)
    g[:, :20] = -150.0  # running sums reach −3000, whose float32 step is 2e-4
    inputs = random_inputs(64, g=g)
    assert_close(chunked(*inputs), float64(*inputs), bound=1e-6)


def test_decay_near_one_accumulates_past_the_largest_half_without_overflow():
    state, q, k, v, g, beta = random_inputs(256, g=-1e-7)
    k[:] = np.eye(DK)[np.arange(256) % DK][None, :, None]
    inputs = state, np.abs(q) * 4, k, np.full_like(v, 3e5), g, np.full_like(beta, 0.5)
    exact = float64(*inputs)
    assert np.abs(exact[0]).max() > 65504 and np.abs(exact[1]).max() > 65504
    assert_close(scan(*inputs), exact)
    assert_close(chunked(*inputs), exact)


def test_error_does_not_grow_over_8192_tokens():
    length, cuts = 8192, (256, 1024, 4096, 8192)
    rng = np.random.default_rng(5)
    inputs = random_inputs(length, batch=1, g=-rng.exponential(0.01, size=(1, length, H)))
    exact, _ = float64(*inputs)
    for form in (scan, chunked):
        out, _ = form(*inputs)
        errors = [relative_error(out[:, n - 256 : n], exact[:, n - 256 : n]) for n in cuts]
        assert max(errors) < 2e-6, errors


def test_padding_is_inert_whatever_it_holds():
    state, *tokens = random_inputs(130)
    counts = np.array([100, 37])
    valid = np.arange(130) < counts[:, None]
    padded = [np.where(valid.reshape(B, 130, *[1] * (x.ndim - 2)), x, np.nan) for x in tokens]
    out, end = chunked(state, *padded, valid)
    for row, count in enumerate(counts):
        alone = scan(state[row : row + 1], *(x[row : row + 1, :count] for x in tokens))
        assert_close((out[row : row + 1, :count], end[row : row + 1]), alone)


def test_padding_chunks_leave_the_state_bit_for_bit():
    state, *tokens = random_inputs(130)
    valid = np.broadcast_to(np.arange(130) < 64, (B, 130))
    _, padded = chunked(state, *tokens, valid)
    _, alone = chunked(state, *(x[:, :64] for x in tokens))
    np.testing.assert_array_equal(padded, alone)


@pytest.mark.parametrize("length", [1, 130])
def test_a_row_without_valid_tokens_keeps_its_state_bit_for_bit(length):
    state, *tokens = random_inputs(length)
    state[0, 0, 0, 0] = -0.0
    valid = np.zeros((B, length), bool)
    valid[1] = True
    _, end = chunked(state, *tokens, valid)
    assert np.asarray(end[0]).tobytes() == state[0].tobytes()
    assert not np.array_equal(end[1], state[1])


def test_shapes_that_disagree_are_refused_while_tracing():
    state, *tokens = random_inputs(3)
    with pytest.raises(AssertionError):
        chunked(np.swapaxes(state, -1, -2), *tokens)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
@pytest.mark.parametrize("scale", [0.1, 1.0])
@pytest.mark.parametrize("inverse", [delta._inverse_by_rows, delta._inverse_by_halves])
def test_unit_lower_inverse_inverts(inverse, size, scale):
    a = np.tril(np.random.default_rng(size).uniform(0, scale, size=(3, size, size)), -1).astype(np.float32)
    found = inverse(jnp.asarray(a))
    exact = np.linalg.inv(np.eye(size) + a.astype(np.float64))
    assert relative_error(found, exact) < 1e-6


def test_unit_lower_inverse_of_all_ones_is_two_diagonals():
    ones = np.tril(np.ones((64, 64), np.float32), -1)
    np.testing.assert_array_equal(delta.unit_lower_inverse(jnp.asarray(ones)), np.eye(64) - np.eye(64, k=-1))


def test_l2_normalise_divides_by_the_norm_or_by_eps():
    x = np.array([[3.0, 4.0], [0.0, 0.0], [3e-7, 4e-7]], np.float32)
    expected = [[0.6, 0.8], [0.0, 0.0], [0.3, 0.4]]
    np.testing.assert_allclose(delta.l2_normalise(jnp.asarray(x), 1e-6), expected, rtol=1e-6)


def test_gates_follow_the_formula_with_the_stored_negative_a():
    rng = np.random.default_rng(2)
    a, b = 8 * rng.normal(size=(2, 5, 4))
    ssm_a, bias = -rng.uniform(0.1, 16, size=4), rng.normal(size=4)
    a[0] = [-40.0, 0.0, 19.9, 60.0]
    g, beta = delta.gates(*(jnp.asarray(x, jnp.bfloat16) for x in (a, b)), *map(jnp.asarray, (ssm_a, bias)))
    a, b = (np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64) for x in (a, b))
    assert g.dtype == beta.dtype == jnp.float32 and (g <= 0).all()
    np.testing.assert_allclose(g, ssm_a * np.logaddexp(0, a + bias), rtol=1e-5)
    np.testing.assert_allclose(beta, 1 / (1 + np.exp(-b)), rtol=1e-5)


def test_gated_norm_normalises_first_and_gates_after():
    rng = np.random.default_rng(4)
    o, z, gain = rng.normal(size=(2, 4, 8)), rng.normal(size=(2, 4, 8)), rng.uniform(0.5, 2, size=8)
    found = delta.gated_norm(*map(jnp.asarray, (o, z, gain)), 1e-6)
    expected = o / np.sqrt(np.mean(o * o, -1, keepdims=True) + 1e-6) * gain * z / (1 + np.exp(-z))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(("grouped", "order"), [(False, [0, 1, 0, 1, 0, 1]), (True, [0, 0, 0, 1, 1, 1])])
def test_value_heads_read_their_key_head(grouped, order):
    x = jnp.arange(2 * 5 * 2 * 3).reshape(2, 5, 2, 3)
    np.testing.assert_array_equal(delta.expand_heads(x, 6, grouped), x[..., order, :])


def test_equal_head_counts_expand_to_themselves():
    x = jnp.arange(24).reshape(2, 4, 3)
    for grouped in (False, True):
        np.testing.assert_array_equal(delta.expand_heads(x, 4, grouped), x)


def test_value_heads_that_key_heads_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="5 value heads are not a multiple of 2 key heads"):
        delta.expand_heads(jnp.zeros((1, 2, 4)), 5, False)
