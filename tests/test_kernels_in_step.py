"""A model computes the same with the Hopper kernels, on an emulated GPU, as in plain XLA."""

import jax
import numpy as np
import pytest

import jaxserve
from synthetic_model import parameters, write
from tests import emulated_hopper
from tests.oracle import tiny_path

KERNELS = {  # some of those that run
    "llama-256-q4_k_m": {"decode_attention", "decode_q4", "decode_q6", "wide_q4", "wide_q6"},
    "gemma3-q5_1": {"decode_q5", "decode_q8", "wide_q5"},
}
ROWS, LENGTH, STEPS = 2, 20, 4
CLOSE = 0.02  # of the logits' deviation: half-precision activations


def weights_of(path):
    return jaxserve.load_weights(path, weights="packed")


def answers(weights, config):
    """Of two rows: the logits behind a prompt, those behind a dispatch of some steps, and its tokens."""
    tokens = np.random.default_rng(0).integers(10, config.vocab_size - 10, LENGTH).astype(np.int32)
    state = jaxserve.init_state(config, slots=ROWS, context=64)
    options = jaxserve.options(jaxserve.SamplingParams(ignore_eos=True), seed=0, vocab_size=config.vocab_size)
    for row in range(ROWS):
        prompt, place = np.roll(tokens, row), [np.int32(x) for x in (row, 0, LENGTH - row)]
        state = jaxserve.admit(state, np.int32(row), options)
        state = jaxserve.prefill(weights, state, prompt, *place, config=config, final=True)
    behind_prompt = np.array(state.logits)
    state = jaxserve.decode(weights, state, np.arange(ROWS, dtype=np.int32), config=config, steps=STEPS)
    return behind_prompt, np.array(state.logits), np.array(state.drawn)


def assert_agrees(path, monkeypatch) -> set[str]:
    """Returns the kinds of kernels that ran."""
    plain = answers(*weights_of(path))
    jax.clear_caches()
    with monkeypatch.context() as patch:
        names = emulated_hopper.install(patch)
        fast = answers(*weights_of(path))
    jax.clear_caches()
    deviation = plain[0].std()
    for ours, theirs in zip(fast[:2], plain[:2], strict=True):
        assert np.abs(ours - theirs).max() < CLOSE * deviation
    np.testing.assert_array_equal(fast[2], plain[2])
    return {"_".join(name.split("_")[:2]) for name in names}


@pytest.mark.parametrize("name", KERNELS)
def test_dense_models(name, monkeypatch):
    assert assert_agrees(tiny_path(name), monkeypatch) >= KERNELS[name]


def test_a_hybrid_mixture_of_real_head_sizes(tmp_path, monkeypatch):
    """Delta layers of 128 × 128 have kernels of their own, for decode and for prefill."""
    path, few = tmp_path / "model.gguf", dict(heads=2, kv_heads=1, key_heads=2, value_heads=4)
    narrow = dict(embed=256, experts=8, used=2, expert_ffn=256, shared_ffn=256)
    write(path, parameters("qwen3.5-35b-a3b", layers=2, interval=2, vocab=512, **few, **narrow))
    kernels = assert_agrees(path, monkeypatch)
    assert kernels >= {
        "decode_attention",
        "decode_delta",
        "delta_chunks",
        "delta_carry",
        "wide_q4",
        "wide_q6",
    }
