"""What the loop does next: which prompt is fed, who gets a free slot, which rows decode together.

Pure functions over plain data: no arrays on a device, no clocks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.prefix import common_prefix


class Cell(NamedTuple):
    """A piece of a prompt that one prefill call feeds."""

    start: int
    stop: int
    size: int  # tokens of the program: the piece is padded to it


class Feeding(NamedTuple):
    """A prompt that is being fed, for those that may share it."""

    tokens: np.ndarray  # i32: those that others may begin with
    fed: int
    stops: Sequence[int] | None  # lengths at which it can be taken over; None: anywhere


class Lane(NamedTuple):
    """A row that decodes."""

    slot: int
    end: int  # tokens it will have fed after this step
    sampled: bool  # it needs more than an argmax
    left: int  # tokens that may still be asked of it


class Launch(NamedTuple):
    """Rows that decode in one call."""

    lanes: tuple[Lane, ...]
    longest: int
    sampled: bool
    left: int  # the fewest of a row


def cells(stops: Iterable[int], size_of: Callable[[int], int]) -> tuple[Cell, ...]:
    """How a prompt is cut from its first token on, with a border at every stop.

    stops: ascending, the prompt's length last; size_of(remaining): the next call's size (`Buckets.chunk`).
    """
    out, start = [], 0
    for border in stops:
        while start < border:
            size = size_of(border - start)
            stop = min(border, start + size)
            out.append(Cell(start, stop, size))
            start = stop
    return tuple(out)


def agreement(a: Sequence[Cell], b: Sequence[Cell]) -> int:
    """How many leading positions two prompts compute with the same programs."""
    for one, other in zip(a, b, strict=False):
        if one.size != other.size:
            return one.start
        if one.stop != other.stop:
            return min(one.stop, other.stop)
    return min(a[-1].stop, b[-1].stop)


def fits_budget(size: int, spent: int, budget: int) -> bool:
    """Whether one more prefill call of `size` tokens goes into this step, which has had `spent`.

    The first always does, so that every step feeds something; running rows wait for at most `budget` tokens,
    or one call.
    """
    return not spent or spent + size <= budget


def next_to_admit(
    waiting: Iterable[Sequence[int]],
    feeding: Sequence[Feeding],
    available: Callable[[int], int],
    *,
    gain: int,
) -> int | None:
    """Which of the waiting prompts gets the free slot: the first that gains nothing by waiting.

    A prompt that begins like one that is being fed waits for it, so that the common part is computed once: if
    that saves `gain` tokens, those of the smallest prefill call. available(i): how many tokens of prompt i
    need no computing now. Every wait ends with the feeding that it is for, and leaves less to wait for.
    """
    for index, prompt in enumerate(waiting):
        most = max((promised(prompt, other, gain=gain) for other in feeding), default=0)
        if not most or most - available(index) < gain:
            return index
    return None


def promised(prompt: Sequence[int], other: Feeding, *, gain: int) -> int:
    """How many tokens of a prompt another one will offer once it is fed; 0: not `gain` more than now."""
    shared = min(common_prefix(prompt, other.tokens), len(prompt) - 1)
    now = min(shared, other.fed)
    if other.stops is not None:
        shared, now = (max((s for s in other.stops if s <= end), default=0) for end in (shared, now))
    return shared if shared - now >= gain else 0


def launches(lanes: Sequence[Lane], reach_of: Callable[[int], int], *, reproducible: bool) -> list[Launch]:
    """Which rows decode in one call: all of them; reproducible: those whose own program is the same.

    reach_of(length): cached positions that a row of `length` tokens is decoded with (`Buckets.reach`).
    """
    groups: dict[object, list[Lane]] = {}
    for lane in lanes:
        key = (reach_of(lane.end), lane.sampled) if reproducible else None
        groups.setdefault(key, []).append(lane)
    return [
        Launch(
            tuple(group),
            longest=max(lane.end for lane in group),
            sampled=any(lane.sampled for lane in group),
            left=min(lane.left for lane in group),
        )
        for group in groups.values()
    ]


def steps(launch: Launch, sizes: Sequence[int], *, alone: bool) -> int:
    """How many steps rows take in one call: the most that all of them may, but one where a prompt is being
    fed (alone: none is), which would wait for them.

    sizes: of the compiled programs, ascending (`Buckets.steps`).
    """
    return max((size for size in sizes if alone and size <= launch.left), default=1)
