"""The decode kernels on a GPU: values, the same bits on every call, rows independent of their neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.activation import ACTIVATIONS
from jaxserve.ops.norm import rms_norm
from jaxserve.quant import mosaic
from jaxserve.quant.mosaic.records import LAYOUTS
from tests.quants import dense
from tests.test_mosaic_records import SHAPES, raw_matrix

pytestmark = pytest.mark.gpu

TYPES = list(LAYOUTS)
DISTINCT_ROWS = 512  # of a matrix; the rest repeats them
REPEATS = 10


@pytest.fixture(scope="module")
def matrix():
    """(type, n, k) → records, and the first `DISTINCT_ROWS` rows in f32. The last one asked for is kept."""
    kept = {}

    def make(name, n, k):
        if (name, n, k) not in kept:
            kept.clear()
            raw = raw_matrix(name, DISTINCT_ROWS, k)
            some = mosaic.pack(name, raw)
            kept[name, n, k] = jnp.resize(some, (n // 16, *some.shape[1:])), dense(raw, name)
        return kept[name, n, k]

    return make


def activations(rows, k, dtype=jnp.float32):
    noise = jax.random.normal(jax.random.key(rows), (rows, k))
    return (noise * jnp.exp(jax.random.normal(jax.random.key(0), (k,)))).astype(dtype)


def exact(x, w, n):
    """x wᵀ in float64, the rows of w repeated up to n."""
    product = np.asarray(x.astype(jnp.float32), np.float64) @ w.astype(np.float64).T
    return np.resize(product.T, (n, len(x))).T


def error(y, want):
    return np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", TYPES)
def test_products_are_exact_to_half_precision_repeatable_and_independent_of_other_rows(name, shape, matrix):
    (n, k), (records, w) = shape, matrix(name, *shape)
    x = activations(8, k)
    y = mosaic.decode_matmul(x, records, name, k)
    assert error(y, exact(x, w, n)) < 1e-3
    # small matrices stay in the L2 cache: a copy then arrives early enough to show a race
    for _ in range(REPEATS):
        assert (mosaic.decode_matmul(x, records, name, k) == y).all()
    for rows in (slice(0, 1), slice(7, 8), slice(2, 5)):
        assert (mosaic.decode_matmul(x[rows], records, name, k) == y[rows]).all()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "F16", "BF16"])
def test_activations_of_every_type_are_taken(name, dtype, matrix):
    records, w = matrix(name, 1536, 1536)
    x = activations(3, 1536, dtype)
    assert error(mosaic.decode_matmul(x, records, name, 1536), exact(x, w, 1536)) < 1e-3


@pytest.mark.parametrize("k", [32, 288, 576, 896])
@pytest.mark.parametrize("name", [name for name in TYPES if LAYOUTS[name].block == 32])
def test_a_last_tile_that_is_not_full_adds_nothing(name, k, matrix):
    records, w = matrix(name, 512, k)
    # what follows a row in memory is the next row: here nothing a sum would survive
    x = jnp.concatenate([activations(1, k), jnp.full((1, k), jnp.nan)])
    y = mosaic.decode_matmul(x, records, name, k)[:1]
    assert error(y, exact(x[:1], w, 512)) < 1e-3


def test_matrices_of_a_single_tile_work(matrix):
    records, w = matrix("Q8_0", 16, 32)
    x = activations(8, 32)
    assert error(mosaic.decode_matmul(x, records, "Q8_0", 32), exact(x, w[:16], 16)) < 1e-3


@pytest.mark.parametrize("rows", [1, 3, 8, 40])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4"])
def test_each_row_meets_the_expert_it_chose(name, rows):
    n, k, experts = 768, 2048, 16
    raw = np.stack([raw_matrix(name, n, k, seed) for seed in range(experts)])
    records = mosaic.pack(name, raw)
    x = activations(rows, k)
    index = jnp.asarray(np.random.default_rng(0).integers(0, experts, rows), jnp.int32)
    y = mosaic.expert_decode_matmul(x, records, index, name, k)
    want = np.concatenate(
        [exact(x[i : i + 1], dense(raw[e], name), n) for i, e in enumerate(np.asarray(index))]
    )
    assert error(y, want) < 1e-3
    for _ in range(REPEATS):
        assert (mosaic.expert_decode_matmul(x, records, index, name, k) == y).all()
    last = mosaic.expert_decode_matmul(x[-1:], records, index[-1:], name, k)
    assert (last == y[-1:]).all()


@pytest.mark.parametrize("name", TYPES)
def test_packing_on_the_device_loses_nothing(name):
    raw = raw_matrix(name, 64, 512)
    unpacked = np.asarray(mosaic.unpack(name, mosaic.pack(name, raw), 512))
    np.testing.assert_array_equal(unpacked.view(np.uint32), dense(raw, name).view(np.uint32))


AROUND = {
    "norm": dict(gain=True),
    "norm and activation": dict(gain=True, activation="silu"),
    "activation": dict(activation="gelu"),
    "residual": dict(residual=True),
    "everything": dict(gain=True, activation="silu", residual=True),
}


@pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "BF16"])
@pytest.mark.parametrize("shape", [(2048, 1536), (17920, 1536), (1536, 8960), (64, 544)], ids=str)
def test_what_stands_around_a_product_rides_along(shape, name, rows, around, matrix):
    """544 columns end inside a chunk; 8960 are split over blocks, where XLA does the rest."""
    n, k = shape
    if k % LAYOUTS[name].block:
        pytest.skip(f"{name} has blocks of {LAYOUTS[name].block}")
    records, w = matrix(name, n, k)
    x = activations(rows, k)
    gain = jnp.linspace(0.5, 1.5, k) if "gain" in around else None
    activation = around.get("activation")
    out = n if activation is None else n // 2
    residual = jax.random.normal(jax.random.key(7), (rows, out)) if "residual" in around else None
    y = mosaic.decode_matmul(
        x, records, name, k, gain=gain, eps=1e-6, activation=activation, residual=residual
    )
    h = x if gain is None else rms_norm(x, gain, 1e-6)
    want = exact(h, w, n)
    if activation is not None:
        want = np.asarray(ACTIVATIONS[activation](want[:, :out])) * want[:, out:]
    if residual is not None:
        want = want + np.asarray(residual)
    assert error(y, want) < 2e-3
    for _ in range(REPEATS):
        again = mosaic.decode_matmul(
            x, records, name, k, gain=gain, eps=1e-6, activation=activation, residual=residual
        )
        assert (again == y).all()


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(
    "parts, k",
    [((("Q4_K", 1792), ("Q6_K", 256)), 1536), ((("Q6_K", 512), ("Q4_K", 416), ("Q8_0", 32)), 2560)],
    ids=str,
)
def test_matrices_of_several_types_share_a_launch(parts, k, rows):
    raws = [raw_matrix(name, n, k, seed) for seed, (name, n) in enumerate(parts)]
    names = tuple(name for name, _ in parts)
    records = tuple(mosaic.pack(name, raw) for name, raw in zip(names, raws, strict=True))
    x, gain = activations(rows, k), jnp.linspace(0.5, 1.5, k)
    assert mosaic.fits_side_by_side(k, names)
    y = mosaic.side_by_side_decode_matmul(x, records, names, k, gain=gain, eps=1e-6)
    h = rms_norm(x, gain, 1e-6)
    want = np.concatenate(
        [exact(h, dense(raw, name), len(raw)) for name, raw in zip(names, raws, strict=True)], 1
    )
    assert error(y, want) < 1e-3
    for _ in range(REPEATS):
        assert (mosaic.side_by_side_decode_matmul(x, records, names, k, gain=gain, eps=1e-6) == y).all()
