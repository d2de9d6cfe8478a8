"""The two prefill kernels of the delta rule without a GPU: in an emulated launch, lowered for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import ptx
from jaxserve.ops import delta
from jaxserve.ops.mosaic import delta_carry, delta_chunks, delta_prefill, tf32
from tests.delta_rule import random_inputs
from tests.emulated_launch import emulated
from tests.oracle import relative_error

DIM = 128


@jax.jit
def _scan(state, q, k, v, g, beta):
    return delta.delta_scan_reference(state, q, k, v, g, beta)


def plain(state, q, k, v, g, beta, count, grouped):
    """Row by row, its valid tokens through the definition."""
    heads, (batch, length) = v.shape[2], k.shape[:2]
    out, states = np.zeros((batch, length, heads, DIM), np.float32), np.array(state)
    for row, n in enumerate(count):
        tokens = [x[row : row + 1, :n] for x in (q, k, v, g, beta)]
        tokens[:2] = (delta.expand_heads(jnp.asarray(x), heads, grouped) for x in tokens[:2])
        out[row : row + 1, :n], states[row : row + 1] = _scan(state[row : row + 1], *tokens)
    return out, states


@pytest.fixture
def emulate(monkeypatch):
    """Stands in for `launch`: runs each program on an emulated launch."""

    modules = (ptx, delta_chunks, delta_carry, tf32)
    monkeypatch.setattr(delta_prefill, "launch", emulated(modules))
    return delta_prefill.prefill_delta.__wrapped__


def assert_equals_plain(emulate, inputs, count, grouped=False, bound=2e-6):
    count = np.asarray(count, np.int32)
    found = emulate(*map(jnp.asarray, inputs), jnp.asarray(count), grouped=grouped)
    expected = plain(*inputs, count, grouped)
    for x, y in zip(found, expected, strict=True):
        assert relative_error(x, y) < bound, relative_error(x, y)
    return found


@pytest.mark.parametrize("length", [1, 63, 64, 130])
def test_any_number_of_tokens_equals_the_recurrence(emulate, length):
    assert_equals_plain(emulate, random_inputs(length), [length])


@pytest.mark.parametrize("grouped", [False, True])
def test_value_heads_read_their_key_head(emulate, grouped):
    assert_equals_plain(emulate, random_inputs(70, key_heads=2, heads=4), [70], grouped)


def test_rows_keep_to_their_own_tokens(emulate):
    inputs = random_inputs(150, batch=3)
    count = np.array([150, 0, 70])
    for x in inputs[1:]:
        for row, n in enumerate(count):
            x[row, n:] = np.nan
    inputs[0][1, 0, 0, 0] = -0.0
    out, state = assert_equals_plain(emulate, inputs, count)
    for row, n in enumerate(count):
        assert not out[row, n:].any()
    assert state[1].tobytes() == inputs[0][1].tobytes()


def test_repeated_keys_stay_accurate(emulate):
    inputs = random_inputs(192, g=np.full((1, 192, 2), -1e-3), repeated=True)
    assert_equals_plain(emulate, inputs, [192], bound=5e-6)


def test_strong_decay_stays_finite_and_accurate(emulate):
    g = np.where(np.random.default_rng(1).uniform(size=(1, 128, 2)) < 0.5, -1e4, -1e-3)
    assert_equals_plain(emulate, random_inputs(128, g=g), [128])


def test_weak_decay_after_a_strongly_decayed_past_keeps_its_precision(emulate):
    g = np.full((1, 64, 2), -0.3)
    g[:, :20] = -150.0
    assert_equals_plain(emulate, random_inputs(64, g=g), [64])


def test_large_values_do_not_overflow(emulate):
    inputs = random_inputs(128, g=np.full((1, 128, 2), -1e-7))
    inputs[3] *= 3e5
    assert_equals_plain(emulate, inputs, [128])


def test_both_kernels_lower_for_cuda():
    f32 = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)  # noqa: E731
    tokens = (
        f32(1, 512, 16, DIM),
        f32(1, 512, 16, DIM),
        f32(1, 512, 32, DIM),
        f32(1, 512, 32),
        f32(1, 512, 32),
    )
    count = jax.ShapeDtypeStruct((1,), jnp.int32)
    traced = delta_prefill.prefill_delta.trace(f32(1, 32, DIM, DIM), *tokens, count, grouped=False)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 2


def test_wrong_arguments_are_named():
    state, q, k, v, g, beta = map(jnp.asarray, random_inputs(3, key_heads=2, heads=3))
    count = jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match="3 value heads are not a multiple of 2 key heads"):
        delta_prefill.prefill_delta(state, q, k, v, g, beta, count, grouped=False)
    with pytest.raises(ValueError, match="heads of 64 × 128"):
        delta_prefill.prefill_delta(state, q, k, v[..., :64], g, beta, count, grouped=False)
    assert delta_prefill.supported(128, 128) and not delta_prefill.supported(64, 128)
