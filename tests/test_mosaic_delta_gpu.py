"""The fused delta kernel on a GPU: values over several steps, bits, and what it leaves alone."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxserve.ops.mosaic.delta import Plan, decode_delta
from tests import delta_decode as layers
from tests.delta_decode import EPS, GROUPED, QWEN35, TILED
from tests.oracle import relative_error

pytestmark = pytest.mark.gpu

REPEATS = 10
SHAPES = {
    "4b": QWEN35,
    "0.8b": dataclasses.replace(QWEN35, value_heads=16),
    "27b": dataclasses.replace(QWEN35, value_heads=48),
    "grouped": GROUPED,
    "width_2": dataclasses.replace(TILED, conv_width=2),
}

fused = jax.jit(
    lambda *operands, config, spread=None: decode_delta(*operands, config=config, eps=EPS, spread=spread),
    static_argnames=("config", "spread"),
    donate_argnums=(5, 6),
)
plain = functools.partial(layers.plain, eps=EPS)


def same(found, expected):
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_equal_the_plain_form(shape, batch):
    d, slots = SHAPES[shape], batch + 1
    layer, memory, expected = layers.random_layer(d), *(layers.random_memory(d, 2, slots) for _ in "ab")
    rows = np.random.default_rng(batch).permutation(slots)[:batch]
    for step in range(5):
        parts = layers.random_parts(d, batch, step)
        where = layers.lanes(rows, step + 2 * np.arange(batch), [True] * batch)  # the first row begins
        *memory, out = fused(parts, *layer, *memory, *where, config=d)
        *expected, wanted = plain(parts, *layer, *expected, *where, config=d)
        assert relative_error(out, wanted) < 1e-5
        assert relative_error(memory[1], expected[1]) < 1e-5
        np.testing.assert_array_equal(memory[0], expected[0])


def test_a_row_has_the_same_bits_alone_among_others_and_on_every_call():
    d, batch = QWEN35, 8
    layer, parts = layers.random_layer(d), layers.random_parts(d, batch, 0)
    memory = functools.partial(layers.random_memory, d, 2, batch)
    together = fused(
        parts, *layer, *memory(), *layers.lanes(range(batch), [4] * batch, [True] * batch), config=d
    )
    for _ in range(REPEATS):
        again = fused(
            parts, *layer, *memory(), *layers.lanes(range(batch), [4] * batch, [True] * batch), config=d
        )
        same(again, together)
    for row in (0, 7):
        one = tuple(part[row : row + 1] for part in parts)
        conv, delta, out = fused(one, *layer, *memory(), *layers.lanes([row], [4], [True]), config=d)
        same(
            (conv[1, row], delta[1, row], out[0]),
            (together[0][1, row], together[1][1, row], together[2][row]),
        )


@pytest.mark.parametrize("spread", [(1, 16, 2), (2, 8, 2), (4, 4, 2), (4, 8, 1)], ids=str)
def test_the_spread_over_blocks_changes_no_bit(spread):
    d, layer, parts = QWEN35, layers.random_layer(QWEN35), layers.random_parts(QWEN35, 2, 0)
    where = layers.lanes([1, 0], [4, 4], [True, True])
    usual = fused(parts, *layer, *layers.random_memory(d, 2, 2), *where, config=d)
    same(fused(parts, *layer, *layers.random_memory(d, 2, 2), *where, config=d, spread=Plan(*spread)), usual)


def test_frozen_and_spare_lanes_leave_the_memory_alone():
    d, slots = QWEN35, 4
    layer, parts = layers.random_layer(d), layers.random_parts(d, 4, 0)
    where = layers.lanes([2, 0, slots, 3], [5, 0, 0, 5], [True, False, True, True])
    conv, delta, out = fused(parts, *layer, *layers.random_memory(d, 3, slots), *where, config=d)
    for found, before in zip((conv, delta), layers.random_memory(d, 3, slots), strict=True):
        same((found[0], found[2], found[1, :2]), (before[0], before[2], before[1, :2]))
        assert not (found[1, 2] == before[1, 2]).all() and not (found[1, 3] == before[1, 3]).all()
    assert not out[1:3].any()


def test_a_step_of_many_layers_copies_no_state():
    d, count = QWEN35, 6
    layer, parts = layers.random_layer(d), layers.random_parts(d, 1, 0)

    def step(conv, delta):
        total = 0.0
        for rank in range(count):
            conv, delta, out = decode_delta(
                parts, *layer, conv, delta, *layers.lanes([0], [4], [True], rank), config=d, eps=EPS
            )
            total = total + out
        return conv, delta, total

    memory = layers.random_memory(d, count, 1)
    analysis = jax.jit(step, donate_argnums=(0, 1)).lower(*memory).compile().memory_analysis()
    assert analysis.alias_size_in_bytes == sum(x.nbytes for x in memory)
    assert analysis.temp_size_in_bytes < memory[1][0].nbytes
