"""The command line: flags, exit statuses and output with a fake engine, then whole runs with tiny models."""

import argparse
import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gguf
import jax
import numpy as np
import pytest

from jaxserve import timing
from jaxserve.cli import console, flags, footprint, generate, main
from jaxserve.cli import inspect as inspect_command
from jaxserve.config import Experts, Layer, ModelConfig
from jaxserve.errors import ContextLimitExceeded, UnsupportedModel
from jaxserve.gguf.reader import Tensor
from jaxserve.params import SamplingParams
from jaxserve.results import Completion, PhaseTimings, Piece

TINY = Path(__file__).parent / "data" / "tiny"
MODEL = str(TINY / "llama-f32.gguf")


class FakeStream:
    """Pieces, then a completion; `break_at` raises in place of a piece."""

    def __init__(self, engine, completion, pieces):
        self.engine, self.completion, self.pieces = engine, completion, iter(pieces)

    def __iter__(self):
        return self

    def __next__(self):
        piece = next(self.pieces)
        if isinstance(piece, BaseException):
            raise piece
        return piece

    def close(self):
        self.engine.closed_streams += 1


class FakeEngine:
    """Says "Paris." whatever it is asked, and remembers what that was."""

    def __init__(self, pieces=None, has_tokenizer=True):
        self.pieces = pieces or [Piece(7, "Par"), Piece(8, "is"), Piece(None, ".")]
        self.has_tokenizer = has_tokenizer
        self.asked, self.closed, self.closed_streams = [], 0, 0
        self.config = SimpleNamespace(vocab_size=1000, architecture="llama")
        self.context, self.slots, self.weights_nbytes, self.state_nbytes = 64, 1, 8 * 10**6, 10**6
        self.device = jax.devices()[0]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed += 1

    @property
    def tokenizer(self):
        if not self.has_tokenizer:
            raise UnsupportedModel("no tokenizer in this file")
        return SimpleNamespace(
            encode_chat=lambda messages: SimpleNamespace(ids=[message["content"] for message in messages])
        )

    def stream(self, prompt, params):
        return FakeStream(self, self.generate(prompt, params), self.pieces)

    def generate(self, prompt, params):
        self.asked.append((prompt, params))
        count, asked = len(prompt), params.max_tokens
        timings = PhaseTimings(0.0, None, 0.01 * count, 0.002 * (asked - 1), 0.02, count, count, asked - 1)
        return Completion([7, 8], "Paris.", "stop", count, 0, "prefill", timings)


@pytest.fixture
def engine(monkeypatch):
    """Every command gets this engine in place of a loaded one."""
    fake = FakeEngine()
    monkeypatch.setattr(generate, "load_engine", lambda args, **_: fake)
    return fake


def parsed_params(*words):
    parser = argparse.ArgumentParser()
    flags.add_sampling_flags(parser)
    return flags.sampling_params(parser.parse_args(words))


# ---- flags


def test_without_flags_the_sampling_params_are_the_defaults():
    assert parsed_params() == SamplingParams()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--max-tokens", "7"], "max_tokens", 7),
        (["--temperature", "0.5"], "temperature", 0.5),
        (["--top-k", "40"], "top_k", 40),
        (["--top-p", "0.9"], "top_p", 0.9),
        (["--min-p", "0.05"], "min_p", 0.05),
        (["--repeat-penalty", "1.1"], "repeat_penalty", 1.1),
        (["--repeat-last-n", "-1"], "repeat_last_n", -1),
        (["--presence-penalty", "-0.5"], "presence_penalty", -0.5),
        (["--frequency-penalty", "0.25"], "frequency_penalty", 0.25),
        (["--stop-tokens", "1,2", "--stop-tokens", "3"], "stop_tokens", (1, 2, 3)),
        (["--stop", "one", "--stop", "two words"], "stop", ("one", "two words")),
        (["--ignore-eos"], "ignore_eos", True),
        (["--seed", "0"], "seed", 0),
        (["--logprobs", "5"], "logprobs", 5),
    ],
)
def test_every_sampling_field_has_a_flag(words, name, value):
    assert parsed_params(*words) == dataclasses.replace(SamplingParams(), **{name: value})


def test_no_sampling_field_is_without_a_help_text():
    assert set(flags.SAMPLING_HELP) == {field.name for field in dataclasses.fields(SamplingParams)}


