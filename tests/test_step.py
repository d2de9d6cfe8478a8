"""The functional layer: every slot for itself, bit for bit; one answer however a prompt is cut or stepped."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import jaxserve
from jaxserve import step
from jaxserve.state import FULL, IDLE, MAX_STEPS, RUNNING, STOPPED
from tests.engines import tiny_weights
from tests.functional import (
    CHUNK,
    CONTEXT,
    MODELS,
    SLOTS,
    assert_same,
    model,
    programs,
    prompt,
    shallow,
    slot_of,
)

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture(params=MODELS)
def p(request):
    return programs(request.param)


def snapshot(state, slots=range(SLOTS), **options):
    return {slot: slot_of(state, slot, **options) for slot in slots}


# -- other slots are untouched


@pytest.mark.parametrize(("length", "start"), [(CONTEXT, 0), (16, 80), (32, 64), (1, 95), (CONTEXT - 1, 0)])
def test_a_chunk_that_ends_at_or_before_the_context_leaves_every_other_slot_untouched(p, length, start):
    state = p.busy()
    if start:
        state = p.feed(state, 1, prompt(p.config, 8, start))
    before = snapshot(state)
    state = p.feed(state, 1, prompt(p.config, 9, length), start)
    after = snapshot(state)
    for slot in (0, 2):
        assert_same(after[slot], before[slot])
    assert after[1][".length"] == start + length
    if start:
        keys = next(name for name in before[1] if name.endswith("keys"))
        np.testing.assert_array_equal(after[1][keys][..., :start, :], before[1][keys][..., :start, :])
        np.testing.assert_array_equal(after[1][".history"][:start], before[1][".history"][:start])


@pytest.mark.parametrize("sampled", [False, True])
def test_a_full_row_is_frozen_even_if_it_should_run_and_its_neighbours_go_on(p, sampled):
    state = p.busy()
    state = p.feed(p.admit(state, 1), 1, prompt(p.config, 9, CONTEXT))
    assert state.status[1] == RUNNING
    before = snapshot(state, without=["drawn"])
    state = p.decode(state, 0, 1, 2, sampled=sampled)
    after = snapshot(state, without=["drawn"])
    assert_same(after[1], before[1])
    assert np.array(state.drawn[1]).tolist() == [-1] * MAX_STEPS
    for slot in (0, 2):
        assert after[slot][".length"] == before[slot][".length"] + 1


def test_a_row_one_short_of_full_takes_its_last_token_and_leaves_others_untouched(p):
    state = p.busy()
    state = p.feed(p.admit(state, 1), 1, prompt(p.config, 9, CONTEXT - 1))
    before = snapshot(state)
    token = int(state.token[1])
    state = p.decode(state, 1)
    after = snapshot(state)
    for slot in (0, 2):
        assert_same(after[slot], before[slot])
    assert after[1][".length"] == CONTEXT and after[1][".history"][-1] == token
    longer = p.feed(p.admit(p.empty(), 1), 1, [*prompt(p.config, 9, CONTEXT - 1), token])
    np.testing.assert_allclose(after[1][".logits"], np.array(longer.logits[1]), atol=1e-3)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_finished_or_cancelled_row_stays_bit_equal_while_its_neighbours_step(p, sampled):
    state = p.busy()
    state = p.feed(p.admit(state, 0, limit=1), 0, prompt(p.config, 4, 9))
    state = p.halt(state, 2, 30)
    assert np.array(state.status).tolist() == [FULL, RUNNING, IDLE]
    before = snapshot(state, without=["drawn"])
    for _ in range(3):
        state = p.decode(state, 0, 1, 2, sampled=sampled)
    after = snapshot(state, without=["drawn"])
    assert_same(after[0], before[0])
    assert_same(after[2], before[2])
    assert after[1][".length"] == before[1][".length"] + 3


def test_a_row_stopped_by_its_stop_id_is_frozen_on_the_device(p):
    state, tokens = p.generate(p.empty(), 1, prompt(p.config, 4, 9), 6)
    stop = next(token for token in tokens[2:] if token not in tokens[:2])
    state = p.feed(p.admit(state, 1, stop_tokens=[stop]), 1, prompt(p.config, 4, 9))
    for _ in range(tokens.index(stop)):
        state = p.decode(state, 1)
    assert state.status[1] == STOPPED and state.length[1] == 9 + tokens.index(stop)
    before = slot_of(state, 1, without=["drawn"])
    assert_same(slot_of(p.decode(state, 1), 1, without=["drawn"]), before)


def test_idle_lanes_touch_nothing(p):
    state = p.busy()
    before = snapshot(state)
    assert_same(slot_of(p.decode(state), 0), before[0])
    state = p.busy()
    state = p.decode(state, 1)
    for slot in (0, 2):
        assert_same(slot_of(state, slot), before[slot])


def test_a_row_answers_the_same_in_every_lane_and_beside_any_neighbour(p):
    alone = p.decode(p.busy(), 1)
    together = p.decode(p.busy(), 2, 0, 1)
    np.testing.assert_allclose(np.array(alone.logits[1]), np.array(together.logits[1]), atol=1e-4)
    assert alone.token[1] == together.token[1]


def test_halting_cuts_the_length_of_its_row_alone(p):
    state = p.busy()
    before = snapshot(state)
    state = p.halt(state, 2, 7)
    after = snapshot(state)
    assert_same(after[0], before[0])
    assert_same(after[1], before[1])
    assert (after[2][".length"], after[2][".status"]) == (7, IDLE)
    assert p.halt(state, 2, 30).length[2] == 7  # never longer


def test_admitting_keeps_what_every_slot_remembers(p):
    state = p.busy()
    before = snapshot(state, without=["options", "remaining", "status"])
    state = p.admit(state, 1, limit=5, temperature=0.5, stop_tokens=[3])
    after = snapshot(state, without=["options", "remaining", "status"])
    for slot in range(SLOTS):
        assert_same(after[slot], before[slot])
    assert (int(state.remaining[1]), int(state.status[1])) == (5, IDLE)


# -- a slot that was used before


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_a_used_slot_answers_as_a_fresh_one_bit_for_bit(p, length):
    second = prompt(p.config, 21, length)
    fresh, expected = p.generate(p.empty(), 1, second, 6)
    used, _ = p.generate(p.empty(), 1, prompt(p.config, 20, 80), 4)
    used, tokens = p.generate(used, 1, second, 6)
    assert tokens == expected
    ours, theirs = slot_of(used, 1), slot_of(fresh, 1)
    for name in (".logits", ".memory.delta", ".memory.conv", ".counts"):
        if name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.parametrize("length", [1, 2, 3, 50])
def test_a_slot_cancelled_half_way_through_a_prompt_answers_as_a_fresh_one(p, length):
    second = prompt(p.config, 21, length)
    fresh, expected = p.generate(p.empty(), 1, second, 6)
    used = p.feed(p.admit(p.empty(), 1), 1, prompt(p.config, 20, CHUNK))  # of a longer prompt
    used, tokens = p.generate(p.halt(used, 1, CHUNK), 1, second, 6)
    assert tokens == expected
    np.testing.assert_array_equal(np.array(used.logits[1]), np.array(fresh.logits[1]))


# -- prefill and decode agree


@pytest.mark.parametrize("length", [1, 31, 40])
def test_decode_continues_a_prefill_as_a_longer_prefill_would(p, length):
    ids = prompt(p.config, 30, length)
    state, tokens = p.generate(p.empty(), 2, ids, 8)
    longer = p.feed(p.admit(p.empty(), 2), 2, ids + tokens[:-1])
    np.testing.assert_allclose(np.array(state.logits[2]), np.array(longer.logits[2]), atol=1e-3)
    assert int(longer.token[2]) == tokens[-1]
    assert_equal_memory(state, longer, 2, len(ids) + 7)


def assert_equal_memory(ours, theirs, slot: int, length: int, atol: float = 1e-3) -> None:
    mine, other = slot_of(ours, slot), slot_of(theirs, slot)
    for name in mine:
        if "memory" in name:
            cut = (..., slice(length), slice(None)) if name.endswith(("keys", "values")) else ...
            np.testing.assert_allclose(mine[name][cut], other[name][cut], atol=atol)


@pytest.mark.parametrize(("kind", "sizes"), [("hybrid", (16, 100)), ("attention", (512,))])
def test_a_prompt_gives_the_same_logits_whatever_its_chunks(kind, sizes):
    """700 tokens at once and in chunks; then 32 greedy tokens."""
    weights, config = model(kind)
    ids, context = prompt(config, 40, 700), 768
    run = functools.partial(jaxserve.decode, config=config, reach=context)
    results = []
    for size in (700, *sizes):
        state = jaxserve.init_state(config, slots=1, context=context, kv_dtype="float32")
        options = jaxserve.options(jaxserve.SamplingParams(), seed=0, vocab_size=config.vocab_size)
        state = jaxserve.admit(state, np.int32(0), options)
        for start in range(0, 700, size):
            chunk = ids[start : start + size]
            padded = np.array(chunk + [0] * (size - len(chunk)), np.int32)
            place = np.int32(0), np.int32(start), np.int32(len(chunk))
            state = jaxserve.prefill(weights, state, padded, *place, config=config, final=True)
        logits, tokens = np.array(state.logits[0]), [int(state.token[0])]
        for _ in range(31):
            state = run(weights, state, np.zeros(1, np.int32))
            tokens.append(int(state.token[0]))
        results.append((logits, tokens))
    whole, expected = results[0]
    for logits, tokens in results[1:]:
        np.testing.assert_allclose(logits, whole, atol=1e-3)
        assert tokens == expected


def test_several_steps_of_one_dispatch_equal_as_many_dispatches():
    p = programs("attention")
    single = p.busy()
    drawn = []
    for _ in range(4):
        single = p.decode(single, 0, 1, 2)
        drawn.append(np.array(single.drawn[:, 0]))
    rows = np.arange(SLOTS, dtype=np.int32)
    several = jaxserve.decode(p.weights, p.busy(), rows, config=p.config, steps=4)
    np.testing.assert_array_equal(np.array(several.drawn[:, :4]), np.stack(drawn, axis=1))
    np.testing.assert_array_equal(np.array(several.length), np.array(single.length))
    np.testing.assert_allclose(np.array(several.logits), np.array(single.logits), atol=1e-4)


@pytest.mark.parametrize("steps", [0, MAX_STEPS + 1])
def test_too_few_or_many_steps_are_refused(steps):
    weights, config = model("attention")
    state = jaxserve.init_state(config, slots=1, context=32)
    with pytest.raises(ValueError, match=f"steps={steps}.*{MAX_STEPS}"):
        jaxserve.decode(weights, state, np.zeros(1, np.int32), config=config, steps=steps)


# -- how a step is run makes no difference


@contextlib.contextmanager
def quick_compilation():
    """Eagerly every operation is a program of its own; most of their time goes into optimising them."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def test_fifty_steps_with_and_without_donation_give_equal_states(p):
    plain = jax.jit(step.decode.__wrapped__, static_argnames=("config", "steps", "sampled", "reach"))
    donated, kept = p.busy(), p.busy()
    rows = np.arange(SLOTS, dtype=np.int32)
    for _ in range(50):
        donated = p.decode(donated, *rows)
        kept = plain(p.weights, kept, rows, config=p.config)
    for slot in range(SLOTS):
        assert_same(slot_of(donated, slot), slot_of(kept, slot))


