"""The benchmark of the routes and the soak: what they count and what they call a fault."""

import contextlib
import json

import numpy as np
import pytest

import bench_prefix
import jaxserve
import soak_prefix
from bench_prefix import Prompts, measure_checkpoints, measure_pairs, measure_routes
from tests.oracle import tiny_path
from tests.prefixes import MODELS, engine

MODEL = str(tiny_path(MODELS["attention"]))


def fresh(kind: str) -> jaxserve.Engine:
    """A shared engine that remembers nothing."""
    chosen = engine(kind, slots=2)
    chosen._reuse.reset()
    chosen._reuse.tier.clear()
    return chosen


@pytest.fixture
def shared_engines(monkeypatch):
    """What the tools load are the engines that other tests use, and they stay open."""

    def load(path, *, residency=True, prefix_bytes=None, **shape):
        assert path == MODEL
        chosen = fresh("attention") if residency else engine("attention", slots=2, reuse=False)
        if prefix_bytes:
            monkeypatch.setattr(chosen._reuse.tier.index, "budget", prefix_bytes)
        return contextlib.nullcontext(chosen)

    monkeypatch.setattr(jaxserve.Engine, "load", load)


def run(monkeypatch, tool, *arguments: str) -> int | None:
    monkeypatch.setattr("sys.argv", [tool.__name__, MODEL, *arguments])
    return tool.main()


def test_no_two_prompts_of_a_benchmark_begin_alike():
    prompts = Prompts(9)
    made = [prompts.new(length) for length in (1, 1, 5, 5, 5, 5, 3, 3, 3)]
    assert [len(prompt) for prompt in made] == [1, 1, 5, 5, 5, 5, 3, 3, 3]
    assert len({prompt[0] for prompt in made}) == 9


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_every_route_of_the_benchmark_is_the_one_meant(kind):
    chosen = fresh(kind)
    before = chosen.stats()["routes"]
    row = measure_routes(chosen, 40, 2, Prompts(300))
    assert row["missed"] == 0
    assert row["restored_bytes_per_s"] > 0
    for name in bench_prefix.EXPECTED:
        assert 0 < row[name]["min_s"] <= row[name]["median_s"] <= row[name]["max_s"]
    assert all(count > before[route] for route, count in chosen.stats()["routes"].items())


def test_a_route_that_was_not_the_one_meant_is_counted(monkeypatch):
    chosen = fresh("attention")
    monkeypatch.setattr(chosen._reuse, "residency", False)
    assert measure_routes(chosen, 40, 1, Prompts(300))["missed"] == 1


def test_pairs_compare_the_same_prompts_with_and_without_reuse():
    with_reuse, without = fresh("attention"), engine("attention", slots=2, reuse=False)
    before = without.stats()["requests"]
    table = measure_pairs(with_reuse, without, 100, 3, Prompts(300))
    assert without.stats()["requests"] == before + 3
    assert (table["pairs"], table["missed"]) == (3, 0)
    for name in ("miss", "hit"):
        assert table[name]["ratio_first_s"] > 0 and table[name]["ratio_whole_s"] > 0


def test_checkpoints_are_compared_by_the_tokens_between_them():
    chosen = fresh("hybrid")
    usual = chosen._reuse.every
    table = measure_checkpoints(chosen, 200, [64, 128], 1, Prompts(300))
    assert {every: row["checkpoints"] for every, row in table.items()} == {0: 1, 64: 4, 128: 2}
    assert table[0]["ratio_first_s"] == 1
    assert chosen._reuse.every == usual


def test_the_benchmark_prints_its_tables_and_json(monkeypatch, shared_engines, capsys, tmp_path):
    options = ("--lengths", "20", "--repetitions", "1", "--pairs", "1", "--hosts", "idle,busy")
    monkeypatch.setattr(bench_prefix, "SPIN_UP_S", 0.0)
    run(monkeypatch, bench_prefix, *options, "--out", str(tmp_path / "out.json"))
    printed = capsys.readouterr().out
    assert "copied" in printed and "hit / off" in printed
    result = json.loads(printed.splitlines()[-1])
    assert result == json.loads((tmp_path / "out.json").read_text())
    assert set(result["routes"]) == {"20"} and set(result["pairs"]) == {"idle", "busy"}


def test_a_small_soak_finds_nothing(monkeypatch, shared_engines, capsys):
    options = ("--requests", "200", "--prefixes", "20", "--longest", "200", "--held", "4")
    assert run(monkeypatch, soak_prefix, *options) == 0
    printed = capsys.readouterr().out
    assert "nothing grew in 200 requests over 20 prefixes" in printed
    tenths = json.loads(printed.splitlines()[-1])["tenths"]
    assert tenths[-1]["requests"] == 200 and tenths[-1]["evictions"] > 20


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_no_route_makes_a_graph_change(kind):
    chosen, rng = fresh(kind), np.random.default_rng(0)
    prefixes = soak_prefix.make_prefixes(6, 250, 300, rng)
    for _ in range(20):
        soak_prefix.serve(chosen, prefixes, rng)
    found = soak_prefix.graph_updates(chosen, prefixes, rng)
    assert all(found[name][0] > 0 for name in ("decode", "hit", "copy_row", "write_end"))
    assert {name: found[name][1] for name in soak_prefix.MOVERS if name in found and found[name][1]} == {}


@pytest.mark.parametrize(
    ("grown", "fault"),
    [
        ({}, None),
        ({"prefix_bytes": 101}, "the host tier held 101 bytes of 100"),
        ({"compilations": 1}, "1 compilations"),
        ({"process_bytes": 2**30}, "process_bytes grew from 0 to 1,073,741,824"),
        ({"device_bytes": 2**25}, "device_bytes grew from 0 to 33,554,432"),
    ],
    ids=str,
)
def test_what_grows_in_the_second_half_of_a_soak_is_a_fault(grown, fault):
    flat = {"prefix_bytes": 100, "compilations": 0, "process_bytes": 0, "device_bytes": 0}
    assert soak_prefix.faults([flat] * 9 + [flat | grown], 100) == ([fault] if fault else [])


def test_prefixes_of_a_soak_are_distinct_and_some_share_their_beginning():
    prefixes = soak_prefix.make_prefixes(40, 50, 300, np.random.default_rng(0))
    assert len({tuple(prefix) for prefix in prefixes}) == 40
    assert all(1 <= len(prefix) <= 50 for prefix in prefixes)
    assert any(
        len(a) > 9 and b[: len(a) // 2] == a[: len(a) // 2]
        for a, b in zip(prefixes, prefixes[1:], strict=False)
    )
