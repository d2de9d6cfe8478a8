"""Moving rows about: bit-exact, in place, other rows untouched, for every kind of memory."""

import jax
import numpy as np
import pytest

from jaxserve import sampling, snapshot, step
from jaxserve.params import SamplingParams
from jaxserve.snapshot import BLOCK_TOKENS
from jaxserve.state import RUNNING, STOPPED, abstract_state, init_state, nbytes
from tests import rows
from tests.rows import KINDS, VOCABULARY, assert_same, model, on_host, row

SLOTS, CONTEXT = 3, 304  # the second block sticks out of the row
i32 = np.int32


def random_state(config, *, context: int = CONTEXT, kv_dtype: str = "float16", seed: int = 0):
    return rows.random_state(config, slots=SLOTS, context=context, kv_dtype=kv_dtype, seed=seed)


def rest(state, slot: int) -> list:
    """Every other row of every leaf."""
    others = [i for i in range(SLOTS) if i != slot]
    memory = [np.asarray(leaf)[:, others] for leaf in jax.tree.leaves(state.memory)]
    return memory + [np.asarray(leaf)[others] for leaf in jax.tree.leaves(state.replace(memory=None))]


def has(config, kind: str) -> bool:
    return config.layers_of(kind) > 0


def read_all(config, state, slot: int) -> dict:
    """A row's first block, where the model has any, and what it has at its last token."""
    parts = {"end": snapshot.read_end(state, i32(slot))}
    if has(config, "attention"):
        parts["block"] = snapshot.read_block(state, i32(slot), i32(0))
    return parts


def request(state, slot: int) -> dict:
    """What belongs to a row's request."""
    names = ("counts", "token", "status", "remaining", "options", "drawn", "logprobs", "likely")
    return {name: jax.tree.map(lambda leaf: np.array(leaf)[slot], state[name]) for name in names}


def mail(*, wide: bool) -> np.ndarray:
    """An empty mailbox."""
    return np.zeros((SLOTS, step.mailbox_width(wide)), np.int32)


@pytest.fixture(params=KINDS)
def config(request):
    return model(request.param)


@pytest.mark.parametrize("length", [1, 257, CONTEXT])
def test_a_copied_row_equals_its_source_bitwise(config, length):
    state = random_state(config)
    before = on_host(state)
    after = on_host(snapshot.copy_row(state, i32(2), i32(0), i32(length)))
    assert_same(row(after, 0, length), row(before, 2, length))
    assert after.length[0] == length
    assert_same(request(after, 0), request(before, 0))
    assert_same(rest(after, 0), rest(before, 0))


def test_a_copy_with_a_reach_leaves_positions_past_it():
    state = random_state(model("attention"))
    before = on_host(state)
    after = on_host(snapshot.copy_row(state, i32(1), i32(2), i32(60), reach=64))
    for name in ("keys", "values"):
        old, new = before.memory[name], after.memory[name]
        np.testing.assert_array_equal(new[:, 2, :, :64], old[:, 1, :, :64])
        np.testing.assert_array_equal(new[:, 2, :, 64:], old[:, 2, :, 64:])


@pytest.mark.parametrize(
    ("context", "kv_dtype"),
    [(7, "float16"), (BLOCK_TOKENS, "bfloat16"), (CONTEXT, "float32"), (3 * BLOCK_TOKENS, "float16")],
)
def test_a_row_written_back_elsewhere_equals_the_row_that_was_read(config, context, kv_dtype):
    source = random_state(config, context=context, kv_dtype=kv_dtype)
    target = random_state(config, context=context, kv_dtype=kv_dtype, seed=1)
    wanted, before = on_host(source), on_host(target)
    for start in range(0, context, BLOCK_TOKENS) if has(config, "attention") else ():
        block = snapshot.read_block(source, i32(1), i32(start))
        count = min(BLOCK_TOKENS, context - start)
        target = snapshot.write_blocks(target, i32(0), i32(start), i32(count), block)
    end = snapshot.read_end(source, i32(1))
    target = snapshot.write_end(target, i32(0), np.array(wanted.history[1]), end)
    after = on_host(target)
    assert_same(row(after, 0, context), row(wanted, 1, context))
    assert_same(rest(after, 0), rest(before, 0))
    assert_same(request(after, 0), request(before, 0))


