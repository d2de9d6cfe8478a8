"""The fused decode attention on a GPU: values, the same bits on every call, rows independent of their
neighbours, no copy of the cache.
"""

import functools

import jax
import numpy as np
import pytest

from jaxserve.ops.mosaic import attention
from tests.attention_decode import LAYERS, plain, random_case
from tests.oracle import relative_error

pytestmark = pytest.mark.gpu

EXACT = 1e-4
REPEATS = 10

SHAPES = {
    "qwen2.5-1.5b": dict(heads=12, kv_heads=2, biased=True),
    "qwen2.5-7b": dict(heads=28, kv_heads=4, biased=True),
    "qwen3-8b": dict(heads=32, kv_heads=8, normed=True),
    "qwen3.5-4b": dict(heads=16, kv_heads=4, dim=256, rotary=64, gated=True, normed=True),
    "qwen3.5-35b": dict(heads=16, kv_heads=2, dim=256, rotary=64, gated=True, normed=True, dtype="bfloat16"),
    "smollm2": dict(heads=9, kv_heads=3, dim=64, interleaved=True),
}


def run(case):
    return attention.decode_attention(*case.arguments, **case.options)


@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_agrees_with_the_plain_form(name):
    case = random_case(**LAYERS[name])
    found, exact = run(case), plain(case)
    for x, wanted in zip(found, exact, strict=True):
        assert relative_error(x.astype(np.float32), wanted.astype(np.float32)) < EXACT


@pytest.mark.parametrize("positions", [[0], [100], [4095], [4000, 3, 255, 256, 1023, 2048, 129, 77]], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_real_shapes_agree_at_every_depth_and_repeat_their_bits(shape, positions):
    case = random_case(positions, capacity=4096, **SHAPES[shape])
    found, exact = run(case), plain(case)
    assert relative_error(found[2], exact[2]) < EXACT
    for _ in range(REPEATS):
        assert (run(case)[2] == found[2]).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rows_bits_do_not_depend_on_what_its_neighbours_hold(shape):
    options = SHAPES[shape] | dict(rows=[0, 1, 2], slots=3, capacity=4096)
    found, changed = (
        run(random_case(positions, **options))[2] for positions in ([3000, 7, 130], [3000, 4000, 3])
    )
    assert (found[0] == changed[0]).all() and (found[1:] != changed[1:]).any()


def test_long_contexts_agree():
    case = random_case([32_000], capacity=32_768, **SHAPES["qwen2.5-7b"])
    assert relative_error(run(case)[2], plain(case)[2]) < EXACT


def test_many_rows_of_different_length_agree():
    positions = np.random.default_rng(0).integers(0, 1024, 64).tolist()
    case = random_case(positions, capacity=1024, **SHAPES["qwen2.5-1.5b"])
    assert relative_error(run(case)[2], plain(case)[2]) < EXACT


def test_spare_and_inactive_lanes_change_nothing_and_put_out_zeros():
    case = random_case([9, 200, 3], rows=[0, 3, 1], slots=3, active=[False, True, True])
    found, exact = run(case), plain(case)
    assert not found[2][:2].any() and relative_error(found[2][2], exact[2][2]) < EXACT
    for before, after, wanted in zip(case.arguments[5:7], found[:2], exact[:2], strict=True):
        assert (after[:, 0] == before[:, 0]).all()
        assert relative_error(after.astype(np.float32), wanted.astype(np.float32)) < EXACT


def test_the_caches_are_not_copied():
    case = random_case([100], capacity=4096, **SHAPES["qwen2.5-1.5b"])
    layer = jax.jit(functools.partial(attention.decode_attention, **case.options), donate_argnums=(5, 6))
    memory = layer.lower(*case.arguments).compile().memory_analysis()
    caches = sum(cache.nbytes for cache in case.arguments[5:7])
    assert memory.alias_size_in_bytes == caches
    assert memory.temp_size_in_bytes < 1 << 16
