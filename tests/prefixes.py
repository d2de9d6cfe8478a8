"""Engines of every kind of memory, with prefix reuse and without, and what their tests ask of both."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import jaxserve
from jaxserve import SamplingParams
from synthetic.architectures import parameters
from synthetic_model import write
from tests.engines import FOLDER
from tests.oracle import tiny_path

MODELS = {"attention": "llama-f32", "sliding window": "gemma3-bf16", "hybrid": "qwen35-mtp-bf16"}
CONTEXT = 320
EVERY = 64  # tokens between recurrent checkpoints, so that short prompts have some
GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
VOCABULARY = 384
SHAPE = {"kv_dtype": "float32", "weights": "float32"}
NO_REUSE = {"residency": False, "prefix_bytes": 0}


@functools.cache
def engine(kind: str, *, slots: int = 1, reuse: bool = True) -> jaxserve.Engine:
    """A shared engine of a tiny model in float32."""
    tiers = {} if reuse else NO_REUSE
    loaded = jaxserve.Engine.load(tiny_path(MODELS[kind]), context=CONTEXT, slots=slots, **SHAPE, **tiers)
    loaded._reuse.every = EVERY
    return loaded


@functools.cache
def chat_engine(*, reuse: bool = True) -> jaxserve.Engine:
    """A hybrid of two layers with a tokenizer, a chat template and room for a long conversation."""
    path = Path(FOLDER) / "hybrid-chat.gguf"
    if not path.exists():
        sizes = dict(vocab=1200, embed=256, ffn=512, heads=4, kv_heads=2, head_dim=64)
        delta = dict(layers=2, interval=2, key_heads=2, value_heads=4, delta_dim=32)
        write(path, parameters("qwen3.5-4b", **sizes, **delta), "F16")
    return jaxserve.Engine.load(path, context=1024, **SHAPE, **({} if reuse else NO_REUSE))


@functools.cache
def cold(kind: str, prompt: tuple[int, ...], params: SamplingParams = GREEDY) -> list[int]:
    """What an engine without reuse answers."""
    return engine(kind, reuse=False).generate(prompt, params).tokens


def ids(seed: int, length: int) -> tuple[int, ...]:
    """A prompt of random tokens."""
    return tuple(int(i) for i in np.random.default_rng(seed).integers(0, VOCABULARY, length))


def passes(chosen: jaxserve.Engine) -> tuple[int, int]:
    """Forward passes so far: chunks of prompts, steps of decode."""
    stats = chosen.stats()
    return stats["prefill_chunks"], stats["decode_steps"]


def checked(
    chosen: jaxserve.Engine, kind: str, prompt: Sequence[int], params: SamplingParams = GREEDY
) -> jaxserve.Completion:
    """Generate, and compare with an engine without reuse."""
    done = chosen.generate(prompt, params)
    assert done.tokens == cold(kind, tuple(prompt), params)
    assert done.timings.prefilled_tokens == done.prompt_tokens - done.cached_tokens
    assert (done.route == "prefill") == (done.cached_tokens == 0)
    return done