def test_a_block_is_zero_past_the_end_of_the_row():
    state = random_state(model("attention"))
    block = snapshot.read_block(state, i32(1), i32(BLOCK_TOKENS))
    held = CONTEXT - BLOCK_TOKENS
    for part, name in zip(block, ("keys", "values"), strict=True):
        np.testing.assert_array_equal(part[:, :, :held], state.memory[name][:, 1, :, BLOCK_TOKENS:])
        assert not np.asarray(part[:, :, held:]).any()


@pytest.mark.parametrize(
    ("start", "count"), [(0, 0), (0, 1), (3, 100), (250, 50), (250, 256), (303, 256), (304, 256)]
)
def test_only_the_counted_positions_of_a_block_are_written(start, count):
    state = random_state(model("attention"))
    block = snapshot.read_block(random_state(model("attention"), seed=1), i32(0), i32(0))
    before = on_host(state)
    after = on_host(snapshot.write_blocks(state, i32(1), i32(start), i32(count), block))
    end = min(start + count, CONTEXT)
    for part, name in zip(np.asarray(block), ("keys", "values"), strict=True):
        expected = before.memory[name].copy()
        expected[:, 1, :, start:end] = part[:, :, : end - start]
        assert_same(after.memory[name], expected)


@pytest.mark.parametrize(("start", "count"), [(0, 600), (0, 768), (256, 700), (3, 257)])
def test_blocks_written_together_equal_blocks_written_one_by_one(start, count):
    source, target = (
        random_state(model("attention"), context=4 * BLOCK_TOKENS - 8, seed=seed) for seed in (0, 1)
    )
    other = jax.tree.map(lambda leaf: leaf.copy(), target)
    blocks = [snapshot.read_block(source, i32(0), i32(at * BLOCK_TOKENS)) for at in range(3)]
    together = snapshot.write_blocks(target, i32(1), i32(start), i32(count), *blocks)
    for at, block in enumerate(blocks):
        done = at * BLOCK_TOKENS
        left = np.clip(count - done, 0, BLOCK_TOKENS).astype(i32)
        other = snapshot.write_blocks(other, i32(1), i32(start + done), left, block)
    assert_same(on_host(together), on_host(other))


def test_a_snapshot_stays_as_it_was_while_the_state_moves_on(config):
    state = random_state(config)
    kept = read_all(config, state, 0)
    wanted = on_host(read_all(config, state, 0))
    for _ in range(10):
        state = snapshot.copy_row(state, i32(1), i32(0), i32(5))
        end = snapshot.read_end(state, i32(1))
        state = snapshot.write_end(state, i32(0), np.zeros(CONTEXT, np.int32), end)
    assert_same(on_host(kept), wanted)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.9, top_k=7, repeat_penalty=1.5, repeat_last_n=20, seed=3, logprobs=4),
        SamplingParams(frequency_penalty=2.0, repeat_last_n=-1, stop_tokens=tuple(range(30))),
    ],
    ids=["greedy", "sampled", "stops"],
)
def test_a_full_hit_draws_what_the_prefill_of_the_prompt_would(params):
    state = random_state(model("attention"))
    length, limit = 40, 9
    options = sampling.options(params, seed=3, vocab_size=VOCABULARY)
    before = on_host(state)
    after, mailbox = step.hit(state, mail(wide=True), sampling.pack(1, limit, length, options=options))
    after = on_host(after)
    window = min(int(options.window), length)
    counts = np.bincount(before.history[1, length - window : length], minlength=VOCABULARY)
    batch = jax.tree.map(lambda leaf: np.asarray(leaf)[None], options)
    token = sampling.draw(before.logits[1:2], counts[None].astype(i32), batch, np.array([length], i32))
    assert after.drawn[1, 0] == after.token[1] == token[0]
    assert (after.drawn[1, 1:] == -1).all()
    assert after.remaining[1] == limit - 1
    assert after.status[1] == (STOPPED if int(token[0]) in params.stop_tokens else RUNNING)
    assert after.length[1] == length
    np.testing.assert_array_equal(after.counts[1], counts)
    assert_same(after.memory, before.memory)
    assert_same(rest(after, 1), rest(before, 1))
    assert (mailbox[1, 0], mailbox[1, 1]) == (after.status[1], token[0])
    assert_same(mailbox, step.peek(mail(wide=True), *step.peeked(after)))


