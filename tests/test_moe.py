"""Routing and the two expert forms against dense NumPy, which runs every expert on every token."""

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops import moe
from jaxserve.ops.activation import ACTIVATIONS
from jaxserve.quant.packed import pack

T, E, X, FE, USED = 11, 16, 6, 8, 3
LOOPS_AND_SORTS = ("stablehlo.sort", "top_k", "stablehlo.while")
OTHER_ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu}
FORMS = {form.__name__: form for form in (moe.moe_decode, moe.moe_prefill)}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
route = jax.jit(moe.route, static_argnums=2)


@pytest.fixture
def model():
    rng = np.random.default_rng(7)
    shapes = {"x": (T, E), "router": (X, E), "gate": (X, FE, E), "up": (X, FE, E), "down": (X, E, FE)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def reference_route(x, router, used):
    logits = x.astype(np.float64) @ router.T.astype(np.float64)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    experts = np.argsort(-p, axis=-1, kind="stable")[:, :used]
    weights = np.take_along_axis(p, experts, -1)
    return weights / np.maximum(weights.sum(-1, keepdims=True), 2.0**-14), experts


def reference(model, weights, experts, activation):
    x, gate, up, down = (model[name].astype(np.float64) for name in ("x", "gate", "up", "down"))
    hidden = activation(np.einsum("te,xfe->txf", x, gate)) * np.einsum("te,xfe->txf", x, up)
    every = np.einsum("txf,xef->txe", hidden, down)
    chosen = np.take_along_axis(every, np.asarray(experts)[..., None], axis=1)
    return np.sum(np.asarray(weights, np.float64)[..., None] * chosen, axis=1)


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.fixture(autouse=True)
def other_activations(monkeypatch):
    for name, function in OTHER_ACTIVATIONS.items():
        monkeypatch.setitem(ACTIVATIONS, name, function)


def run(form, model, weights, experts, *, fused=False, activation="silu"):
    gate_up = model["gate"], model["up"]
    gate_up = (np.concatenate(gate_up, axis=1),) if fused else gate_up
    matrices = [tuple(jnp.asarray(w) for w in parts) for parts in (gate_up, (model["down"],))]
    return jax.jit(form, static_argnames="activation")(
        model["x"], weights, experts, *matrices, activation=activation
    )


def test_route_equals_its_definition(model):
    weights, experts = route(model["x"], model["router"], USED)
    exact_weights, exact_experts = reference_route(model["x"], model["router"], USED)
    assert weights.dtype == jnp.float32 and experts.dtype == jnp.int32
    np.testing.assert_array_equal(experts, exact_experts)
    np.testing.assert_allclose(weights, exact_weights, rtol=1e-5)


def test_weights_descend_and_sum_to_one(model):
    weights, _ = route(model["x"], model["router"], USED)
    assert (np.diff(weights, axis=-1) <= 0).all()
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1.0, rtol=1e-6)


def test_ties_go_to_the_lowest_expert(model):
    router = np.zeros_like(model["router"])
    router[[1, 4]] = model["router"][0]  # 1 ties with 4, and the zero rows 0, 2, 3, 5 with each other
    x = np.stack([model["router"][0], -model["router"][0]])  # the pair wins, the pair loses
    _, experts = route(x, router, 5)
    np.testing.assert_array_equal(experts, [[1, 4, 0, 2, 3], [0, 2, 3, 5, 1]])


def test_many_tokens_are_routed_as_few_are(model):
    x = np.random.default_rng(8).normal(size=(2 * moe.RANKED_TOKENS, E)).astype(np.float32)
    model["router"][4] = model["router"][1]
    weights, experts = route(x, model["router"], USED)
    halves = [route(half, model["router"], USED) for half in np.split(x, 2)]
    np.testing.assert_array_equal(experts, np.concatenate([half[1] for half in halves]))
    np.testing.assert_allclose(weights, np.concatenate([half[0] for half in halves]), rtol=1e-6)


def test_all_experts_can_be_used(model):
    weights, experts = route(model["x"], model["router"], X)
    np.testing.assert_array_equal(np.sort(experts, axis=-1), np.broadcast_to(np.arange(X), (T, X)))
    np.testing.assert_allclose(np.sum(weights, axis=-1), 1.0, rtol=1e-6)


@pytest.mark.parametrize("used", [0, X + 1])
def test_a_count_of_experts_out_of_range_is_refused(model, used):
    with pytest.raises(ValueError, match=f"used={used}: expected 1 ≤ used ≤ {X}"):
        moe.route(model["x"], model["router"], used)


def test_a_token_of_nan_names_valid_experts_and_disturbs_no_other(model):
    clean = route(model["x"], model["router"], USED)
    model["x"][4] = np.nan
    weights, experts = route(model["x"], model["router"], USED)
    assert np.isnan(weights[4]).all() and ((experts >= 0) & (experts < X)).all()
    for found, expected in zip((weights, experts), clean, strict=True):
        np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(expected, 4, 0))


