"""What the benchmarks count: bytes of a step by layer kind, and speeds from an engine's own steps."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest

from jaxserve.buckets import chunk_sizes
from jaxserve.cli import measure
from jaxserve.cli.footprint import Footprint
from jaxserve.cli.measure import decode_runs, prompt_runs, tokens_needed, traffic
from jaxserve.cli.traffic import kind_of_tensor, step_bytes
from jaxserve.config import Delta, Experts, Layer, ModelConfig
from jaxserve.gguf.hyperparameters import read_config
from jaxserve.gguf.reader import open_gguf
from jaxserve.trace import LAYER_KINDS
from tests.clockwork import PROMPT_TOKEN_S, STEP_S, Clockwork
from tests.engines import scripted
from tests.oracle import tiny_path

DENSE = ModelConfig(
    architecture="llama", vocab_size=100, embed_size=8, context_length=512, heads=4, kv_heads=2, head_dim=16,
    layers=(Layer("attention", 0), Layer("attention", 1, window=10)), rope_dims=16, rope_interleaved=False,
    norm_eps=1e-5, attention_scale=0.25,
)  # fmt: skip
HYBRID = dataclasses.replace(
    DENSE,
    layers=(Layer("delta", 0, experts=True), Layer("attention", 0, experts=True)),
    delta=Delta(conv_width=4, key_heads=1, value_heads=2, key_dim=8, value_dim=8, grouped=True),
    experts=Experts(count=8, used=2, shared=False),
)


def tensor(name, nbytes, shape=(100, 8)):
    return Footprint(name, "F32", shape, nbytes, "float32", nbytes, nbytes)


def test_a_step_reads_every_weight_once_however_many_rows_it_has():
    tensors = [
        tensor("token_embd.weight", 3200),
        tensor("blk.0.attn_q.weight", 500),
        tensor("blk.1.ffn_up.weight", 70),
    ]
    one, many = (step_bytes(tensors, DENSE, rows=rows) for rows in (1, 16))
    logits = 4 * 100
    assert one["mlp"] == many["mlp"] == 70
    assert (one["lm_head"], many["lm_head"]) == (3200 + logits, 3200 + 16 * logits)  # tied: the head reads it
    assert "embed" not in one


def test_of_an_embedding_with_its_own_head_a_step_reads_a_row_for_each_token():
    tensors = [tensor("token_embd.weight", 3200), tensor("output.weight", 3200)]
    assert step_bytes(tensors, DENSE, rows=3)["embed"] == 3 * 32


def test_the_cache_counts_as_far_as_it_is_filled_and_a_window_reaches():
    tensors = [tensor("blk.0.attn_q.weight", 500), tensor("output.weight", 0)]
    token = 2 * 2 * 16 * 2  # keys and values, heads, dims, float16
    assert step_bytes(tensors, DENSE, rows=3, length=0)["attention"] == 500 + 3 * 2 * token  # written
    assert step_bytes(tensors, DENSE, rows=3, length=50)["attention"] == 500 + 3 * (51 + 11) * token
    double = step_bytes(tensors, DENSE, rows=3, length=50, kv_dtype="float32")["attention"]
    assert double == 500 + 3 * (51 + 11) * 2 * token


def test_recurrent_state_is_read_and_written_by_every_row():
    state = 2 * 8 * 8 + 3 * (2 * 8 + 2 * 8)
    moved = step_bytes([tensor("output.weight", 0)], HYBRID, rows=5, length=1000)
    assert moved["delta"] == 2 * 4 * 5 * state


def test_of_the_experts_those_count_that_the_rows_are_expected_to_choose():
    tensors = [tensor("blk.0.ffn_up_exps.weight", 800), tensor("output.weight", 0)]
    assert step_bytes(tensors, HYBRID, rows=1)["moe"] == pytest.approx(200)
    assert step_bytes(tensors, HYBRID, rows=2)["moe"] == pytest.approx(350)  # 1 - (6/8)²
    assert step_bytes(tensors, HYBRID, rows=64)["moe"] == pytest.approx(800, rel=1e-6)


def test_bytes_follow_what_the_weights_take_on_the_device():
    tensors = [tensor("blk.0.ffn_up.weight", 300), tensor("output.weight", 100)]
    assert step_bytes(tensors, DENSE, weights_nbytes=800)["mlp"] == 600


def tiny_file(name):
    file = open_gguf(tiny_path(name))
    return file, read_config(file)


@pytest.mark.parametrize("name", ["llama-f32", "gemma3-bf16", "qwen3moe-f16", "qwen35moe-f16"])
def test_every_tensor_belongs_to_a_kind_that_traces_name(name):
    file, config = tiny_file(name)
    kinds = {kind_of_tensor(tensor, config, tied=False) for tensor in file.tensors}
    assert kinds <= set(LAYER_KINDS)
    assert {"embed", "lm_head", "moe" if "moe" in name else "mlp"} <= kinds
    assert ("delta" in kinds) == (name == "qwen35moe-f16")


def test_traffic_of_one_row_is_all_weights_but_the_embedding():
    file, config = tiny_file("llama-f32")
    read = sum(t.raw.nbytes for name, t in file.tensors.items() if name != "token_embd.weight")
    whole = read + file.tensors["token_embd.weight"].raw.nbytes
    engine = SimpleNamespace(config=config, weights_nbytes=whole)
    moved = traffic(engine, tiny_path("llama-f32"), kv_dtype="float32")
    assert sum(moved.values()) == pytest.approx(read, rel=0.05)
    assert moved["lm_head"] >= file.tensors["output.weight"].raw.nbytes


@pytest.fixture
def clockwork(monkeypatch):
    engine = Clockwork()
    monkeypatch.setattr(measure, "time", engine)
    return engine


def test_decode_runs_count_steps_in_which_all_rows_decode(clockwork):
    runs = decode_runs(clockwork, 20, repetitions=3, rows=4, depth=30)
    assert [(run.tokens, run.steps) for run in runs] == [(80, 20)] * 3
    assert all(run.step_s == pytest.approx(STEP_S) for run in runs)
    assert all(run.tokens_per_s == pytest.approx(4 / STEP_S) for run in runs)
    assert [len(prompt) for prompt, _ in clockwork.asked] == [30] * 4
    assert len({tuple(prompt) for prompt, _ in clockwork.asked}) == 4
    assert clockwork.open == []  # cancelled


def test_decode_runs_that_do_not_fit_name_the_context_they_need():
    needed = tokens_needed(30, 20, repetitions=3, rows=4)
    with pytest.raises(ValueError, match=f"context=60.*{needed} ≤ context"):
        decode_runs(Clockwork(context=60), 20, repetitions=3, rows=4, depth=30)


def test_the_context_has_room_for_the_smallest_chunks_of_later_prompts():
    smallest = chunk_sizes(jax.default_backend())[0]
    needed = {rows: tokens_needed(4 * smallest, 8, repetitions=1, rows=rows) for rows in (1, 4)}
    assert needed[4] - needed[1] == 3 * 4


@pytest.mark.parametrize(("rows", "depth"), [(1, 1), (2, 40)])
def test_decode_runs_fit_the_context_they_ask_for(rows, depth):
    needed = tokens_needed(depth, 5, repetitions=2, rows=rows)
    engine = scripted(slots=2, context=128, reuse=False)
    assert needed <= engine.context
    runs = decode_runs(engine, 5, repetitions=2, rows=rows, depth=depth)
    assert all(run.tokens >= 0.95 * rows * run.steps and run.seconds > 0 for run in runs)


def test_prompt_runs_never_ask_for_the_same_prompt_twice_and_warm_up_first(clockwork):
    runs = prompt_runs(clockwork, 10, repetitions=3)
    prompts = [tuple(prompt) for prompt, _ in clockwork.asked]
    assert len(prompts) == len(set(prompts)) == 4 and len(runs) == 3
    assert runs[0].tokens_per_s == pytest.approx(1 / PROMPT_TOKEN_S)
    assert runs[0].first_token_s == pytest.approx(10 * PROMPT_TOKEN_S)
    assert all(params.ignore_eos for _, params in clockwork.asked)


def test_prompt_runs_at_a_depth_fill_the_state_first(clockwork):
    prompt_runs(clockwork, 5, repetitions=1, depth=7)
    before, after = clockwork.asked[-2][0], clockwork.asked[-1][0]
    assert (len(before), len(after), after[:7]) == (7, 12, before)


def test_dispatching_a_step_of_idle_rows_changes_no_tokens_and_takes_time():
    engine = scripted(slots=2, context=128, reuse=False)
    before = engine.generate([1, 2, 3]).tokens
    seconds = measure.host_dispatch_s(engine, rows=2)
    assert 0 < seconds < 1
    assert engine.generate([1, 2, 3]).tokens == before
