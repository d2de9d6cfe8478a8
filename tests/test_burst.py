"""Several decode steps in a dispatch: the same answers as one by one, wherever a request ends."""

import dataclasses
import functools
import itertools
from unittest import mock

import numpy as np
import pytest

import jaxserve
from jaxserve import SamplingParams, buckets
from jaxserve.models.weights import step_nbytes
from jaxserve.state import nbytes
from jaxserve.trace import kinds_from_hlo
from tests.engines import SCRIPT, scripted_path, tiny_weights
from tests.oracle import tiny_path

BURST = 4
MODELS = {"attention": "llama-f32", "hybrid": "qwen35-mtp-bf16"}
OPTIONS = [
    dict(),
    dict(temperature=1.5, top_k=20, seed=1, logprobs=3),
    dict(repeat_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.2, repeat_last_n=5),
]


@functools.cache
def engine(path, burst: int) -> jaxserve.Engine:
    shape = {"context": 192, "slots": 2, "kv_dtype": "float32", "weights": "float32"}
    with mock.patch.object(buckets, "burst_steps", lambda *_, **__: burst):
        return jaxserve.Engine.load(path, **shape)


def both(path) -> tuple[jaxserve.Engine, jaxserve.Engine]:
    return engine(path, 1), engine(path, BURST)


def ids(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 384, length).tolist()


@pytest.fixture(params=MODELS)
def path(request):
    return tiny_path(MODELS[request.param])


@pytest.mark.parametrize(("gigabytes", "steps"), [(1, 4), (2.5, 4), (2.6, 2), (5, 2), (9, 1)])
def test_a_small_model_takes_several_steps_a_dispatch_on_a_gpu_with_kernels(gigabytes, steps):
    shape = dict(step_nbytes=int(gigabytes * 1e9), one_reach=True)
    assert buckets.Buckets.of(4096, 16, "gpu", **shape).steps(8) == tuple(sorted({1, steps}))
    assert buckets.Buckets.of(4096, 16, "gpu", **shape).steps(16) == (1,)
    for other in (dict(one_reach=False), dict(pinned=True)):
        assert buckets.Buckets.of(4096, 16, "gpu", **(shape | other)).steps(1) == (1,)
    assert buckets.Buckets.of(4096, 16, "cpu", **shape).steps(1) == (1,)


def test_of_experts_a_step_reads_those_it_chooses():
    weights, config = tiny_weights("qwen3moe-f16")
    experts = nbytes([m for key, m in weights.layers.stacks.items() if key.startswith("experts_")])
    used, count = config.experts.used, config.experts.count
    assert 0 < used < count
    assert step_nbytes(weights, config) == nbytes(weights) - experts + experts * used // count
    dense, config = tiny_weights("llama-f32")
    assert step_nbytes(dense, config) == nbytes(dense)


@pytest.mark.parametrize("options", OPTIONS)
def test_the_answers_are_those_of_single_steps(path, options):
    for count in (1, 2, 5, 6, 17):
        params = SamplingParams(max_tokens=count, ignore_eos=True, **options)
        single, several = (each.generate(ids(count, 30), params) for each in both(path))
        assert several.tokens == single.tokens and len(several.tokens) == count
        assert several.finish_reason == single.finish_reason == "length"
        for one, other in zip(single.logprobs or [], several.logprobs or [], strict=True):
            assert other.token == one.token and other.logprob == pytest.approx(one.logprob, abs=1e-4)


def test_a_request_ends_on_its_stop_token_and_its_conversation_goes_on(path):
    """At every place in a dispatch. What the row then holds is what was said, and no more."""
    prompt, params = ids(1, 20), SamplingParams(max_tokens=12, ignore_eos=True)
    said = engine(path, 1).generate(prompt, params).tokens
    for place in range(1, 9):
        stop = said[place]
        answers = []
        for each in both(path):
            first = each.generate(prompt, dataclasses.replace(params, stop_tokens=[stop]))
            follow = [*prompt, *first.tokens, 7]
            answers.append((first.tokens, first.finish_reason, each.generate(follow, params).tokens))
        assert answers[0] == answers[1]
        assert answers[0][:2] == (said[: said.index(stop)], "stop")


def test_a_caller_ends_its_request_and_the_conversation_goes_on(path):
    prompt, params = ids(2, 20), SamplingParams(max_tokens=20, ignore_eos=True)
    for length in range(1, 8):
        answers = []
        for each in both(path):
            left = itertools.count(length - 1, -1)
            done = each.generate(prompt, params, on_token=lambda _, left=left: next(left) > 0)
            follow = each.generate([*prompt, *done.tokens, 9], params)
            answers.append((done.tokens, done.finish_reason, follow.tokens))
        assert answers[0] == answers[1] and len(answers[1][0]) == length


def test_rows_of_different_lengths_and_options_answer_as_alone(path):
    _, several = both(path)
    prompts = [ids(10 + i, 3 + 20 * i) for i in range(5)]
    params = [
        SamplingParams(max_tokens=3 + 4 * i, ignore_eos=True, **OPTIONS[i % len(OPTIONS)]) for i in range(5)
    ]
    together = several.generate_batch(prompts, params, progress=False)
    for prompt, each, done in zip(prompts, params, together, strict=True):
        assert done.tokens == engine(path, 1).generate(prompt, each).tokens


def test_a_stop_string_ends_a_request_in_the_middle_of_a_dispatch():
    for stop in ("pha", "ga", "beta gamma", "more"):
        params = SamplingParams(max_tokens=20, stop=[stop])
        single, several = (each.generate([SCRIPT.start["greek"]], params) for each in both(scripted_path()))
        assert (several.text, several.finish_reason) == (single.text, single.finish_reason)
        assert several.text == SCRIPT.text("greek").partition(stop)[0]


def test_a_row_that_breaks_in_the_middle_of_a_dispatch_leaves_the_engine_usable():
    for each in both(scripted_path()):
        with pytest.raises(jaxserve.EngineError, match="non-finite"):
            each.generate([SCRIPT.late_overflow], SamplingParams(max_tokens=20))
        assert each.generate([SCRIPT.start["greek"]]).text == SCRIPT.text("greek")


def test_a_full_context_ends_a_request_in_the_middle_of_a_dispatch(path):
    single, several = (
        each.generate(ids(5, 185), SamplingParams(max_tokens=50, ignore_eos=True)) for each in both(path)
    )
    assert several.tokens == single.tokens and several.finish_reason == single.finish_reason == "length"


def test_most_steps_go_several_to_a_dispatch_and_a_trace_counts_the_steps(tmp_path):
    _, several = both(tiny_path(MODELS["attention"]))
    params = SamplingParams(max_tokens=34, ignore_eos=True)  # one of the prefill, 8 · 4, one alone
    several.generate(ids(6, 20), params)
    before = several.stats()["decode_steps"]
    with several.trace(tmp_path) as report:
        several.generate(ids(7, 20), params)
    assert several.stats()["decode_steps"] - before == 33 == report.steps
    assert report.steps_per_dispatch == BURST and len(report.each_dispatch) == 8
    assert {name: count for name, count in several._runner.ran.items() if name[0] == "decode"} == {
        ("decode", 1, 192, BURST, False): 8,
        ("decode", 1, 192, 1, False): 1,
    }
    named = kinds_from_hlo(several._runner.program_texts()["decode"]).by_name.values()
    assert {"attention", "mlp", "lm_head", "sampling"} <= set(named)
    assert {"attention", "mlp", "lm_head"} <= {row["kind"] for row in report.layers}
