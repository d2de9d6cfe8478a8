"""Jobs over files: what is written, what a killed job leaves and how it goes on, exit statuses."""

import io
import json
import multiprocessing
import os
import random
import signal
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from jaxserve import SamplingParams
from jaxserve.cli import batch as batch_command
from jaxserve.cli import main
from jaxserve.jobs.job import (
    Answer,
    Finished,
    Job,
    Stamp,
    Summary,
    check_paths,
    count_lines,
    read_finished,
    read_rows,
    rows_left,
)
from jaxserve.jobs.ledger import Ledger
from tests.engines import SCRIPT, scripted, scripted_path
from tests.oracle import tiny_path

FLAGS = ["--max-tokens", "6", "--ignore-eos"]
DEFAULTS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def files(tmp_path):
    """Paths of an input and an output; the input is written from objects and bytes, a line each."""

    def write(*lines, name: str = "in.jsonl") -> tuple[str, str]:
        data = [line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines]
        (tmp_path / name).write_bytes(b"".join(data))
        return str(tmp_path / name), str(tmp_path / "out.jsonl")

    return write


@pytest.fixture
def engine(monkeypatch):
    """`jaxserve batch` gets a shared engine in place of one that it loads."""
    shared = scripted(slots=2)
    loads = []

    class Kept:
        def __enter__(self):
            return shared

        def __exit__(self, *_):
            pass

    def load(args, **options):
        shared._reuse.reset()
        shared._reuse.tier.clear()
        loads.append((args.slots, args.weights, options))
        return Kept()

    monkeypatch.setattr(batch_command, "load_engine", load)
    monkeypatch.setattr(batch_command, "resolve_mode", lambda *_: "float32")
    shared.loads = loads
    return shared


def run(source: str, target: str, *flags: str) -> int:
    return main(["batch", str(scripted_path()), source, target, *FLAGS, *flags])


def rows(path: str) -> list[dict]:
    return [json.loads(line) for line in Path(path).read_bytes().split(b"\n") if line]


def single(prompt, **options) -> str:
    return scripted().generate(prompt, SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | options)).text


# -- rows in, rows out