def test_the_choice_is_made_in_float32_at_full_precision():
    x = np.full((1, 2), 1.0, np.float32)
    router = np.array([[1.0, 0.0], [1.0, 1e-6]], np.float32)  # equal in bfloat16 and in TF32
    _, experts = route(x, router, 1)
    np.testing.assert_array_equal(experts, [[1]])


def test_routing_has_no_sort_and_no_loop(model):
    text = jax.jit(moe.route, static_argnums=2).lower(model["x"], model["router"], USED).as_text()
    assert not any(op in text for op in LOOPS_AND_SORTS)


def test_decode_has_no_sort_and_no_loop(model):
    weights, experts = reference_route(model["x"], model["router"], USED)
    matrices = (model["gate"], model["up"]), (model["down"],)
    lowered = jax.jit(lambda *a: moe.moe_decode(*a, "silu")).lower(model["x"], weights, experts, *matrices)
    assert not any(op in lowered.as_text() for op in LOOPS_AND_SORTS)


@each_form
@pytest.mark.parametrize("fused", [False, True])
def test_experts_equal_the_dense_form(model, form, fused):
    weights, experts = reference_route(model["x"], model["router"], USED)
    out = run(form, model, weights, experts, fused=fused)
    assert out.dtype == jnp.float32 and out.shape == (T, E)
    exact = reference(model, weights, experts, silu)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@each_form
def test_another_activation_is_applied_to_the_gate(model, form):
    weights, experts = reference_route(model["x"], model["router"], USED)
    out = run(form, model, weights, experts, activation="tanh")
    exact = reference(model, weights, experts, np.tanh)
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max())


@each_form
def test_one_token_is_enough(model, form):
    weights, experts = reference_route(model["x"], model["router"], USED)
    model["x"], weights, experts = model["x"][:1], weights[:1], experts[:1]
    exact = reference(model, weights, experts, silu)
    np.testing.assert_allclose(
        run(form, model, weights, experts), exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max()
    )


@each_form
def test_experts_that_nobody_chose_change_nothing(model, form):
    weights, experts = reference_route(model["x"], model["router"], 1)
    experts = np.where(experts == 2, 5, experts)
    expected = run(form, model, weights, experts)
    for name in ("gate", "up", "down"):
        model[name][2] = 1e3
    np.testing.assert_array_equal(run(form, model, weights, experts), expected)


@each_form
def test_all_tokens_may_choose_one_expert(model, form):
    weights, experts = np.ones((T, 1), np.float32), np.full((T, 1), 3, np.int32)
    exact = reference(model, weights, experts, silu)
    np.testing.assert_allclose(
        run(form, model, weights, experts), exact, rtol=1e-4, atol=1e-5 * np.abs(exact).max()
    )


@each_form
def test_padding_tokens_do_not_disturb_the_others(model, form):
    weights, experts = reference_route(model["x"], model["router"], USED)
    expected = run(form, model, weights, experts)
    model["x"][-4:] = np.nan
    np.testing.assert_allclose(run(form, model, weights, experts)[:-4], expected[:-4], rtol=1e-5, atol=1e-6)


@each_form
def test_outputs_are_summed_in_selection_order(model, form):
    model = {name: np.sign(x) for name, x in model.items()}  # small whole numbers: every product is exact
    for name in ("gate", "up", "down"):
        model[name][:] = model[name][0]
    experts = np.broadcast_to(np.array([5, 0, 2], np.int32), (T, 3))
    weights = np.broadcast_to(np.array([2.0**28, -(2.0**28), 1.0], np.float32), (T, 3))
    alone = run(form, model, weights[:, 2:], experts[:, 2:], activation="relu")
    assert np.abs(alone).max() > 1
    np.testing.assert_array_equal(run(form, model, weights, experts, activation="relu"), alone)


@each_form
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_packed_experts_equal_their_dequantised_values(form, layout):
    rng = np.random.default_rng(9)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    shapes = {"gate": (X, 64, 32), "up": (X, 64, 32), "down": (X, 32, 64)}
    raw = {
        name: gguf.quants.quantize(rng.normal(size=s).astype(np.float32), q8_0) for name, s in shapes.items()
    }
    model = {name: gguf.quants.dequantize(bytes_, q8_0) for name, bytes_ in raw.items()}
    model["x"] = rng.normal(size=(T, 32)).astype(np.float32)
    weights, experts = reference_route(model["x"], rng.normal(size=(X, 32)), USED)
    packed = {name: pack(jnp.asarray(bytes_), "Q8_0", layout) for name, bytes_ in raw.items()}
    matrices = (packed["gate"], packed["up"]), (packed["down"],)
    out = jax.jit(form, static_argnums=5)(model["x"], weights, experts, *matrices, "silu")
    exact = reference(model, weights, experts, silu)
    bound = 1e-2 if layout == "rows" and form is moe.moe_prefill else 1e-5  # bf16 products on tensor cores
    assert np.linalg.norm(out - exact) < bound * np.linalg.norm(exact)
