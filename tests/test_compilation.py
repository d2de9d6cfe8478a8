"""What XLA made of the step: nothing compiles after loading, the state alone comes out, updated in place."""

import collections
import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxserve
from jaxserve import SamplingParams, snapshot, step
from jaxserve.buckets import Buckets
from jaxserve.runner import TOUCHED
from jaxserve.state import State, abstract_memory, abstract_state, nbytes, part
from tests.engines import scripted, tiny_weights
from tests.functional import CONTEXT, MODELS, SLOTS, model, programs

TOGGLES = [
    {},
    dict(temperature=1.0),
    dict(temperature=1.0, seed=3, top_k=5),
    dict(temperature=0.5, top_p=0.5, min_p=0.1),
    dict(repeat_penalty=1.5, repeat_last_n=-1),
    dict(presence_penalty=1.0, frequency_penalty=0.5, repeat_last_n=8),
    dict(logprobs=5),
    dict(stop_tokens=[3, 4], ignore_eos=True),
    dict(stop=["ab", "c"], max_tokens=1),
    dict(temperature=2.0, logprobs=16, stop="x"),
]


class Compilations:
    """Counts what jax compiles or traces."""

    def __init__(self):
        self.events = collections.Counter()

    def __call__(self, event: str, duration: float, **_) -> None:
        if "/jax/core/compile" in event:
            self.events[event] += 1

    def __enter__(self):
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self)


def test_the_counter_sees_a_compilation():
    with Compilations() as compilations:
        jax.jit(lambda x: x * 3 + 1)(np.float32(2))
    assert len(compilations.events) >= 2


def test_200_requests_of_all_lengths_and_options_compile_nothing_and_leave_no_array():
    engine = scripted(context=256, reuse=False)

    def serve(length: int) -> None:
        prompt = np.random.default_rng(length).integers(0, 256, length)
        options = {"max_tokens": 1 + length % 5} | TOGGLES[length % len(TOGGLES)]
        params = SamplingParams(**options)
        if length % 3:
            engine.generate(prompt, params)
        else:
            next(engine.stream(prompt, params))  # dropped

    with Compilations() as compilations, jax.no_tracing(True):
        serve(1)
        serve(16)  # with log-probabilities: a mailbox that was read has two views
        arrays = len(jax.live_arrays())
        for length in range(1, 201):
            serve(length)
        engine.logits(list(range(200)))
        engine.stats()
    assert not compilations.events
    assert len(jax.live_arrays()) == arrays


def test_two_slots_compile_nothing_either():
    engine = scripted(slots=2)
    with Compilations() as compilations, jax.no_tracing(True):
        for length in range(1, 41):
            options = [TOGGLES[(length + i) % len(TOGGLES)] for i in range(3)]
            streams = [
                engine.stream([5] * length, SamplingParams(**{"max_tokens": 4} | chosen))
                for chosen in options
            ]
            for stream in streams:
                list(stream)
    assert not compilations.events


@pytest.mark.parametrize(("slots", "limit"), [(1, 16), (64, 40)])  # beside at most 11 for rows as values
@pytest.mark.parametrize(("platform", "kernels"), [("cpu", False), ("gpu", False), ("gpu", True)])
def test_an_engine_has_few_programs(slots, limit, platform, kernels):
    buckets = Buckets.of(4096, slots, platform, one_reach=kernels, step_nbytes=10**9)
    assert (buckets.burst > 1) == kernels
    prefills = 2 * len(buckets.chunks)
    decodes = 2 * len(buckets.reaches) * sum(len(buckets.steps(lanes)) for lanes in buckets.lanes)
    assert prefills + decodes + len(["admit", "halt", "score", "peek", "peek wide"]) <= limit
    config = model("hybrid")[1]
    shape = dict(slots=slots, context=4096)
    block, end = snapshot.abstract_block(config), snapshot.abstract_end(config)
    rows = snapshot.lowerings(abstract_state(config, **shape), block, end, reaches=buckets.reaches)
    assert len(rows) <= 8


def test_an_engine_has_the_programs_its_buckets_say():
    engine = scripted()
    assert len(engine.programs) == engine.stats()["programs"] == 9 + 6  # six for rows as values
    assert len(scripted(reuse=False).programs) == 9
    assert engine.programs.count("admit") == 1


