"""The float64 reference of the hybrid and expert models against llama.cpp's logits."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxserve.gguf.reader import open_gguf
from tests.reference_hybrid import Hybrid, write_qwen3next

TINY = Path(__file__).parent / "data" / "tiny"
MODELS = [
    "qwen35-bf16",
    "qwen35-q8_0",
    "qwen35-mtp-bf16",
    "qwen35-256-q4_k_m",
    "qwen35moe-f16",
    "qwen35moe-fused-f16",
    "qwen3moe-f16",
    "qwen3moe-256-q4_k_m",
    "qwen3moe-mxfp4_moe",
]
TOLERANCE = 2e-3  # on logits of about ±12: the oracle is llama.cpp in float32


def prompts(name):
    return json.loads((TINY / "tiny.json").read_text())["models"][name]["prompts"]


@pytest.mark.parametrize("name", MODELS)
def test_reference_gives_the_logits_of_llama_cpp(name):
    logits, _ = Hybrid(TINY / f"{name}.gguf").forward(prompts(name)[1])
    np.testing.assert_allclose(logits, np.load(TINY / f"{name}.npz")["exact_17"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["qwen35-bf16", "qwen3moe-f16"])
def test_reference_follows_a_longer_prompt(name):
    oracle = np.load(TINY / f"{name}.npz")
    logits, _ = Hybrid(TINY / f"{name}.gguf").forward(prompts(name)[2])
    np.testing.assert_allclose(logits[oracle["pos_130"]], oracle["exact_130"], atol=TOLERANCE, rtol=0)


def test_a_returned_state_goes_on_where_it_ended_and_is_left_as_it_is():
    model, tokens = Hybrid(TINY / "qwen35moe-f16.gguf"), prompts("qwen35moe-f16")[1]
    whole, _ = model.forward(tokens)
    _, state = model.forward(tokens[:9])
    for _ in range(2):
        rest, _ = model.forward(tokens[9:], state)
        np.testing.assert_array_equal(rest, whole[9:])


def test_both_qwen3next_variants_hold_the_same_model(tmp_path):
    paths = [write_qwen3next(tmp_path / f"{legacy}.gguf", legacy) for legacy in (False, True)]
    new, old = (set(open_gguf(path).tensors) for path in paths)
    assert "blk.0.ssm_in.weight" in old and "blk.0.attn_qkv.weight" in new
    assert {name for name in old & new if "ssm_ba" in name}
    tokens = np.random.default_rng(0).integers(0, 259, size=24)
    logits = [Hybrid(path).forward(tokens)[0] for path in paths]
    np.testing.assert_allclose(*logits, rtol=1e-12, atol=1e-12)
    assert logits[0].std() > 0.5


def test_the_head_order_of_qwen3next_matters(tmp_path):
    model = Hybrid(write_qwen3next(tmp_path / "model.gguf", False))
    grouped, _ = model.forward(range(6))
    model.architecture = "qwen35moe"
    model.metadata = {key.replace("qwen3next", "qwen35moe"): value for key, value in model.metadata.items()}
    tiled, _ = model.forward(range(6))
    assert np.abs(grouped - tiled).max() > 0.1
