"""Real models against llama.cpp's and transformers' float32 outputs, all arithmetic in float32.

`tools/correctness.py` runs every prompt in every mode; docs/correctness.md has its figures.
"""

import functools

import numpy as np
import pytest

import jaxserve
from tests.models import path
from tests.oracle import assert_same_up_to_near_tie, generations

MARGIN = {"smollm2": 0.01, "gemma3": 0.05}
PROMPTS = {
    "smollm2": ("story", "code_c_tabs", "emoji_zwj", "one_token", "long_600"),
    "gemma3": ("story", "multilingual", "long_600"),  # long_600 goes past the sliding window of 512
}
CASES = [(model, name) for model, names in PROMPTS.items() for name in names]


@functools.lru_cache(maxsize=1)
def engine(model: str) -> jaxserve.Engine:
    exact = dict(kv_dtype="float32", weights="float32")
    return jaxserve.Engine.load(path(f"{model}.gguf"), context=1024, residency=False, prefix_bytes=0, **exact)


def case(model: str, name: str) -> dict:
    return next(prompt for prompt in generations(model) if prompt["name"] == name)


@pytest.mark.parametrize("model, name", CASES)
def test_logits_and_greedy_tokens_equal_the_reference(model, name):
    prompt = case(model, name)
    ids, exact = prompt["ids"], prompt["exact"]
    logits = engine(model).logits([*ids, *exact["gen"][:-1]])[len(ids) - 1 :]
    top = np.array(exact["top_id"])
    decided = np.array(exact["gap"]) > MARGIN[model]
    np.testing.assert_array_equal(logits.argmax(axis=-1)[decided], top[decided, 0])
    best = np.array(exact["hf_top_val"])
    np.testing.assert_allclose(np.take_along_axis(logits, top, axis=-1), best, atol=2e-3, rtol=0)
    params = jaxserve.SamplingParams(max_tokens=len(exact["gen"]), ignore_eos=True)
    tokens = engine(model).generate(prompt["text"], params).tokens
    assert_same_up_to_near_tie(tokens, exact["gen"], exact["gap"], MARGIN[model])
