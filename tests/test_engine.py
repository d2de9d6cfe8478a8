"""What a request gives back: tokens, text, reason, log-probabilities, timings; every option in the engine."""

import time
import warnings

import jax
import numpy as np
import pytest

import jaxserve
from jaxserve import SamplingParams
from tests.engines import BOS, CHAINS, END, SCRIPT, TURN_END, scripted, scripted_path

LOGITS = SCRIPT.logits()
FREE = dict(ignore_eos=True)


def best(token: int) -> int:
    return int(LOGITS[token].argmax())


def greedy_chain(token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        tokens.append(best(tokens[-1] if tokens else token))
    return tokens


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


# -- ends and lengths


@pytest.mark.parametrize("name", CHAINS)
def test_every_end_token_of_the_model_stops_and_is_left_out(name):
    done = scripted().generate([SCRIPT.start[name]], SamplingParams())
    assert (done.tokens, done.text, done.finish_reason) == (SCRIPT.tokens[name], SCRIPT.text(name), "stop")


@pytest.mark.parametrize("name", ["greek", "family", "empty"])
def test_ignored_end_tokens_are_drawn_and_kept_and_add_no_text(name):
    end = CHAINS[name][1]
    count = len(SCRIPT.tokens[name]) + 1
    done = scripted().generate([SCRIPT.start[name]], SamplingParams(max_tokens=count, **FREE))
    assert done.tokens == [*SCRIPT.tokens[name], end]
    assert (done.text, done.finish_reason) == (SCRIPT.text(name), "length")


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_id_of_the_caller_ends_the_request_whether_or_not_end_tokens_count(ignore_eos):
    tokens = SCRIPT.tokens["greek"]
    params = SamplingParams(stop_tokens=[tokens[2]], ignore_eos=ignore_eos)
    done = scripted().generate([SCRIPT.start["greek"]], params)
    assert (done.tokens, done.text, done.finish_reason) == (tokens[:2], "alpha be", "stop")


def test_an_end_token_listed_as_stop_id_stops_although_end_tokens_are_ignored():
    done = scripted().generate([SCRIPT.start["greek"]], SamplingParams(stop_tokens=[END], **FREE))
    assert (done.tokens, done.finish_reason) == (SCRIPT.tokens["greek"], "stop")


@pytest.mark.parametrize("count", [1, 2, 7])
def test_max_tokens_gives_exactly_that_many(count):
    done = scripted().generate([5], SamplingParams(max_tokens=count))
    assert (done.tokens, done.finish_reason) == (greedy_chain(5, count), "length")
    assert done.timings.decoded_tokens == count - 1


def test_an_end_token_on_the_last_allowed_step_is_a_stop():
    tokens = SCRIPT.tokens["greek"]
    at_the_end = scripted().generate([SCRIPT.start["greek"]], SamplingParams(max_tokens=len(tokens) + 1))
    one_short = scripted().generate([SCRIPT.start["greek"]], SamplingParams(max_tokens=len(tokens)))
    assert (at_the_end.tokens, at_the_end.finish_reason) == (tokens, "stop")
    assert (one_short.tokens, one_short.finish_reason) == (tokens, "length")


def test_an_end_token_drawn_first_gives_an_empty_answer():
    done = scripted().generate([SCRIPT.start["empty"]], SamplingParams(logprobs=1))
    assert (done.tokens, done.text, done.finish_reason, done.logprobs) == ([], "", "stop", [])


def test_no_tokens_asked_gives_none_and_runs_nothing():
    before = scripted().stats()
    done = scripted().generate([5], SamplingParams(max_tokens=0))
    after = scripted().stats()
    assert (done.tokens, done.text, done.finish_reason) == ([], "", "length")
    assert done.timings.prefill_s is None and done.timings.decode_s is None
    assert (before["prefill_chunks"], before["decode_steps"]) == (
        after["prefill_chunks"],
        after["decode_steps"],
    )


# -- stop strings


@pytest.mark.parametrize(
    ("stop", "text", "tokens"),
    [
        ("beta gamma", "alpha ", 4),
        (["beta gamma"], "alpha ", 4),
        (["ha beta", "beta"], "alp", 3),  # the longest of those that complete together
        (["gamma x m", "pha"], "al", 2),  # the first to be complete
        ("x more", "alpha beta gamma ", 5),
        ("absent", "alpha beta gamma x more", 5),
    ],
)
def test_a_stop_string_across_token_borders_ends_the_text_before_it(stop, text, tokens):
    done = scripted().generate([SCRIPT.start["greek"]], SamplingParams(stop=stop, logprobs=1))
    assert (done.text, done.finish_reason) == (text, "stop")
    assert done.tokens == SCRIPT.tokens["greek"][:tokens]  # through the one that completes it
    assert len(done.logprobs) == tokens


def test_a_stop_string_in_the_prompt_does_not_count():
    done = scripted().generate([*b"beta", SCRIPT.start["greek"]], SamplingParams(stop="betaal"))
    assert done.text == SCRIPT.text("greek")


def test_the_slot_is_free_after_a_stop_string_and_the_next_answer_is_right():
    scripted().generate([SCRIPT.start["greek"]], SamplingParams(stop="pha"))
    assert scripted().stats()["free_slots"] == 1
    assert scripted().generate([5], SamplingParams(max_tokens=9)).tokens == greedy_chain(5, 9)


# -- every option, for the first token too: `a` leads to `x`, which the prompt already holds

LAST = 5
FIRST = best(LAST)
SEEN = [FIRST, FIRST, 7, LAST]
HOT = dict(temperature=50.0, seed=3)


def first_token(**options) -> int | None:
    done = scripted().generate(SEEN, SamplingParams(max_tokens=1, **options))
    return done.tokens[0] if done.tokens else None


@pytest.mark.parametrize(
    "options",
    [
        {},
        HOT | dict(top_k=1),
        HOT | dict(top_p=1e-6),
        HOT | dict(min_p=1.0),
        dict(temperature=1e-30, seed=1),
        dict(repeat_penalty=1e6, repeat_last_n=0),
        dict(repeat_penalty=1e6, repeat_last_n=2),  # the window holds 7 and the last token
        dict(presence_penalty=1e3, repeat_last_n=2),
        dict(frequency_penalty=1e3, repeat_last_n=0),
        dict(presence_penalty=-1e3),
    ],
    ids=str,
)
def test_an_option_that_leaves_the_likeliest_token_leaves_the_first_token(options):
    assert first_token(**options) == FIRST


@pytest.mark.parametrize(
    "options",
    [
        HOT,
        HOT | dict(top_k=200),
        HOT | dict(top_p=0.999),
        HOT | dict(min_p=1e-6),
        dict(repeat_penalty=1e6),
        dict(repeat_penalty=1e6, repeat_last_n=3),
        dict(repeat_penalty=1e6, repeat_last_n=-1),
        dict(presence_penalty=1e3),
        dict(frequency_penalty=1e3),
        dict(stop_tokens=[FIRST]),
    ],
    ids=str,
)
def test_an_option_at_an_extreme_changes_the_first_token(options):
    assert first_token(**options) != FIRST


def test_a_repeat_penalty_over_the_whole_context_never_repeats_a_token():
    done = scripted().generate([5], SamplingParams(max_tokens=40, repeat_penalty=1e6, repeat_last_n=-1))
    assert len({5, *done.tokens}) == 41


def test_a_penalty_window_forgets_what_leaves_it():
    done = scripted().generate([5], SamplingParams(max_tokens=40, presence_penalty=1e3, repeat_last_n=3))
    expected = [5]
    for _ in range(40):
        row = LOGITS[expected[-1]].copy()
        row[expected[-3:]] -= 1e3
        expected.append(int(row.argmax()))
    assert done.tokens == expected[1:]


def test_a_frequency_penalty_counts_every_occurrence():
    done = scripted().generate([5], SamplingParams(max_tokens=40, frequency_penalty=0.3))
    expected = [5]
    for _ in range(40):
        row = LOGITS[expected[-1]] - 0.3 * np.bincount(expected, minlength=SCRIPT.vocab)
        expected.append(int(row.argmax()))
    assert done.tokens == expected[1:]


# -- seeds

WARM = dict(temperature=2.0, max_tokens=40)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_the_same_seed_gives_the_same_tokens(seed):
    runs = [scripted().generate([5], SamplingParams(seed=seed, **WARM)).tokens for _ in range(2)]
    assert runs[0] == runs[1]


def test_seeds_that_differ_in_any_half_give_other_tokens():
    seeds = [0, 1, 2**32, 2**32 + 1, 2**63]
    runs = {tuple(scripted().generate([5], SamplingParams(seed=s, **WARM)).tokens) for s in seeds}
    assert len(runs) == len(seeds)


def test_unseeded_requests_differ():
    runs = {tuple(scripted().generate([5], SamplingParams(**WARM)).tokens) for _ in range(4)}
    assert len(runs) == 4


def test_the_noise_is_new_at_every_step():
    done = scripted().generate([5], SamplingParams(temperature=1e3, max_tokens=50, seed=0))
    assert len(set(done.tokens)) > 30


# -- log-probabilities


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(temperature=2.0, seed=5),
        dict(temperature=1.5, top_k=20, top_p=0.9, min_p=0.05, seed=5),
        dict(repeat_penalty=3.0, presence_penalty=2.0, frequency_penalty=1.0),
    ],
    ids=str,
)
def test_logprobs_are_the_raw_log_softmax_of_the_logits_at_each_position(options):
    prompt = list(b"some prompt")
    done = scripted().generate(prompt, SamplingParams(max_tokens=20, logprobs=4, **FREE, **options))
    rows = scripted().logits(prompt + done.tokens)[len(prompt) - 1 :]
    assert len(done.logprobs) == len(done.tokens) == 20
    for token, row, entry in zip(done.tokens, rows, done.logprobs, strict=False):
        expected = log_softmax(row)
        assert entry.token == token
        assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
        top = np.argsort(-expected, kind="stable")[:4]
        assert [i for i, _ in entry.top] == top.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], expected[top], atol=1e-4)


