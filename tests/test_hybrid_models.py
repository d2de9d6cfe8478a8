"""Whole hybrid models against the float64 reference: qwen3next, which no other oracle covers, and a long
prompt.
"""

import numpy as np
import pytest

import jaxserve
from jaxserve import step
from jaxserve.state import init_memory
from tests.oracle import tiny_path
from tests.reference_hybrid import LONG_MODEL, LONG_REFERENCE, Hybrid, long_prompt, write_qwen3next


def scored(path, tokens, *, chunk: int) -> np.ndarray:
    """Logits of every position, `chunk` tokens at a time, all in float32."""
    weights, config = jaxserve.load_weights(path, weights="float32")
    memory = init_memory(config, context=len(tokens), kv_dtype="float32")
    logits = []
    for start in range(0, len(tokens), chunk):
        part = np.zeros(chunk, np.int32)
        count = min(chunk, len(tokens) - start)
        part[:count] = tokens[start : start + count]
        memory, out = step.score(weights, memory, part, np.int32(start), np.int32(count), config=config)
        logits.append(np.array(out)[:count])
    return np.concatenate(logits)


@pytest.mark.parametrize("legacy", [False, True], ids=["attn_qkv", "ssm_in"])
def test_qwen3next_gives_the_reference_logits_in_either_layout(tmp_path, legacy):
    path = write_qwen3next(tmp_path / "model.gguf", legacy)
    tokens = np.random.default_rng(0).integers(0, 259, size=40)
    expected, _ = Hybrid(path).forward(tokens)
    np.testing.assert_allclose(scored(path, tokens, chunk=16), expected, atol=2e-3, rtol=0)


def test_the_error_of_a_long_prompt_does_not_grow():
    """A delta layer and one of attention over 8,192 tokens: chunked in float32, token by token in float64."""
    reference = np.load(LONG_REFERENCE)
    logits = scored(tiny_path(LONG_MODEL), long_prompt(), chunk=512)
    error = np.abs(logits[reference["positions"]] - reference["logits"]).max(axis=-1)
    by_length = error.reshape(4, -1).max(axis=-1)  # up to 256, 1,024, 4,096 and 8,192 tokens
    assert by_length.max() < 1e-3
    assert by_length[-1] < 4 * by_length[0]
