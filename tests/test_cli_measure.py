"""`jaxserve bench` and `jaxserve trace` with a stand-in for the engine."""

import contextlib
import json

import pytest

from jaxserve.cli import bench, main, measure
from jaxserve.cli import trace as trace_command
from jaxserve.trace import Figures, Phase, plot
from tests.clockwork import Clockwork

STEP_BYTES = {"mlp": 3e6, "attention": 1e6}


@pytest.fixture
def engine(monkeypatch):
    """Both commands get this engine, a copy rate of 10 GB/s and steps of 4 MB for each row."""
    fake = Clockwork()
    moved = lambda engine, path, *, rows, **_: {kind: rows * n for kind, n in STEP_BYTES.items()}  # noqa: E731
    for command in (bench, trace_command):
        monkeypatch.setattr(command, "load_engine", lambda args, **_: fake)
        monkeypatch.setattr(command, "measured_copy_bandwidth", lambda device: 10e9)
        monkeypatch.setattr(command, "traffic", moved)
    monkeypatch.setattr(trace_command, "host_dispatch_s", lambda engine, rows: 0.0007 * rows)
    monkeypatch.setattr(measure, "time", fake)
    return fake


def printed(capsys):
    """(what people read, the object on the last line)"""
    table, last = capsys.readouterr().out.rstrip("\n").rsplit("\n", 1)
    return table, json.loads(last)


def test_bench_reports_speed_bandwidth_and_what_they_depend_on(engine, capsys):
    assert main(["bench", "m", "--prompt", "10", "--generate", "20", "--repetitions", "2"]) == 0
    table, result = printed(capsys)
    prompt, decode = result["rows"]
    assert (prompt["test"], prompt["tokens_per_s"], prompt["gb_per_s"]) == ("pp10", pytest.approx(100), None)
    assert (decode["test"], decode["tokens_per_s"]) == ("tg20", pytest.approx(500))
    assert (decode["gb_per_s"], decode["percent_of_copy"]) == (pytest.approx(2), pytest.approx(20))
    assert [len(row["runs"]) for row in result["rows"]] == [2, 2]
    assert {"model", "context", "device", "versions", "date", "copy_gb_per_s"} <= set(result)
    for word in ("pp10", "tg20", "500.00 ± 0.00", "20.0 %"):
        assert word in table


def test_bench_measures_every_depth_and_every_batch(engine, capsys):
    words = ["bench", "m", "--prompt", "4", "--generate", "8", "--depth", "0,16", "--batch", "1,4"]
    assert main(words) == 0
    rows = printed(capsys)[1]["rows"]
    assert [(row["test"], row["depth"], row["batch"]) for row in rows] == [
        ("pp4", 0, 1), ("tg8", 0, 1), ("tg8", 0, 4), ("pp4", 16, 1), ("tg8", 16, 1), ("tg8", 16, 4),
    ]  # fmt: skip
    assert rows[2]["tokens_per_s"] == pytest.approx(4 * rows[1]["tokens_per_s"])
    assert rows[2]["gb_per_s"] == pytest.approx(4 * rows[1]["gb_per_s"])  # four times the bytes in a step
    assert rows[2]["bytes_per_token"] == rows[1]["bytes_per_token"]


