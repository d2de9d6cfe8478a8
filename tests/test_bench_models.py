"""The model benchmark: sections, what is compiled for them, and that one failure costs no other figure."""

import argparse
import contextlib
import json

import pytest

import bench_models
from bench_models import SECTIONS, contexts, guarded, loaded, measure, model_file, only_greedy, table
from jaxserve import runner
from tests.engines import scripted, scripted_path


def arguments(**changed):
    given = dict(
        sections=list(SECTIONS), generate=4, depths=[12], prompts=[8, 20], batches=[2], batch_prompt=8,
        repetitions=3, weights="float32", quant="Q8_0",
    )  # fmt: skip
    return argparse.Namespace(**given | changed)


@pytest.fixture
def ready(monkeypatch):
    """Loading hands out an engine that is there; yields what was asked for."""
    asked = []

    @contextlib.contextmanager
    def instead(path, weights, *, context, slots, lanes):
        asked.append((list(lanes), context))
        yield scripted(slots=2, context=128, reuse=False), {"load_s": 1.5}

    monkeypatch.setattr(bench_models, "loaded", instead)
    monkeypatch.setattr(bench_models, "GREEDY_TOKENS", 16)
    monkeypatch.setattr(bench_models, "TRACED_STEPS", 8)
    return asked


def test_every_section_is_measured_and_saved_as_soon_as_it_is_there(ready):
    saved = []
    found = measure(scripted_path(), arguments(), 1e10, lambda found: saved.append(list(found)))
    assert not [name for name in SECTIONS if "error" in found[name]]
    assert [len(lanes) for lanes, _ in ready] == [1, 1] and ready[1][0] == [2]
    for name, later in zip(SECTIONS, list(SECTIONS)[1:], strict=False):
        assert any(name in names and later not in names for names in saved), name
    json.dumps(found)
    assert len(found["decode"]["runs"]) == 3 and found["decode"]["percent_of_copy"] > 0
    assert list(found["depths"]) == [12] and list(found["prompts"]) == [8, 20]
    assert found["batch"][2]["tok_s"] > 0 and found["batch"][2]["step_ms"] > 0
    assert found["dispatch"]["host_dispatch_ms"] > 0
    assert found["trace"]["per_step"]["kernels"] > 0 and found["trace"]["prefill"]["steps"] > 0
    shown = table(found)
    for words in (
        "decode at depth 12",
        "decode of 2 rows",
        "prompt of 20",
        "host dispatch",
        "kernels",
        "load_s 1.5",
    ):
        assert words in shown


def test_a_section_that_fails_leaves_its_error_and_the_others(ready, monkeypatch, capsys):
    def fails(bench):
        raise RuntimeError("no such luck")

    monkeypatch.setitem(SECTIONS, "depths", fails)
    found = measure(scripted_path(), arguments(sections=["depths", "prompts"]), 1e10, lambda found: None)
    assert found["depths"] == {"error": "RuntimeError: no such luck"}
    assert "tok_s" in found["prompts"][8]
    assert "no such luck" in capsys.readouterr().out
    assert "prompt of 8" in table(found) and "depth" not in table(found)


def test_an_engine_that_cannot_be_loaded_is_reported_in_its_place(monkeypatch):
    def refuses(*_, **options):
        raise MemoryError("too large")

    monkeypatch.setattr(bench_models, "loaded", refuses)
    found = measure(scripted_path(), arguments(), 1e10, lambda found: None)
    assert found["alone"] == found["batched"] == {"error": "MemoryError: too large"}
    assert "too large" in table(found)


def test_sections_that_are_not_chosen_load_nothing_for_themselves(ready):
    measure(scripted_path(), arguments(sections=["prompts"]), 1e10, lambda found: None)
    assert len(ready) == 1
    few, many = (contexts(arguments(sections=chosen, depths=[4096])) for chosen in (["decode"], ["depths"]))
    assert few[0] < 200 and many[0] > 4096


def test_only_the_lanes_and_programs_that_are_run_get_compiled():
    with loaded(scripted_path(), "float32", context=64, slots=2, lanes=[2]) as (engine, loading):
        decodes = [name for name in engine.programs if name.startswith("decode")]
        assert decodes == ["decode 2 64 1 False"]
        assert not [name for name in engine.programs if name.startswith(("read", "write", "copy", "hit"))]
        assert loading["load_to_first_token_s"] >= loading["load_s"] > 0
        assert engine.slots == 2


def test_lanes_are_limited_inside_the_block_only():
    lanes = lambda: runner.Buckets.of(64, 4, "cpu", step_nbytes=0).lanes  # noqa: E731
    usual, compiled = lanes(), runner.Runner._lowerings
    with only_greedy([4]):
        assert lanes() == (4,) != usual
    with only_greedy():
        assert lanes() == usual
    assert lanes() == usual and runner.Runner._lowerings is compiled


def test_a_preset_is_written_and_removed_and_a_file_is_left_alone(tmp_path, monkeypatch, capsys):
    written = []
    monkeypatch.setattr(
        bench_models.synthetic_model, "write", lambda path, *_: written.append(path) or path.touch()
    )
    with model_file("qwen2.5-7b", tmp_path, "Q8_0") as path:
        assert written == [path] and path.exists()
    assert not path.exists()
    own = tmp_path / "own.gguf"
    own.touch()
    with model_file(str(own), tmp_path, "Q8_0") as path:
        assert path == own
    assert own.exists() and written != [own]


def test_an_interruption_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt), guarded({}, "decode"):
        raise KeyboardInterrupt
