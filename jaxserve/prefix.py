"""Which prefixes exist where, and the cheapest way to a prompt's state. Token ids and counts; no arrays of a device.

Attention rows can be cut to any length. Recurrent state cannot: it is of use only where it stands, or where a
checkpoint of it was taken. A prompt that is held to its last token needs no forward pass if the logits there were
kept; otherwise its last token is computed again.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.prefix_index import Match, PrefixIndex

MIN_GAIN_TOKENS = 8  # a dearer route must save this many more tokens: half of the smallest prefill chunk
ROUTES = ("resident", "copied", "restored", "prefill")  # cheapest first


class Holding(NamedTuple):
    """What one slot remembers."""

    tokens: Sequence[int] = ()  # fed, with certainty; best a NumPy array i32
    exact: bool = True  # the row stands right after `tokens`; False: it is being fed, or was cut
    kept_logits: bool = False  # its kept logits are those after the last of `tokens`
    busy: bool = False  # a request has the slot: it can be copied from, not taken
    used: int = 0  # when it was last used, by any clock that only goes up


class Plan(NamedTuple):
    """How a prompt's state comes about. What `length` does not cover is prefilled."""

    route: str  # one of ROUTES
    slot: int  # the slot to take
    length: int  # prompt tokens that need no forward pass
    full_hit: bool  # length is the whole prompt and its logits are there: draw from them
    why: str  # for people
    source: int | None = None  # the slot to copy from first, if route is "copied"
    snapshot: Match | None = None  # what to restore from the host tier, if anything
    keep: int = 0  # leading positions whose attention rows `slot` holds by then: they need no restoring


class _Candidate(NamedTuple):
    """A way to have the first `length` tokens of a prompt."""

    route: str
    length: int
    full_hit: bool
    slot: int
    source: int | None
    snapshot: Match | None
    why: str


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

    A dearer route is taken for a full hit or for `min_gain` more tokens. A slot is continued in place if most of what it
    holds is of use, or nothing less valuable is free; else its prefix is copied, so that the other conversation survives.
    """
    prompt = np.asarray(prompt)
    shared = [common_prefix(prompt, holding.tokens) for holding in holdings]
    free = [slot for slot, holding in enumerate(holdings) if not holding.busy]
    if not free:
        raise ValueError(f"all {len(holdings)} slots are busy: wait until one is free")
    spare = min(free, key=lambda slot: (len(holdings[slot].tokens) > 0, holdings[slot].used))
    best = _prefill(prompt, shared, spare)
    resident = _from_slots(prompt, holdings, shared, [s for s in free if s == spare or _is_continued(prompt, holdings[s], shared[s])], None, recurrent)
    return best