def test_bench_loads_as_many_slots_and_tokens_as_it_needs(engine, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(bench, "load_engine", lambda args, **_: seen.append(args) or engine)
    assert main(["bench", "m", "--generate", "8", "--depth", "100", "--batch", "1,4"]) == 0
    assert (seen[0].slots, seen[0].context) == (4, 613)  # 100 + 512 + 1: the prompt is the longest
    assert main(["bench", "m", "--generate", "8", "--prompt", "0", "--slots", "9", "--context", "99"]) == 0
    assert (seen[1].slots, seen[1].context) == (9, 99)


@pytest.mark.parametrize("words", [["--batch", "0"], ["--depth", "4,-1"], ["--generate", "-1"]])
def test_bench_refuses_sizes_that_mean_nothing_before_loading(engine, words, capsys):
    assert main(["bench", "m", *words]) == 1
    assert f"{words[0][2:]}={words[1].split(',')[-1]}" in capsys.readouterr().err and engine.closed == 0


def test_bench_takes_lists_of_numbers_only(capsys):
    assert main(["bench", "m", "--depth", "1,x"]) == 2
    assert "like 0,4096" in capsys.readouterr().err


def test_bench_json_is_the_object_alone(engine, capsys):
    assert main(["bench", "m", "--prompt", "4", "--generate", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][1]["batch"] == 1


def test_bench_deviation_of_one_run_is_zero():
    assert bench.row("pp1", 0, 1, [5.0])["std"] == 0
    assert bench.row("pp1", 0, 1, [4.0, 6.0])["std"] == pytest.approx(2**0.5)


def test_trace_prints_a_table_and_writes_the_same_report(engine, tmp_path, capsys):
    assert main(["trace", "m", "--out", str(tmp_path / "new"), "--steps", "3"]) == 0
    table, last = printed(capsys)
    written = json.loads((tmp_path / "new" / "report.json").read_text())
    assert written.pop("each_dispatch") == written["prefill"].pop("each_dispatch") == []
    assert written == last
    assert last["steady_steps"] == 3 and "3 steady steps" in table
    assert len({tuple(prompt) for prompt, _ in engine.asked}) == len(engine.asked) == 3
    assert (len(engine.asked[-1][0]), engine.asked[-1][1].max_tokens) == (64, 4)
    assert last["named"] is None


def test_trace_says_how_fast_each_layer_kind_moves_its_bytes(engine, tmp_path, capsys):
    assert main(["trace", "m", "--out", str(tmp_path)]) == 0
    table, result = printed(capsys)
    layer, busy = result["layers"]
    assert (layer["kind"], layer["gb_per_s"], layer["percent_of_copy"]) == ("mlp", 1.5, 15)  # 3 MB in 2 ms
    assert (busy["kind"], busy["gb_per_s"], busy["percent_of_copy"]) == ("busy", 2, 20)
    assert "percent of copy" in table and result["copy_gb_per_s"] == 10


def test_trace_of_several_rows_runs_them_side_by_side(engine, tmp_path, capsys):
    words = ["--batch", "4", "--steps", "10", "--prompt-tokens", "5"]
    assert main(["trace", "m", "--out", str(tmp_path), *words]) == 0
    result = printed(capsys)[1]
    assert (result["rows"], result["mean_length"]) == (4, 5 + 11 / 2)
    assert len({tuple(prompt) for prompt, _ in engine.asked}) == 3 * 4
    assert engine.steps == 16 + 11 + 11  # all rows in the same steps: warm-up, without and with the profiler


def test_trace_says_what_a_step_takes_without_the_profiler(engine, tmp_path, capsys):
    assert main(["trace", "m", "--out", str(tmp_path), "--batch", "2"]) == 0
    table, result = printed(capsys)
    assert result["untraced"] == {"step_ms": pytest.approx(2), "host_dispatch_ms": pytest.approx(1.4)}
    assert "without the profiler: 2.000 ms a step, host dispatch 1.400 ms" in table


@pytest.mark.parametrize("words", [["--steps", "1"], ["--batch", "0"], ["--plot", "token.pdf"]])
def test_trace_refuses_before_loading_what_cannot_be_traced_or_drawn(engine, words, tmp_path, capsys):
    assert main(["trace", "m", "--out", str(tmp_path), *words]) == 1
    assert words[1] in capsys.readouterr().err and (engine.asked, engine.closed) == ([], 0)


def test_trace_refuses_a_folder_it_cannot_write_before_loading(engine, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["trace", "m", "--out", str(tmp_path / "file")]) == 1
    assert (engine.asked, engine.closed) == ([], 0)


@pytest.fixture
def without_graphs(engine, monkeypatch):
    """Counts the traces with graphs off."""
    taken = []

    @contextlib.contextmanager
    def graphs_off(runner):
        taken.append(runner)
        engine.hides_names = False
        yield

    engine._runner = "the runner"
    monkeypatch.setattr(trace_command, "graphs_off", graphs_off)
    return taken


def test_hidden_names_bring_a_second_trace_that_says_so(engine, without_graphs, tmp_path, capsys):
    engine.hides_names = True
    assert main(["trace", "m", "--out", str(tmp_path)]) == 0
    table, result = printed(capsys)
    assert without_graphs == ["the runner"]
    assert (
        f"graphs hide 100% of the kernel time. A second trace with graphs off, for names only: {tmp_path}"
        in table
    )
    assert [row["kind"] for row in result["layers"]] == ["in graph", "busy"]
    assert [row["kind"] for row in result["named"]["layers"]] == ["mlp", "busy"]
    assert (tmp_path / "named").is_dir() or result["named"]["path"] == str(tmp_path / "named")


def test_names_that_are_all_known_need_no_second_trace_unless_asked_for(
    engine, without_graphs, tmp_path, capsys
):
    assert main(["trace", "m", "--out", str(tmp_path)]) == 0
    assert without_graphs == []
    assert main(["trace", "m", "--out", str(tmp_path), "--named"]) == 0
    assert without_graphs == ["the runner"]


def phase():
    one = Phase(steady_steps=1, per_step=Figures(busy_ms=2.0, wall_ms=2.5))
    one.layers = [
        {"kind": kind, "ms_per_step": 2 * ms, "share": ms / 2, "kernels_per_step": 1.0}
        for kind, ms in (("mlp", 1.5), ("norm", 0.5))
    ]
    one.add_traffic({"mlp": 3e6}, 10e9)
    return one


def test_a_plot_s_parts_take_shares_from_the_named_trace_and_times_from_the_other():
    found = {part.kind: (part.ms, part.floor_ms) for part in plot.parts(phase(), busy_ms=1.0, step_ms=1.4)}
    assert found == {
        "mlp": (pytest.approx(0.75), pytest.approx(0.3)),  # 3 MB at 10 GB/s
        "norm": (pytest.approx(0.25), 0.0),
        "idle": (pytest.approx(0.4), 0.0),
    }


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"jaxserve\[plot\]"):
        plot.check_plot("token.svg")


@pytest.mark.parametrize("suffix", plot.SUFFIXES)
def test_a_plot_is_written_with_every_layer_kind(suffix, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"token{suffix}"
    plot.plot_token(phase(), Figures(busy_ms=2.0, wall_ms=2.5), path, step_ms=2.5, title="a token")
    content = path.read_bytes()
    assert len(content) > 2000
    if suffix == ".svg":
        assert b"<svg" in content


def test_trace_draws_the_plot_it_is_asked_for(engine, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    assert main(["trace", "m", "--out", str(tmp_path), "--plot", str(tmp_path / "token.svg")]) == 0
    assert (tmp_path / "token.svg").exists()
