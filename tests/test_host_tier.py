"""Snapshots on the host: what comes back is bit for bit what left, and only what is missing moves."""

import jax
import numpy as np
import pytest

from jaxserve.host_tier import HostTier
from jaxserve.snapshot import BLOCK_TOKENS, snapshot_nbytes
from tests.rows import KINDS, StateRows, assert_same, model, on_host, random_state, row

CONTEXT, LENGTH, PLENTY = 700, 600, 2**30
TOKENS = np.arange(LENGTH, dtype=np.int32) % 50


@pytest.fixture(params=KINDS)
def config(request):
    return model(request.param)


def filled(config, seed: int = 0) -> StateRows:
    """Rows of noise whose slot 1 was fed TOKENS."""
    rows = StateRows(random_state(config, slots=2, context=CONTEXT, seed=seed))
    rows.write_end(1, TOKENS, rows.read_end(1))
    rows.calls.clear()
    return rows


def new_tier(config, budget: int = PLENTY) -> HostTier:
    return HostTier(config, kv_dtype="float16", budget=budget)


def test_a_restored_row_equals_the_stored_one_bitwise(config):
    source, target, tier = filled(config), filled(config, seed=1), new_tier(config)
    assert tier.store(TOKENS, source, 1, logits=True)
    wanted, before = on_host(source.state), on_host(target.state)
    match = tier.match(TOKENS)
    assert (match.length, match.full_hit) == (LENGTH, True)
    tier.restore(target, 0, match)
    after = on_host(target.state)
    assert_same(row(after, 0, LENGTH), row(wanted, 1, LENGTH))
    assert_same(row(after, 1, CONTEXT), row(before, 1, CONTEXT))


def test_a_snapshot_outlives_the_row_it_was_taken_from(config):
    source, target, tier = filled(config), filled(config, seed=1), new_tier(config)
    wanted = on_host(source.state)
    tier.store(TOKENS, source, 1, logits=True)
    other, others = filled(config, seed=2), new_tier(config)
    others.store(TOKENS, other, 1, logits=True)
    others.restore(source, 1, others.match(TOKENS))
    tier.restore(target, 0, tier.match(TOKENS))
    assert_same(row(on_host(target.state), 0, LENGTH), row(wanted, 1, LENGTH))


def test_what_the_slot_still_holds_is_not_moved():
    source, target, tier = filled(model("hybrid")), filled(model("hybrid"), seed=1), new_tier(model("hybrid"))
    tier.store(TOKENS, source, 1, logits=True)
    match = tier.match(TOKENS)
    for keep, blocks in ((0, 3), (BLOCK_TOKENS - 1, 3), (BLOCK_TOKENS, 2), (LENGTH - 1, 1), (LENGTH, 0)):
        target.calls.clear()
        tier.restore(target, 1, match, keep=keep)
        assert target.calls == ["write_block"] * blocks + ["write_end"]


def test_bytes_are_counted_as_they_come_back():
    source, tier = filled(model("hybrid")), new_tier(model("hybrid"))
    tier.store(TOKENS, source, 1, logits=True)
    block, recurrent, logits = snapshot_nbytes(model("hybrid"), "float16")
    tier.restore(source, 0, tier.match(TOKENS))
    assert tier.stats()["restored_bytes"] == 3 * block + recurrent + logits
    tier.restore(source, 0, tier.match(TOKENS), keep=LENGTH)
    assert tier.stats()["restored_bytes"] == 3 * block + 2 * (recurrent + logits)


def test_a_part_of_an_attention_prefix_comes_back_alone():
    source, target, tier = (
        filled(model("attention")),
        filled(model("attention"), seed=1),
        new_tier(model("attention")),
    )
    tier.store(TOKENS, source, 1, logits=True)
    before = on_host(target.state)
    match = tier.match([*TOKENS[:300], 99])
    assert (match.length, match.full_hit) == (300, False)
    tier.restore(target, 0, match)
    after = on_host(target.state)
    for name in ("keys", "values"):
        expected = before.memory[name].copy()
        expected[:, 0, :, :300] = np.asarray(source.state.memory[name])[:, 1, :, :300]
        assert_same(after.memory[name], expected)
    assert not after.logits[0].any()  # those after 300 tokens are not known
    assert_same(after.logits[1], before.logits[1])


def test_a_prefix_with_recurrent_state_comes_back_at_its_checkpoints_only():
    source, tier = filled(model("hybrid")), new_tier(model("hybrid"))
    tier.store(TOKENS[:500], source, 1, logits=False)
    assert tier.match(TOKENS[:499]) is None
    assert tier.match(TOKENS[:500]) is None  # its logits were not kept, and the state cannot step back
    assert tier.match(TOKENS).length == 500


