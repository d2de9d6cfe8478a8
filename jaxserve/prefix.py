"""The cheapest way to a prompt's state, from what the slots and the host tier hold. Policy: no arrays here.

Attention rows can be cut to any length. Recurrent state cannot: it is of use only where it stands, or where a
checkpoint of it was taken. A prompt that is held to its last token needs no forward pass if the logits there
were kept; otherwise its last token is computed again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.prefix_index import Match, PrefixIndex

MIN_GAIN_TOKENS = 8  # a dearer route must save this many more tokens: half of the smallest prefill chunk


class Holding(NamedTuple):
    """What one slot remembers."""

    tokens: Sequence[int] = ()  # fed, with certainty; an i32 array is fastest
    exact: bool = True  # the row stands right after `tokens`; False: it was cut back to them, or is being fed
    kept_logits: bool = False  # its kept logits are those after the last of `tokens`
    busy: bool = False  # a request has the slot: it can be copied from, not taken
    used: int = 0  # when it was last used, by any clock that only goes up


class Plan(NamedTuple):
    """How a prompt's state comes about. What `length` does not cover is prefilled."""

    route: str  # "resident" | "copied" | "restored" | "prefill"
    slot: int  # the slot to take
    length: int  # prompt tokens that need no forward pass
    full_hit: bool  # `length` is the whole prompt and its logits are there: draw from them
    why: str  # for people
    source: int | None = None  # the slot to copy `length` tokens from, before anything else
    snapshot: Match | None = None  # what to restore from the host tier, then
    keep: int = 0  # leading positions whose attention rows `slot` holds by then: they need no restoring


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens are the same."""
    size = min(len(a), len(b))
    differ = np.asarray(a[:size]) != np.asarray(b[:size])
    return int(differ.argmax()) if differ.any() else size


def plan(
    prompt: Sequence[int],
    holdings: Sequence[Holding],
    index: PrefixIndex | None = None,
    *,
    recurrent: bool,
    min_gain: int = MIN_GAIN_TOKENS,
) -> Plan:
    """The longest usable prefix by the cheapest route. At least one slot must be free.

    A dearer route is taken for a full hit, or for `min_gain` more tokens. A free slot is continued in place
    if at least half of what it holds is of use, or no other is less valuable; else its prefix is copied, so
    that the other conversation survives. Least valuable is an empty slot, then the least recently used.
    """
    free = [slot for slot, holding in enumerate(holdings) if not holding.busy]
    if not free:
        raise ValueError(f"all {len(holdings)} slots are busy: wait until one is free")
    prompt = np.asarray(prompt)
    total = len(prompt)
    shared = [common_prefix(prompt, holding.tokens) for holding in holdings]
    spare = min(free, key=lambda slot: (len(holdings[slot].tokens) > 0, holdings[slot].used))
    own = [s for s in free if s == spare or _is_continued(holdings[s], shared[s], total)]
    is_resident = any(_use(holdings[s], shared[s], total, None, recurrent).full_hit for s in own)
    snapshot = None if index is None or is_resident else index.match(prompt)
    uses = [_use(h, same, total, snapshot, recurrent) for h, same in zip(holdings, shared, strict=True)]

    best = Plan(
        "prefill", spare, 0, False, f"no snapshot; slots share at most {max(shared)} of {total} tokens"
    )
    slot = max(own, key=lambda slot: (uses[slot].length, -len(holdings[slot].tokens)))
    length, full_hit, needs = uses[slot]
    if length:
        why = _why(f"slot {slot}", shared[slot], total, full_hit)
        best = Plan("resident", slot, length, full_hit, why, snapshot=needs, keep=length)
    source = max(range(len(holdings)), key=lambda slot: uses[slot].length)
    length, full_hit, needs = uses[source]
    if source != spare and _is_better(length, full_hit, best, min_gain):
        why = _why(f"slot {source}", shared[source], total, full_hit)
        best = Plan("copied", spare, length, full_hit, why, source, needs, keep=length)
    if snapshot is not None and _is_better(snapshot.length, snapshot.full_hit, best, min_gain):
        slot = max(own, key=lambda slot: (shared[slot], slot == spare))
        why = _why("a snapshot", snapshot.length, total, snapshot.full_hit)
        keep = min(shared[slot], snapshot.length)
        best = Plan("restored", slot, snapshot.length, snapshot.full_hit, why, snapshot=snapshot, keep=keep)
    return best


def checkpoint_lengths(length: int, borders: Iterable[int], every: int, *, start: int = 0) -> tuple[int, ...]:
    """Where the prefill of a prompt of `length` tokens stops for a checkpoint, ascending.

    At every `every` tokens (0: nowhere), at the borders of messages, at its end; `start` tokens are there
    already.
    """
    regular = range(every, length, every) if every else ()
    return tuple(sorted({at for at in (*regular, *borders, length) if start < at <= length}))


class _Use(NamedTuple):
    """What a row is good for."""

    length: int  # prompt tokens it can stand for; all of them only with logits
    full_hit: bool
    needs: Match | None  # the snapshot that has the logits the row has not


def _use(holding: Holding, shared: int, total: int, snapshot: Match | None, recurrent: bool) -> _Use:
    stands_there = holding.exact and shared == len(holding.tokens)
    if shared == total and stands_there and holding.kept_logits:
        return _Use(total, True, None)
    if recurrent:
        return _Use(shared if stands_there and shared < total else 0, False, None)
    if shared == total and snapshot is not None and snapshot.full_hit:
        return _Use(total, True, snapshot)
    return _Use(min(shared, total - 1), False, None)


def _is_continued(holding: Holding, shared: int, length: int) -> bool:
    return shared == length or 2 * shared >= len(holding.tokens) > 0


def _is_better(length: int, full_hit: bool, best: Plan, min_gain: int) -> bool:
    return full_hit > best.full_hit or (full_hit == best.full_hit and length >= best.length + min_gain)


def _why(holder: str, held: int, total: int, full_hit: bool) -> str:
    logits = "" if held < total else ", with logits" if full_hit else ", without logits"
    return f"{holder} holds {held} of {total} prompt tokens{logits}"
