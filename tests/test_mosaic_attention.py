"""The fused decode attention without a GPU: whole launches on an emulated one, plans, lowering, aliases.

What only a GPU can show (its memory's order, speed) is in test_mosaic_attention_gpu.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import ptx
from jaxserve.ops.mosaic import (
    attention,
    attention_cell,
    attention_merge,
    attention_plan,
    attention_program,
    attention_stream,
    attention_tile,
    attention_token,
)
from tests.attention_decode import LAYERS, plain, random_case
from tests.emulated_launch import emulated
from tests.oracle import relative_error

EXACT = 1e-5  # f32 sums in another order; bf16 halves of q and of the weights keep 16 bits
MODULES = (
    ptx,
    attention_cell,
    attention_merge,
    attention_program,
    attention_stream,
    attention_tile,
    attention_token,
)


@pytest.fixture
def emulate(monkeypatch):
    """decode_attention on an emulated launch."""

    monkeypatch.setattr(attention, "launch", emulated(MODULES))
    return attention.decode_attention.__wrapped__


def both_forms(emulate, case):
    return emulate(*case.arguments, **case.options), plain(case)


@pytest.mark.parametrize("name", LAYERS)
def test_a_launch_agrees_with_the_plain_form(name, emulate):
    found, exact = both_forms(emulate, random_case(**LAYERS[name]))
    assert relative_error(found[2], exact[2]) < EXACT
    for cache, wanted in zip(found[:2], exact[:2], strict=True):
        assert cache.dtype == wanted.dtype and relative_error(cache, wanted) < EXACT


@pytest.mark.parametrize("position", [0, 15, 16, 127, 128, 511])
def test_every_length_of_a_row_is_read_to_its_end(position, emulate):
    found, exact = both_forms(emulate, random_case([position], heads=4, kv_heads=1, dim=64))
    assert relative_error(found[2], exact[2]) < EXACT


def test_a_rows_bits_do_not_depend_on_what_its_neighbours_hold(emulate):
    options = dict(rows=[0, 1, 2], slots=3, heads=4, kv_heads=1, dim=64)
    one, other = random_case([300, 7, 130], **options), random_case([300, 450, 3], **options)
    found, changed = (emulate(*case.arguments, **case.options)[2] for case in (one, other))
    np.testing.assert_array_equal(found[0], changed[0])
    assert (found[1:] != changed[1:]).any()


def test_a_row_has_the_same_bits_alone_where_it_has_as_many_blocks(emulate):
    case = random_case([100, 7], heads=4, kv_heads=1, dim=64)
    together = emulate(*case.arguments, **case.options)[2]
    for b in range(2):
        np.testing.assert_array_equal(emulate(*case.lane(b), **case.options)[2][0], together[b])


def test_spare_and_inactive_lanes_change_nothing_and_put_out_zeros(emulate):
    case = random_case([9, 200, 3], rows=[0, 3, 1], slots=3, active=[False, True, True])
    found, exact = both_forms(emulate, case)
    assert not found[2][:2].any() and relative_error(found[2][2], exact[2][2]) < EXACT
    for before, after, wanted in zip(case.arguments[5:7], found[:2], exact[:2], strict=True):
        np.testing.assert_array_equal(after, wanted)
        np.testing.assert_array_equal(after[:, 0], before[:, 0])


def test_a_position_past_the_capacity_is_not_kept(emulate):
    case = random_case([64, 70], capacity=64)
    found, exact = both_forms(emulate, case)
    assert relative_error(found[2], exact[2]) < EXACT
    for before, after in zip(case.arguments[5:7], found[:2], strict=True):
        np.testing.assert_array_equal(after, before)


def test_a_window_past_the_capacity_sees_nothing(emulate):
    case = random_case([200], capacity=64, window=100)
    assert not emulate(*case.arguments, **case.options)[2].any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_what_lies_past_the_last_key_does_not_matter(dtype, emulate):
    case = random_case([37], heads=4, kv_heads=1, dim=64, dtype=dtype)
    parts, bias, q_norm, k_norm, rope, keys, values, *lanes = case.arguments
    wanted = emulate(*case.arguments, **case.options)[2]
    keys, values = (cache.at[..., 37:, :].set(jnp.nan) for cache in (keys, values))
    found = emulate(parts, bias, q_norm, k_norm, rope, keys, values, *lanes, **case.options)[2]
    np.testing.assert_array_equal(found, wanted)


def test_large_scores_do_not_overflow(emulate):
    case = random_case([50], heads=4, kv_heads=1, dim=64, biased=True)
    parts, bias, *rest = case.arguments
    bias = bias.at[:64].set(30_000.0)
    found, exact = both_forms(emulate, case._replace(arguments=(parts, bias, *rest)))
    assert relative_error(found[2], exact[2]) < 1e-3  # scores of millions: f32 itself keeps no more


# ---- plans


def test_blocks_double_as_a_row_grows():
    blocks = [1 << attention_plan.doublings(tiles, 16) for tiles in (1, 4, 5, 8, 9, 32, 33, 5000)]
    assert blocks == [1, 1, 2, 2, 4, 8, 16, 16]


def test_a_cell_has_no_more_blocks_than_a_full_row_uses():
    for capacity, blocks in ((60, 1), (128, 2), (2048, 16), (32768, 16)):
        assert attention_plan.plan(1, 12, 2, capacity).blocks == blocks


def test_many_rows_get_fewer_blocks_each():
    blocks = [attention_plan.plan(rows, 12, 2, 4096).blocks for rows in (1, 8, 64)]
    assert blocks == sorted(blocks, reverse=True) and blocks[0] > blocks[-1]


def test_query_heads_are_split_evenly_where_a_tile_does_not_hold_them():
    for heads, group, cells in ((7, 7, 1), (8, 8, 1), (11, 6, 2), (16, 8, 2)):
        p = attention_plan.plan(1, heads, 1, 4096)
        assert (p.group, p.cells) == (group, cells)


@pytest.mark.parametrize("dim", range(64, 257, 16))
def test_pieces_of_a_head_cover_its_columns_once(dim):
    for blocks, columns in ((attention_tile.key_blocks(dim), 8), (attention_tile.value_blocks(dim), 16)):
        ends = [first + columns * words for first, words in blocks]
        assert [first for first, _ in blocks] == [0, *ends[:-1]] and ends[-1] == dim


# ---- lowering


def lowered(case):
    layer = jax.jit(
        lambda *arguments: attention.decode_attention(*arguments, **case.options), donate_argnums=(5, 6)
    )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.arguments)
    return layer.trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", ["plain", "gated", "80 columns", "bfloat16", "a window"])
def test_launches_lower_for_cuda_and_write_the_caches_in_place(name):
    text = lowered(random_case(**LAYERS[name]))
    assert text.count("@mosaic_gpu_v2") == 1
    for cache in (0, 1):
        alias = f"output_tuple_indices = [{cache + 1}], operand_index = {cache},"
        assert text.count(alias) == 1
    assert text.count("tf.aliasing_output") == 2


def test_layers_of_one_shape_share_a_lowering():
    case = random_case([5], heads=4, kv_heads=1, dim=64)
    parts, bias, q_norm, k_norm, rope, keys, values, _, *lanes = case.arguments

    def layers(parts, keys, values, *lanes):
        out = 0
        for rank in range(2):
            keys, values, x = attention.decode_attention(
                parts, bias, q_norm, k_norm, rope, keys, values, jnp.int32(rank), *lanes, **case.options
            )
            out += x
        return keys, values, out

    text = jax.jit(layers).trace(parts, keys, values, *lanes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1 and text.count("call @decode_attention") == 2


# ---- refusals


def test_shapes_the_kernel_does_not_take_are_named():
    assert attention.supported(12, 2, 128, 128, "float16")
    for refused in (
        (12, 5, 128, 128, "float16"),
        (34, 2, 128, 128, "float16"),
        (12, 2, 72, 64, "float16"),
        (12, 2, 272, 64, "float16"),
        (12, 2, 128, 12, "float16"),
        (12, 2, 256, 192, "float16"),
        (12, 2, 128, 128, "float32"),
    ):
        assert not attention.supported(*refused)
    case = random_case([5], dim=128)
    with pytest.raises(ValueError, match="12 heads over 5 of 128 columns"):
        attention.decode_attention(*case.arguments, **case.options | {"kv_heads": 5})


def test_operands_that_do_not_fit_are_named():
    case = random_case([5])
    parts, *rest = case.arguments
    with pytest.raises(ValueError, match="parts of .* expected 1536 of q, then 256 each of k and v"):
        attention.decode_attention((parts[0][:, :-16],), *rest, **case.options)
    with pytest.raises(ValueError, match="none of them in two parts"):
        attention.decode_attention(tuple(jnp.split(parts[0], [100], axis=1)), *rest, **case.options)
    with pytest.raises(ValueError, match="rank is int32\\(1,\\)"):
        attention.decode_attention(*case.arguments[:7], jnp.zeros(1, jnp.int32), *rest[7:], **case.options)