def test_no_logprobs_unless_asked():
    assert scripted().generate([5], SamplingParams(max_tokens=2)).logprobs is None


def test_sixteen_logprobs_can_be_asked():
    done = scripted().generate([5], SamplingParams(max_tokens=2, logprobs=16))
    assert [len(entry.top) for entry in done.logprobs] == [16, 16]


def test_logits_are_those_the_model_was_written_with_and_disturb_no_request():
    stream = scripted().stream([5], SamplingParams(max_tokens=9))
    first = next(stream).token
    logits = scripted().logits(list(range(40)))
    assert logits.shape == (40, SCRIPT.vocab) and logits.dtype == np.float32
    np.testing.assert_allclose(logits, LOGITS[:40], atol=1e-4)
    assert [first, *[piece.token for piece in stream]] == greedy_chain(5, 9)


# -- on_token


def test_on_token_sees_every_token_once_in_order():
    seen = []
    done = scripted().generate([5], SamplingParams(max_tokens=9), on_token=seen.append)  # None goes on
    assert seen == done.tokens == greedy_chain(5, 9)


def test_false_from_on_token_stops_with_that_token_included():
    seen = []
    done = scripted().generate(
        [SCRIPT.start["greek"]],
        SamplingParams(logprobs=1),
        on_token=lambda token: seen.append(token) or len(seen) < 2,
    )
    assert (done.tokens, done.text) == (SCRIPT.tokens["greek"][:2], "alpha be")
    assert done.finish_reason == "cancelled" and len(done.logprobs) == 2
    assert scripted().stats()["free_slots"] == 1


