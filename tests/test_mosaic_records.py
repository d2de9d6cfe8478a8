"""Records; how decode kernels are cut and lowered. What they compute is in test_mosaic_launches.py."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.quant import mosaic
from jaxserve.quant.mosaic import decode, plan
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS
from tests.quants import dense, oracle, random_raw

TYPES = list(LAYOUTS)
FLOATS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}
BLOCKS_OF_32 = [name for name in TYPES if LAYOUTS[name].block == 32]
SHAPES = ((37888, 3584), (3584, 18944), (17920, 1536), (4096, 4096), (1536, 1536))


def raw_matrix(name, n, k, seed=0):
    if name in FLOATS:
        return np.random.default_rng(seed).standard_normal((n, k)).astype(FLOATS[name]).view(np.uint8)
    return random_raw(name, (n, k), seed)


def same_bits(got, want):
    numbers = ~np.isnan(want)
    assert got.shape == want.shape and (np.isnan(got) == ~numbers).all()
    np.testing.assert_array_equal(got.view(np.uint32)[numbers], want.view(np.uint32)[numbers])


@pytest.mark.parametrize("name", TYPES)
def test_every_bit_of_a_code_has_a_place_of_its_own(name):
    places = LAYOUTS[name].places
    assert sorted(places.reshape(-1)) == list(range(32 * LAYOUTS[name].lane_words))


@pytest.mark.parametrize("name", TYPES)
def test_records_can_be_copied_in_one_piece(name):
    assert LAYOUTS[name].words % 4 == 0  # the copy engine moves multiples of 16 bytes


@pytest.mark.parametrize("name", TYPES)
def test_unpacked_records_equal_gguf_py_bit_for_bit(name):
    raw = raw_matrix(name, 3 * ROWS, 2 * COLUMNS)
    records = mosaic.pack(name, raw)
    assert records.shape == (3, 2, LAYOUTS[name].words) and records.dtype == jnp.uint32
    same_bits(np.asarray(mosaic.unpack(name, records, 2 * COLUMNS)), dense(raw, name))


@pytest.mark.parametrize("name", TYPES)
def test_unpacked_records_equal_what_ggml_decodes(name):
    raw = np.concatenate([oracle()[f"{name}.{kind}"] for kind in ("raw", "rnd_raw")])
    want = np.concatenate([oracle()[f"{name}.{kind}"] for kind in ("deq", "rnd_deq")])
    spare = -len(raw) % ROWS
    records = mosaic.pack(name, np.pad(raw, ((0, spare), (0, 0))))
    same_bits(np.asarray(mosaic.unpack(name, records, want.shape[1]))[: len(want)], want)


@pytest.mark.parametrize("name", BLOCKS_OF_32)
def test_columns_past_the_last_are_weights_of_zero(name):
    raw = raw_matrix(name, ROWS, COLUMNS + 96)
    records = mosaic.pack(name, raw)
    whole = np.asarray(mosaic.unpack(name, records, 2 * COLUMNS))
    same_bits(whole[:, : COLUMNS + 96], dense(raw, name))
    assert not whole[:, COLUMNS + 96 :].any()


def test_a_stack_of_matrices_is_packed_matrix_by_matrix():
    stack = np.stack([raw_matrix("Q4_K", 2 * ROWS, COLUMNS, seed) for seed in range(3)])
    records = mosaic.pack("Q4_K", stack)
    assert records.shape == (3, 2, 1, LAYOUTS["Q4_K"].words)
    for one, raw in zip(records, stack, strict=True):
        np.testing.assert_array_equal(one, mosaic.pack("Q4_K", raw))


def test_matrices_without_a_record_form_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="IQ1_S has no record form"):
        mosaic.pack("IQ1_S", np.zeros((16, 50), np.uint8))
    with pytest.raises(ValueError, match="multiple of 16 rows"):
        mosaic.pack("Q8_0", np.zeros((17, 34), np.uint8))
    assert not mosaic.supported("IQ1_S", 16, 256)
    assert not mosaic.supported("Q8_0", 17, 256)
    assert not mosaic.supported("Q4_K", 16, 288)
    assert mosaic.supported("Q4_0", 16, 288)


# ---- plans and lowering


def lowered(name, n, k, rows, dtype=jnp.float32):
    records = jax.ShapeDtypeStruct((n // ROWS, -(-k // COLUMNS), LAYOUTS[name].words), jnp.uint32)
    x = jax.ShapeDtypeStruct((rows, k), dtype)
    traced = decode.decode_matmul.trace(x, records, name, k)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("name", TYPES)
def test_every_type_lowers_for_cuda(name):
    assert "mosaic_gpu" in lowered(name, 4096, 4096, 8)


@pytest.mark.parametrize("shape", [*SHAPES, (151936, 1536), (16, 32), (49152, 576)], ids=str)
def test_every_shape_lowers_for_cuda(shape):
    assert "mosaic_gpu" in lowered("Q8_0", *shape, 1, jnp.bfloat16)


def test_the_expert_form_lowers_for_cuda():
    records = jax.ShapeDtypeStruct((128, 48, 8, LAYOUTS["Q4_K"].words), jnp.uint32)
    x, index = jax.ShapeDtypeStruct((8, 2048), jnp.float16), jax.ShapeDtypeStruct((8,), jnp.int32)
    traced = decode.expert_decode_matmul.trace(x, records, index, "Q4_K", 2048)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("shape", [*SHAPES, (151936, 1536), (16, 32), (49152, 576)], ids=str)
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q8_0", "F16"])
def test_a_plan_covers_the_matrix_in_one_wave(name, shape):
    row_tiles, chunks = shape[0] // ROWS, -(-shape[1] // COLUMNS)
    record = LAYOUTS[name].words * 4
    p = plan.plan(row_tiles, chunks, record)
    assert p.groups * p.splits <= plan.MULTIPROCESSORS
    assert (p.groups - 1) * p.tiles < row_tiles <= p.groups * p.tiles
    assert (p.splits - 1) * p.chunks < chunks <= p.splits * p.chunks
    assert p.row_warps * p.chunks <= 16
    assert p.warps * p.stages * record <= plan.RING_BYTES and p.stages >= min(2, p.tiles_per_warp)


def test_the_order_of_summation_does_not_depend_on_the_number_of_experts():
    cuts = {(p.chunks, p.splits) for p in (plan.plan(48, 12, 2368, copies) for copies in (1, 2, 8, 64))}
    assert len(cuts) == 1


def test_wrong_arguments_are_named():
    records = jnp.zeros((1, 1, LAYOUTS["Q8_0"].words), jnp.uint32)
    for x, message in (
        (jnp.zeros((9, 256)), "9 rows"),
        (jnp.zeros((1, 128)), "do not fit"),
        (jnp.zeros((1, 256), jnp.int32), "int32"),
    ):
        with pytest.raises(ValueError, match=message):
            mosaic.decode_matmul(x, records, "Q8_0", 256)
    with pytest.raises(ValueError, match="no decode kernel"):
        mosaic.decode_matmul(jnp.zeros((1, 255)), records, "Q8_0", 255)
    with pytest.raises(ValueError, match="index"):
        mosaic.expert_decode_matmul(jnp.zeros((2, 256)), records[None], jnp.zeros(3, jnp.int32), "Q8_0", 256)