def test_every_program_updates_all_that_it_gets_of_the_state_in_place():
    engine = scripted(slots=2)
    shape = dict(context=64, kv_dtype="float32")
    state = abstract_state(engine.config, slots=2, **shape)
    whole = [field.name for field in dataclasses.fields(State)]
    memory = nbytes(abstract_memory(engine.config, slots=1, **shape))
    for name, program in engine._runner.programs.items():
        if str(name).startswith("read_"):  # of a row, into arrays of their own
            continue
        fields = TOUCHED.get(name, TOUCHED.get(name[0], whole))
        expected = memory if name == "score" else nbytes(part(state, fields))
        if name[0] == "peek":
            expected = 4 * 2 * step.mailbox_width(name[1])
        assert program.memory_analysis().alias_size_in_bytes >= expected, name


def aliased_outputs(text: str) -> tuple[int, int]:
    """(outputs, outputs that alias an argument) of a compiled program."""
    header = text[: text.index("\n")]
    table = re.search(r"input_output_alias=\{(.*?)\}, entry", header).group(1)
    outputs = re.search(r"->\((.*?)\)\}", header).group(1)
    return len(re.findall(r"\w+\[", outputs)), len(re.findall(r"\{\d+\}: \(", table))


@pytest.mark.parametrize("name", ["prefill", "decode", "decode sampled", "admit", "halt"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_output_is_a_fresh_array(kind, name):
    outputs, aliased = aliased_outputs(programs(kind)[name].as_text())
    leaves = len(jax.tree.leaves(programs(kind).state))
    assert outputs == aliased == leaves


@pytest.mark.parametrize("name", ["prefill", "decode", "decode sampled"])
@pytest.mark.parametrize("kind", MODELS)
def test_no_program_copies_a_whole_cache(kind, name):
    memory = programs(kind).state.memory
    text = programs(kind)[name].as_text()
    for leaf in jax.tree.leaves(memory):
        shape = re.escape(f"f32[{','.join(map(str, leaf.shape))}]")
        assert re.search(shape, text)  # the shape is written as expected
        assert not re.findall(rf"= {shape}\S* copy(?:-start)?\(.*", text), name
        assert not re.findall(rf"= {shape}\S* fusion\(.*calls=%?copy\S*", text), name


def test_other_options_slots_lengths_and_positions_do_not_trace_again():
    weights, config = tiny_weights("llama-f32")
    chex.clear_trace_counter()
    once = functools.partial(chex.assert_max_traces, n=1)
    admit = jax.jit(once(step.admit.__wrapped__), donate_argnums=0)
    prefill = jax.jit(once(step.prefill.__wrapped__), static_argnames=("config", "final"), donate_argnums=1)
    decode = jax.jit(
        once(step.decode.__wrapped__),
        static_argnames=("config", "steps", "sampled", "reach"),
        donate_argnums=1,
    )
    state = jaxserve.init_state(config, slots=SLOTS, context=CONTEXT, kv_dtype="float32")
    for turn, chosen in enumerate(TOGGLES):
        slot = np.int32(turn % SLOTS)
        params = SamplingParams(**chosen)
        options = jaxserve.options(params, seed=turn, vocab_size=config.vocab_size)
        state = admit(state, slot, options, np.int32(9 + turn))
        tokens = np.full(32, turn, np.int32)
        count = np.int32(1 + 3 * turn)
        state = prefill(weights, state, tokens, slot, np.int32(0), count, config=config, final=True)
        rows = np.array([slot, SLOTS, (slot + 1) % SLOTS], np.int32)
        state = decode(weights, state, rows, config=config, sampled=True)
    assert jnp.isfinite(state.logits).all()


def test_the_step_is_public_and_can_be_lowered():
    weights, config = model("attention")
    state = abstract_state(config, slots=1, context=32)
    rows = jax.ShapeDtypeStruct((1,), np.int32)
    text = jaxserve.decode.lower(weights, state, rows, config=config).as_text()
    leaves = len(jax.tree.leaves(state))
    assert text.count("tf.aliasing_output") + text.count("jax.buffer_donor") == leaves
