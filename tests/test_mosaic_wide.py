"""How wide and decoding kernels are cut, chosen, lowered. What they compute: test_mosaic_launches.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.quant import mosaic
from jaxserve.quant.mosaic import by_rows, wide
from jaxserve.quant.mosaic.records import COLUMNS, LAYOUTS, ROWS
from jaxserve.quant.mosaic.wide_plan import SHARED_BYTES, wide_plan

TYPES = list(LAYOUTS)


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


def lowered(function, *arguments, **options):
    return function.trace(*arguments, **options).lower(lowering_platforms=("cuda",)).as_text()


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
    index = jax.ShapeDtypeStruct((4096,), jnp.int32)
    for rows in ({}, {"index": index}):
        assert "mosaic_gpu" in lowered(wide.grouped_wide_matmul, x, sizes, records, "Q4_K", 2048, **rows)
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