def test_every_row_is_answered_and_equals_its_single_run(files, engine):
    source, target = files(
        {"id": "a", "prompt": "hi"},
        {"id": "b", "prompt_tokens": [5, 6], "max_tokens": 3},
        {"id": "c", "messages": [{"role": "user", "content": "hi"}], "temperature": 2.0, "seed": 4},
        {"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "hi", "max_tokens": 2}},
    )
    assert run(source, target) == 0
    found = {row.get("custom_id", row["id"]): row for row in rows(target)}
    assert found["a"]["text"] == single("hi")
    assert found["b"]["text"] == single([5, 6], max_tokens=3)
    chat = engine.tokenizer.encode_chat([{"role": "user", "content": "hi"}]).ids
    assert found["c"]["text"] == single(chat, temperature=2.0, seed=4)
    body = found["d"]["response"]["body"]
    assert body["choices"][0]["text"] == single("hi", max_tokens=2)
    assert engine.loads == [("auto", "float32", {"reproducible": True})]


def test_one_bad_row_harms_no_other(files, engine, capsys):
    good = {"id": "good", "prompt": "hi"}
    source, target = files(
        good,
        b"{broken\n",
        [1, 2],
        {"id": "long", "prompt_tokens": [5] * 65},
        b"  \n",
        b"\n",
        json.dumps(good | {"id": "crlf"}).encode() + b"\r\n",
        {"id": "bad ids", "prompt_tokens": [-1]},
        {"prompt": "no id"},
        {"id": "good", "prompt": "twice"},
        json.dumps({"id": "last", "prompt": "without an end"}).encode(),
    )
    assert run(source, target) == 1
    found = {row["id"]: row for row in rows(target) if row["error"] is None}
    failed = {row["id"]: row["error"] for row in rows(target) if row["error"] is not None}
    assert set(found) == {"good", "crlf", 9, "last"}
    assert found["good"]["text"] == found["crlf"]["text"] == single("hi")
    assert set(failed) == {2, 3, "long", "bad ids", "good"}
    assert "65 tokens" in failed["long"] and "line 1 has the id 'good'" in failed["good"]
    assert len(rows(target)) == 9
    assert "errors" in capsys.readouterr().err


def test_lines_end_at_newlines_only(files, engine):
    text = "a\u2028b\u2029c\u0085d\re\u000bf"
    lines = [json.dumps({"id": f"{i}{text}", "prompt": text}, ensure_ascii=False) for i in range(3)]
    source, target = files(*(line.encode() + b"\n" for line in lines))
    assert run(source, target) == 0
    assert Path(target).read_bytes().count(b"\n") == 3
    assert {row["id"] for row in rows(target)} == {f"{i}{text}" for i in range(3)}


def test_text_round_trips(files, engine):
    source, target = files({"id": "語\ud800", "prompt_tokens": [SCRIPT.start["family"]]})
    assert main(["batch", str(scripted_path()), source, target]) == 0
    (row,) = rows(target)
    assert (row["id"], row["text"], row["finish_reason"]) == ("語\ud800", SCRIPT.text("family"), "stop")
    assert "👩" in Path(target).read_text("utf-8")


def test_ordered_answers_come_in_the_order_of_the_rows(files, engine):
    lines = [{"id": i, "prompt": "hi", "max_tokens": n} for i, n in enumerate((30, 1, 1, 9, 1))]
    source, target = files(*lines)
    assert run(source, target) == 0
    assert [row["id"] for row in rows(target)] != [0, 1, 2, 3, 4]
    assert run(source, target, "--overwrite", "--ordered") == 0
    assert [row["id"] for row in rows(target)] == [0, 1, 2, 3, 4]


def test_an_empty_file_is_a_job_without_rows(files, engine):
    source, target = files()
    assert run(source, target) == 0
    assert rows(target) == []


def test_stdin_and_stdout(files, engine, monkeypatch, capfdbinary):
    data = b'{"id": "a", "prompt": "hi"}\n{"id": "b", "prompt_tokens": [5]}'
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run("-", "-") == 0
    out, err = capfdbinary.readouterr()
    found = {row["id"]: row["text"] for row in map(json.loads, out.splitlines())}
    assert found == {"a": single("hi"), "b": single([5])}
    assert b"tok/s" in err


def test_the_summary_counts_rows_tokens_and_cache_hits(files, engine, capsys):
    prompt = list(b"the same beginning for every row of this job")
    source, target = files(*({"id": i, "prompt_tokens": [*prompt, i]} for i in range(5)), {"id": "bad"})
    assert run(source, target, "--json") == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["rows"], summary["errors"], summary["kept"]) == (6, 1, 0)
    assert (summary["tokens"], summary["prompt_tokens"]) == (30, 5 * (len(prompt) + 1))
    assert summary["cached_tokens"] >= 3 * (len(prompt) - 8) and summary["tokens_per_s"] > 0


# -- what is refused before a model is loaded


def test_files_that_cannot_be_used_are_refused_before_a_model_is_loaded(files, engine, tmp_path, capsys):
    source, target = files({"prompt": "hi"})
    Path(target).write_text("something of value\n")
    for words, why in [
        ((str(tmp_path / "absent"), target), "absent"),
        ((source, str(tmp_path / "no folder" / "out")), "no folder"),
        ((source, source), "is the input"),
        ((source, target), "is not empty"),
        ((source, "-", "--resume"), "have to be files"),
        (("-", target, "--resume"), "have to be files"),
        ((source, target, "--resume", "--overwrite"), "one of them"),
        ((source, target, "--resume"), "line 1 of"),
        ((source, "-", "--json"), "stdout"),
        ((source, target, "--temperature", "-1"), "temperature"),
    ]:
        assert run(*words) == 1
        assert why in capsys.readouterr().err
    assert Path(target).read_text() == "something of value\n" and not engine.loads


def test_only_a_torn_row_is_cut_off(files, engine):
    source, target = files({"id": "a", "prompt": "hi"})
    for torn in (b'{"id": "a", "te', b'{"i'):
        Path(target).write_bytes(torn)
        assert run(source, target, "--resume") == 0
        assert [row["text"] for row in rows(target)] == [single("hi")]
    for foreign in (b"notes", b"{}", b'{"id": "a", "te\n'):
        Path(target).write_bytes(foreign)
        assert run(source, target, "--resume") == 1
        assert Path(target).read_bytes() == foreign


