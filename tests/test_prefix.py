"""The policy of prefix reuse against brute force: plain tokens, fake payloads, no model."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.prefix import Holding, checkpoint_lengths, common_prefix, plan
from jaxserve.prefix_index import Checkpoint, Node, PrefixIndex

BLOCK = 4
SIZES = {False: dict(block_bytes=10, recurrent_bytes=0), True: dict(block_bytes=10, recurrent_bytes=25)}
LOGITS_BYTES = 3
PLENTY = 10**9

# Beginnings of a few sequences that share their own beginnings, so that random prompts continue each other.
SEQUENCES = [[1] * 14, [1] * 6 + [2] * 8, [1] * 6 + [3] * 8, [1] * 3 + [4] * 11, [5] * 14]
prompts = st.builds(lambda tokens, size: tokens[:size], st.sampled_from(SEQUENCES), st.integers(1, 14))
each_kind = pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "recurrent"])


def make_index(recurrent: bool, budget: int = PLENTY) -> PrefixIndex:
    return PrefixIndex(budget, block_tokens=BLOCK, logits_bytes=LOGITS_BYTES, **SIZES[recurrent])


def store(index: PrefixIndex, tokens, *, logits: bool = True, reads: list | None = None) -> bool:
    """Store payloads that say which tokens they stand for."""
    tokens = list(tokens)

    def read(kind, end):
        assert index.nbytes <= index.budget
        if reads is not None:
            reads.append(kind)
        return kind, tuple(tokens[:end])

    return index.store(
        tokens,
        lambda start: read("block", start + BLOCK),
        lambda: read("recurrent", len(tokens)),
        (lambda: read("logits", len(tokens))) if logits else None,
    )


def check(index: PrefixIndex, recurrent: bool) -> None:
    """The books are right, every path is whole, and every payload is that of its tokens."""
    assert index.nbytes == sum(item.nbytes for item in index.items()) <= index.budget
    order = {item: age for age, item in enumerate(index.items())}
    seen = set()

    def visit(node, before):
        tokens = before + tuple(node.tokens.tolist())
        if node is not index.root:
            seen.add(node)
            assert node.payload[1][: len(tokens)] == tokens
            assert node.nbytes == SIZES[recurrent]["block_bytes"]
            assert not recurrent or node.children or node.checkpoints, "rows that no checkpoint needs"
        for offset, end in node.checkpoints.items():
            seen.add(end)
            assert end.nbytes == recurrent * 25 + (end.logits is not None) * LOGITS_BYTES
            assert not recurrent or end.recurrent == ("recurrent", before + tokens[len(before) :][:offset])
            assert end.logits in (None, ("logits", before + tokens[len(before) :][:offset]))
            assert order[end] < order[node]
        for child in node.children.values():
            assert len(node.tokens) in (0, BLOCK)
            assert node is index.root or order[child] < order[node]
            visit(child, tokens)

    visit(index.root, ())
    assert seen == set(index.items())


def longest(stored: dict[tuple, bool], prompt: tuple, recurrent: bool) -> tuple[bool, int]:
    """(full hit, tokens) by looking at everything that was ever stored."""
    if stored.get(prompt):
        return True, len(prompt)
    if recurrent:
        ends = [
            len(tokens) for tokens in stored if len(tokens) < len(prompt) and prompt[: len(tokens)] == tokens
        ]
    else:
        ends = [min(common_prefix(tokens, prompt), len(prompt) - 1) for tokens in stored]
    return False, max(ends, default=0)


@each_kind
@given(
    entries=st.lists(st.tuples(prompts, st.booleans()), max_size=12), queries=st.lists(prompts, max_size=6)
)
@settings(max_examples=150, deadline=None)
def test_a_match_is_the_longest_usable_prefix_ever_stored(recurrent, entries, queries):
    index, stored = make_index(recurrent), {}
    for tokens, logits in entries:
        assert store(index, tokens, logits=logits)
        stored[tuple(tokens)] = stored.get(tuple(tokens), False) or logits
        check(index, recurrent)
    ends = [item for item in index.items() if isinstance(item, Checkpoint)]
    assert len(ends) == sum(recurrent or logits for logits in stored.values())
    for prompt in [*queries, *(tokens for tokens, _ in entries)]:
        match = index.match(prompt)
        found = (match.full_hit, match.length) if match else (False, 0)
        assert found == longest(stored, tuple(prompt), recurrent)
        if match:
            assert match.tokens.tolist() == prompt[: match.length]
            assert not recurrent or match.checkpoint.recurrent == ("recurrent", tuple(prompt[: match.length]))
            assert not match.full_hit or match.checkpoint.logits == ("logits", tuple(prompt))


@each_kind
@given(
    budget=st.integers(0, 150),
    steps=st.lists(
        st.tuples(st.sampled_from(["store", "store", "match", "pin", "unpin"]), prompts, st.booleans())
    ),
)
@settings(max_examples=150, deadline=None)
def test_the_budget_holds_and_pinned_prefixes_stay(recurrent, budget, steps):
    index, pinned = make_index(recurrent, budget), []
    for action, tokens, logits in steps:
        if action == "store":
            stored = store(index, tokens, logits=logits)
            match = index.match(tokens)
            if stored and logits:
                assert match.full_hit
            elif stored:
                assert index.match([*tokens, 7]).length >= len(tokens)
        elif action == "unpin" and pinned:
            index.unpin(pinned.pop())
        elif action in ("pin", "match") and (match := index.match(tokens)):
            assert match.tokens.tolist() == tokens[: match.length]
            if action == "pin":
                index.pin(match)
                pinned.append(match)
        check(index, recurrent)
        for match in pinned:
            assert set(match.nodes) <= set(index.items())
    for match in pinned:
        index.unpin(match)
    assert index._pinned_bytes == 0


def test_the_least_recently_used_prefix_goes_first():
    index = make_index(True, budget=3 * (10 + 25 + LOGITS_BYTES))
    for first in (1, 2, 3):
        store(index, [first, 9])
    index.pin(index.match([1, 9]))
    index.unpin(index.match([1, 9]))
    store(index, [4, 9])
    assert [bool(index.match([first, 9])) for first in (1, 2, 3, 4)] == [True, False, True, True]
    assert index.evictions == 2  # its checkpoint, then its block


def test_blocks_that_prefixes_share_are_read_and_counted_once():
    index, reads = make_index(False), []
    store(index, range(10), reads=reads)
    assert reads == ["block"] * 3 + ["logits"]
    del reads[:]
    store(index, [*range(8), 20, 21], reads=reads)
    assert reads == ["block", "logits"]
    assert index.nbytes == 4 * 10 + 2 * LOGITS_BYTES


def test_what_is_stored_twice_is_not_read_again():
    index, reads = make_index(True), []
    store(index, range(6), logits=False)
    store(index, range(6), logits=True, reads=reads)
    store(index, range(6), logits=True, reads=reads)
    assert reads == ["logits"]


def test_a_checkpoint_is_found_again_whichever_sibling_has_it():
    index, reads = make_index(True), []
    for tokens in ([1, 2], [1, 2, 3], [1, 2, 7], [1, 2, 3, 4]):
        store(index, tokens)
    store(index, [1, 2], reads=reads)
    assert reads == []


def test_a_continued_block_grows_and_keeps_its_checkpoints():
    index, reads = make_index(True), []
    store(index, [1, 2])
    store(index, [1, 2, 3, 4, 5], reads=reads)
    assert reads == ["block", "block", "recurrent", "logits"]
    assert index.nbytes == 2 * 10 + 2 * (25 + LOGITS_BYTES)
    assert index.match([1, 2]).full_hit and index.match([1, 2, 9]).length == 2


def test_a_block_grows_within_a_budget_that_has_room_for_it_alone():
    index = make_index(False, budget=10 + LOGITS_BYTES)
    assert store(index, [1, 2])
    assert store(index, [1, 2, 3])
    assert index.match([1, 2, 3]).full_hit


@each_kind
def test_a_prefix_that_cannot_fit_is_skipped_and_nothing_goes_for_it(recurrent):
    index, reads = make_index(recurrent, budget=60), []
    store(index, [1, 2])
    assert not store(index, range(5, 40), reads=reads)
    assert not reads and index.evictions == 0 and index.skipped == 1
    assert index.match([1, 2]).full_hit


def test_logits_added_to_a_pinned_checkpoint_are_pinned_with_it():
    index = make_index(True, budget=10 + 25 + LOGITS_BYTES)
    store(index, [1], logits=False)
    pinned = index.match([1, 2])
    index.pin(pinned)
    assert store(index, [1], logits=True)
    assert not store(index, [2, 3])
    index.unpin(pinned)
    assert index._pinned_bytes == 0
    assert store(index, [2, 3])


def test_a_failed_read_leaves_nothing_half_stored():
    index = make_index(True)
    store(index, [1, 2, 3, 4])
    store(index, [1, 2, 3, 4, 5])

    def fail(*_):
        raise RuntimeError("device")

    with pytest.raises(RuntimeError):
        index.store([1, 2, 3, 4, 5, 6], fail, fail, None)
    check(index, True)
    assert index.match([1, 2, 3, 4, 5, 6]).length == 4
    assert index._pinned_bytes == 0


@each_kind
def test_a_dropped_block_takes_what_hangs_on_it(recurrent):
    index = make_index(recurrent)
    store(index, range(10))
    store(index, [7])
    index.drop(index.match(range(10)).nodes[1])
    assert (index.match(range(10)).length if not recurrent else index.match(range(10))) == (
        None if recurrent else 4
    )
    assert index.match([7]).full_hit


@each_kind
@given(entries=st.lists(st.tuples(prompts, st.booleans()), max_size=8))
@settings(max_examples=100, deadline=None)
def test_the_ends_of_an_index_rebuild_it(recurrent, entries):
    index, copy = make_index(recurrent), make_index(recurrent)
    for tokens, logits in entries:
        store(index, tokens, logits=logits)
    for end in index.ends():
        assert store(copy, end.tokens.tolist(), logits=end.full_hit)
    check(copy, recurrent)
    assert copy.nbytes == index.nbytes and len(copy) == len(index)
    for tokens, _ in entries:
        a, b = index.match(tokens), copy.match(tokens)
        assert (a.full_hit, a.length) == (b.full_hit, b.length) if a else b is None


def test_a_budget_of_nothing_holds_nothing():
    index = make_index(False, budget=0)
    assert not store(index, [1]) and not len(index) and index.skipped == 0


def test_items_are_blocks_and_checkpoints():
    index = make_index(False)
    store(index, range(5))
    assert [type(item) for item in index.items()] == [Checkpoint, Node, Node]


@given(a=prompts, b=prompts)
def test_common_prefix_counts_equal_leading_tokens(a, b):
    expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    assert common_prefix(a, b) == expected
    assert common_prefix(np.array(a), b) == common_prefix(tuple(a), np.array(b)) == expected


# -- plan

holdings = st.lists(
    st.builds(
        Holding,
        tokens=prompts | st.just([]),
        exact=st.booleans(),
        kept_logits=st.booleans(),
        busy=st.booleans(),
        used=st.integers(0, 5),
    ),
    min_size=1,
    max_size=4,
).map(lambda slots: [h._replace(kept_logits=h.kept_logits and h.exact and len(h.tokens) > 0) for h in slots])


def reachable(prompt, slots, stored, recurrent) -> tuple[bool, int]:
    """(full hit, tokens) at best, by any route."""
    n, ways = len(prompt), [longest(stored, tuple(prompt), recurrent)]
    for holding in slots:
        same = common_prefix(prompt, holding.tokens)
        stands = holding.exact and same == len(holding.tokens)
        if stands and same == n and holding.kept_logits:
            ways.append((True, n))
        if not recurrent:
            ways.append((False, min(same, n - 1)))
        elif stands and same < n:
            ways.append((False, same))
    return max(ways)


@each_kind
@given(prompt=prompts, slots=holdings, entries=st.lists(st.tuples(prompts, st.booleans()), max_size=4))
@settings(max_examples=300, deadline=None)
def test_a_plan_reaches_as_far_as_anything_held_and_can_be_carried_out(recurrent, prompt, slots, entries):
    if all(holding.busy for holding in slots):
        slots[0] = slots[0]._replace(busy=False)
    index, stored = make_index(recurrent), {}
    for tokens, logits in entries:
        store(index, tokens, logits=logits)
        stored[tuple(tokens)] = stored.get(tuple(tokens), False) or logits
    result = plan(prompt, slots, index, recurrent=recurrent, min_gain=1)
    assert (result.full_hit, result.length) == reachable(prompt, slots, stored, recurrent)
    assert not slots[result.slot].busy
    assert result.length < len(prompt) or result.full_hit
    assert result.keep <= result.length
    origin = {"resident": result.slot, "copied": result.source}.get(result.route)
    if origin is not None:
        holding = slots[origin]
        assert list(holding.tokens[: result.length]) == prompt[: result.length]
        assert not recurrent or (holding.exact and len(holding.tokens) == result.length)
        own = holding.exact and holding.kept_logits and len(holding.tokens) == len(prompt)
        assert not result.full_hit or own or result.snapshot.full_hit
    elif result.route == "restored":
        assert result.snapshot.length == result.length
        assert list(slots[result.slot].tokens[: result.keep]) == prompt[: result.keep]
    else:
        assert result.route == "prefill" and result.length == 0 and result.snapshot is None
    assert str(len(prompt)) in result.why


CHAT = tuple(range(100, 160))


def test_routes_of_equal_length_go_cheapest_first():
    index = make_index(False)
    store(index, CHAT)
    full = Holding(CHAT, kept_logits=True)
    route = lambda *slots: plan(CHAT, slots, index, recurrent=False).route  # noqa: E731
    assert route(Holding(), full) == "resident"
    assert route(Holding(), full._replace(busy=True)) == "copied"
    assert route(Holding()) == "restored"
    assert plan(CHAT, [Holding()], recurrent=False).route == "prefill"


def test_a_row_without_logits_gets_them_from_a_snapshot_and_nothing_else():
    index = make_index(False)
    store(index, CHAT)
    longer = Holding((*CHAT, 1, 2, 3), kept_logits=True)
    result = plan(CHAT, [longer], index, recurrent=False)
    assert (result.route, result.length, result.full_hit, result.keep) == ("resident", 60, True, 60)
    assert result.snapshot.full_hit
    assert plan(CHAT, [longer], recurrent=False).length == 59


def test_a_recurrent_row_that_went_on_is_brought_back_over_its_own_attention_rows():
    index = make_index(True)
    store(index, CHAT)
    result = plan(CHAT, [Holding((*CHAT, 1, 2, 3), kept_logits=True)], index, recurrent=True)
    assert (result.route, result.full_hit, result.keep) == ("restored", True, 60)


def test_a_snapshot_goes_where_most_of_its_attention_rows_are():
    index = make_index(True)
    store(index, CHAT)
    slots = [
        Holding(CHAT[:30], exact=False, used=1),
        Holding(CHAT[:50], exact=False, used=2),
        Holding((1, 2)),
    ]
    result = plan((*CHAT, 9), slots, index, recurrent=True)
    assert (result.route, result.slot, result.keep) == ("restored", 1, 50)


def test_a_recurrent_row_is_continued_only_from_where_it_stands():
    for exact, expected in ((True, ("resident", 60)), (False, ("prefill", 0))):
        result = plan((*CHAT, 1), [Holding(CHAT, exact=exact)], recurrent=True)
        assert (result.route, result.length) == expected
    assert plan(CHAT[:50], [Holding(CHAT)], recurrent=True).length == 0
    assert (
        plan(CHAT, [Holding(CHAT)], recurrent=True).length == 0
    )  # its logits were not kept, it cannot step back


def test_another_conversation_survives_a_shared_beginning():
    other = Holding((*CHAT[:20], *range(300)), used=9)
    result = plan((*CHAT[:20], 5, 6), [other, Holding()], recurrent=False)
    assert (result.route, result.slot, result.source, result.length) == ("copied", 1, 0, 20)
    assert plan((*CHAT[:20], 5, 6), [other], recurrent=False).route == "resident"


def test_the_same_conversation_is_continued_in_place():
    for prompt in ((*CHAT, 5, 6), (*CHAT[:40], 5, 6), CHAT[:10]):
        result = plan(prompt, [Holding(CHAT, used=9), Holding()], recurrent=False)
        assert (result.route, result.slot) == ("resident", 0)


def test_a_new_prompt_takes_the_least_valuable_free_slot():
    slots = [Holding((1, 2), used=5), Holding((3, 4), used=2), Holding((5, 6), used=1, busy=True)]
    assert plan(CHAT, slots, recurrent=False).slot == 1
    assert plan(CHAT, [*slots, Holding(used=9)], recurrent=False).slot == 3


def test_a_few_shared_tokens_are_not_worth_a_copy_but_are_used_in_place():
    other = Holding((*CHAT[:3], *range(300)))
    assert plan(CHAT, [other, Holding()], recurrent=False).route == "prefill"
    result = plan(CHAT, [other], recurrent=False)
    assert (result.route, result.length) == ("resident", 3)


def test_a_full_hit_is_worth_any_route():
    index = make_index(False)
    store(index, [1, 2])
    assert plan([1, 2], [Holding()], index, recurrent=False).route == "restored"
    assert plan([1, 2], [Holding((1,))], index, recurrent=False).full_hit


def test_no_free_slot_is_an_error():
    with pytest.raises(ValueError, match="all 2 slots are busy"):
        plan(CHAT, [Holding(busy=True)] * 2, recurrent=False)


def test_checkpoints_lie_at_intervals_borders_and_the_end():
    assert checkpoint_lengths(100, (), 0) == (100,)
    assert checkpoint_lengths(100, (7, 50, 100, 130), 25) == (7, 25, 50, 75, 100)
    assert checkpoint_lengths(100, (7, 50), 25, start=50) == (75, 100)
    assert checkpoint_lengths(100, (), 25, start=100) == ()
