"""The two prefill kernels of the delta rule on a GPU: values against the recurrence, bits, padding."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.mosaic.delta_prefill import prefill_delta
from tests.delta_rule import random_inputs
from tests.test_mosaic_delta_prefill import assert_equals_plain

pytestmark = pytest.mark.gpu

REPEATS = 5


def run(*inputs, **options):
    return [np.asarray(x) for x in prefill_delta(*inputs, **options)]


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("length", [1, 64, 130, 512, 2000])
def test_tokens_equal_the_recurrence(length, grouped):
    assert_equals_plain(run, random_inputs(length, key_heads=4, heads=8), [length], grouped)


def test_repeated_keys_stay_accurate():
    inputs = random_inputs(512, g=np.full((1, 512, 2), -1e-3), repeated=True)
    assert_equals_plain(run, inputs, [512], bound=5e-6)


def test_rows_keep_to_their_own_tokens_and_repeat_bit_for_bit():
    inputs, count = random_inputs(300, batch=3, key_heads=16, heads=32), np.array([300, 0, 70], np.int32)
    for x in inputs[1:]:
        for row, n in enumerate(count):
            x[row, n:] = np.nan
    out, state = assert_equals_plain(run, inputs, count)
    assert not out[1].any() and not out[2, 70:].any()
    assert state[1].tobytes() == inputs[0][1].tobytes()
    for _ in range(REPEATS):
        again = run(*map(jnp.asarray, inputs), jnp.asarray(count), grouped=False)
        np.testing.assert_array_equal(again[0], out)
        np.testing.assert_array_equal(again[1], state)
