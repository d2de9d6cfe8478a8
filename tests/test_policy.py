"""What the loop does next, on plain data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.buckets import Buckets
from jaxserve.policy import (
    Cell,
    Feeding,
    Lane,
    Launch,
    agreement,
    cells,
    fits_budget,
    launches,
    next_to_admit,
    promised,
    steps,
)

GAIN = 64
BUCKETS = Buckets(chunks=(32, 256), reaches=(1024, 4096), lanes=(8,))


def prompt(seed: int, *parts: int) -> np.ndarray:
    """Ids in parts: the first parts of prompts with the same seeds are the same."""
    return np.concatenate([np.random.default_rng(seed + i).integers(0, 999, n) for i, n in enumerate(parts)])


SYSTEM = prompt(0, 1000)


def question(seed: int, length: int = 50) -> np.ndarray:
    return np.concatenate([SYSTEM, prompt(100 + seed, length)])


# -- cells


def test_a_prompt_is_cut_into_large_cells_and_its_rest_into_small_ones():
    assert cells([1050], BUCKETS.chunk) == (
        Cell(0, 256, 256),
        Cell(256, 512, 256),
        Cell(512, 768, 256),
        Cell(768, 1024, 256),
        Cell(1024, 1050, 32),
    )


def test_every_stop_is_a_border_of_cells():
    cut = cells([300, 512, 560], BUCKETS.chunk)
    assert {300, 512, 560} <= {cell.stop for cell in cut}


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5, unique=True).map(sorted))
def test_cells_cover_a_prompt_without_gaps_and_fit_their_programs(stops):
    cut = cells(stops, BUCKETS.chunk)
    assert cut[0].start == 0 and cut[-1].stop == stops[-1]
    assert all(a.stop == b.start for a, b in zip(cut, cut[1:], strict=False))
    assert all(0 < cell.stop - cell.start <= cell.size for cell in cut)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_two_prompts_are_cut_alike_up_to_where_the_shorter_one_has_its_last_large_cell(a, b):
    same = min(a, b) // 256 * 256
    cut = [[cell for cell in cells([n], BUCKETS.chunk) if cell.stop <= same] for n in (a, b)]
    assert cut[0] == cut[1]


def test_prompts_agree_up_to_where_their_programs_differ():
    cut = lambda *stops: cells(stops, BUCKETS.chunk)  # noqa: E731
    assert agreement(cut(1020), cut(900)) == 900  # large cells, one shorter
    assert agreement(cut(1020), cut(850)) == 768  # the rest of the second is cut into small ones
    assert agreement(cut(850), cut(840)) == 840
    assert agreement(cut(300), cut(5000)) == 256
    assert agreement(cut(300, 700), cut(300, 900)) == 700
    assert agreement(cut(300, 700), cut(310, 700)) == 300


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_agreement_is_the_same_both_ways_and_whole_with_itself(a, b):
    one, other = (cells([n], BUCKETS.chunk) for n in (a, b))
    assert agreement(one, other) == agreement(other, one) <= min(a, b)
    assert agreement(one, one) == a


# -- feeding


def test_a_step_feeds_one_call_at_least_and_then_up_to_its_budget():
    assert fits_budget(512, spent=0, budget=256)
    assert fits_budget(64, spent=192, budget=256)
    assert not fits_budget(64, spent=193, budget=256)


# -- admission


def admit(waiting, feeding=(), available=0):
    return next_to_admit(waiting, feeding, lambda index: available, gain=GAIN)


def test_without_anything_in_common_the_first_goes_first():
    other = Feeding(prompt(7, 900), fed=0, stops=None)
    assert admit([prompt(8, 50), prompt(9, 50)], [other]) == 0


def test_a_prompt_waits_for_the_one_that_it_shares_a_beginning_with():
    fed = lambda n: [Feeding(question(1), fed=n, stops=None)]  # noqa: E731
    assert admit([question(2)], fed(0)) is None
    assert admit([question(2)], fed(1000 - GAIN)) is None
    assert admit([question(2)], fed(1000 - GAIN + 1)) == 0


def test_others_overtake_a_prompt_that_waits():
    assert admit([question(2), prompt(9, 50)], [Feeding(question(1), fed=0, stops=None)]) == 1


def test_a_prompt_does_not_wait_for_what_is_there_already():
    feeding = [Feeding(question(1), fed=0, stops=None)]
    assert admit([question(2)], feeding, available=1000) == 0
    assert admit([question(2)], feeding, available=1000 - GAIN) is None


def test_a_short_common_beginning_is_not_waited_for():
    head = prompt(3, GAIN - 1)
    other = Feeding(np.concatenate([head, prompt(4, 500)]), fed=0, stops=None)
    assert admit([np.concatenate([head, prompt(5, 500)])], [other]) == 0


def test_the_same_prompt_offers_all_but_its_last_token():
    assert promised(question(1), Feeding(question(1), fed=0, stops=None), gain=GAIN) == 1049


def test_recurrent_rows_promise_only_where_they_stop():
    other = Feeding(question(1), fed=0, stops=(512, 1000))
    assert promised(question(2), other, gain=GAIN) == 1000
    assert promised(question(2)[:1000], other, gain=GAIN) == 512
    assert promised(question(2)[:512], other, gain=GAIN) == 0
    assert promised(question(2), other._replace(fed=512), gain=GAIN) == 1000
    assert promised(question(2), other._replace(stops=(512,), fed=600), gain=GAIN) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400)), min_size=1, max_size=6), st.data())
def test_someone_is_admitted_unless_all_wait_for_something_that_is_being_fed(waiting, data):
    prompts = [np.concatenate([prompt(kind, 300), prompt(kind + 50, n)]) for kind, n in waiting]
    feeding = [
        Feeding(prompt(kind, 300), fed=data.draw(st.integers(0, 300)), stops=None)
        for kind in data.draw(st.lists(st.integers(0, 3), max_size=2))
    ]
    index = admit(prompts, feeding)
    kinds = {kind for kind, _ in waiting}
    awaited = {k for k in range(4) for f in feeding if (prompt(k, 300) == f.tokens).all() and f.fed < 300}
    assert (index is None) <= (kinds <= awaited)


# -- decoding


def test_rows_decode_in_one_launch_with_the_reach_of_the_longest():
    lanes = [Lane(0, 10, False, 7), Lane(3, 2000, True, 5)]
    (launch,) = launches(lanes, BUCKETS.reach, reproducible=False)
    assert launch == (tuple(lanes), 2000, True, 5)


def test_reproducible_rows_decode_with_those_of_their_own_program():
    lanes = [Lane(0, 10, False, 9), Lane(1, 10, True, 9), Lane(2, 1024, False, 9), Lane(3, 1025, False, 9)]
    groups = launches(lanes, BUCKETS.reach, reproducible=True)
    assert [[lane.slot for lane in launch.lanes] for launch in groups] == [[0, 2], [1], [3]]
    assert [(launch.longest, launch.sampled) for launch in groups] == [
        (1024, False),
        (10, True),
        (1025, False),
    ]


@pytest.mark.parametrize(
    ("left", "sizes", "alone", "expected"),
    [
        (9, (1, 4), True, 4),
        (4, (1, 4), True, 4),
        (3, (1, 4), True, 1),  # the last tokens one by one: no step is computed for nothing
        (9, (1, 4), False, 1),  # a prompt that is being fed waits for one step at most
        (9, (1,), True, 1),
    ],
)
def test_a_launch_takes_the_steps_that_all_its_rows_may(left, sizes, alone, expected):
    launch = Launch((Lane(0, 10, False, left),), 10, False, left)
    assert steps(launch, sizes, alone=alone) == expected


def test_nothing_decodes_in_no_launch():
    assert launches([], BUCKETS.reach, reproducible=False) == []
