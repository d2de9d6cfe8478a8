"""The fused delta kernel without a GPU: its whole launch, emulated, its lowering, its aliases.

What only a GPU can show (barriers, speed) is in test_mosaic_delta_gpu.py.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import ptx
from jaxserve.config import Delta
from jaxserve.ops.mosaic import delta as kernel
from jaxserve.ops.mosaic import recurrence
from tests import delta_decode as layers
from tests.delta_decode import EPS, GROUPED, QWEN35, TILED
from tests.emulated_launch import Launch, emulated
from tests.oracle import relative_error

NARROW = Delta(conv_width=2, key_heads=1, value_heads=1, key_dim=128, value_dim=32, grouped=False)


@pytest.fixture
def emulate(monkeypatch):
    """Stands in for `launch`: runs the program on an emulated launch."""

    monkeypatch.setattr(kernel, "launch", emulated((ptx, kernel, recurrence)))
    return kernel.decode_delta.__wrapped__


def both_forms(emulate, d, *, rows, start, active, cut=None, spread=None, slots=3, memory=None):
    parts, layer = layers.random_parts(d, len(rows), 0, cut), layers.random_layer(d)
    memory = layers.random_memory(d, 2, slots) if memory is None else memory
    where = layers.lanes(rows, start, active)
    found = emulate(parts, *layer, *memory, *where, config=d, eps=EPS, spread=spread)
    return found, layers.plain(parts, *layer, *map(jnp.copy, memory), *where, config=d, eps=EPS)


@pytest.mark.parametrize(
    "d",
    [
        TILED,
        GROUPED,
        NARROW,
        dataclasses.replace(TILED, value_heads=6),
        dataclasses.replace(GROUPED, conv_width=3),
    ],
    ids=["tiled", "grouped", "narrow", "three_value_heads_a_key_head", "width_3"],
)
def test_a_token_equals_the_plain_form(emulate, d):
    (conv, delta, out), plain = both_forms(emulate, d, rows=[2, 0], start=[7, 0], active=[True, True])
    np.testing.assert_array_equal(conv, plain[0])
    assert relative_error(delta, plain[1]) < 1e-6
    assert relative_error(out, plain[2]) < 5e-6


@pytest.mark.parametrize("cut", [(1024, 512, 4, 4), (1024, 512, 8), (1536, 4, 4), (700, 844)], ids=str)
def test_projections_come_in_any_parts(emulate, cut):
    (_, _, out), plain = both_forms(emulate, TILED, rows=[0], start=[1], active=[True], cut=cut)
    assert relative_error(out, plain[2]) < 5e-6


@pytest.mark.parametrize("spread", [(1, 4, 8), (1, 16, 2), (2, 8, 2), (4, 4, 2)], ids=str)
def test_the_spread_over_blocks_changes_no_bit(emulate, spread):
    where = dict(rows=[1, 0], start=[3, 4], active=[True, True])
    usual, _ = both_forms(emulate, TILED, **where)
    other, _ = both_forms(emulate, TILED, **where, spread=kernel.Plan(*spread))
    for x, y in zip(usual, other, strict=True):
        np.testing.assert_array_equal(x, y)


def test_inactive_and_spare_lanes_write_nothing_and_put_out_zeros(emulate):
    d, slots = TILED, 3
    before = layers.random_memory(d, 2, slots)
    (conv, delta, out), _ = both_forms(
        emulate, d, rows=[0, slots, 2], start=[4, 0, 4], active=[False, True, True], slots=slots
    )
    for found, old in zip((conv, delta), before, strict=True):
        np.testing.assert_array_equal(found[:, :2], old[:, :2])
        np.testing.assert_array_equal(found[0], old[0])
        assert not np.array_equal(found[1, 2], old[1, 2])
    assert not out[:2].any() and out[2].all()


def test_a_row_at_its_start_does_not_see_what_the_slot_held(emulate):
    memory = tuple(x.at[1, 0].set(jnp.nan) for x in layers.random_memory(TILED, 2, 1))
    found, plain = both_forms(emulate, TILED, rows=[0], start=[0], active=[True], slots=1, memory=memory)
    for x, y in zip(found[:2], plain[:2], strict=True):
        np.testing.assert_allclose(x[1], y[1], rtol=1e-4, atol=1e-6)
    assert relative_error(found[2], plain[2]) < 5e-6


def test_softplus_keeps_the_relative_precision_of_small_values(emulate, monkeypatch):
    x = np.linspace(-60, 60, 1024, dtype=np.float32)
    Launch(1, len(x) // 32, 1, [], []).install(monkeypatch, [ptx, recurrence])
    found = recurrence.softplus(recurrence.Register(x)).lanes
    np.testing.assert_allclose(found, np.logaddexp(0, x.astype(np.float64)), rtol=5e-6)


# ---- plans, lowering, arguments


def shapes(d, batch, slots=4):
    f32, i32 = (lambda *s, t=t: jax.ShapeDtypeStruct(s, t) for t in (jnp.float32, jnp.int32))
    return (
        (f32(batch, sum(layers.sizes(d))),),
        f32(d.channels, d.conv_width),
        f32(d.value_heads),
        f32(d.value_heads),
        f32(d.value_dim),
        f32(3, slots, d.conv_width - 1, d.channels),
        f32(3, slots, d.value_heads, d.value_dim, d.key_dim),
        i32(),
        i32(batch),
        i32(batch),
        jax.ShapeDtypeStruct((batch,), bool),
    )


@pytest.mark.parametrize("batch", [1, 64])
def test_both_stacks_are_updated_in_place(batch):
    traced = kernel.decode_delta.trace(*shapes(QWEN35, batch), config=QWEN35, eps=EPS)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    aliases = re.findall(r"output_tuple_indices = \[(\d)\], operand_index = (\d)", text)
    assert sorted(aliases) == [("1", "0"), ("2", "1")]


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("heads", [16, 32, 48, 64, 128])
def test_a_plan_gives_every_tile_to_one_warp(heads, batch):
    d = dataclasses.replace(QWEN35, value_heads=heads)
    p = kernel.plan(d, batch)
    assert p.cluster * p.warps * p.tiles * recurrence.ROWS == heads // d.key_heads * d.value_dim
    assert 2 <= p.cluster <= 8 and p.warps % 4 == 0 and p.tiles <= 4


def test_wrong_arguments_are_named():
    d = TILED
    good = list(shapes(d, 2))
    for index, bad, message in (
        (0, (jax.ShapeDtypeStruct((2, 5), jnp.float32),), "columns"),
        (5, jax.ShapeDtypeStruct((3, 4, 3, 7), jnp.float32), "conv is"),
        (10, jax.ShapeDtypeStruct((2,), jnp.int32), "active is"),
    ):
        with pytest.raises(ValueError, match=message):
            kernel.decode_delta.trace(*good[:index], bad, *good[index + 1 :], config=d, eps=EPS)
    wide = dataclasses.replace(d, key_dim=64)
    assert kernel.supported(d) and not kernel.supported(wide)
    with pytest.raises(ValueError, match="heads of 128 × 64"):
        kernel.decode_delta.trace(*shapes(wide, 2), config=wide, eps=EPS)