# -- resume

TWENTY = [
    {
        "id": f"r{i}",
        "prompt_tokens": [5 + i] * (1 + 3 * i),
        "max_tokens": 1 + i % 5,
        "top_k": 1 + i,
        "seed": i,
    }
    for i in range(20)
]


def test_a_resumed_job_keeps_finished_rows_and_does_nothing_a_second_time(files, engine):
    source, target = files(*TWENTY)
    run(source, target)
    whole = Path(target).read_bytes()
    lines = whole.splitlines(keepends=True)
    kept = b"".join(lines[:7])
    for torn in (lines[7][: len(lines[7]) // 2], lines[7][:-1], b"", lines[7] + lines[8][:1]):
        Path(target).write_bytes(kept + torn)
        engine.loads.clear()
        assert run(source, target, "--resume") == 0
        after = Path(target).read_bytes()
        assert after.startswith(kept) and sorted(after.splitlines()) == sorted(whole.splitlines())
        assert run(source, target, "--resume") == 0
        assert Path(target).read_bytes() == after
        assert len(engine.loads) == 1  # the second time there was nothing to load a model for


def test_a_job_without_output_may_be_resumed(files, engine):
    source, target = files(*TWENTY[:3])
    assert run(source, target, "--resume") == 0
    assert len(rows(target)) == 3


def test_rows_added_to_the_input_are_answered(files, engine):
    source, target = files(*TWENTY[:5])
    run(source, target)
    before = Path(target).read_bytes()
    files(*TWENTY[3:8], *TWENTY[:3])
    assert run(source, target, "--resume") == 0
    assert Path(target).read_bytes().startswith(before)
    assert sorted(row["id"] for row in rows(target)) == sorted(row["id"] for row in TWENTY[:8])


@pytest.mark.parametrize("kind", ["a row", "a flag"])
def test_a_finished_row_that_asks_something_else_now_is_named_and_refused(kind, files, engine, capsys):
    source, target = files(*TWENTY[:4], {"prompt": "no id"})
    run(source, target)
    before = Path(target).read_bytes()
    engine.loads.clear()
    if kind == "a row":
        files(*TWENTY[:3], TWENTY[3] | {"seed": 99}, {"prompt": "another"})
        assert run(source, target, "--resume") == 1
        assert "2 finished rows" in (err := capsys.readouterr().err) and "'r3', 5" in err
    else:
        assert run(source, target, "--resume", "--top-k", "5") == 1
        assert "5 finished rows" in capsys.readouterr().err
    assert Path(target).read_bytes() == before and not engine.loads


def test_errors_and_repeated_ids_are_finished_rows_too(files, engine):
    source, target = files(b"{broken\n", TWENTY[0], TWENTY[0], {"id": "r0", "prompt": "third"}, {"id": "x"})
    assert run(source, target) == 1
    before = Path(target).read_bytes()
    assert run(source, target, "--resume") == 1
    assert Path(target).read_bytes() == before
    for index in range(5):
        lines = before.splitlines(keepends=True)
        del lines[index]
        Path(target).write_bytes(b"".join(lines))
        assert run(source, target, "--resume") == 1
        assert sorted(Path(target).read_bytes().splitlines()) == sorted(before.splitlines())


def test_openai_rows_are_resumed_by_their_custom_id(files, engine):
    options = {"max_tokens": 3, "temperature": 1.0, "seed": 1}
    asked = [{"custom_id": f"c{i}", "body": {"prompt": [5 + i], **options}} for i in range(4)]
    source, target = files(*asked, {"custom_id": "c1", "body": {}})
    assert run(source, target) == 1
    whole = Path(target).read_bytes()
    lines = whole.splitlines(keepends=True)
    Path(target).write_bytes(b"".join(lines[:2]) + lines[2][:30])
    assert run(source, target, "--resume") == 1
    assert sorted(Path(target).read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_resumed_job_chooses_the_slots_and_weights_it_had_chosen(files, engine, capsys):
    source, target = files(*TWENTY[:4])
    run(source, target)
    lines = Path(target).read_text().replace("/2/float32", "/16/packed").splitlines(keepends=True)
    Path(target).write_text("".join(lines[:2]))
    engine.loads.clear()
    run(source, target, "--resume")
    assert engine.loads[0][:2] == (16, "packed")
    Path(target).write_text("".join(lines[:2]))
    capsys.readouterr()
    run(source, target, "--resume", "--slots", "4")
    assert engine.loads[1][:2] == (4, "packed")
    assert "answered with --slots 16" in capsys.readouterr().err


# -- interruptions


@pytest.mark.parametrize(("error", "status"), [(KeyboardInterrupt(), 130), (RuntimeError("on fire"), 1)])
def test_an_interrupted_job_writes_nothing_of_what_was_in_flight_and_goes_on(
    error, status, files, engine, monkeypatch, capsys
):
    source, target = files(*TWENTY)
    decode, calls = engine._runner.decode, []

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 20:
            raise error
        return decode(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", fail)
        assert run(source, target) == status
    assert "--resume goes on" in capsys.readouterr().err
    kept = Path(target).read_bytes()
    assert 0 < len(rows(target)) < 20 and all(row["error"] is None for row in rows(target))
    assert run(source, target, "--resume") == 0
    assert Path(target).read_bytes().startswith(kept) and len(rows(target)) == 20


def test_a_reader_that_leaves_ends_a_job_quietly(files, engine, monkeypatch, capsys):
    source, _ = files(*TWENTY)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run(source, "-") == 0
        monkeypatch.undo()
    assert "Traceback" not in capsys.readouterr().err
    assert engine.stats()["free_slots"] == 2


SMALL = ["--context", "48", "--slots", "4", "--kv-dtype", "float32", "--weights", "float32"]


def start(*words: str):
    """A process of its own that runs a command. It is forked from one that has imported the package."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["jaxserve.cli.batch"])
    process = context.Process(target=main, args=(words,))
    process.start()
    return process


def killed(process, target: Path, goal: int) -> bytes:
    """What a job has written when it is killed, which is once there are `goal` rows."""
    while not target.exists() or target.read_bytes().count(b"\n") < goal:
        assert process.is_alive()
        time.sleep(0.001)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    return target.read_bytes()


def test_a_job_killed_five_times_equals_one_that_was_never_interrupted(tmp_path):
    rng, dice = np.random.default_rng(0), random.Random(0)
    source, target, whole = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    system = rng.integers(0, 384, 33).tolist()  # begins two rows of three
    with source.open("w") as file:
        for i in range(120):
            own = rng.integers(0, 384, rng.integers(1, 36)).tolist()
            prompt = (system[: 36 - len(own)] if i % 3 else []) + own
            options = {"max_tokens": int(rng.integers(1, 13)), "temperature": i % 2 * 1.5, "seed": i}
            print(json.dumps({"id": f"row {i}", "prompt_tokens": prompt, **options}), file=file)
    command = ["batch", str(tiny_path("llama-f32")), str(source)]
    kept = b""
    for _ in range(5):
        job = start(*command, str(target), *SMALL, "--resume")
        written = killed(job, target, goal=kept.count(b"\n") + dice.randint(3, 15))
        assert written.startswith(kept)  # what was finished stays as it is
        target.write_bytes(written[: -dice.randint(1, 60)])  # as if it had come inside a write
        kept = target.read_bytes()
        kept = kept[: kept.rfind(b"\n") + 1]
    assert main([*command, str(target), *SMALL, "--resume"]) == 0
    assert target.read_bytes().startswith(kept)
    assert main([*command, str(whole), *SMALL]) == 0
    drop = lambda row: {name: value for name, value in row.items() if name != "cached_tokens"}  # noqa: E731
    ours, theirs = ({row["id"]: drop(row) for row in rows(path)} for path in (target, whole))
    assert len(rows(target)) == len(ours) == 120 and ours == theirs


# -- the parts


def test_memory_does_not_grow_with_the_rows():
    def peak(count: int) -> int:
        line = b'{"id": "a rather long id of row %d", "prompt": "some words"}\n'
        lines, ledger = (line % i for i in range(count)), Ledger()
        tracemalloc.start()
        for row in read_rows(lines, DEFAULTS, ledger):
            ledger.finish(row.id, row.digest)
            assert ledger.is_finished(row.id, row.digest)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    assert peak(5_000) < peak(500) + 50_000  # 11 bytes a row


def test_a_ledger_knows_ids_by_type_and_digest():
    ledger = Ledger()
    ledger.finish("1", "aa")
    assert ledger.is_finished("1", "aa")
    assert not ledger.is_finished("1", "bb") and not ledger.is_finished(1, "aa")
    seen = [ledger.see(id, line) for id, line in [("a", 1), (1, 2), ("1", 3), ("a", 4), ("a", 5)]]
    assert seen == [(1, 1), (2, 1), (3, 1), (1, 2), (1, 3)]
    ledger.start_again()
    assert ledger.see("a", 9) == (9, 1) and ledger.is_finished("1", "aa")


def test_finished_rows_that_ask_something_else_now_are_stale():
    ledger = Ledger()
    for id, digest in [("same", "aa"), ("changed", "bb"), ("gone", "cc"), (4, "dd")]:
        ledger.finish(id, digest)
    for line, (id, digest) in enumerate([("same", "aa"), ("changed", "xx"), ("new", "cc"), (4, "yy")], 1):
        ledger.see(id, line)
        ledger.is_finished(id, digest)
    count, ids = ledger.stale(limit=1)
    assert count == 2 and len(ids) == 1
    assert set(ledger.stale(limit=9)[1]) == {"changed", 4}


def test_a_stamp_is_text_and_back():
    stamp = Stamp("0f1e", 64, "packed")
    assert str(stamp) == "0f1e/64/packed" and Stamp.parse(str(stamp)) == stamp


def test_whole_lines_of_an_output_count_and_a_torn_one_does_not(tmp_path):
    line = b'{"id": %d, "error": %s, "digest": "aa/%d/packed"}\n'
    path, ledger = tmp_path / "out", Ledger()
    path.write_bytes(line % (1, b"null", 2) + line % (2, b'"bad"', 4) + b'{"id": 3, "err')
    with path.open("rb") as output:
        found = read_finished(output, ledger)
    assert found == Finished(found.end, rows=2, errors=1, stamp=Stamp("aa", 4, "packed"))
    assert path.read_bytes()[found.end :] == b'{"id": 3, "err'
    assert ledger.is_finished(1, "aa") and not ledger.is_finished(3, "aa")


@pytest.mark.parametrize(("data", "lines"), [(b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)])
def test_lines_are_counted_with_a_last_one_without_end(data, lines, tmp_path):
    (tmp_path / "in").write_bytes(data)
    assert count_lines(str(tmp_path / "in")) == lines


def test_a_summary_without_tokens_has_no_speed():
    assert Summary().tokens_per_s is None and Summary(tokens=10, seconds=2.0).tokens_per_s == 5.0


def test_a_pipe_may_be_an_input_but_not_of_a_resumed_job(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    keep = os.open(tmp_path / "pipe", os.O_RDWR)
    os.write(keep, b'{"prompt": "hi"}\n')
    source, target = str(tmp_path / "pipe"), str(tmp_path / "out")
    job = Job(source, target, DEFAULTS)
    assert job.left is None and next(job.rows()).question.prompt == "hi"
    with pytest.raises(ValueError, match="have to be files"):
        check_paths(source, target, resume=True, overwrite=False)
    os.close(keep)


def test_two_jobs_do_not_write_to_one_output(files):
    source, target = files({"id": "a", "prompt": "hi"})
    first, second, third = (Job(source, target, DEFAULTS, resume=True) for _ in range(3))
    answer = Answer(b'{"id": "a", "error": null, "digest": "aa/2/packed"}\n', False, 1, 0, 1)

    def while_it_writes():
        with pytest.raises(ValueError, match="another job writes"):
            second.write([answer])
        yield answer

    assert first.write(while_it_writes()).rows == 1
    with pytest.raises(ValueError, match="has changed"):
        third.write([answer])
    assert Path(target).read_bytes() == answer.line


def test_rows_left_are_those_of_the_first_bytes_of_an_output(files, engine):
    source, target = files(*TWENTY[:6])
    run(source, target)
    lines = Path(target).read_bytes().splitlines(keepends=True)
    left = rows_left(source, target, len(lines[0]) + len(lines[1]), DEFAULTS)
    kept = {json.loads(line)["id"] for line in lines[:2]}
    assert [row.id for row in left] == [row["id"] for row in TWENTY[:6] if row["id"] not in kept]