def test_stop_ids_that_are_no_numbers_are_wrong_usage(capsys):
    assert main(["generate", "model.gguf", "hi", "--stop-tokens", "1,x"]) == 2
    assert "'1,x'" in capsys.readouterr().err


def test_engine_flags_reach_the_engine(monkeypatch, capsys):
    seen = {}

    def load(path, **options):
        seen.update(options, path=path)
        options["progress"]("weights", 1, 2)
        return FakeEngine()

    monkeypatch.setattr(flags, "jaxserve", SimpleNamespace(Engine=SimpleNamespace(load=load)))
    words = "generate m.gguf hi --context 99 --slots 3 --kv-dtype float32 --weights packed"
    assert main(words.split()) == 0
    del seen["progress"]
    assert seen == {"path": "m.gguf", "context": 99, "slots": 3, "kv_dtype": "float32", "weights": "packed"}
    assert str(jax.devices()[0]) in capsys.readouterr().err  # which device is used


def test_made_up_prompts_are_within_the_vocabulary_and_differ_from_the_first_token():
    prompts = [flags.made_up_prompt(1000, 50, seed) for seed in range(8)]
    assert all(len(prompt) == 50 and 0 <= min(prompt) and max(prompt) < 1000 for prompt in prompts)
    assert len({prompt[0] for prompt in prompts}) == 8


# ---- help and exit statuses


@pytest.mark.parametrize("words", [[], ["generate"], ["batch"], ["inspect"], ["bench"], ["trace"]])
def test_help_shows_examples(words, capsys):
    assert main([*words, "--help"]) == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["generate", "m"], ["generate", "m", "hi", "--top-k", "x"], ["trace", "m"]]
)
def test_wrong_usage_is_exit_status_2(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "m", "hi", "--temperature", "-1"],
        ["generate", "m", "1,x", "--tokens"],
        ["generate", "m", "--tokens", "1", "--chat"],
        ["bench", "m", "--repetitions", "0"],
        ["trace", "m", "--out", "{tmp}", "--steps", "1"],
    ],
)
def test_bad_values_are_one_line_and_exit_status_1_before_a_model_is_loaded(words, engine, tmp_path, capsys):
    assert main([word.replace("{tmp}", str(tmp_path)) for word in words]) == 1
    out, err = capsys.readouterr()
    assert (out, engine.asked) == ("", [])
    assert err.startswith("jaxserve: error: ") and err.count("\n") == 1


def test_an_error_of_the_engine_is_one_line_and_exit_status_1(engine, capsys):
    engine.pieces = [Piece(7, "Par"), ContextLimitExceeded(100, 64)]
    assert main(["generate", "m", "hi"]) == 1
    assert "error: prompt has 100 tokens, context is 64" in capsys.readouterr().err
    assert (engine.closed, engine.closed_streams) == (1, 1)


def test_a_missing_file_is_named(capsys):
    assert main(["inspect", "/nowhere/model.gguf"]) == 1
    assert "/nowhere/model.gguf" in capsys.readouterr().err


def test_ctrl_c_is_exit_status_130_and_frees_the_engine(engine, capsys):
    engine.pieces = [Piece(7, "Par"), KeyboardInterrupt()]
    assert main(["generate", "m", "hi"]) == 130
    assert (engine.closed, engine.closed_streams) == (1, 1)
    assert "Traceback" not in capsys.readouterr().err


def test_a_closed_pipe_ends_quietly_and_frees_the_engine(engine, monkeypatch, capsys):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["generate", "m", "hi"]) == 0
        monkeypatch.undo()
    assert (engine.closed, engine.closed_streams) == (1, 1)
    assert capsys.readouterr().err == ""


# ---- generate


