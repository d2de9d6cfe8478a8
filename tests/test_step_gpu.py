"""The step on a GPU: one graph launch a token, nothing recorded or updated again, the state updated in place,
the same values with graphs and without, the same tokens as the references.
"""

import dataclasses
import functools
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest

import jaxserve
from jaxserve import SamplingParams, hopper, step
from jaxserve.trace import Event, TraceReport, read_events
from synthetic_model import parameters, write
from tests.oracle import assert_same_up_to_near_tie, tiny_models, tiny_path

pytestmark = pytest.mark.gpu

SHAPE = dict(layers=4, vocab=16384)  # of the width of real models; one of four hybrid layers attends
PRESETS = {"dense": "qwen2.5-1.5b", "hybrid": "qwen3.5-0.8b"}
CONTEXT, SLOTS = 1024, 2
TOKENS = 1000
WITHOUT_GRAPHS = {"xla_gpu_enable_command_buffer": ""}
WEIGHTS_PER_TEMPORARY = 100  # temporaries take at most 1 % of the weights
KERNELS_PER_LAYER, KERNELS_BESIDE = 9, 10
MARGIN = 0.4  # of the two best logits, with quantised activations and a float16 cache
ORACLES = (
    "llama-256-q4_k_m",
    "qwen2-q4_0",
    "qwen3-q8_0",
    "gemma3-q5_1",
    "qwen3moe-mxfp4_moe",
    "qwen35-256-q4_k_m",
)


@functools.cache
def model(kind: str) -> Path:
    """A file of random weights."""
    path = Path(tempfile.mkdtemp(prefix="jaxserve-gpu-")) / f"{kind}.gguf"
    write(path, parameters(PRESETS[kind], **SHAPE))
    return path


@functools.lru_cache(maxsize=1)
def engine(kind: str) -> jaxserve.Engine:
    return jaxserve.Engine.load(model(kind), context=CONTEXT, slots=SLOTS, prefix_bytes=2**28)


@pytest.fixture(params=PRESETS, scope="module")
def kind(request) -> str:
    return request.param


class Traced(NamedTuple):
    """A trace and what it says of the decode program, however late the launching thread was."""

    report: TraceReport
    events: list[Event]

    @property
    def decode(self) -> dict:
        return next(row for row in self.report.programs if row["name"] == "decode")

    def count(self, name: str) -> int:
        """Host events whose name contains `name`, over the whole trace."""
        return sum(name in event.name for event in self.events if event.plane.startswith("/host:"))


def traced(engine: jaxserve.Engine, folder: Path, run) -> Traced:
    with engine.trace(folder) as report:
        run()
    return Traced(report, read_events(report.path))


def assert_one_launch_a_step(trace: Traced, steps: int) -> None:
    decode = trace.decode
    assert decode["graph_launches"] == decode["executes"] == steps
    assert decode["executions"] <= steps  # a dispatch may take several
    assert (decode["loose_launches"], decode["updates"], decode["records"]) == (0, 0, 0)
    assert trace.count("EvictCommandBuffers") == trace.count("command_buffer::record") == 0


def test_a_thousand_tokens_are_a_thousand_graph_launches_and_no_update(kind, tmp_path):
    served = engine(kind)
    params = SamplingParams(max_tokens=TOKENS + 1, ignore_eos=True)  # the prefill draws the first
    served.generate(range(8), SamplingParams(max_tokens=8, ignore_eos=True))
    trace = traced(served, tmp_path, lambda: served.generate(range(100, 116), params))
    assert_one_launch_a_step(trace, TOKENS)
    assert trace.report.per_step.loose_launches <= 2  # the peek


@pytest.mark.skipif(not hopper.is_available(), reason="the kernels that fuse a layer need a Hopper GPU")
def test_a_dense_step_is_at_most_nine_kernels_a_layer(tmp_path):
    served = engine("dense")
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    trace = traced(served, tmp_path, lambda: served.generate(range(300, 316), params))
    assert trace.report.per_step.kernels <= KERNELS_PER_LAYER * SHAPE["layers"] + KERNELS_BESIDE
    assert not trace.report.hides_names


