"""Many prompts in one call: answers as from single calls, errors as results, a bounded look-ahead."""

import itertools

import pytest

from jaxserve import EngineError, JaxserveError, SamplingParams, batch
from jaxserve.batch import Batch
from jaxserve.request import Request
from tests.engines import SCRIPT, scripted

GREEDY = SamplingParams(max_tokens=6)
PROMPTS = [[5], list(b"a longer prompt of more than one chunk"), [9, 8, 7], [SCRIPT.start["greek"]]]


def single(prompt, params=GREEDY) -> list[int]:
    return scripted().generate(prompt, params).tokens


def idle(engine) -> bool:
    stats = engine.stats()
    return stats["free_slots"] == engine.slots and stats["waiting"] == 0


# -- results


@pytest.mark.parametrize("slots", [1, 2])
def test_completions_come_in_the_order_of_the_prompts_and_equal_single_runs(slots):
    done = scripted(slots=slots).generate_batch(PROMPTS, GREEDY)
    assert [each.tokens for each in done] == [single(prompt) for prompt in PROMPTS]
    assert [each.finish_reason for each in done] == ["length", "length", "length", "stop"]
    assert idle(scripted(slots=slots))


def test_texts_and_ids_stand_beside_each_other():
    done = scripted(slots=2).generate_batch(["hi", [*b"hi"]], GREEDY)
    assert [each.prompt_tokens for each in done] == [3, 2]  # a text begins with BOS


def test_every_prompt_may_have_its_own_options():
    params = [GREEDY, SamplingParams(max_tokens=3, temperature=2.0, seed=4), SamplingParams(max_tokens=0)]
    done = scripted(slots=2).generate_batch([[5], [6], [7]], params)
    assert [each.tokens for each in done] == [single([5 + i], params[i]) for i in range(3)]


def test_prompts_and_options_may_be_generators():
    params = (SamplingParams(max_tokens=n) for n in (1, 2, 3))
    done = scripted(slots=2).generate_batch(([i] for i in (5, 6, 7)), params)
    assert [len(each.tokens) for each in done] == [1, 2, 3]


@pytest.mark.parametrize("stop", [(), "beta gamma", "absent"])
def test_texts_are_those_of_single_runs(stop):
    prompts, params = [[start] for start in SCRIPT.start.values()], SamplingParams(stop=stop)
    done = scripted(slots=2).generate_batch(prompts, params)
    singles = [scripted().generate(prompt, params) for prompt in prompts]
    assert [each.text for each in done] == [single.text for single in singles]
    assert [each.tokens for each in done] == [single.tokens for single in singles]


def test_no_prompts_are_no_completions():
    assert scripted().generate_batch([]) == []


def test_a_bad_row_is_a_result_and_harms_no_other():
    good = [5, 6, 7]
    bad = ["", [], [-1], [SCRIPT.vocab], [2**31], [1] * 65, [1.5], None]
    rows = [x for pair in zip(itertools.cycle([good]), bad, strict=False) for x in pair]
    done = scripted(slots=2).generate_batch(rows, GREEDY)
    assert [each.tokens for each in done[::2]] == [single(good)] * len(bad)
    assert {each.finish_reason for each in done[1::2]} == {"error"}
    for each, word in zip(done[1::2], ["empty", "empty", "-1", "outside", "outside", "65"], strict=False):
        assert word in each.error and each.tokens == [] and each.text == ""
    assert done[11].prompt_tokens == 65


def test_options_that_are_none_are_a_result_too():
    done = scripted().generate_batch([[5], [6]], [GREEDY, {"max_tokens": 3}])
    assert (done[0].finish_reason, done[1].finish_reason) == ("length", "error")
    assert "SamplingParams" in done[1].error


def test_stop_ids_outside_the_vocabulary_end_their_row_only():
    params = [GREEDY, SamplingParams(stop_tokens=[SCRIPT.vocab + 5])]
    done = scripted().generate_batch([[5], [5]], params)
    assert done[0].tokens == single([5]) and "outside the vocabulary" in done[1].error


