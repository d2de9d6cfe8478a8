"""Conversations: what was said before is found again, and any earlier turn can be gone back to."""

import pytest

from jaxserve import SamplingParams
from tests.engines import BOS, TURN_END, scripted, tiny

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def test_turns_of_ids_compute_only_what_is_new():
    engine = tiny("llama-f32")
    session = engine.session()
    first = session.send([5, 6, 7, 8], SHORT)
    second = session.send([9, 10], SHORT)
    assert session.tokens == [5, 6, 7, 8, *first.tokens, 9, 10, *second.tokens]
    assert second.prompt_tokens == 9 and second.timings.prefilled_tokens <= 3
    expected = tiny("llama-f32", reuse=False).generate([5, 6, 7, 8, *first.tokens, 9, 10], SHORT)
    assert second.tokens == expected.tokens


def test_a_rewound_session_answers_as_if_the_turns_had_not_been():
    session = tiny("llama-f32").session()
    session.send([15, 16, 17], SHORT)
    kept = session.tokens
    other = session.send([1], SHORT)
    session.send([2], SHORT)
    session.rewind(1)
    assert (session.turns, session.tokens, len(session.completions)) == (1, kept, 1)
    again = session.send([1], SHORT)
    assert again.tokens == other.tokens and again.cached_tokens == again.prompt_tokens
    session.rewind(0)
    assert (session.turns, session.tokens) == (0, [])


def test_messages_are_rendered_with_the_answers_between_them():
    session = scripted(context=256).session()
    first = session.send("hi", SHORT)
    session.send([{"role": "system", "content": "be brief"}, {"role": "user", "content": "why"}], SHORT)
    roles = [message["role"] for message in session.messages]
    assert roles == ["user", "assistant", "system", "user", "assistant"]
    assert session.messages[1]["content"] == first.text
    session.rewind(0)
    session.send({"role": "user", "content": "bye"}, SHORT)
    assert session.messages[0]["content"] == "bye"
    assert first.prompt_tokens == len([BOS, *b"[user]hi", TURN_END, *b"[assistant]"])


def test_a_session_does_not_mix_ids_and_messages():
    session = scripted(context=256).session()
    session.send([5], SHORT)
    with pytest.raises(ValueError, match="token ids, not of messages"):
        session.send("hi")
    assert session.turns == 1 and session.messages == []


@pytest.mark.parametrize("content", [[], [5, "x"], [{"role": "user", "content": "x"}, 5]], ids=str)
def test_what_is_neither_text_nor_messages_nor_ids_is_refused(content):
    session = scripted(context=256).session()
    with pytest.raises(ValueError, match="expected a text"):
        session.send(content)
    assert session.turns == 0


@pytest.mark.parametrize("turn", [-1, 2])
def test_only_turns_that_were_taken_can_be_gone_back_to(turn):
    session = scripted(context=256).session()
    session.send([5], SHORT)
    with pytest.raises(ValueError, match="0 ≤ turn ≤ 1"):
        session.rewind(turn)


def test_a_turn_that_fails_leaves_the_conversation_as_it_was():
    session = tiny("llama-f32").session()
    session.send([5], SHORT)
    before = session.tokens
    with pytest.raises(ValueError, match="outside the vocabulary"):
        session.send([10**6], SHORT)
    assert (session.tokens, session.turns) == (before, 1)