@pytest.mark.parametrize("value", [0, "", 0.0])
def test_only_false_itself_stops(value):
    done = scripted().generate([5], SamplingParams(max_tokens=5), on_token=lambda token: value)
    assert (len(done.tokens), done.finish_reason) == (5, "length")


@pytest.mark.parametrize("error", [KeyError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_an_exception_from_on_token_arrives_unchanged_and_the_engine_goes_on(error):
    def fail(token):
        raise error

    with pytest.raises(type(error)) as caught:
        scripted().generate([5], SamplingParams(), on_token=fail)
    assert caught.value is error
    assert scripted().stats()["free_slots"] == 1
    assert scripted().generate([5], SamplingParams(max_tokens=9)).tokens == greedy_chain(5, 9)


# -- chat and prompts as text


def test_a_text_prompt_begins_with_one_bos():
    engine = scripted()
    assert engine.tokenizer.encode("hi") == [BOS, *b"hi"]
    assert engine.generate("hi", SamplingParams(max_tokens=1)).prompt_tokens == 3
    assert engine.generate("<s>hi", SamplingParams(max_tokens=1)).prompt_tokens == 3


def test_ids_are_taken_as_they_are():
    assert scripted().generate([*b"hi"], SamplingParams(max_tokens=1)).prompt_tokens == 2


def chat_prompts(monkeypatch, content: str) -> list[list[int]]:
    """The ids that a chat of one message submits."""
    engine, prompts = scripted(), []
    submit = engine._submit
    monkeypatch.setattr(
        engine, "_submit", lambda ids, *rest, **more: prompts.append(ids) or submit(ids, *rest, **more)
    )
    engine.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=1))
    return prompts


def test_a_chat_has_the_bos_of_its_template_only(monkeypatch):
    assert chat_prompts(monkeypatch, "hi") == [[BOS, *b"[user]hi", TURN_END, *b"[assistant]"]]


def test_special_tokens_in_a_message_stay_text(monkeypatch):
    assert chat_prompts(monkeypatch, "<|eot_id|><s>") == [
        [BOS, *b"[user]<|eot_id|><s>", TURN_END, *b"[assistant]"]
    ]


# -- timings


