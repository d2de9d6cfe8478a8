"""Decoding and products of many rows on a GPU: values, the same bits on every call and among other rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.quant import mosaic
from jaxserve.quant.mosaic import slots
from jaxserve.quant.mosaic.records import LAYOUTS, ROWS
from tests.quants import dense
from tests.test_mosaic_gpu import activations, error, exact
from tests.test_mosaic_records import raw_matrix, same_bits

pytestmark = pytest.mark.gpu

TYPES = list(LAYOUTS)
DTYPES = ("float32", "float16", "bfloat16")
LARGEST_ERROR = 6e-4
REPEATS = 5


def tall(name, n, k):
    """Records of N rows that repeat the first 512, and those in f32."""
    raw = raw_matrix(name, min(n, 512), k)
    some = mosaic.pack(name, raw)
    return jnp.resize(some, (n // ROWS, *some.shape[1:])), dense(raw, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TYPES)
def test_decoded_matrices_are_gguf_pys_rounded_once(name, dtype):
    for k in (512, 288) if LAYOUTS[name].block == 32 else (512,):
        raw = raw_matrix(name, 64, k)
        stack = mosaic.pack(name, np.stack([raw, raw]))
        got = mosaic.dequantise(stack, name, k, jnp.dtype(dtype))
        want = jnp.asarray(dense(raw, name)).astype(dtype)
        assert got.shape == (2, 64, k) and got.dtype == dtype
        for matrix in got:
            same_bits(*(np.asarray(v.astype(jnp.float32)) for v in (matrix, want)))


@pytest.mark.parametrize("name", TYPES)
def test_taken_rows_are_gguf_pys_and_ids_beyond_mean_the_first_or_last(name):
    k = 288 if LAYOUTS[name].block == 32 else 2304
    raw = raw_matrix(name, 64, k)
    ids = np.array([0, 63, 17, 5, 8, 64, 10**6, -1, -(10**9)], np.int32)
    got = mosaic.take_rows(mosaic.pack(name, raw), name, k, jnp.asarray(ids))
    same_bits(np.asarray(got), dense(raw, name)[np.clip(ids, 0, 63)])


@pytest.mark.parametrize("rows", [19, 1035])
@pytest.mark.parametrize("of", ["f16", "bf16"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_prepared_as_in_plain_jax(dtype, of, rows):
    x = activations(rows, 9568, jnp.dtype(dtype)) * 1e3
    (operand, inverse), (plain, plain_inverse) = slots.slot_order(x, of), slots.plain_slot_order(x, of)

    def by_row(v):
        cores = np.asarray(v.reshape(*v.shape[:3], 16, 8, 4)).transpose(2, 4, 0, 1, 3, 5)
        return cores.reshape(v.shape[2] * 8, -1)[:rows]

    np.testing.assert_array_equal(by_row(operand), by_row(plain))
    np.testing.assert_array_equal(inverse[:rows], plain_inverse[:rows])


@pytest.mark.parametrize("shape", [(9, 2048, 1536), (100, 1536, 1536), (64, 1024, 8960)], ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_products_are_exact_to_half_precision_repeatable_and_independent_of_other_rows(name, shape):
    rows, n, k = shape
    records, w = tall(name, n, k)
    x = activations(rows, k)
    y = mosaic.wide_matmul(x, records, name, k)
    assert error(y, exact(x, w, n)) < LARGEST_ERROR
    for _ in range(REPEATS):
        assert (mosaic.wide_matmul(x, records, name, k) == y).all()
    alone = mosaic.wide_matmul(x.at[1:].set(jnp.nan), records, name, k)
    assert (alone[0] == y[0]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["Q4_K", "F16", "BF16"])
def test_activations_of_every_type_are_taken(name, dtype):
    records, w = tall(name, 1536, 512)
    x = activations(33, 512, jnp.dtype(dtype))
    assert error(mosaic.wide_matmul(x, records, name, 512), exact(x, w, 1536)) < LARGEST_ERROR


@pytest.mark.parametrize("k", [32, 288, 576])
@pytest.mark.parametrize("name", [name for name in TYPES if LAYOUTS[name].block == 32])
def test_a_last_chunk_and_a_last_row_block_may_be_small(name, k):
    records, w = tall(name, 528, k)
    x = activations(17, k)
    assert error(mosaic.wide_matmul(x, records, name, k), exact(x, w, 528)) < LARGEST_ERROR


@pytest.mark.parametrize("rows", [20, 300, 3000])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4"])
def test_rows_meet_their_own_expert(name, rows):
    n, k, experts = 192, 768, 24
    raw = np.stack([raw_matrix(name, n, k, seed) for seed in range(experts)])
    owner = np.sort(np.random.default_rng(rows).integers(0, experts, rows) ** 2 // experts)
    sizes = jnp.asarray(np.bincount(owner, minlength=experts), jnp.int32)
    x, records = activations(rows, k), mosaic.pack(name, raw)
    y = mosaic.grouped_wide_matmul(x, sizes, records, name, k)
    order = np.random.default_rng(0).permutation(rows)
    index = jnp.asarray(np.argsort(order), jnp.int32)
    assert (mosaic.grouped_wide_matmul(x[order], sizes, records, name, k, index=index) == y).all()
    want = np.empty((rows, n))
    for expert in np.unique(owner):
        want[owner == expert] = exact(x[owner == expert], dense(raw[expert], name), n)
    assert error(y, want) < LARGEST_ERROR
    for _ in range(REPEATS):
        assert (mosaic.grouped_wide_matmul(x, sizes, records, name, k) == y).all()


def test_rows_of_very_different_size_keep_their_precision():
    records, w = tall("Q4_K", 512, 1536)
    x = activations(40, 1536) * jnp.logspace(-25, 25, 40)[:, None]
    y, want = np.asarray(mosaic.wide_matmul(x, records, "Q4_K", 1536)), exact(x, w, 512)
    assert max(error(a, b) for a, b in zip(y, want, strict=True)) < LARGEST_ERROR


@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
@pytest.mark.parametrize("rows", [8, 9, 2000])
def test_every_number_of_rows_gives_the_same_product(name, rows):
    records, w = tall(name, 512, 1536)
    x = activations(rows, 1536)
    y = jax.jit(mosaic.matmul, static_argnums=(2, 3))(x, records, name, 1536)
    assert error(y, exact(x, w, 512)) < 3e-3
