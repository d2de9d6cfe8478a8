"""Calls beside each other: threads, calls inside callbacks, streams in turn, rows with other options."""

import threading
import time

import numpy as np
import pytest

from jaxserve import SamplingParams
from tests.engines import SCRIPT, scripted

WATCHDOG_S = 60
OPTIONS = {
    "greedy": {},
    "top-k": dict(temperature=2.0, top_k=5, seed=1),
    "top-p": dict(temperature=2.0, top_p=0.5, seed=2),
    "min-p": dict(temperature=2.0, min_p=0.2, seed=3),
    "penalty": dict(repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.5),
    "plain": dict(temperature=1.0, seed=4),
    "logprobs": dict(logprobs=3),
    "seed 0": dict(temperature=1.0, seed=0),
}


def params(name: str, count: int = 20) -> SamplingParams:
    return SamplingParams(max_tokens=count, **OPTIONS[name])


def prompt(number: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(number).integers(0, 256, 1 + number % 40)]


@pytest.mark.parametrize("slots", [1, 2])
def test_eight_threads_of_twenty_prompts_get_their_own_answers(slots):
    engine, names = scripted(slots=slots), list(OPTIONS)
    expected = [scripted().generate(prompt(i), params(names[i % 8], 6)).tokens for i in range(40)]
    wrong, finished = [], []

    def work(thread: int) -> None:
        for turn in range(20):
            i = (thread * 7 + turn) % 40
            seen = []
            done = engine.generate(prompt(i), params(names[i % 8], 6), on_token=seen.append)
            if not done.tokens == seen == expected[i] or done.finish_reason != "length":
                wrong.append((i, done.tokens, seen, expected[i]))
        finished.append(thread)

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(8)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + WATCHDOG_S
    for thread in threads:
        thread.join(max(0, end - time.monotonic()))
    assert sorted(finished) == list(range(8)) and not wrong
    assert engine.stats()["free_slots"] == slots


def test_threads_that_cancel_stream_and_fail_do_not_disturb_each_other():
    engine = scripted(slots=2)
    expected = scripted().generate(prompt(3), params("greedy", 9)).tokens
    problems = []

    def guarded(work):
        try:
            for _ in range(10):
                work()
        except BaseException as error:
            problems.append(error)

    def answers():
        assert engine.generate(prompt(3), params("greedy", 9)).tokens == expected

    def cancels():
        engine.generate(prompt(4), params("plain"), on_token=lambda token: False)

    def drops():
        next(engine.stream(prompt(5), params("top-k")))

    def refused():
        with pytest.raises(ValueError):
            engine.generate([-1])

    def asks():
        assert engine.logits([1, 2]).shape[0] == 2 and engine.stats()["slots"] == 2

    works = (answers, cancels, drops, refused, asks, answers)
    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
        assert not thread.is_alive()
    assert not problems
    assert engine.stats()["free_slots"] == 2


@pytest.mark.parametrize("slots", [1, 2])
def test_a_callback_may_generate_on_the_same_engine(slots):
    engine, inner = scripted(slots=slots), []
    expected = engine.generate([5], params("greedy", 6)).tokens

    def nested(token):
        inner.append(engine.generate([token], params("greedy", 4)).tokens)

    assert engine.generate([5], params("greedy", 6), on_token=nested).tokens == expected
    assert inner == [engine.generate([token], params("greedy", 4)).tokens for token in expected]


def test_a_callback_that_generates_may_then_stop_its_own_request():
    engine = scripted()

    def nested(token):
        engine.generate([7], params("greedy", 4))  # with one slot the outer request is stepped to its end
        return False

    done = engine.generate([SCRIPT.start["greek"]], SamplingParams(), on_token=nested)
    assert (done.tokens, done.text, done.finish_reason) == (SCRIPT.tokens["greek"][:1], "al", "cancelled")


@pytest.mark.parametrize("slots", [1, 2])
def test_two_streams_in_one_thread_take_turns(slots):
    engine = scripted(slots=slots)
    expected = [engine.generate([start], params("greedy")).tokens for start in (5, 6)]
    streams = [engine.stream([start], params("greedy")) for start in (5, 6)]
    received = [[piece.token for piece in turn] for turn in zip(*streams, strict=False)]
    for stream in streams:
        stream.close()
    assert [list(tokens) for tokens in zip(*received, strict=True)] == expected


@pytest.mark.parametrize("first", OPTIONS)
def test_rows_with_other_options_beside_them_equal_their_single_runs(first):
    engine = scripted(slots=2)
    for second in OPTIONS:
        alone = [scripted().generate(prompt(i), params(n)) for i, n in ((3, first), (20, second))]
        streams = [engine.stream(prompt(i), params(n)) for i, n in ((3, first), (20, second))]
        for _ in zip(*streams, strict=False):
            pass
        for stream, single in zip(streams, alone, strict=True):
            list(stream)
            assert stream.completion.tokens == single.tokens
            if single.logprobs:
                ours = [entry.logprob for entry in stream.completion.logprobs]
                np.testing.assert_allclose(ours, [entry.logprob for entry in single.logprobs], atol=1e-5)


def test_a_seeded_request_gives_the_same_tokens_in_every_slot():
    engine = scripted(slots=2)
    alone = engine.generate([9], params("plain")).tokens
    holder = engine.stream([5], SamplingParams(max_tokens=60))
    next(holder)  # takes the first slot
    assert engine.generate([9], params("plain")).tokens == alone
    holder.close()


def test_a_request_that_joins_late_equals_its_single_run():
    engine = scripted(slots=2)
    expected = [engine.generate(prompt(i), params("greedy", 24)).tokens for i in (33, 38)]
    early = engine.stream(prompt(33), params("greedy", 24))
    tokens = [next(early).token for _ in range(7)]
    late = engine.generate(prompt(38), params("greedy", 24)).tokens
    tokens += [piece.token for piece in early if piece.token is not None]
    assert [tokens, late] == expected
