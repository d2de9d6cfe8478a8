"""The load generator: arrivals, what counts as good, the search for the peak, and a run on a small model."""

import argparse
from types import SimpleNamespace

import numpy as np
import pytest

import load_test
from load_test import Shape, Visit, arrivals, percentiles, run, summary, sweep
from tests.engines import scripted

MIX = [Shape(100, 20), Shape(400, 10, weight=3)]


def test_equal_seeds_give_equal_arrivals_and_other_seeds_others():
    first, again, other = (arrivals(MIX, 5, 10, 1000, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(visit.prompt) for visit in first}) == len(first)


def test_arrivals_are_poisson_of_the_rate_asked_for():
    visits = arrivals(MIX, 20, 200, 1000, seed=0)
    gaps = np.diff([visit.at for visit in visits])
    assert len(visits) == pytest.approx(4000, rel=0.05)
    assert gaps.min() >= 0 and gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)  # exponential: the deviation is the mean


def test_classes_are_as_frequent_as_their_weights_and_lengths_vary_around_theirs():
    visits = arrivals(MIX, 20, 200, 1000, seed=0)
    long = [visit for visit in visits if len(visit.prompt) >= 200]
    assert len(long) == pytest.approx(0.75 * len(visits), rel=0.05)
    assert np.mean([len(visit.prompt) for visit in long]) == pytest.approx(400, rel=0.05)
    assert {visit.output for visit in long} == set(range(5, 16))


@pytest.mark.parametrize(
    ("text", "shape"), [("128x64", Shape(128, 64)), ("1x2@3", Shape(1, 2, 3)), ("9x9@0.5", Shape(9, 9, 0.5))]
)
def test_a_class_is_written_as_lengths_and_weight(text, shape):
    assert Shape.parse(text) == shape


@pytest.mark.parametrize("text", ["128", "0x5", "5x1", "5x5@0", "x5", "5x5@"])
def test_a_class_that_means_nothing_is_refused_with_an_example(text):
    with pytest.raises(argparse.ArgumentTypeError, match="128x64@3"):
        Shape.parse(text)


def visit(first, *gaps, at=1.0, finished=True):
    times = np.cumsum([at + first, *gaps]).tolist()
    return Visit(at, [1], 1 + len(gaps), submitted=at + 0.001, tokens=times, finished=finished)


def test_a_request_is_good_if_its_first_token_and_every_gap_are_in_time():
    limits = dict(ttft=1.0, gap=0.05)
    assert visit(0.9, 0.04, 0.04).is_good(**limits)
    assert not visit(1.1, 0.04).is_good(**limits)
    assert not visit(0.1, 0.01, 0.06, 0.01).is_good(**limits)
    assert not visit(0.1, 0.01, finished=False).is_good(**limits)
    assert not Visit(1.0, [1], 5).is_good(**limits)


def test_a_summary_counts_what_is_good_and_ranks_all_times():
    visits = [visit(0.1, 0.01, 0.03), visit(2.0, 0.02), visit(0.3, finished=False), Visit(9.0, [1], 5)]
    one = summary(visits, 10.0, rate=0.4, ttft=1.0, gap=0.05)
    assert (one["requests"], one["finished"], one["good"], one["goodput"]) == (4, 2, 1, 0.1)
    assert one["ttft_ms"]["p50"] == pytest.approx(300) and one["gap_ms"]["p50"] == pytest.approx(20)
    assert one["submitted_late_ms"]["p99"] == pytest.approx(1)
    assert one["tokens_per_s"] == pytest.approx(0.6)


def test_percentiles_of_nothing_are_none():
    assert set(percentiles([]).values()) == {None}
    assert percentiles([0.1, 0.2, 0.3])["p50"] == pytest.approx(200)


def test_the_sweep_doubles_until_goodput_falls_behind_and_then_narrows_the_peak_down():
    def measure(rate):  # an engine that serves 11 requests a second and chokes on more
        good = 100 if rate <= 11 else 20
        return {"rate": rate, "requests": 100, "good": good, "goodput": rate * good / 100}

    done = sweep(measure, start=1)
    assert [one["rate"] for one in done] == [1, 2, 4, 8, 16, 12, 10, 11]
    assert max(one["goodput"] for one in done) == 11


