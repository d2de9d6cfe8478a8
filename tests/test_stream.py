"""Pieces as they come: whole characters, joined they are the text; closing and dropping a stream frees its
slot.
"""

import gc

import pytest

from jaxserve import SamplingParams
from tests.engines import CHAINS, SCRIPT, scripted


def test_the_pieces_of_every_chain_join_to_the_text_and_hold_whole_characters_only():
    for name in CHAINS:
        stream = scripted().stream([SCRIPT.start[name]])
        pieces = list(stream)
        text = "".join(piece.text for piece in pieces)
        assert text == stream.completion.text == SCRIPT.text(name)
        assert text == scripted().tokenizer.decode(stream.completion.tokens)
        assert [piece.token for piece in pieces if piece.token is not None] == SCRIPT.tokens[name]
        assert all("\ufffd" not in piece.text for piece in pieces[:-1])


def test_an_incomplete_end_is_flushed_once_in_a_piece_without_token():
    *_, last = scripted().stream([SCRIPT.start["broken"]])
    assert (last.token, last.text) == (None, "\ufffd")


def test_the_text_is_that_of_the_generated_tokens_alone():
    done = scripted().generate([0xC3, SCRIPT.start["accents"]], SamplingParams(max_tokens=2))
    assert done.text == "é"


def test_a_text_of_random_bytes_streams_as_it_decodes():
    for seed in range(20):
        stream = scripted().stream(
            [5], SamplingParams(temperature=3.0, seed=seed, max_tokens=50, ignore_eos=True)
        )
        joined = "".join(piece.text for piece in stream)
        assert joined == stream.completion.text == scripted().tokenizer.decode(stream.completion.tokens)


@pytest.mark.parametrize("stop", ["beta gamma", "ta g", "x more", "lph", "more!"])
def test_no_piece_ever_shows_a_part_of_a_stop_string(stop):
    stream = scripted().stream([SCRIPT.start["greek"]], SamplingParams(stop=stop))
    shown, whole = "", SCRIPT.text("greek")
    expected = whole[: whole.index(stop)] if stop in whole else whole
    for piece in stream:
        shown += piece.text
        assert expected.startswith(shown)
    assert shown == stream.completion.text == expected


def test_text_that_only_began_like_a_stop_string_is_released():
    pieces = list(scripted().stream([SCRIPT.start["greek"]], SamplingParams(stop="more!")))
    assert (pieces[-1].token, pieces[-1].text) == (None, "more")


def test_an_ended_stream_stays_ended():
    stream = scripted().stream([5], SamplingParams(max_tokens=2))
    assert stream.completion is None
    assert len(list(stream)) >= 2
    assert next(stream, "nothing") == "nothing"
    assert stream.completion.finish_reason == "length"
    stream.close()
    assert stream.completion.finish_reason == "length"


def test_closing_keeps_what_was_delivered_and_frees_the_slot():
    stream = scripted().stream([SCRIPT.start["greek"]], SamplingParams(logprobs=1))
    next(stream), next(stream)
    stream.close()
    done = stream.completion
    assert (done.tokens, done.text) == (SCRIPT.tokens["greek"][:2], "alpha be")
    assert done.finish_reason == "cancelled" and len(done.logprobs) == 2
    assert scripted().stats()["free_slots"] == 1
    assert next(stream, "nothing") == "nothing"


def test_closing_before_the_first_piece_cancels_the_request():
    stream = scripted().stream([5])
    stream.close()
    assert (stream.completion.tokens, stream.completion.finish_reason) == ([], "cancelled")
    assert stream.completion.timings.prefill_s is None
    assert scripted().stats()["waiting"] == 0


def test_a_piece_held_back_for_a_stop_string_is_released_by_closing():
    stream = scripted().stream([SCRIPT.start["greek"]], SamplingParams(stop="alpha!"))
    next(stream)
    stream.close()
    assert stream.completion.text == "al"


def test_streams_left_300_times_in_any_way_leave_the_slot_free_and_later_answers_right():
    engine = scripted()
    prompt, params = list(b"a prompt longer than one chunk of prefill"), SamplingParams(max_tokens=9)
    cold = engine.generate(prompt, params).tokens

    def leave_early():
        for _ in engine.stream(prompt, params):
            break

    def close_in_prefill():
        stream = engine.stream(prompt, params)
        with engine._lock:
            engine._scheduler.step()  # the first chunk of two
        stream.close()

    def drop_unread():
        engine.stream(prompt, params)

    for leave in (leave_early, close_in_prefill, drop_unread):
        for _ in range(100):
            leave()
        gc.collect()
        stats = engine.stats()
        assert (stats["free_slots"], stats["waiting"]) == (1, 0)
        assert engine.generate(prompt, params).tokens == cold
