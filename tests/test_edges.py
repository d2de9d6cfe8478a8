"""Prompts and ids at and past every limit: refused before any device work, and the engine stays usable."""

import numpy as np
import pytest

from jaxserve import ContextLimitExceeded, SamplingParams, UnsupportedModel
from tests.engines import END, SCRIPT, scripted

V = SCRIPT.vocab
CONTEXT = 64


@pytest.fixture(autouse=True)
def _usable_afterwards():
    before = scripted().stats()
    yield
    stats = scripted().stats()
    assert (stats["free_slots"], stats["waiting"]) == (1, 0)
    assert stats["recoveries"] == before["recoveries"]
    answer = scripted().generate([SCRIPT.start["greek"]], SamplingParams())
    assert answer.tokens == SCRIPT.tokens["greek"]


@pytest.mark.parametrize("length", [1, 31, 32, 33, 62, 63, 64])
def test_generation_ends_with_length_when_the_context_is_full(length):
    prompt = [int(i) for i in np.random.default_rng(length).integers(0, 256, length)]
    done = scripted().generate(prompt, SamplingParams(max_tokens=1000))
    assert (len(done.tokens), done.finish_reason) == (CONTEXT - length + 1, "length")
    alone = [int(SCRIPT.logits()[token].argmax()) for token in [prompt[-1], *done.tokens[:-1]]]
    assert done.tokens == alone


@pytest.mark.parametrize("length", [65, 200])
def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(length):
    before = scripted().stats()
    for call in (scripted().generate, scripted().stream, scripted().logits):
        with pytest.raises(ContextLimitExceeded, match=f"{length}.*{CONTEXT}") as caught:
            call([1] * length)
        assert (caught.value.provided, caught.value.maximum) == (length, CONTEXT)
    assert scripted().stats() == before


def test_an_over_long_prompt_does_not_disturb_a_running_one():
    stream = scripted().stream([SCRIPT.start["greek"]])
    first = next(stream)
    with pytest.raises(ContextLimitExceeded):
        scripted().generate([1] * 65)
    assert [first.token, *[piece.token for piece in stream]] == SCRIPT.tokens["greek"]


@pytest.mark.parametrize("prompt", ["", [], (), np.array([], np.int32), range(0)], ids=repr)
def test_an_empty_prompt_is_refused(prompt):
    for call in (scripted().generate, scripted().stream):
        with pytest.raises(ValueError, match="empty"):
            call(prompt)


@pytest.mark.parametrize("token", [-1, V, 2**31, 2**63, 2**64, -(2**70), 10**30])
def test_an_id_outside_the_vocabulary_is_refused_by_value_and_place(token):
    for call in (scripted().generate, scripted().stream, scripted().logits):
        with pytest.raises(ValueError, match=f"{token} at position 1.*{V}"):
            call([0, token])


def test_the_last_id_of_the_vocabulary_is_accepted():
    assert scripted().logits([V - 1]).shape == (1, V)
    assert scripted().generate([V - 1]).finish_reason == "stop"


@pytest.mark.parametrize(
    "prompt",
    [None, 5, b"", b"bytes", [1.0], ["a"], [[1, 2]], np.zeros((1, 3), np.int32), [True], {1: 2}, [None]],
    ids=repr,
)
def test_a_prompt_of_another_type_is_refused(prompt):
    with pytest.raises(TypeError, match="prompt"):
        scripted().generate(prompt)


@pytest.mark.parametrize("params", [{}, 3, "greedy", [SamplingParams()]], ids=repr)
def test_options_of_another_type_are_refused(params):
    with pytest.raises(TypeError, match="SamplingParams"):
        scripted().generate([1], params)


@pytest.mark.parametrize(
    "kind", [list, tuple, np.int32, np.uint8, np.int64, range], ids=lambda kind: kind.__name__
)
def test_ids_come_in_any_sequence_of_integers(kind):
    ids = range(40, 50)
    prompt = np.array(ids, kind) if isinstance(kind, type) and issubclass(kind, np.generic) else ids
    prompt = kind(ids) if kind in (list, tuple) else prompt
    done = scripted().generate(prompt, SamplingParams(max_tokens=3))
    assert done.tokens == scripted().generate(list(ids), SamplingParams(max_tokens=3)).tokens
    assert all(type(token) is int for token in done.tokens)


@pytest.mark.parametrize("token", [V, V + 5, 2**31])
def test_a_stop_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=f"stop id {token} .*{V}"):
        scripted().generate([1], SamplingParams(stop_tokens=[token]))


def test_stop_ids_are_limited_to_64_together_with_the_models_own():
    assert scripted().generate([1], SamplingParams(stop_tokens=range(62), max_tokens=1)).prompt_tokens == 1
    with pytest.raises(ValueError, match="66 distinct stop ids.*64"):
        scripted().generate([1], SamplingParams(stop_tokens=range(64)))
    only = SamplingParams(stop_tokens=range(64), ignore_eos=True, max_tokens=1)
    assert scripted().generate([1], only).prompt_tokens == 1


# -- a file without a tokenizer


def test_text_needs_a_tokenizer_and_ids_do_not():
    engine = scripted(tokenizer=False)
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        engine.generate("text")
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        engine.generate([1], SamplingParams(stop="x"))
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        engine.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        _ = engine.tokenizer
    done = engine.generate([SCRIPT.start["greek"]])
    assert (done.tokens, done.text, done.finish_reason) == (SCRIPT.tokens["greek"], "", "stop")
    assert engine.file.metadata["tokenizer.ggml.eos_token_id"] == END


def test_an_empty_text_is_refused_before_the_missing_tokenizer_is():
    with pytest.raises(ValueError, match="empty"):
        scripted(tokenizer=False).generate("")