def test_the_context_limit_is_one_rows_own():
    engine = scripted(slots=2)
    for length in (62, 63, 64, 65, 200):
        long, good = engine.generate_batch([[5] * length, [6]], SamplingParams(max_tokens=9, ignore_eos=True))
        assert good.tokens == single([6], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(long.tokens) == max(0, 65 - length)
        assert (long.error is None) == (length <= 64)


@pytest.mark.parametrize("prompts", ["one text", b"bytes"])
def test_one_text_is_not_many_prompts(prompts):
    with pytest.raises(TypeError, match="several prompts"):
        scripted().generate_batch(prompts)


@pytest.mark.parametrize("params", [[GREEDY], [GREEDY] * 3])
def test_as_many_options_as_prompts(params):
    with pytest.raises(ValueError, match="2 prompts"):
        scripted().generate_batch([[5], [6]], params)
    with pytest.raises(ValueError, match="zip"):
        scripted().generate_batch(iter([[5], [6]]), iter(params))
    assert idle(scripted())


def test_a_closed_engine_takes_no_batch():
    engine = scripted.__wrapped__()
    engine.close()
    with pytest.raises(JaxserveError, match="closed"):
        engine.generate_batch([[5]])


# -- as they finish


def test_completions_are_yielded_as_they_finish():
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (30, 3, 3, 3)]
    order = [number for number, _ in scripted(slots=2).as_completed([[5]] * 4, params)]
    assert order == [1, 2, 3, 0]


@pytest.mark.parametrize("slots", [1, 2])
def test_an_endless_source_is_pulled_as_slots_become_free(slots):
    pulled = []
    source = (pulled.append(i) or [5 + i % 50] for i in itertools.count())
    for count, (_, completion) in enumerate(scripted(slots=slots).as_completed(source, GREEDY)):
        assert completion.finish_reason == "length"
        assert len(pulled) - count <= 2 * slots
        if count == 100:
            break


def test_dropping_the_iterator_cancels_what_is_in_flight():
    engine = scripted(slots=2)
    done = engine.as_completed(([5] for _ in itertools.count()), GREEDY)
    next(done)
    assert not idle(engine)
    del done
    assert idle(engine)
    assert engine.generate([5], GREEDY).tokens == single([5])


def test_an_error_of_the_source_arrives_and_frees_the_slots():
    def source():
        yield [5]
        yield [6]
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        scripted(slots=2).generate_batch(source(), SamplingParams(max_tokens=50, ignore_eos=True))
    assert idle(scripted(slots=2))


@pytest.mark.parametrize("slots", [1, 2])
def test_the_source_may_use_the_engine_itself(slots):
    engine = scripted(slots=slots)

    def source():
        token = 5
        for _ in range(6):
            yield [token]
            token = engine.generate([token], SamplingParams(max_tokens=1)).tokens[0]

    done = engine.generate_batch(source(), GREEDY)
    chain = [5, *single([5], SamplingParams(max_tokens=5))]
    assert [each.tokens for each in done] == [single([token]) for token in chain]