def test_generate_prints_text_alone_to_stdout_and_a_summary_to_stderr(engine, capsys):
    assert main(["generate", "m", "Capital of France?", "--max-tokens", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "Paris.\n"
    assert err.count("\n") == 1
    for word in ("first token 0.020 s", "100.0 tok/s", "500.0 tok/s", "stop", "prefill"):
        assert word in err
    assert engine.asked == [("Capital of France?", SamplingParams(max_tokens=5))]


def test_generate_flushes_every_piece(engine, monkeypatch):
    shown = []
    monkeypatch.setattr("builtins.print", lambda *words, **how: shown.append((words, how)))
    assert main(["generate", "m", "hi"]) == 0
    pieces = [(words[0], how["flush"]) for words, how in shown if how.get("file") is None]
    assert pieces == [("Par", True), ("is", True), (".", True), ("", True)]


def test_generate_json_has_the_fields_of_a_completion(engine, capsys):
    assert main(["generate", "m", "hi", "--json"]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert set(completion) == {field.name for field in dataclasses.fields(Completion)}
    assert set(completion["timings"]) == {field.name for field in dataclasses.fields(PhaseTimings)}
    assert (completion["text"], completion["timings"]["load_state_s"]) == ("Paris.", None)


def test_generate_reads_stdin_less_its_last_newline(engine, monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(read=lambda: "two\nlines\n"))
    assert main(["generate", "m", "-"]) == 0
    assert engine.asked[0][0] == "two\nlines"


def test_generate_takes_ids_and_shows_ids_where_there_is_no_tokenizer(engine, capsys):
    engine.has_tokenizer = False
    engine.pieces = [Piece(7, ""), Piece(8, "")]
    assert main(["generate", "m", "--tokens", "1,2,3"]) == 0
    assert engine.asked[0][0] == [1, 2, 3]
    assert capsys.readouterr().out.split() == ["7", "8"]


def test_chat_sends_the_system_message_before_the_prompt(engine):
    assert main(["generate", "m", "hi", "--system", "be brief"]) == 0
    assert main(["generate", "m", "hi", "--chat"]) == 0
    assert [prompt for prompt, _ in engine.asked] == [["be brief", "hi"], ["hi"]]


def test_timings_turns_the_phase_log_on(engine, monkeypatch):
    monkeypatch.setenv(timing.TRACE_VARIABLE, "0")
    assert not timing.PhaseLog().enabled
    assert main(["generate", "m", "hi", "--timings"]) == 0
    assert timing.PhaseLog().enabled


@pytest.mark.parametrize(
    "words",
    ["m {} --max-tokens 3", "m --max-tokens 3 {}", "--max-tokens 3 m {}", "--chat m --max-tokens 3 {}"],
)
def test_flags_may_stand_anywhere(words, engine):
    assert main(["generate", *(word.format("hi there") for word in words.split())]) == 0
    assert engine.asked[0][0] in ("hi there", ["hi there"])


# ---- timing


def test_a_phase_is_one_line_with_its_facts(capsys):
    log = timing.PhaseLog(enabled=True)
    log.mark(3, "route resident", 0.00125, cached=96, why="slot 0 holds it")
    log.mark(3, "done stop")
    assert capsys.readouterr().err == (
        'jaxserve: request 3: route resident 1.2 ms cached=96 why="slot 0 holds it"\n'
        "jaxserve: request 3: done stop\n"
    )


def test_a_phase_log_that_is_off_prints_nothing(capsys):
    timing.PhaseLog(enabled=False).mark(1, "queue", 1.0)
    assert capsys.readouterr().err == ""


def test_phases_that_did_not_run_are_not_divided_by():
    timings = PhaseTimings(prompt_tokens=9, first_token_s=0.001)
    completion = Completion([], "", "length", 9, 9, "resident", timings)
    line = timing.summary_line(timings, completion)
    assert line.count("n/a") == 2 and "9 tokens, 9 cached" in line and "route resident" in line
    assert timing.rate(5, None) is None and timing.rate(0, 1.0) is None and timing.rate(10, 2.0) == 5


# ---- console


def test_progress_is_a_line_per_stage_where_there_is_no_terminal(capsys):
    progress = console.Progress()
    for done in range(101):
        progress("weights", done, 100)
    progress("programs", 1, 1)
    progress.close()
    assert capsys.readouterr().err == "jaxserve: weights\njaxserve: programs\n"


def test_progress_updates_one_line_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = console.Progress()
    progress("weights", 1, 2)
    progress("weights", 2, 2)
    progress.close()
    err = capsys.readouterr().err
    assert "50 %" in err and "100 %" in err and "\n" not in err and err.endswith("\r\x1b[K")


def test_a_gpu_left_unused_is_named_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(console, "NVIDIA_DEVICES", str(tmp_path / "nvidia*"))
    cpu = SimpleNamespace(platform="cpu")
    assert console.unused_gpu(cpu) is None
    (tmp_path / "nvidia0").touch()
    assert "jaxserve[cuda12]" in console.unused_gpu(cpu)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # asked for
    assert console.unused_gpu(cpu) is None


def test_versions_name_jax_and_the_driver(monkeypatch, tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  575.57.08  Sat May 24\n")
    monkeypatch.setattr(console, "NVIDIA_DRIVER", file)
    assert console.versions()["driver"] == "575.57.08"
    assert console.versions()["jax"] == jax.__version__
    monkeypatch.setattr(console, "NVIDIA_DRIVER", tmp_path / "absent")
    assert console.versions()["driver"] is None


# ---- what tensors take


def config(layers=2, experts=None):
    return ModelConfig(
        architecture="qwen3moe",
        vocab_size=10,
        embed_size=256,
        context_length=64,
        layers=tuple(Layer("attention", i, experts=experts is not None) for i in range(layers)),
        heads=2,
        kv_heads=1,
        head_dim=8,
        rope_dims=8,
        rope_interleaved=False,
        norm_eps=1e-6,
        attention_scale=1.0,
        experts=experts,
    )


def tensor(name, type, *shape):
    kind = gguf.GGMLQuantizationType[type]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    return Tensor(name, shape, kind, np.zeros((*shape[:-1], shape[-1] // block * nbytes), np.uint8))


def test_a_tensor_takes_what_its_form_on_the_device_takes():
    tensors = [
        tensor("blk.0.attn_q.weight", "Q4_0", 4, 256),
        tensor("blk.0.attn_k.weight", "IQ2_XS", 4, 256),
        tensor("blk.0.attn_v.weight", "BF16", 4, 256),
        tensor("blk.0.attn_norm.weight", "F32", 256),
        tensor("blk.1.ffn_gate_inp.weight", "F16", 4, 256),
        tensor("blk.2.nextn.eh_proj.weight", "Q8_0", 4, 256),
    ]
    rows = [(row.form, row.device_bytes) for row in footprint.footprints(tensors, config(), "packed")]
    assert rows == [
        ("packed", 4 * 144),
        ("float16", 4 * 512),
        ("bfloat16", 4 * 512),
        ("float32", 1024),
        ("float32", 4 * 1024),
        ("skipped", 0),
    ]
    whole = footprint.footprints(tensors, config(), "float32")
    assert [row.device_bytes for row in whole] == [4096, 4096, 4096, 1024, 4096, 0]


def test_a_token_reads_one_row_of_an_untied_embedding_and_the_experts_it_uses():
    tensors = [
        tensor("token_embd.weight", "F16", 10, 256),
        tensor("output.weight", "F16", 10, 256),
        tensor("blk.0.ffn_down_exps.weight", "F16", 8, 4, 256),
    ]
    model = config(experts=Experts(count=8, used=2, shared=False))
    assert [row.read_bytes for row in footprint.footprints(tensors, model, "packed")] == [512, 5120, 4096]
    assert (
        footprint.footprints(tensors[:1], model, "packed")[0].read_bytes == 5120
    )  # tied: it is the head too


def test_tensors_are_summed_by_type_largest_first():
    tensors = [tensor("blk.0.attn_norm.weight", "F32", 256), tensor("blk.0.attn_q.weight", "Q8_0", 64, 256)]
    rows = inspect_command.tensors_by_type(footprint.footprints(tensors, config(), "packed"))
    assert [(row["type"], row["device"], row["count"]) for row in rows] == [
        ("Q8_0", "packed", 1),
        ("F32", "float32", 1),
    ]


def test_metadata_that_is_no_text_can_still_be_printed():
    broken = b"ab\xff".decode("utf-8", "surrogateescape")
    assert inspect_command.plain([broken, 1, np.arange(2)]) == ["ab\ufffd", 1, [0, 1]]


# ---- whole runs with tiny models


def jaxserve_command(*words, **options):
    command = [sys.executable, "-m", "jaxserve", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


SMALL = ("--context", "64", "--weights", "float32", "--kv-dtype", "float32")


@pytest.fixture(scope="module")
def tiny():
    return json.loads((TINY / "tiny.json").read_text())["models"]["llama-f32"]


def test_generate_gives_the_reference_tokens_of_a_tiny_model(tiny, capsys):
    ids = tiny["prompts"][1]
    words = [
        "generate",
        MODEL,
        "--tokens",
        ",".join(map(str, ids)),
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--json",
    ]
    assert main([*words, *SMALL]) == 0
    completion = json.loads(capsys.readouterr().out)
    assert completion["tokens"] == tiny["exact"][1]["gen"][:8]
    assert completion["timings"]["prompt_tokens"] == len(ids)


def test_streamed_text_is_the_completion_s_text(capsys):
    words = ["generate", MODEL, "hello", "--max-tokens", "8", *SMALL]
    assert main(words) == 0
    streamed = capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    assert streamed == json.loads(capsys.readouterr().out)["text"] + "\n"


def test_inspect_predicts_the_weights_and_the_state_an_engine_takes(capsys):
    import jaxserve

    assert main(["inspect", MODEL, "--json", *SMALL]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    with jaxserve.Engine.load(MODEL, context=64, kv_dtype="float32", weights="float32") as engine:
        assert memory["state_bytes"] == engine.state_nbytes
        assert memory["weights_bytes"] == pytest.approx(engine.weights_nbytes, rel=0.02)


def test_inspect_plans_slots_and_context(capsys):
    words = ["inspect", MODEL, "--slots", "auto", "--context", "128", "--kv-dtype", "float32"]
    assert main([*words, "--json"]) == 0
    memory = json.loads(capsys.readouterr().out)["memory"]
    assert [row["context"] for row in memory["plan"]] == [32, 128, 512]
    chosen = memory["plan"][1]
    assert chosen["slot_bytes"] == memory["slot_fixed_bytes"] + 128 * memory["slot_token_bytes"]
    assert memory["slots"] == chosen["slots_auto"] <= chosen["slots_that_fit"]
    assert memory["state_bytes"] == pytest.approx(memory["slots"] * chosen["slot_bytes"], rel=0.01)
    assert main(words) == 0
    assert "slots that fit" in capsys.readouterr().out


def test_slots_are_a_number_or_auto(capsys):
    assert flags.slot_count("auto") == "auto" and flags.slot_count("3") == 3
    assert main(["inspect", MODEL, "--slots", "many"]) == 2
    assert "many" in capsys.readouterr().err


def test_inspect_describes_a_hybrid_model_and_what_it_skips(capsys):
    assert main(["inspect", str(TINY / "qwen35-mtp-bf16.gguf"), "--json", "--tensors", "--metadata"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "qwen35" and report["layers"] == {"delta": 3, "attention": 1}
    assert report["skipped"] and all(name.startswith("blk.4.") for name in report["skipped"])
    assert report["tokenizer"]["tokens"] == report["vocabulary"]
    assert report["metadata"]["general.architecture"] == "qwen35"
    assert {"name", "type", "shape", "form"} <= set(report["tensors"][0])
    assert set(report["buckets"]) == {"chunks", "reaches", "lanes", "burst"}


def test_inspect_text_names_layers_types_memory_and_tokenizer(capsys):
    assert (
        main(["inspect", str(TINY / "gemma3-q5_1.gguf"), "--tensors", "--metadata", "--weights", "packed"])
        == 0
    )
    out = capsys.readouterr().out
    for word in (
        "gemma3",
        "window 16",
        "Q5_1",
        "packed",
        "weights +",
        "chat template",
        "blk.0.attn_q.weight",
    ):
        assert word in out


def test_a_reader_that_leaves_ends_the_program_quietly():
    with jaxserve_command(
        "generate", MODEL, "--tokens", "1,2,3", "--max-tokens", "60", "--ignore-eos", *SMALL
    ) as run:
        run.stdout.close()
        assert run.wait(timeout=120) == 0
        assert "Traceback" not in run.stderr.read()


SLOW_READER = """
import time
from jaxserve.cli import generate, main
from tests.test_cli import FakeEngine

class Slow(FakeEngine):
    def stream(self, prompt, params):
        stream = super().stream(prompt, params)
        stream.pieces = map(lambda piece: (time.sleep(0.05), piece)[1], [self.pieces[0]] * 10_000)
        return stream

generate.load_engine = lambda args: Slow()
raise SystemExit(main(["generate", "m", "hi"]))
"""


def test_a_real_ctrl_c_while_text_comes_is_exit_status_130():
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", SLOW_READER], stdout=pipe, stderr=pipe, text=True) as run:
        assert run.stdout.read(1) == "P"
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
        assert run.returncode == 130


def test_bench_and_trace_run_on_a_tiny_model(tmp_path, capsys):
    sizes = ["--prompt", "8", "--generate", "8", "--repetitions", "1"]
    assert main(["bench", MODEL, "--json", *sizes, *SMALL]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["test"] for row in rows] == ["pp8", "tg8"] and all(row["tokens_per_s"] > 0 for row in rows)
    assert main(["trace", MODEL, "--out", str(tmp_path), "--steps", "6", "--prompt", "hello", *SMALL]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["steps"] >= 5 and report["totals"]["busy_ms"] > 0