def test_a_greedy_full_hit_draws_the_same_without_the_sampler():
    options = sampling.options(SamplingParams(), seed=0, vocab_size=VOCABULARY)
    state, request = random_state(model("attention")), sampling.pack(1, 5, 40, options=options)
    other = jax.tree.map(lambda leaf: leaf.copy(), state)
    plain = on_host(step.hit(state, mail(wide=False), request, sampled=False)[0])
    full = on_host(step.hit(other, mail(wide=True), request)[0])
    kept = dict(counts=full.counts, logprobs=full.logprobs, likely=full.likely)
    assert_same(plain.replace(**kept), full)


def test_every_program_writes_in_place_and_makes_no_copy_of_the_state(config):
    state = abstract_state(config, slots=8, context=4096)
    block, end = snapshot.abstract_block(config), snapshot.abstract_end(config)
    for name, lower in snapshot.lowerings(state, block, end, reaches=(512, 4096)).items():
        memory = lower().compile().memory_analysis()
        if str(name).startswith("read"):
            assert memory.alias_size_in_bytes == 0
        else:
            changed = snapshot.TOUCHED[name if isinstance(name, str) else name[0]]
            assert memory.alias_size_in_bytes == nbytes([state[leaf] for leaf in changed]), name
        assert memory.temp_size_in_bytes < nbytes(state) / 4, name


def test_addresses_stay_through_reads_and_writes(config):
    state = random_state(config)
    addresses = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    parts = read_all(config, state, 0)
    if "block" in parts:
        state = snapshot.write_blocks(state, i32(1), i32(0), i32(9), parts["block"])
    state = snapshot.write_end(state, i32(1), np.zeros(CONTEXT, np.int32), parts["end"])
    state = snapshot.copy_row(state, i32(1), i32(2), i32(9))
    options = sampling.options(SamplingParams(), seed=0, vocab_size=VOCABULARY)
    state, _ = step.hit(state, mail(wide=True), sampling.pack(2, 5, 9, options=options))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)] == addresses


def test_a_program_exists_for_what_the_model_has_and_no_more(config):
    names = {}
    for slots in (1, 3):
        state = init_state(config, slots=slots, context=64)
        parts = snapshot.abstract_block(config), snapshot.abstract_end(config)
        names[slots] = set(snapshot.lowerings(state, *parts, reaches=(32, 64)))
    assert names[3] - names[1] == {("copy_row", 32), ("copy_row", 64)}
    blocks = {"read_block", "write_blocks"} if has(config, "attention") else set()
    assert names[1] == {"read_end", "write_end"} | blocks


def test_sizes_and_shapes_are_those_of_what_is_read(config):
    parts = read_all(config, random_state(config, kv_dtype="float32"), 0)
    shapes = {
        "block": snapshot.abstract_block(config, "float32"),
        "end": snapshot.abstract_end(config),
    }
    assert {name for name, shape in shapes.items() if shape is not None} == set(parts)
    for name, part in parts.items():
        assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), part) == jax.tree.map(
            lambda leaf: (leaf.shape, leaf.dtype), shapes[name]
        )
    sizes = (nbytes(parts.get("block")), nbytes(parts["end"].recurrent), nbytes(parts["end"].logits))
    assert snapshot.snapshot_nbytes(config, "float32") == sizes
