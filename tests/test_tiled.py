"""Matrices as tiles of records, where no kernel reads them: the plain forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import hopper, quant
from jaxserve.models import layers as layers_module
from jaxserve.models.layers import stack
from jaxserve.quant.tiled import tile
from tests.quants import dense, random_raw


def tiled(name, n, k, seed=0, lead=()):
    raw = random_raw(name, (*lead, n, k), seed)
    return tile(jnp.asarray(raw), name), dense(raw, name)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "Q5_0"])
def test_tiles_hold_the_same_numbers_as_the_file(name):
    w, want = tiled(name, 32, 512)
    assert w.shape == (32, 512) and quant.type_name(w) == name
    np.testing.assert_array_equal(quant.dequantise(w), want)
    ids = jnp.array([[31, 0], [7, 16]])
    np.testing.assert_array_equal(quant.take_rows(w, ids), want[np.asarray(ids)])


def test_stacks_of_experts_are_tiled_and_taken_without_decoding():
    w, want = tiled("Q8_0", 16, 96, lead=(3,))
    chosen = quant.take(w, jnp.array([2, 0]))
    assert isinstance(chosen, quant.Tiled) and chosen.shape == (2, 16, 96)
    np.testing.assert_array_equal(quant.dequantise(chosen), want[[2, 0]])


def test_tiles_of_one_type_concatenate_along_rows():
    (a, wa), (b, wb) = tiled("Q8_0", 16, 64), tiled("Q8_0", 32, 64, seed=1)
    np.testing.assert_array_equal(quant.dequantise(quant.concatenate_rows([a, b])), np.concatenate([wa, wb]))


def test_tiles_and_planes_do_not_concatenate():
    tiles, _ = tiled("Q8_0", 16, 64)
    planes = quant.load_matrix(
        random_raw("Q8_0", (16, 64), 0), quant.load.gguf.GGMLQuantizationType.Q8_0, name="w"
    )
    with pytest.raises(ValueError, match="Packed Q8_0.*Tiled Q8_0"):
        quant.concatenate_rows([tiles, planes])


def test_a_product_with_tiles_equals_the_dense_one():
    w, want = tiled("Q4_K", 32, 512)
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    np.testing.assert_allclose(quant.matmul(jnp.asarray(x), w), x @ want.T, rtol=1e-4, atol=1e-4)


def test_norm_activation_and_residual_around_a_product_are_applied_in_turn():
    w, want = tiled("Q8_0", 32, 64)
    rng = np.random.default_rng(0)
    x, gain = rng.standard_normal((2, 64)).astype(np.float32), rng.random(64).astype(np.float32)
    residual = rng.standard_normal((2, 16)).astype(np.float32)
    y = quant.matmul(
        jnp.asarray(x), w, norm=quant.Norm(jnp.asarray(gain), 1e-6), activation="silu", residual=residual
    )
    h = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain
    gate, up = np.split(h @ want.T, 2, -1)
    np.testing.assert_allclose(y, residual + gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-5)


def test_matrices_that_read_the_same_input_give_their_outputs_in_order():
    (a, wa), (b, wb) = tiled("Q4_K", 32, 256), tiled("Q6_K", 16, 256, seed=1)
    x = jax.random.normal(jax.random.key(0), (2, 256))
    norm = quant.Norm(jnp.ones(256), 1e-6)
    y = jnp.concatenate(quant.matmuls(x, (a, b), norm), -1)
    h = np.asarray(x) / np.sqrt((np.asarray(x) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(y, h @ np.concatenate([wa, wb]).T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("are_offsets", "leaves"), [(True, 3), (False, 4)])
def test_equal_tiles_of_several_layers_lie_in_one_stack_where_its_slices_cost_nothing(
    are_offsets, leaves, monkeypatch
):
    monkeypatch.setattr(layers_module, "SLICES_ARE_OFFSETS", are_offsets)
    (a, wa), (b, wb), (other, w_other) = (tiled("Q8_0", n, 64, seed=i) for i, n in enumerate((16, 16, 32)))
    plain = jnp.ones((4, 64))
    layers = stack([{"up": (a,), "router": (plain,)}, {"up": (b,)}, {"up": (other,)}])
    assert len(layers) == 3 and len(jax.tree.leaves(layers)) == leaves
    for index, want in enumerate((wa, wb, w_other)):
        np.testing.assert_array_equal(quant.dequantise(layers[index]["up"][0]), want)
    np.testing.assert_array_equal(layers[0]["router"][0], plain)


def test_a_device_that_is_no_hopper_gpu_takes_the_plain_forms():
    assert not hopper.is_available() or "H" in jax.devices()[0].device_kind


def test_an_unknown_choice_of_kernels_is_refused(monkeypatch):
    monkeypatch.setenv(hopper.SWITCH, "fast")
    hopper.is_available.cache_clear()
    with pytest.raises(ValueError, match="JAXSERVE_KERNELS='fast'.*'auto' or 'plain'"):
        hopper.is_available()
    monkeypatch.undo()
    hopper.is_available.cache_clear()
