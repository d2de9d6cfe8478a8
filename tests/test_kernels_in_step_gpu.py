"""A model computes the same with the device's own kernels and in plain XLA."""

import contextlib

import numpy as np
import pytest

import jaxserve
from jaxserve import SamplingParams, hopper
from synthetic_model import parameters, write

pytestmark = pytest.mark.gpu

SHAPES = {  # presets of tools/synthetic_model.py, with less of everything that only repeats
    "qwen2.5-1.5b": dict(layers=3, vocab=2048),
    "llama-3.2-1b": dict(layers=3, vocab=2048),
    "gemma3-1b": dict(layers=7, vocab=2048),
    "qwen3.5-4b": dict(layers=8, vocab=2048),
    "qwen3.5-35b-a3b": dict(layers=4, vocab=2048, experts=32),
    "qwen3-30b-a3b": dict(layers=2, vocab=2048, experts=32),
}
PROMPT = [int(t) for t in np.random.default_rng(0).integers(300, 2000, 150)]
STEPS = 40


@contextlib.contextmanager
def kernels(choice, monkeypatch):
    monkeypatch.setenv(hopper.SWITCH, choice)
    hopper.is_available.cache_clear()
    yield
    hopper.is_available.cache_clear()


def answers(path, choice, monkeypatch):
    """Teacher-forced logits of prompt and answer, and the greedy answer with its log-probabilities."""
    with kernels(choice, monkeypatch), jaxserve.Engine.load(path, context=1024) as engine:
        params = SamplingParams(max_tokens=STEPS, ignore_eos=True, logprobs=2)
        done = engine.generate(PROMPT, params)
        return engine.logits(PROMPT + done.tokens), done


def softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("preset", SHAPES)
def test_logits_agree_with_the_plain_form(preset, tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    write(path, parameters(preset, **SHAPES[preset]))
    plain, _ = answers(path, "plain", monkeypatch)
    fast, done = answers(path, "auto", monkeypatch)
    p, q = softmax(plain[: len(PROMPT)]), softmax(fast[: len(PROMPT)])
    divergence = (p * np.log(p / q)).sum(-1).mean()
    # the decode step drew these tokens: their logits, forced through prefill, agree with it
    forced = np.log(softmax(fast))[len(PROMPT) - 1 : -1]
    drawn = np.array([step.logprob for step in done.logprobs])
    distance = np.abs(drawn - forced[np.arange(STEPS), done.tokens]).mean()
    print(f"{preset}: KL to the plain form {divergence:.1e}, decode to prefill {distance:.1e}")
    assert divergence < 5e-3 and distance < 0.1