def test_the_donated_state_is_gone_and_a_copy_taken_before_is_not(p):
    state = p.busy()
    copy = jax.tree.map(lambda leaf: leaf.copy(), state)
    before = slot_of(copy, 0)
    for _ in range(10):
        following = p.decode(state, 0, 1, 2)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
        state = following
    assert_same(slot_of(copy, 0), before)
    again = p.decode(copy, 0, 1, 2)  # a step from the copy is the first step again
    assert_same(slot_of(again, 0), slot_of(p.decode(p.busy(), 0, 1, 2), 0))


@pytest.mark.parametrize(
    ("name", "layers"),
    [("llama-f32", (0, 1)), ("gemma3-bf16", (0, 5)), ("qwen35-bf16", (0, 3)), ("qwen3moe-f16", (0, 1))],
)
def test_the_compiled_step_equals_the_eager_one(name, layers):
    weights, config = shallow(*tiny_weights(name), layers)
    ids = np.array([*prompt(config, 50, 5), 0, 0, 0], np.int32)
    place, rows = (np.int32(0), np.int32(0), np.int32(5)), np.zeros(1, np.int32)
    options = jaxserve.options(jaxserve.SamplingParams(), seed=0, vocab_size=config.vocab_size)

    def run(admit, prefill, decode) -> tuple[list[int], np.ndarray]:
        state = jaxserve.init_state(config, slots=1, context=16, kv_dtype="float32")
        state = admit(state, np.int32(0), options)
        state = prefill(weights, state, ids, *place, config=config, final=True)
        tokens = [int(state.token[0])]
        for _ in range(3):
            state = decode(weights, state, rows, config=config)
            tokens.append(int(state.token[0]))
        return tokens, np.array(state.logits)

    compiled, logits = run(step.admit, step.prefill, step.decode)
    with jax.disable_jit(), quick_compilation():
        eager, plain = run(step.admit.__wrapped__, step.prefill.__wrapped__, step.decode.__wrapped__)
    assert compiled == eager
    np.testing.assert_allclose(logits, plain, atol=1e-4)