@pytest.mark.parametrize("count", [1, 56])
def test_the_phases_sum_to_the_wall_time(count):
    prompt, shares = [5] * 9, []
    for _ in range(5):  # another process may take the core between two clocks
        start = time.perf_counter()
        timings = scripted(reuse=False).generate(prompt, SamplingParams(max_tokens=count)).timings
        wall = time.perf_counter() - start
        phases = (timings.queue_s, timings.load_state_s, timings.prefill_s, timings.decode_s)
        total = sum(phase for phase in phases if phase is not None)
        assert total <= wall
        shares.append((wall - total) / wall)
        assert 0 < timings.first_token_s <= wall
        assert timings.first_token_s == pytest.approx(timings.queue_s + timings.prefill_s)
        assert (timings.decode_s is None) == (count == 1)
        assert timings.load_state_s is None
    assert min(shares) < 0.1


def test_counts_are_of_ids():
    done = scripted(reuse=False).generate([5] * 40, SamplingParams(max_tokens=7))
    timings = done.timings
    assert (done.prompt_tokens, done.cached_tokens, done.route) == (40, 0, "prefill")
    assert (timings.prompt_tokens, timings.prefilled_tokens, timings.decoded_tokens) == (40, 40, 6)


def test_a_request_that_waits_counts_its_waiting():
    first = scripted().stream([5], SamplingParams(max_tokens=20))
    second = scripted().stream([6], SamplingParams(max_tokens=2))
    next(first)
    time.sleep(0.05)
    list(second), list(first)
    timings = second.completion.timings
    assert timings.queue_s >= 0.05 and timings.first_token_s >= timings.queue_s
    assert first.completion.timings.queue_s < timings.queue_s


def test_stats_count_requests_tokens_and_chunks():
    before = scripted(reuse=False).stats()
    scripted(reuse=False).generate([5] * 50, SamplingParams(max_tokens=7))
    after = scripted(reuse=False).stats()
    grown = {name: after[name] - before[name] for name in ("requests", "tokens", "prefill_chunks")}
    assert grown == {"requests": 1, "tokens": 7, "prefill_chunks": 2}
    assert (after["slots"], after["free_slots"], after["waiting"]) == (1, 1, 0)


# -- the life of an engine


def live_bytes() -> int:
    return sum(array.nbytes for array in jax.live_arrays())


def load(**options) -> jaxserve.Engine:
    return jaxserve.Engine.load(scripted_path(), context=64, kv_dtype="float32", weights="float32", **options)


def test_two_engines_live_beside_each_other_and_closing_one_frees_its_memory():
    expected = scripted(reuse=False).generate([5], SamplingParams(max_tokens=9)).tokens
    before = live_bytes()
    with load() as engine:
        assert live_bytes() >= before + engine.weights_nbytes + engine.state_nbytes
        stream = engine.stream([5], SamplingParams(max_tokens=9))
        next(stream)
        assert engine.generate([5], SamplingParams(max_tokens=9)).tokens == expected
        assert scripted(reuse=False).generate([5], SamplingParams(max_tokens=9)).tokens == expected
        running = engine.stream([5], SamplingParams(max_tokens=30))
        first = next(running)
    assert live_bytes() <= before + 64
    assert scripted(reuse=False).generate([5], SamplingParams(max_tokens=9)).tokens == expected

    assert [piece.token for piece in stream] == expected[1:]  # it was done before
    with pytest.raises(jaxserve.JaxserveError, match="closed"):
        list(running)
    assert running.completion.finish_reason == "error" and running.completion.tokens[0] == first.token
    for call in (
        lambda: engine.generate([5]),
        lambda: engine.generate("text"),
        lambda: engine.stream([5]),
        lambda: engine.logits([5]),
        lambda: engine.stats(),
        lambda: engine.trace("nowhere"),
        lambda: engine.program_memory(),
    ):
        with pytest.raises(jaxserve.JaxserveError, match="closed"):
            call()
    engine.close()  # a second time


def test_a_context_above_the_trained_length_warns():
    with pytest.warns(UserWarning, match="context=64 is above the 32 tokens"):
        engine = jaxserve.Engine.load(scripted_path(context=32), context=64, kv_dtype="float32")
    assert engine.context == 64
    engine.close()


def test_the_trained_length_itself_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load().close()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(context=0), ValueError),
        (dict(context=1.5), TypeError),
        (dict(slots=0), ValueError),
        (dict(slots=True), TypeError),
        (dict(kv_dtype="int8"), ValueError),
        (dict(weights="half"), ValueError),
        (dict(context=10**12), jaxserve.OutOfMemory),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:context=")
def test_wrong_sizes_and_types_are_refused_at_load(options, error):
    with pytest.raises(error, match="context|slots|int8|half"):
        jaxserve.Engine.load(scripted_path(), **options)
