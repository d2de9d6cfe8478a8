"""Loading and decoding: every type, bit for bit."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import quant
from jaxserve.errors import UnsupportedTensorType
from jaxserve.quant.formats import FORMATS
from jaxserve.quant.load import DECODED
from tests.quants import LAYOUTS, dense, ggml_type, oracle, packed, random_raw

DEVICE_TYPES = {"F16": "float16", "BF16": "bfloat16"}
PLAIN = DEVICE_TYPES  # F32 has a test of its own


def recorded(name):
    """ggml's own quantisation of x, and random bytes: bytes and the f32 values that ggml makes of them."""
    return [
        np.concatenate([oracle()[f"{name}.{kind}"], oracle()[f"{name}.rnd_{kind}"]])
        for kind in ("raw", "deq")
    ]


def assert_same_bits(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape
    width = {2: np.uint16, 4: np.uint32}[want.dtype.itemsize]
    numbers = ~np.isnan(want)
    assert (np.isnan(got) == ~numbers).all()
    np.testing.assert_array_equal(got.view(width)[numbers], want.view(width)[numbers])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_packed_types_decode_to_the_same_bits_as_ggml_and_gguf_py(name, layout):
    raw, want = recorded(name)
    noise = np.random.default_rng(1).integers(0, 256, (500, raw.shape[1]), dtype=np.uint8)  # ≥ 1000 blocks
    w = packed(np.concatenate([raw, noise]), name, layout)
    got = np.asarray(jax.jit(quant.dequantise)(w))
    assert_same_bits(got[: len(want)], want)
    assert_same_bits(got[len(want) :], dense(noise, name))


@pytest.mark.parametrize("name", [*FORMATS, *PLAIN, *DECODED])
def test_float32_mode_loads_ggmls_bits(name):
    raw, want = recorded(name)
    assert_same_bits(quant.load_matrix(raw, ggml_type(name), name="w", mode="float32"), want)


@pytest.mark.parametrize("name", [*FORMATS, *PLAIN])
def test_packed_mode_loses_nothing(name):
    raw, want = recorded(name)
    w = quant.load_matrix(raw, ggml_type(name), name="w", mode="packed")
    assert quant.type_name(w) == DEVICE_TYPES.get(name, name)
    assert_same_bits(jax.jit(quant.dequantise)(w), want)


@pytest.mark.parametrize("mode", ["packed", "float32"])
def test_float32_tensors_load_as_they_are(mode):
    values = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6)
    w = quant.load_matrix(values.view(np.uint8), ggml_type("F32"), name="w", mode=mode)
    assert_same_bits(w, values)


@pytest.mark.parametrize("name", DECODED)
def test_types_without_a_packed_form_load_as_float16(name, monkeypatch):
    monkeypatch.setattr("jaxserve.quant.load.DECODE_CHUNK_BYTES", 2 * 4 * 512)  # two rows at a time
    raw, want = oracle()[f"{name}.raw"], oracle()[f"{name}.deq"]
    assert not quant.has_packed_form(ggml_type(name))
    assert_same_bits(quant.load_matrix(raw, ggml_type(name), name="w"), want.astype(np.float16))


@pytest.mark.parametrize("name", ["Q4_K", "TQ2_0", "BF16"])
@pytest.mark.parametrize("mode", ["packed", "float32"])
def test_a_stack_of_experts_loads_in_one_piece(name, mode):
    raw = oracle()[f"{name}.raw"][:4].reshape(2, 2, -1)
    w = quant.load_matrix(raw, ggml_type(name), name="w", mode=mode)
    assert w.shape == (2, 2, 512)
    want = oracle()[f"{name}.deq"][:4].reshape(2, 2, 512)
    np.testing.assert_allclose(jax.jit(quant.dequantise)(w), want, rtol=1e-3)


@pytest.mark.parametrize("name", ["Q1_0", "I32"])
def test_a_type_nobody_decodes_is_refused_by_name(name):
    assert not quant.is_supported(ggml_type(name))
    with pytest.raises(UnsupportedTensorType, match=f"blk.0.ffn_up.weight.*{name}.*Q4_K"):
        quant.load_matrix(np.zeros((2, 64), np.uint8), ggml_type(name), name="blk.0.ffn_up.weight")


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="'int8'.*'packed' or 'float32'"):
        quant.load_matrix(oracle()["Q8_0.raw"], ggml_type("Q8_0"), name="w", mode="int8")


@pytest.mark.parametrize("type", gguf.GGMLQuantizationType, ids=lambda type: type.name)
def test_supported_types_are_those_that_gguf_py_decodes(type):
    _, nbytes = gguf.GGML_QUANT_SIZES[type]
    try:
        gguf.quants.dequantize(np.zeros((1, nbytes), np.uint8), type)
        decodable = True
    except NotImplementedError:
        decodable = False
    assert quant.is_supported(type) == decodable


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_bits_of_the_table_are_what_the_device_holds(name, layout):
    w = packed(random_raw(name, (3, 512)), name, layout)
    assert quant.nbytes(w) * 8 == FORMATS[name].bits * 3 * 512
    assert len(jax.tree.leaves(w)) <= 4


def test_bytes_of_a_plain_matrix():
    assert quant.nbytes(jnp.zeros((3, 5), jnp.bfloat16)) == 30


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["Q4_1", "Q5_0", "Q6_K", "MXFP4"])
def test_taken_rows_are_exact(name, layout):
    raw = random_raw(name, (40, 512))
    ids = jnp.array([[39, 0], [7, 7]])
    got = jax.jit(quant.take_rows)(packed(raw, name, layout), ids)
    assert_same_bits(got, dense(raw, name)[np.asarray(ids)])


def test_taken_rows_of_a_plain_matrix_are_float32():
    w = jnp.arange(12, dtype=jnp.float16).reshape(4, 3)
    assert_same_bits(quant.take_rows(w, jnp.array([3, 1])), np.array([[9, 10, 11], [3, 4, 5]], np.float32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lead", [(), (3,)])
def test_concatenated_matrices_are_stacked_along_rows(layout, lead):
    raws = [random_raw("Q8_0", (*lead, n, 64), seed=n) for n in (16, 8)]
    parts = [packed(raw, "Q8_0", layout) for raw in raws]
    whole = quant.concatenate_rows(parts)
    assert whole.shape == (*lead, 24, 64)
    assert_same_bits(jax.jit(quant.dequantise)(whole), dense(np.concatenate(raws, -2), "Q8_0"))


def test_plain_matrices_concatenate_too():
    a, b = jnp.ones((2, 4), jnp.float16), jnp.zeros((1, 4), jnp.float16)
    whole = quant.concatenate_rows([a, b])
    assert whole.shape == (3, 4) and whole.dtype == jnp.float16
    np.testing.assert_array_equal(whole[2:], b)


def test_matrices_of_different_types_do_not_concatenate():
    with pytest.raises(ValueError, match="Q4_0.*Q8_0|Q8_0.*Q4_0"):
        quant.concatenate_rows([packed(random_raw(name, (8, 64)), name, "rows") for name in ("Q4_0", "Q8_0")])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_are_taken_without_decoding(layout):
    raw = random_raw("Q6_K", (5, 8, 256))
    chosen = quant.take(packed(raw, "Q6_K", layout), jnp.array([4, 1]))
    assert chosen.shape == (2, 8, 256) and chosen.type == "Q6_K"
    assert_same_bits(jax.jit(quant.dequantise)(chosen), dense(raw[[4, 1]], "Q6_K"))
