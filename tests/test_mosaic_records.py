"""Records and the arithmetic of the decode kernels, without a GPU.

The arithmetic runs on an emulated warp; what only a GPU can show (copies, barriers, speed) is in
test_mosaic_gpu.py.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve import ptx
from jaxserve.quant import mosaic
from jaxserve.quant.mosaic import activations, decode, plan, products
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS
from tests import emulated_warp
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


# ---- arithmetic, on an emulated warp


@pytest.fixture
def warp(monkeypatch):
    emulated_warp.install(monkeypatch, ptx, products, activations)
    return emulated_warp


def emulated_product(monkeypatch, name, x, records, k, gain=None):
    """What one warp computes for each row tile and chunk, summed over chunks; with a norm's gain also Σx² of
    every row.
    """
    lane = emulated_warp.constant(0) + emulated_warp.Register(np.arange(32, dtype=np.uint32))
    lanes = products.lane_constants(name, lane)
    batch = len(x)
    column = emulated_warp.select(lanes.g < batch, lanes.g, emulated_warp.constant(batch - 1))
    # what lies beyond a row's end must not matter
    beyond = np.full(COLUMNS, np.nan, x.dtype)
    gains = [] if gain is None else [gain, beyond]
    padded = np.concatenate([np.asarray(x).reshape(-1), beyond, *gains])
    monkeypatch.setattr(ptx, "load_global", emulated_warp.memory(padded))
    squares = np.zeros(batch)
    y = np.zeros((batch, records.shape[0] * ROWS), np.float32)
    chunks = records.shape[1]
    for chunk in range(chunks):
        address = (column * k + chunk * COLUMNS + lanes.t * 4) * x.dtype.itemsize
        is_whole = emulated_warp.Register(np.full(32, chunk < chunks - 1))
        gain_address = None
        if gain is not None:
            gain_address = (lanes.t * 4 + chunk * COLUMNS + batch * k + COLUMNS) * 4
        xs, inverse, share = activations.load_chunk(
            name, address, gain_address, x.dtype, k - (chunks - 1) * COLUMNS, is_whole, lanes
        )
        if gain is not None:
            squares += share.lanes.reshape(8, 4).sum(1)[:batch]
        for tile, record in enumerate(records[:, chunk]):
            monkeypatch.setattr(products, "load_shared", emulated_warp.memory(record))
            c = products.tile_product(name, emulated_warp.constant(0), xs, lanes)
            for i in range(4):
                rows, columns = emulated_warp.G + 8 * (i // 2), 2 * emulated_warp.T + i % 2
                undo = 1 if inverse is None else inverse.lanes[4 * columns]
                here = columns < batch
                y[columns[here], tile * ROWS + rows[here]] += (c[i].lanes * undo)[here]
    return y if gain is None else (y, squares)


def error(y, x, w):
    exact = np.asarray(x, np.float64) @ w.astype(np.float64).T
    return np.linalg.norm(y - exact) / np.linalg.norm(exact)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", TYPES)
def test_a_warps_product_is_exact_but_for_x_in_half_precision(name, dtype, warp, monkeypatch):
    raw = raw_matrix(name, ROWS, COLUMNS)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, COLUMNS)) * np.exp(rng.standard_normal(COLUMNS))
    x = np.asarray(jnp.asarray(x, dtype))
    y = emulated_product(monkeypatch, name, x, np.asarray(mosaic.pack(name, raw)), COLUMNS)
    assert error(y, x, dense(raw, name)) < (1e-4 if name == "BF16" else 6e-4)


@pytest.mark.parametrize("k", [2 * COLUMNS, COLUMNS + 32])
@pytest.mark.parametrize("name", ["Q8_0", "BF16"])
def test_a_norms_gain_is_multiplied_in_and_the_squares_are_summed(name, k, warp, monkeypatch):
    raw = raw_matrix(name, ROWS, k)
    rng = np.random.default_rng(1)
    x, gain = rng.standard_normal((3, k)).astype(np.float32), rng.standard_normal(k).astype(np.float32)
    y, squares = emulated_product(monkeypatch, name, x, np.asarray(mosaic.pack(name, raw)), k, gain)
    assert error(y, x * gain, dense(raw, name)) < 6e-4
    np.testing.assert_allclose(squares, (x.astype(np.float64) ** 2).sum(1), rtol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_halves_that_need_no_rounding_give_the_exact_product(name, warp, monkeypatch):
    raw = raw_matrix(name, ROWS, COLUMNS)
    x = np.random.default_rng(1).integers(-8, 9, (8, COLUMNS)).astype(np.float16)
    y = emulated_product(monkeypatch, name, x, np.asarray(mosaic.pack(name, raw)), COLUMNS)
    assert error(y, x, dense(raw, name)) < 1e-5


@pytest.mark.parametrize("name", BLOCKS_OF_32)
def test_what_lies_past_the_last_column_does_not_matter(name, warp, monkeypatch):
    k = COLUMNS + 32
    raw = raw_matrix(name, ROWS, k)
    x = np.random.default_rng(1).standard_normal((1, k)).astype(np.float32)
    y = emulated_product(monkeypatch, name, x, np.asarray(mosaic.pack(name, raw)), k)
    assert error(y, x, dense(raw, name)) < 6e-4


@pytest.mark.parametrize("size", [1e-30, 1e-5, 1e6, 1e30])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_activations_of_any_size_keep_their_precision(name, size, warp, monkeypatch):
    raw = raw_matrix(name, ROWS, COLUMNS)
    x = (np.random.default_rng(1).standard_normal((2, COLUMNS)) * size).astype(np.float32)
    x[1] = 0
    y = emulated_product(monkeypatch, name, x, np.asarray(mosaic.pack(name, raw)), COLUMNS)
    assert error(y, x, dense(raw, name)) < 6e-4
    assert not y[1].any()


def test_half_precision_activations_are_brought_into_range_too(warp, monkeypatch):
    raw = raw_matrix("Q8_0", ROWS, COLUMNS)
    for size in (60000, 1e-6):
        x = (np.random.default_rng(1).uniform(-1, 1, (2, COLUMNS)) * size).astype(np.float16)
        y = emulated_product(monkeypatch, "Q8_0", x, np.asarray(mosaic.pack("Q8_0", raw)), COLUMNS)
        assert error(y, x, dense(raw, "Q8_0")) < 6e-4


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
