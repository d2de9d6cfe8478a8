"""x @ W.T from packed and plain matrices, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import quant
from jaxserve.quant import plain
from jaxserve.quant.formats import FORMATS
from tests.quants import LAYOUTS, dense, packed, random_raw, relative_error

EXACT, TENSOR_CORE = 1e-5, 3e-3  # relative error of f32 and of bf16 products
MANY = plain.FEW_ROWS + 1
GROUPS = [(0, 65, 0, 128, 3), (150, 0, 0, 0, 0), (0, 0, 0, 0, 150), (9, 9, 9, 9, 9), (1, 0, 1, 0, 0)]


def gaussian(*shape):
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)


def on_cpu(w):
    return jax.device_put(w, jax.local_devices(backend="cpu")[0])


@jax.jit
def one_and_many(x, w):
    """The products of x[0] and of all of x: both forms in one program, compiling is what takes time here."""
    return quant.matmul(x[:1], w), quant.matmul(x, w)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_close_to_float64(name, layout):
    raw, x = random_raw(name, (96, 512)), gaussian(MANY, 512)
    one, many = one_and_many(x, packed(raw, name, layout))
    assert one.shape == (1, 96) and one.dtype == jnp.float32
    assert many.shape == (MANY, 96) and many.dtype == jnp.float32
    assert relative_error(one, x[:1], dense(raw, name)) < EXACT
    assert relative_error(many, x, dense(raw, name)) < (TENSOR_CORE if layout == "rows" else EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(512, 96), (576, 1536), (1, 512)])
def test_shapes_need_not_be_square(layout, shape):
    raw, x = random_raw("Q4_0", shape), gaussian(2, shape[1])
    y = jax.jit(quant.matmul)(x, packed(raw, "Q4_0", layout))
    assert relative_error(y, x, dense(raw, "Q4_0")) < EXACT


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leading_axes_of_x_are_kept(layout):
    raw, x = random_raw("Q8_0", (24, 64)), gaussian(2, 3, 64)
    w = packed(raw, "Q8_0", layout)
    np.testing.assert_allclose(quant.matmul(x, w), x @ dense(raw, "Q8_0").T, rtol=0.02, atol=0.05)
    assert quant.matmul(x[0, 0], w).shape == (24,)


def test_half_precision_x_gives_float32():
    raw, x = random_raw("Q8_0", (24, 512)), gaussian(2, 512).astype(jnp.bfloat16)
    y = quant.matmul(x, packed(raw, "Q8_0", "rows"))
    assert y.dtype == jnp.float32
    assert relative_error(y, x, dense(raw, "Q8_0")) < EXACT


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_plain_matrices_multiply_exactly_on_cpu(dtype):
    w, x = on_cpu(jnp.asarray(gaussian(96, 512), dtype)), gaussian(MANY, 512)
    for y in one_and_many(x, w):
        assert relative_error(y, x[: len(y)], np.asarray(w, np.float64)) < EXACT


@pytest.mark.parametrize("kind", ["packed", "plain"])
def test_a_matrix_larger_than_a_tile_is_multiplied_tile_by_tile(kind, monkeypatch):
    monkeypatch.setattr(plain, "TILE_ELEMENTS", 40 * 512)
    raw, x = random_raw("Q4_1", (96, 512)), gaussian(3, 512)  # tiles of 40, 40 and 16 rows
    values = dense(raw, "Q4_1").astype(jnp.bfloat16)
    w = on_cpu(packed(raw, "Q4_1", "columns") if kind == "packed" else values)
    product = jax.jit(quant.matmul)
    text = product.lower(x, w).as_text()
    assert "while" in text and "96x512xf32" not in text and "512x96xf32" not in text
    assert relative_error(product(x, w), x, np.asarray(quant.dequantise(w))) < EXACT


def test_a_row_that_is_not_a_number_leaves_the_others_alone():
    raw, x = random_raw("Q4_K", (32, 256)), gaussian(3, 256)
    w = packed(raw, "Q4_K", "columns")
    y = quant.matmul(np.concatenate([np.full((1, 256), np.nan, np.float32), x]), w)
    assert np.isnan(y[0]).all()
    np.testing.assert_allclose(y[1:], quant.matmul(x, w), rtol=1e-5, atol=1e-5)


def test_a_mismatched_x_is_refused():
    with pytest.raises(AssertionError):
        quant.matmul(gaussian(2, 96), packed(random_raw("Q8_0", (8, 64)), "Q8_0", "rows"))


def experts_of(name, layout, shape=(5, 24, 512)):
    raw = random_raw(name, shape)
    return packed(raw, name, layout), dense(raw, name)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "MXFP4"])
def test_each_row_meets_its_own_expert(name, layout):
    w, values = experts_of(name, layout)
    x, index = gaussian(6, 512), jnp.array([4, 0, 0, 2, 4, 3])
    y = jax.jit(quant.expert_matmul)(x, w, index)
    assert relative_error(y[:, None], x[:, None], values[index]) < EXACT


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_plain_experts_work_like_packed_ones(dtype):
    w, x = on_cpu(jnp.asarray(gaussian(5, 24, 512), dtype)), gaussian(3, 512)
    index, values = jnp.array([4, 0, 4]), np.asarray(w, np.float32)
    assert relative_error(quant.expert_matmul(x, w, index)[:, None], x[:, None], values[index]) < EXACT
    y = jax.jit(quant.grouped_matmul)(x, w, jnp.array([1, 0, 2, 0, 0]))
    assert relative_error(y[:, None], x[:, None], values[jnp.array([0, 2, 2])]) < EXACT


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sizes", GROUPS)
def test_sorted_rows_meet_their_groups_expert(layout, sizes):
    w, values = experts_of("Q4_K", layout, (5, 24, 256))
    x = gaussian(sum(sizes), 256)
    y = jax.jit(quant.grouped_matmul)(x, w, jnp.array(sizes))
    want = np.repeat(values, sizes, 0)
    assert relative_error(y[:, None], x[:, None], want) < (TENSOR_CORE if layout == "rows" else EXACT)
    index = np.random.default_rng(0).permutation(len(x))
    shuffled = np.empty_like(x)
    shuffled[index] = x
    np.testing.assert_array_equal(quant.grouped_matmul(shuffled, w, jnp.array(sizes), index=index), y)


@pytest.mark.parametrize("name", FORMATS)
def test_gpu_forms_lower_for_cuda(name):
    w, x = packed(random_raw(name, (32, 512)), name, "rows"), jnp.ones((MANY, 512))
    one_and_many.trace(x, w).lower(lowering_platforms=("cuda",))


def test_the_few_row_form_holds_no_decoded_matrix():
    n, k = 64, 1024
    w = packed(random_raw("Q4_K", (n, k)), "Q4_K", "rows")
    few = jax.jit(quant.matmul).trace(jnp.ones((1, k)), w).lower(lowering_platforms=("cuda",)).as_text()
    many = jax.jit(quant.matmul).trace(jnp.ones((MANY, k)), w).lower(lowering_platforms=("cuda",)).as_text()
    # only a part at a time is decoded, and goes into the one reduction: nothing puts the parts together
    assert "dot_general" not in few and "stablehlo.concatenate" not in few
    assert few.count("stablehlo.reduce(") == 1
    assert "dot_general" in many and f"{n}x{k}xbf16" in many


def test_matrices_are_decoded_when_they_are_needed():
    weights = [packed(random_raw("Q4_0", (512, 512), seed), "Q4_0", "columns") for seed in range(8)]

    @jax.jit
    def chain(x, weights):
        for w in weights:
            x = quant.matmul(x, w) * 0.01
        return x

    temporaries = chain.lower(jnp.ones((1, 512)), weights).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < 2.5 * 4 * 512 * 512  # not all eight


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_jit_the_result_is_the_same(layout):
    w, x = packed(random_raw("Q8_0", (32, 64)), "Q8_0", layout), gaussian(2, 64)
    jitted = jax.jit(quant.matmul)(x, w)
    with jax.disable_jit():
        np.testing.assert_allclose(quant.matmul(x, w), jitted, rtol=1e-5, atol=1e-5)