def test_shared_blocks_are_read_once(config):
    source, tier = filled(config), new_tier(config)
    tier.store(TOKENS, source, 1, logits=True)
    source.calls.clear()
    tier.store(np.append(TOKENS[:-1], 7), source, 1, logits=False)
    attention, delta = config.layers_of("attention") > 0, config.layers_of("delta") > 0
    assert source.calls == ["read_block"] * attention + ["read_end"] * delta


def test_the_sizes_in_the_books_are_those_of_the_arrays(config):
    source, tier = filled(config), new_tier(config)
    tier.store(TOKENS, source, 1, logits=True)
    arrays = [leaf for entry in tier.export() for name, leaf in entry.arrays.items() if name != "tokens"]
    assert tier.stats()["bytes"] == sum(array.nbytes for array in arrays)
    block, recurrent, logits = snapshot_nbytes(config, "float16")
    assert tier.stats()["bytes"] == 3 * block + recurrent + logits


def test_a_small_budget_evicts_and_a_tiny_one_skips(config):
    block, recurrent, logits = snapshot_nbytes(config, "float16")
    one = block + recurrent + logits
    source, tier = filled(config), new_tier(config, budget=2 * one)
    for first in range(5):
        assert tier.store([first, 1, 2], source, 1, logits=True)
        assert tier.stats()["bytes"] <= 2 * one
    assert tier.stats()["entries"] == 4 and tier.stats()["evictions"] == 6
    tiny = new_tier(config, budget=one - 1)
    assert not tiny.store([1, 2], source, 1, logits=True)
    assert tiny.stats() == {"bytes": 0, "entries": 0, "evictions": 0, "skipped": 1, "restored_bytes": 0}


def test_a_match_survives_its_eviction(config):
    block, recurrent, logits = snapshot_nbytes(config, "float16")
    source, target, tier = (
        filled(config),
        filled(config, seed=1),
        new_tier(config, block + recurrent + logits),
    )
    tier.store(TOKENS[:9], source, 1, logits=True)
    match = tier.match(TOKENS[:9])
    tier.store([40, 41], source, 1, logits=True)
    assert tier.match(TOKENS[:9]) is None
    tier.restore(target, 0, match)
    assert_same(row(on_host(target.state), 0, 9), row(on_host(source.state), 1, 9))
    assert tier.store([42, 43], source, 1, logits=True)


def test_snapshots_that_failed_on_the_device_are_forgotten():
    source, tier = filled(model("hybrid")), new_tier(model("hybrid"))
    tier.store(TOKENS, source, 1, logits=True)
    tier.store(TOKENS[:300], source, 1, logits=True)
    broken = tier.match(TOKENS).nodes[2]
    jax.tree.map(lambda leaf: leaf.delete(), broken.payload)
    tier.settle()
    assert tier.match(TOKENS).length == 300


def test_exported_entries_rebuild_a_tier(config):
    source, target, tier, copy = filled(config), filled(config, seed=1), new_tier(config), new_tier(config)
    for tokens in (TOKENS[:300], TOKENS, [7, 8, 9]):
        tier.store(tokens, source, 1, logits=True)
    copy.add(tier.export())
    assert copy.stats() == tier.stats()
    copy.restore(target, 0, copy.match(TOKENS))
    assert_same(row(on_host(target.state), 0, LENGTH), row(on_host(source.state), 1, LENGTH))


def test_a_merge_takes_what_fits(config):
    source, tier = filled(config), new_tier(config)
    for first in (1, 2, 3):
        tier.store([first, 5], source, 1, logits=True)
    everything, small = new_tier(config), new_tier(config, budget=sum(snapshot_nbytes(config, "float16")))
    everything.merge(tier)
    small.merge(tier)
    assert everything.stats() == tier.stats()
    assert small.match([3, 5]).full_hit and small.match([1, 5]) is None


def test_storing_and_restoring_compile_nothing_new(config):
    source, tier = filled(config), new_tier(config)
    for _ in range(2):  # the second time with a state that a program made
        tier.store(TOKENS, source, 1, logits=True)
        tier.restore(source, 0, tier.match(TOKENS))
        tier = new_tier(config)
    with jax.no_tracing():
        tier.store([3, *TOKENS[:50]], source, 1, logits=True)
        tier.restore(source, 0, tier.match([3, *TOKENS[:50]]))
        tier.settle()


def test_a_reserved_tier_works_as_any_other():
    source, tier = filled(model("hybrid")), new_tier(model("hybrid"))
    tier.reserve()
    assert tier.stats()["bytes"] == 0
    assert tier.store(TOKENS, source, 1, logits=True)


@pytest.mark.gpu
def test_snapshots_lie_in_pinned_host_memory():
    source, tier = filled(model("hybrid")), new_tier(model("hybrid"))
    tier.store(TOKENS, source, 1, logits=True)
    match = tier.match(TOKENS)
    held = [match.nodes[0].payload, match.checkpoint.recurrent, match.checkpoint.logits]
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(held)} == {"pinned_host"}
