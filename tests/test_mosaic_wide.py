"""Decoding and wide products of records, without a GPU: the arithmetic on an emulated warp, and lowering."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import ptx
from jaxserve.quant import mosaic
from jaxserve.quant.mosaic import by_rows, products, weights, wide
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS
from jaxserve.quant.mosaic.slots import plain_slot_order
from jaxserve.quant.mosaic.wide_plan import SHARED_BYTES, wide_plan
from tests import emulated_warp
from tests.quants import dense, oracle
from tests.test_mosaic_records import raw_matrix, same_bits

TYPES = list(LAYOUTS)


@pytest.fixture
def warp(monkeypatch):
    emulated_warp.install(monkeypatch, ptx, products, weights)
    return emulated_warp


def decoded(monkeypatch, name, record):
    """What one warp decodes of a record: f32 [16, 256]."""
    monkeypatch.setattr(products, "load_shared", emulated_warp.memory(record))
    lane = emulated_warp.Register(np.arange(32, dtype=np.uint32))
    k = products.lane_constants(name, lane)
    tile = np.empty((ROWS, COLUMNS), np.float32)
    for step, rows in enumerate(weights.exact_weights(name, emulated_warp.constant(0), k)):
        for half, values in enumerate(rows):
            for i, value in enumerate(values):
                tile[emulated_warp.G + 8 * half, 16 * step + 4 * emulated_warp.T + i] = value.lanes
    return tile


@pytest.mark.parametrize("name", TYPES)
def test_a_warp_decodes_what_gguf_py_decodes_bit_for_bit(name, warp, monkeypatch):
    raw = np.concatenate([oracle()[f"{name}.{kind}"] for kind in ("raw", "rnd_raw")])
    values = np.concatenate([oracle()[f"{name}.{kind}"] for kind in ("deq", "rnd_deq")])
    records = np.asarray(mosaic.pack(name, np.pad(raw, ((0, -len(raw) % ROWS), (0, 0)))))
    with np.errstate(over="ignore", invalid="ignore"):
        tiles = [[decoded(monkeypatch, name, record) for record in row] for row in records]
    got = np.concatenate([np.concatenate(row, 1) for row in tiles])
    same_bits(got[: len(values), : values.shape[1]], values)


def tensor_operand(monkeypatch, name, record):
    """The weights that one warp hands to the tensor core, their power of two undone: f32 [16, 256]."""
    monkeypatch.setattr(products, "load_shared", emulated_warp.memory(record))
    lane = emulated_warp.Register(np.arange(32, dtype=np.uint32))
    k = products.lane_constants(name, lane)
    unpack = emulated_warp.unpack_bf16x2 if name == "BF16" else emulated_warp.unpack_f16x2
    tile = np.empty((ROWS, COLUMNS), np.float32)
    for s, step in enumerate(weights.tensor_weights(name, emulated_warp.constant(0), k)):
        for i, register in enumerate(step):
            for p, value in enumerate(unpack(register)):
                tile[emulated_warp.G + 8 * (i % 2), 16 * s + 4 * emulated_warp.T + 2 * (i // 2) + p] = (
                    value.lanes
                )
    return tile / 2.0 ** weights.TENSOR_SHIFT[name]


@pytest.mark.parametrize("name", TYPES)
def test_tensor_core_weights_are_exact_to_half_precision(name, warp, monkeypatch):
    raw = raw_matrix(name, ROWS, COLUMNS)
    (record,) = np.asarray(mosaic.pack(name, raw))[0]
    got, want = tensor_operand(monkeypatch, name, record), dense(raw, name)
    if name in ("F16", "BF16", "MXFP4"):
        np.testing.assert_array_equal(got, want)
    assert np.linalg.norm(got - want) < 6e-4 * np.linalg.norm(want)


# ---- operands that meet


def steps_of(operand, of):
    """Operand B of `slot_order` → f32 [parts, chunk, step, slot, row]."""
    dtype = {"f16": np.float16, "bf16": jnp.bfloat16}[of]
    values = np.asarray(operand).view(dtype).astype(np.float32)
    parts, halves, blocks, _ = values.shape
    values = values.reshape(parts, halves, blocks, 8, 2, 8, 8).transpose(0, 1, 3, 4, 6, 2, 5)
    return values.reshape(parts, halves // 2, 16, 16, blocks * 8)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", ["Q4_K", "MXFP4", "F16", "BF16"])
def test_weights_and_activations_meet_column_by_column(name, dtype, warp, monkeypatch):
    of = "bf16" if name == "BF16" else "f16"
    raw, k = raw_matrix(name, ROWS, 2 * COLUMNS), 2 * COLUMNS
    x = jnp.asarray(np.random.default_rng(0).standard_normal((11, k)) * 2000, dtype)
    operand, inverse = plain_slot_order(x, of)
    b = steps_of(operand, of)
    y = np.zeros((ROWS, b.shape[-1]))
    unpack = emulated_warp.unpack_bf16x2 if of == "bf16" else emulated_warp.unpack_f16x2
    lane = emulated_warp.Register(np.arange(32, dtype=np.uint32))
    for chunk, record in enumerate(np.asarray(mosaic.pack(name, raw))[0]):
        monkeypatch.setattr(products, "load_shared", emulated_warp.memory(record))
        lanes = products.lane_constants(name, lane)
        for s, step in enumerate(weights.tensor_weights(name, emulated_warp.constant(0), lanes)):
            a = np.zeros((ROWS, 16))
            for i, register in enumerate(step):
                for p, value in enumerate(unpack(register)):
                    a[emulated_warp.G + 8 * (i % 2), 8 * (i // 2) + 2 * emulated_warp.T + p] = value.lanes
            y += a @ b[:, chunk, s].sum(0)
    y = (y * np.asarray(inverse) / 2.0 ** weights.TENSOR_SHIFT[name])[:, : len(x)].T
    want = np.asarray(x, np.float64) @ dense(raw, name).astype(np.float64).T
    assert np.linalg.norm(y - want) < 6e-4 * np.linalg.norm(want)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_rows_of_any_size_keep_their_precision(scale):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((3, 512)), jnp.float32) * scale
    operand, inverse = plain_slot_order(x, "f16")
    b = steps_of(operand, "f16")[0].reshape(2, 16, 2, 4, 2, 8).transpose(5, 0, 1, 3, 2, 4).reshape(8, 512)
    np.testing.assert_allclose(b[:3] * np.asarray(inverse)[:3, None], x, rtol=2**-11, atol=scale * 1e-8)
    assert not b[3:].any()


# ---- cuts


@pytest.fixture(scope="module")
def tile_table():
    return jax.jit(wide.tile_table, static_argnums=(1, 2))


@pytest.mark.parametrize("t_tile", [16, 64])
@pytest.mark.parametrize("most", [1, 3, 9, 200])
def test_every_row_lies_in_one_tile_of_its_expert(most, t_tile, tile_table):
    experts, rng = 24, np.random.default_rng(most)
    for _ in range(10):
        sizes = rng.integers(0, most + 1, experts) * rng.integers(0, 2, experts)
        sizes[rng.integers(experts)] += 1
        rows, owner = sizes.sum(), np.repeat(np.arange(experts), sizes)
        table = np.asarray(tile_table(jnp.asarray(sizes, jnp.int32), t_tile, 600))
        used = table[table[:, 0] < experts]
        assert len(used) <= wide.most_tiles(rows, experts, t_tile) and not (used[:, 1] % 8).any()
        covered = [
            (t, expert)
            for expert, first, start, end in used
            for t in range(max(first, start), min(first + t_tile, end))
        ]
        assert sorted(covered) == list(zip(range(rows), owner, strict=True))


@pytest.mark.parametrize("rows", [9, 16, 33, 64, 100, 2000])
@pytest.mark.parametrize(
    "shape", [(37888, 3584), (3584, 18944), (2048, 1536), (1536, 8960), (16, 32)], ids=str
)
@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "Q8_0", "F16", "BF16"])
def test_a_plan_covers_the_matrix_and_fits_the_multiprocessor(name, shape, rows):
    row_tiles, chunks = shape[0] // ROWS, -(-shape[1] // COLUMNS)
    p = wide_plan(name, rows, row_tiles, chunks, 2 if name == "BF16" else 1)
    assert p.shared_bytes <= SHARED_BYTES
    assert (p.row_blocks - 1) * 4 * p.row_groups < row_tiles <= p.row_blocks * 4 * p.row_groups
    assert (p.splits - 1) * p.chunks < chunks <= p.splits * p.chunks
    assert p.warps * p.record_stages + p.k_groups * p.operand_stages <= 128  # barriers


# ---- lowering


def lowered(function, *arguments):
    return function.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def abstract_records(name, n, k, *stack):
    return jax.ShapeDtypeStruct((*stack, n // ROWS, -(-k // COLUMNS), LAYOUTS[name].words), jnp.uint32)


@pytest.mark.parametrize("name", TYPES)
def test_every_kernel_of_every_type_lowers_for_cuda(name):
    records, ids = abstract_records(name, 1536, 1536), jax.ShapeDtypeStruct((5,), jnp.int32)
    x = jax.ShapeDtypeStruct((40, 1536), jnp.float32)
    assert "mosaic_gpu" in lowered(mosaic.dequantise, records, name, 1536, jnp.float16)
    assert "mosaic_gpu" in lowered(mosaic.take_rows, records, name, 1536, ids)
    assert "mosaic_gpu" in lowered(wide.wide_matmul, x, records, name, 1536)


@pytest.mark.parametrize("rows", [16, 128, 512])
@pytest.mark.parametrize("shape", [(37888, 3584), (3584, 18944), (1536, 8960)], ids=str)
def test_every_shape_lowers_for_cuda(shape, rows):
    x = jax.ShapeDtypeStruct((rows, shape[1]), jnp.bfloat16)
    assert "mosaic_gpu" in lowered(wide.wide_matmul, x, abstract_records("Q4_K", *shape), "Q4_K", shape[1])


def test_stacks_lower_for_cuda():
    x, sizes = jax.ShapeDtypeStruct((512, 2048), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    records = abstract_records("Q4_K", 768, 2048, 64)
    assert "mosaic_gpu" in lowered(wide.grouped_wide_matmul, x, sizes, records, "Q4_K", 2048)
    decoded = mosaic.dequantise.trace(records, "Q4_K", 2048, jnp.float32)
    assert decoded.out_info.shape == (64, 768, 2048)


# ---- the choice


def kernels(rows, n, k, name="Q4_K"):
    x, w = jax.ShapeDtypeStruct((rows, k), jnp.float32), abstract_records(name, n, k)
    text = str(jax.make_jaxpr(lambda x, w: by_rows.matmul(x, w, name, k))(x, w))
    return {form for form in ("decode_", "wide_", "dequantise_") if form in text}


def test_the_number_of_rows_chooses_the_kernel():
    assert kernels(8, 4096, 4096) == {"decode_"}
    assert kernels(9, 4096, 4096) == kernels(4096, 4096, 4096) == {"wide_"}
    most = by_rows.MOST_WIDE_ROWS["BF16"]
    assert kernels(most, 4096, 4096, "BF16") == {"wide_"}
    assert kernels(most + 1, 4096, 4096, "BF16") == {"dequantise_"}


def test_a_decoded_matrix_takes_bounded_memory():
    assert kernels(4096, 151936, 3584, "BF16") == {"wide_"}


def test_wrong_arguments_are_named():
    records, x = jnp.zeros((1, 1, LAYOUTS["Q8_0"].words), jnp.uint32), jnp.zeros((9, 256))
    with pytest.raises(ValueError, match="do not fit"):
        wide.wide_matmul(x[:, :128], records, "Q8_0", 256)
    with pytest.raises(ValueError, match="int32"):
        wide.wide_matmul(x.astype(jnp.int32), records, "Q8_0", 256)
    with pytest.raises(ValueError, match="group_sizes"):
        wide.grouped_wide_matmul(x, jnp.zeros(2, jnp.int32), records[None], "Q8_0", 256)
    with pytest.raises(ValueError, match="no record form"):
        mosaic.dequantise(records, "IQ1_S", 256, jnp.float32)
    with pytest.raises(ValueError, match="not a Q4_0 matrix"):
        mosaic.dequantise(records, "Q4_0", 256, jnp.float32)
    with pytest.raises(ValueError, match="int8"):
        mosaic.dequantise(records, "Q8_0", 256, jnp.int8)
    with pytest.raises(ValueError, match="ids"):
        mosaic.take_rows(records, "Q8_0", 256, jnp.zeros((1, 1), jnp.int32))
