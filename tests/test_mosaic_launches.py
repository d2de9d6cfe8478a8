"""Whole launches of the matrix kernels on an emulated GPU: every type and form, sizes that need padding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.activation import ACTIVATIONS
from jaxserve.ops.norm import rms_norm
from jaxserve.quant import mosaic
from jaxserve.quant.mosaic import slots
from jaxserve.quant.mosaic.records import LAYOUTS, ROWS
from tests import emulated_hopper
from tests.quants import dense, oracle
from tests.test_mosaic_records import raw_matrix, same_bits

TYPES = list(LAYOUTS)
EXACT = 6e-4  # x or the weights in half precision


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """Names of the kernels that ran."""
    jax.clear_caches()  # of what was traced without the emulator
    yield emulated_hopper.install(monkeypatch)
    jax.clear_caches()


def activations(rows, k, dtype=jnp.float32):
    rng = np.random.default_rng(rows)
    return jnp.asarray(rng.standard_normal((rows, k)) * np.exp(rng.standard_normal(k)), dtype)


def matrix(name, n, k, seed=0):
    """Records, and f64 [N, K]"""
    raw = raw_matrix(name, n, k, seed)
    return mosaic.pack(name, raw), dense(raw, name).astype(np.float64)


def assert_close(y, want, bound=EXACT):
    assert y.dtype == jnp.float32
    error = np.linalg.norm(np.asarray(y, np.float64) - want) / np.linalg.norm(want)
    assert error < bound, error


def columns(name):
    """K of several records, the last not whole where the type allows it."""
    return 544 if LAYOUTS[name].block == 32 else 512


# ---- up to 8 rows


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("name", TYPES)
def test_few_rows_times_a_matrix(name, rows, dtype, launched):
    k = columns(name)
    (records, w), x = matrix(name, 48, k), activations(rows, k, dtype)
    y = mosaic.decode_matmul(x, records, name, k)
    assert_close(y, np.asarray(x, np.float64) @ w.T, 1e-4 if name == "BF16" else EXACT)
    assert launched and launched[0].startswith("decode_")


@pytest.mark.parametrize("name", TYPES)
def test_halves_that_need_no_rounding_give_the_exact_product(name):
    records, w = matrix(name, 16, 256)
    x = np.random.default_rng(1).integers(-8, 9, (8, 256)).astype(np.float16)
    assert_close(mosaic.decode_matmul(jnp.asarray(x), records, name, 256), x @ w.T, 1e-5)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_activations_of_any_size_keep_their_precision(name):
    (records, w), x = matrix(name, 32, 512), activations(8, 512) * jnp.logspace(-30, 30, 8)[:, None]
    x = x.at[2].set(0)
    few = mosaic.decode_matmul(x, records, name, 512)
    many = mosaic.wide_matmul(jnp.concatenate([x, x]), records, name, 512)
    assert not few[2].any() and not many[2].any()
    for y in (few, many[:8], many[8:]):
        for row, values in zip(y, np.asarray(x, np.float64), strict=True):
            if values.any():
                assert_close(row, values @ w.T, 1e-3)  # of a row alone


@pytest.mark.parametrize("size", [60000, 1e-6])
def test_half_precision_activations_are_brought_into_range_too(size):
    x = jnp.asarray(np.random.default_rng(1).uniform(-1, 1, (2, 256)) * size, jnp.float16)
    records, w = matrix("Q8_0", 16, 256)
    assert_close(mosaic.decode_matmul(x, records, "Q8_0", 256), np.asarray(x, np.float64) @ w.T)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q8_0", "BF16"])
def test_norm_activation_and_residual_ride_along(name, rows, activation):
    n, k = 64, columns(name)
    (records, w), x = matrix(name, n, k), activations(rows, k)
    gain, residual = 1 + activations(1, k)[0] / 10, activations(rows, n // 2)
    y = mosaic.decode_matmul(
        x, records, name, k, gain=gain, eps=1e-5, activation=activation, residual=residual
    )
    gate, up = np.split(np.asarray(rms_norm(x, gain, 1e-5), np.float64) @ w.T, 2, axis=1)
    want = np.asarray(residual, np.float64) + np.asarray(ACTIVATIONS[activation](jnp.asarray(gate))) * up
    assert_close(y, want)


def test_matrices_of_two_types_share_a_launch(launched):
    k, x, gain = 512, activations(2, 512), 1 + activations(1, 512)[0] / 10
    (q, w), (v, u) = matrix("Q4_K", 48, k), matrix("Q6_K", 32, k)
    y = mosaic.side_by_side_decode_matmul(x, (q, v), ("Q4_K", "Q6_K"), k, gain=gain, eps=1e-5)
    assert_close(y, np.asarray(rms_norm(x, gain, 1e-5), np.float64) @ np.concatenate([w, u]).T)
    assert len(launched) == 1


def test_a_wide_k_is_split_over_blocks():
    (records, w), x = matrix("Q4_K", 32, 5120), activations(2, 5120)
    assert_close(mosaic.decode_matmul(x, records, "Q4_K", 5120), np.asarray(x, np.float64) @ w.T)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4"])
def test_each_row_meets_its_own_expert_and_an_index_beyond_means_the_last(name):
    k, index = columns(name), np.array([2, 0, 2, 1, 7], np.int32)
    stack = [matrix(name, 64, k, seed) for seed in range(3)]
    x, records = activations(len(index), k), jnp.stack([records for records, _ in stack])
    y = mosaic.expert_decode_matmul(x, records, jnp.asarray(index), name, k, activation="silu")
    halves = [np.split(np.asarray(x[p], np.float64) @ stack[min(e, 2)][1].T, 2) for p, e in enumerate(index)]
    assert_close(y, np.stack([np.asarray(jax.nn.silu(gate)) * up for gate, up in halves]))


# ---- more rows


@pytest.mark.parametrize("name", TYPES)
def test_more_rows_times_a_matrix(name, launched):
    k = columns(name)
    (records, w), x = matrix(name, 80, k), activations(19, k)
    assert_close(mosaic.wide_matmul(x, records, name, k), np.asarray(x, np.float64) @ w.T)
    assert [kernel.split("_")[0] for kernel in launched] == ["slot", "wide"]


@pytest.mark.parametrize("name", TYPES)
def test_the_identity_times_a_matrix_is_the_matrix(name):
    records, w = matrix(name, 32, 256)
    y = mosaic.wide_matmul(jnp.eye(256), records, name, 256)
    assert_close(y, w.T)
    if name in ("F16", "BF16", "MXFP4"):  # their weights need no rounding
        np.testing.assert_array_equal(y, w.T.astype(np.float32))


@pytest.mark.parametrize("rows", [9, 64, 200])
@pytest.mark.parametrize("shape", [(272, 256), (64, 2816)], ids=str)
def test_every_cut_of_a_product_covers_it(shape, rows):
    (records, w), x = matrix("Q4_K", *shape), activations(rows, shape[1])
    assert_close(mosaic.wide_matmul(x, records, "Q4_K", shape[1]), np.asarray(x, np.float64) @ w.T)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["Q4_K", "BF16"])
def test_activations_of_every_type_are_taken(name, dtype):
    (records, w), x = matrix(name, 48, 512), activations(11, 512, dtype)
    assert_close(mosaic.wide_matmul(x, records, name, 512), np.asarray(x, np.float64) @ w.T)
    few = mosaic.decode_matmul(x[:3], records, name, 512)
    assert_close(few, np.asarray(x[:3], np.float64) @ w.T)


@pytest.mark.parametrize("rows", [20, 150])
@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4"])
def test_rows_meet_their_own_expert(name, rows):
    k, experts = columns(name), 7
    stack = [matrix(name, 80, k, seed) for seed in range(experts)]
    owner = np.sort(np.random.default_rng(rows).integers(0, experts, rows) ** 2 // experts)
    sizes = jnp.asarray(np.bincount(owner, minlength=experts), jnp.int32)
    x, records = activations(rows, k), jnp.stack([records for records, _ in stack])
    y = mosaic.grouped_wide_matmul(x, sizes, records, name, k)
    assert_close(y, np.stack([np.asarray(x[p], np.float64) @ stack[e][1].T for p, e in enumerate(owner)]))
    order = np.random.default_rng(0).permutation(rows)
    index = jnp.asarray(np.argsort(order), jnp.int32)
    assert (mosaic.grouped_wide_matmul(x[order], sizes, records, name, k, index=index) == y).all()


# ---- weights and activations on their own


@pytest.mark.parametrize("name", TYPES)
def test_decoded_matrices_and_taken_rows_are_what_ggml_decodes(name):
    raw = np.concatenate([oracle()[f"{name}.{kind}"] for kind in ("raw", "rnd_raw")])
    want = np.concatenate([oracle()[f"{name}.{kind}"] for kind in ("deq", "rnd_deq")])
    (count, k), spare = want.shape, -len(want) % ROWS
    records = mosaic.pack(name, np.pad(raw, ((0, spare), (0, 0))))
    decoded = mosaic.dequantise(records, name, k, jnp.dtype("float32"))
    same_bits(np.asarray(decoded)[:count], want)
    last = count + spare - 1
    ids = np.array([0, 5, count - 1, last + 1, -1], np.int32)
    same_bits(np.asarray(mosaic.take_rows(records, name, k, ids)), np.asarray(decoded)[np.clip(ids, 0, last)])


@pytest.mark.parametrize("rows", [19, slots.MANY_ROWS + 11])
@pytest.mark.parametrize("of", ["f16", "bf16"])
def test_activations_are_prepared_as_in_plain_jax(of, rows):
    x = activations(rows, 544) * 1e3
    (operand, inverse), (plain, plain_inverse) = slots.slot_order(x, of), slots.plain_slot_order(x, of)

    def by_row(v):
        cores = np.asarray(v).reshape(*v.shape[:3], 16, 8, 4).transpose(2, 4, 0, 1, 3, 5)
        return cores.reshape(v.shape[2] * 8, -1)[:rows]

    np.testing.assert_array_equal(by_row(operand), by_row(plain))
    np.testing.assert_array_equal(inverse[:rows], plain_inverse[:rows])
