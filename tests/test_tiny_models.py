"""Every architecture against llama.cpp's float32 logits on tiny random models, all arithmetic in float32."""

import functools

import numpy as np
import pytest

import jaxserve
from tests.oracle import assert_same_up_to_near_tie, tiny_logits, tiny_models, tiny_path

CONTEXT = 192
NAMES = sorted(tiny_models())


@functools.lru_cache(maxsize=2)
def engine(name: str) -> jaxserve.Engine:
    exact = dict(kv_dtype="float32", weights="float32")
    return jaxserve.Engine.load(tiny_path(name), context=CONTEXT, residency=False, prefix_bytes=0, **exact)


def reference(name: str, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(positions, logits) — transformers' for gemma3, whose GELU llama.cpp rounds to half precision."""
    arrays = tiny_logits(name)
    kind = "hf" if f"hf_{length}" in arrays else "exact"
    logits = arrays[f"{kind}_{length}"]
    positions = arrays["pos_130"] if length == 130 else np.arange(length)
    return positions, logits


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_at_every_position(name):
    for case, length in enumerate((1, 17, 130)):
        positions, expected = reference(name, length)
        logits = engine(name).logits(tiny_models()[name]["prompts"][case])
        np.testing.assert_allclose(
            logits[positions], expected, atol=2e-3 if "gemma3-q" not in name else 1e-2, rtol=0
        )


@pytest.mark.parametrize("name", NAMES)
def test_greedy_generations_equal_the_reference_up_to_near_ties(name):
    model = tiny_models()[name]
    margin = 0.05 if name.startswith("gemma3") else 0.01
    params = jaxserve.SamplingParams(max_tokens=32, ignore_eos=True)
    for prompt, exact in zip(model["prompts"], model["exact"], strict=True):
        done = engine(name).generate(prompt, params)
        assert done.finish_reason == "length" and len(done.tokens) == 32
        assert_same_up_to_near_tie(done.tokens, exact["gen"], exact["gen_gap"], margin)