def test_a_sweep_that_starts_too_high_looks_below():
    done = sweep(lambda rate: {"rate": rate, "requests": 10, "good": 10 * (rate <= 3)}, start=8)
    assert [one["rate"] for one in done] == [8, 4, 2, 3]


class SlowDriver:
    """Each step takes a second and draws a token of one request; the clock is its own."""

    def __init__(self):
        self.now, self.queue = 0.0, []

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def start(self, visit):
        self.queue.append([])
        return self.queue[-1]

    def step(self, stream):
        self.now += 1.0
        next(tokens for tokens in self.queue if len(tokens) < 2).append(7)

    def progress(self, stream):
        return len(stream), len(stream) == 2


@pytest.fixture
def slow(monkeypatch):
    driver = SlowDriver()
    monkeypatch.setattr(load_test, "time", driver)
    return driver


def test_arrivals_do_not_wait_for_answers(slow):
    visits = [Visit(at, [1], 2) for at in (0.5, 0.6, 0.7, 10.0)]
    run(slow, visits, drain=100)
    assert [visit.submitted for visit in visits] == [0.5, 1.5, 1.5, 10.0]  # between two steps at the latest
    assert [visit.first_token_s for visit in visits] == pytest.approx([1.0, 2.9, 4.8, 1.0])
    assert all(visit.finished and visit.gaps_s == [1.0] for visit in visits)


def test_what_still_runs_when_the_time_is_over_is_cut_off(slow):
    visits = [Visit(0.0, [1], 2), Visit(0.0, [1], 2)]
    closed = []
    slow.start = lambda visit: slow.queue.append(Closable(closed)) or slow.queue[-1]
    assert run(slow, visits, drain=3.0) == 3.0
    assert [visit.finished for visit in visits] == [True, False]
    assert len(closed) == 1


class Closable(list):
    """The tokens of a stream that notes its end."""

    def __init__(self, closed):
        super().__init__()
        self.closed = closed

    def close(self):
        self.closed.append(self)


def test_a_small_model_serves_its_visitors_and_the_report_has_every_run():
    engine = scripted(slots=2, context=128, reuse=False)
    args = SimpleNamespace(
        mix=[Shape(20, 8)], rate=None, start=20.0, seconds=0.5, drain=10.0, seed=3, ttft=1e-9, gap=0.05
    )
    result = load_test.load(load_test.Driver(engine), args)
    assert result["alone"]["finished"] == load_test.ALONE_REQUESTS
    assert result["alone"]["gap_ms"]["p50"] > 0
    assert len(result["runs"]) == 1 + load_test.NARROWING_RUNS  # nothing is that fast: no rate keeps up
    assert result["peak_goodput"] == 0 and "at_80_percent" not in result
    table = load_test.table(result)
    assert len(table.splitlines()) == 3 + len(result["runs"]) and "alone" in table
    assert "peak goodput 0.00" in table
    assert engine.stats()["free_slots"] == 2


def test_the_last_run_offers_80_percent_of_the_peak_and_compares_its_gaps(monkeypatch):
    engine = scripted(slots=2, context=128, reuse=False)
    monkeypatch.setattr(load_test, "sweep", lambda measure, start: [measure(start)])
    args = SimpleNamespace(
        mix=[Shape(20, 8)], rate=None, start=20.0, seconds=0.5, drain=10.0, seed=3, ttft=10.0, gap=10.0
    )
    result = load_test.load(load_test.Driver(engine), args)
    assert result["at_80_percent"]["rate"] == pytest.approx(0.8 * result["peak_goodput"])
    p95 = [result[name]["gap_ms"]["p95"] for name in ("at_80_percent", "alone")]
    assert result["gap_p95_over_alone"] == pytest.approx(p95[0] / p95[1])
    assert "p95 gap" in load_test.table(result)


def test_one_rate_is_measured_alone_when_it_is_asked_for():
    engine = scripted(slots=2, context=128, reuse=False)
    args = SimpleNamespace(
        mix=[Shape(20, 8)], rate=20.0, start=1.0, seconds=0.5, drain=10.0, seed=3, ttft=10.0, gap=10.0
    )
    result = load_test.load(load_test.Driver(engine), args)
    (one,) = result["runs"]
    assert one["requests"] == one["finished"] == one["good"] > 0 and one["goodput"] == one["good"] / 0.5