@pytest.mark.parametrize("slots", [1, 2])
def test_a_stream_that_nobody_reads_holds_up_no_batch(slots):
    engine = scripted(slots=slots)
    stream = engine.stream([5], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    done = engine.generate_batch([[i] for i in range(5, 15)], GREEDY)
    assert [each.tokens for each in done] == [single([i]) for i in range(5, 15)]
    assert len(list(stream)) == 39


def test_two_batches_in_one_thread_take_turns():
    engine = scripted(slots=2)
    prompts = [[[i] for i in range(5, 12)], [[i] for i in range(40, 47)]]
    iterators = [engine.as_completed(each, GREEDY) for each in prompts]
    found = [{}, {}]
    for pairs in itertools.zip_longest(*iterators):
        for index, pair in enumerate(pairs):
            if pair is not None:
                found[index][pair[0]] = pair[1].tokens
    for index, each in enumerate(prompts):
        assert found[index] == {i: single(prompt) for i, prompt in enumerate(each)}


class Device:
    """Stands in for an engine whose rows all end in the same step; notes steps and rows made."""

    def __init__(self, slots: int):
        self.slots, self.events, self.flying = slots, [], []

    def make(self) -> Request:
        self.events.append("made")
        return Request(0, [1], GREEDY, None, 1)

    def _enqueue(self, request):
        self.flying.append(request)

    def _turn(self, caller, is_over):
        self.events.append("step")
        for request in self.flying:
            request.finish("length")
        self.flying = []

    def _flush(self):
        pass


def test_where_many_rows_end_at_once_steps_go_on_between_those_made_and_handed_over():
    device = Device(slots=16)
    for _ in Batch(device, ((i, device.make) for i in range(200))):
        device.events.append("handed")
    words = "".join({"step": "|", "made": "m", "handed": "h"}[event] for event in device.events)
    assert words.count("h") == words.count("m") == 200
    between = words.split("|")
    assert max(part.count("m") for part in between) <= device.slots
    assert max(part.count("h") for part in between[:-1]) <= device.slots + batch.ROWS_A_STEP


# -- failures


def failing(engine, monkeypatch, error: BaseException) -> None:
    """The second decode step fails, once."""
    decode, calls = engine._runner.decode, itertools.count()

    def once(*arguments, **options):
        if next(calls) == 1:
            raise error
        return decode(*arguments, **options)

    monkeypatch.setattr(engine._runner, "decode", once)


def test_a_failed_step_ends_the_rows_in_flight_and_the_others_go_on(monkeypatch):
    engine = scripted(slots=2)
    failing(engine, monkeypatch, RuntimeError("the device is on fire"))
    done = engine.generate_batch([[5], [6], [7], [8]], GREEDY)
    assert [each.finish_reason for each in done] == ["error", "error", "length", "length"]
    assert "on fire" in done[0].error and "on fire" in done[1].error
    assert [each.tokens for each in done[2:]] == [single([7]), single([8])]


def test_a_strict_batch_ends_with_a_failed_step(monkeypatch):
    engine = scripted(slots=2)
    failing(engine, monkeypatch, RuntimeError("the device is on fire"))
    rows = ((i, lambda i=i: engine._request([i], GREEDY)) for i in range(5, 15))
    with pytest.raises(EngineError, match="on fire"):
        list(Batch(engine, rows, strict=True))
    assert idle(engine)


def test_an_interruption_arrives_unchanged_and_frees_the_slots(monkeypatch):
    engine = scripted(slots=2)
    failing(engine, monkeypatch, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.generate_batch([[5], [6], [7]], GREEDY)
    assert idle(engine)
    assert engine.generate([5], GREEDY).tokens == single([5])


# -- in order


def ordered(engine, limits) -> Batch:
    make = lambda n: engine._request([5], SamplingParams(max_tokens=n, ignore_eos=True))  # noqa: E731
    return Batch(engine, ((i, lambda n=n: make(n)) for i, n in enumerate(limits)), ordered=True)


def test_an_ordered_batch_keeps_the_order_of_its_rows():
    numbers = [number for number, _ in ordered(scripted(slots=2), [30, 2, 2, 9, 1, 1])]
    assert numbers == [0, 1, 2, 3, 4, 5]


def test_an_ordered_batch_holds_a_bounded_number_of_finished_rows(monkeypatch):
    monkeypatch.setattr(batch, "MAX_HELD", 3)
    pulled = []
    rows = ordered(scripted(slots=2), (pulled.append(n) or n for n in [40] + [1] * 20))
    next(rows)
    assert len(pulled) <= 3 + 2 * 2
    assert [number for number, _ in rows] == list(range(1, 21))


# -- the bar


def test_the_bar_shows_rows_and_tokens_per_second(capsys):
    scripted(slots=2).generate_batch(PROMPTS, GREEDY, progress=True)
    shown = capsys.readouterr().err
    assert "4/4" in shown and "tok/s" in shown


@pytest.mark.parametrize("progress", [None, False])
def test_no_bar_where_there_is_no_terminal(progress, capsys):
    scripted().generate_batch(PROMPTS, GREEDY, progress=progress)
    assert capsys.readouterr().err == ""