def test_a_hundred_requests_on_alternating_routes_record_and_update_nothing(kind, tmp_path):
    served = engine(kind)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    prompt = lambda number: np.random.default_rng(number).integers(0, 16000, 40 + number).tolist()  # noqa: E731

    def cycle(number: int) -> None:
        first, _ = served.generate_n(prompt(number), params, n=2)  # computed once, its second row copied
        served.generate([*prompt(number), *first.tokens, 7, 8], params)  # resident: the answer is continued
        served.generate(prompt(number - 3), params)  # no slot has it any more: restored

    for number in range(3, 6):
        cycle(number)
    before = served.stats()
    trace = traced(served, tmp_path, lambda: [cycle(number) for number in range(6, 31)])
    after = served.stats()
    assert after["requests"] - before["requests"] == 100
    taken = {route: after["routes"][route] - before["routes"][route] for route in after["routes"]}
    assert taken == dict.fromkeys(("resident", "copied", "restored", "prefill"), 25)
    assert_one_launch_a_step(trace, after["decode_steps"] - before["decode_steps"])


def test_every_program_updates_the_state_in_place_beside_small_temporaries(kind):
    served = engine(kind)
    for name, sizes in served.program_memory().items():
        if name.startswith(("decode", "prefill")):
            assert sizes["aliased"] >= served.state_nbytes, name
        if name.startswith("decode"):
            assert sizes["temporaries"] * WEIGHTS_PER_TEMPORARY <= served.weights_nbytes, name


@pytest.mark.skipif(not hopper.is_available(), reason="elsewhere a dispatch is one step")
def test_most_dispatches_of_a_small_model_take_several_steps(kind, tmp_path):
    served = engine(kind)
    params = SamplingParams(max_tokens=TOKENS + 1, ignore_eos=True)
    trace = traced(served, tmp_path, lambda: served.generate(range(500, 516), params))
    steps = served._runner.buckets.burst
    assert steps > 1 and trace.report.steps_per_dispatch == steps
    assert trace.decode["executions"] == TOKENS / steps


def test_several_steps_of_a_dispatch_draw_what_as_many_dispatches_draw(kind, monkeypatch):
    served = engine(kind)
    params = SamplingParams(max_tokens=100, ignore_eos=True)
    several = served.generate(range(700, 716), params).tokens
    single = dataclasses.replace(served._runner.buckets, burst=1)
    monkeypatch.setattr(served._runner, "buckets", single)
    assert served.generate(range(700, 716), params).tokens == several


def test_replaying_a_graph_changes_no_bit_of_a_hundred_tokens(kind):
    weights, config = jaxserve.load_weights(model(kind))
    rows = np.arange(1, dtype=np.int32)

    def state():
        fresh = jaxserve.init_state(config, slots=1, context=256)
        options = jaxserve.options(SamplingParams(ignore_eos=True), seed=0, vocab_size=config.vocab_size)
        fresh = jaxserve.admit(fresh, np.int32(0), options)
        tokens = np.arange(200, 264, dtype=np.int32)
        place = (np.int32(0), np.int32(0), np.int32(64))
        return jaxserve.prefill(weights, fresh, tokens, *place, config=config, final=True)

    def after_100_tokens(options: dict):
        lowered = step.decode.lower(weights, state(), rows, config=config)
        program, reached = lowered.compile(compiler_options=options), state()
        for _ in range(100):
            reached = program(weights, reached, rows)
        return jax.tree.leaves_with_path(jax.device_get(reached))

    for (path, replayed), (_, launched) in zip(
        after_100_tokens({}), after_100_tokens(WITHOUT_GRAPHS), strict=True
    ):
        assert replayed.tobytes() == launched.tobytes(), jax.tree_util.keystr(path)


@pytest.mark.parametrize("name", ORACLES)
def test_greedy_tokens_of_packed_weights_equal_the_references_up_to_near_ties(name):
    oracle = tiny_models()[name]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    with jaxserve.Engine.load(tiny_path(name), context=192) as served:
        for prompt, exact in zip(oracle["prompts"], oracle["exact"], strict=True):
            tokens = served.generate(prompt, params).tokens
            assert len(tokens) == 32
            assert_same_up_to_near_tie(tokens, exact["gen"], exact["gen_gap"], MARGIN)
