"""The on-device sampler against plain arithmetic, a sorted reference and frequencies with fixed seeds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve import sampling
from jaxserve.params import MAX_STOP_IDS, SamplingParams

DRAWS = 20_000
WIDTH = 8  # smallest vocabulary: narrower logits are filled up with −inf, so that most tests share a program
WIDE = 700
draw = jax.jit(sampling.draw)
penalise = jax.jit(sampling.penalise)
draw_reference = jax.jit(sampling.draw_reference)
filtered_weights = jax.jit(sampling.filtered_weights)
filtered_weights_reference = jax.jit(sampling.filtered_weights_reference)


def options(seed=0, *, vocab_size, **fields):
    """One row of options."""
    return sampling.options(SamplingParams(**fields), seed=seed, vocab_size=vocab_size)


def stack(rows):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *rows)


def batch(logits, rows=1, counts=0, position=0, **fields):
    """Arguments of `draw` for `rows` equal rows with the seeds 0, 1, 2, …"""
    logits = np.asarray(logits, np.float32)
    padding = (0, max(0, WIDTH - logits.size))
    counts = np.pad(np.broadcast_to(counts, logits.shape), padding).astype(np.int32)
    logits = np.pad(logits, padding, constant_values=-np.inf)
    logits, counts, packed = tiled = jax.tree.map(
        lambda leaf: np.tile(leaf, (rows, 1)), (logits, counts, options(vocab_size=logits.size, **fields))
    )
    packed.integers[:, 2] = np.arange(rows)
    return *tiled, np.full(rows, position, np.int32)


def tokens_of(logits, **fields):
    """DRAWS draws, each with a seed of its own."""
    return np.asarray(draw(*batch(logits, DRAWS, **fields)))


def frequencies(logits, **fields):
    """How often each token comes in DRAWS draws."""
    return np.bincount(tokens_of(logits, **fields), minlength=len(logits)) / DRAWS


def kept(logits, **fields):
    """The ids that the filters leave, by the fast path."""
    logits, _, row, _ = batch(logits, **({"temperature": 1.0} | fields))
    return set(np.flatnonzero(np.asarray(filtered_weights(logits, row))[0]).tolist())


def assert_matches(observed, expected):
    """Within five standard errors of a frequency, and never where the probability is 0."""
    expected = np.asarray(expected, np.float64)
    error = np.sqrt(expected * (1 - expected) / DRAWS)
    assert np.all(np.abs(observed - expected) <= 5 * error), (observed, expected)


# Penalties


@pytest.mark.parametrize("count", [1, 5])
def test_repeat_penalty_divides_positive_and_multiplies_negative_once(count):
    logits, counts, row, _ = batch([2, -2, 0, 2], counts=[count, count, count, 0], repeat_penalty=1.5)
    penalised = penalise(logits, counts, row)
    np.testing.assert_allclose(penalised[0, :4], [4 / 3, -3, 0, 2], rtol=1e-6)


def test_presence_counts_once_and_frequency_every_time():
    arguments = batch([1, 1, 1], counts=[0, 1, 5], presence_penalty=0.5, frequency_penalty=0.25)
    np.testing.assert_array_equal(penalise(*arguments[:3])[0, :3], [1, 0.25, -0.75])


def test_penalties_that_are_off_change_nothing():
    logits = np.random.default_rng(0).normal(size=50)
    arguments = batch(logits, counts=np.arange(50))
    np.testing.assert_array_equal(penalise(*arguments[:3]), arguments[0])


def test_repeat_penalty_comes_before_the_additive_ones():
    arguments = batch([2.0], counts=[2], repeat_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    assert penalise(*arguments[:3])[0, 0] == 0.0


@pytest.mark.parametrize("value", [1e300, 1e-300])
def test_extreme_penalties_leave_no_nan(value):
    arguments = batch([5, -5, 0, -np.inf, np.nan, np.inf], counts=[3] * 6, repeat_penalty=value)
    penalised = np.asarray(penalise(*arguments[:3]))
    assert not np.isnan(penalised).any() and not np.isposinf(penalised).any()


# Each option, and the filters


@pytest.mark.parametrize(
    ("fields", "counts", "without", "with_"),
    [
        (dict(temperature=100.0), None, {0}, {0, 1, 2, 3}),
        (dict(temperature=100.0, top_k=2), None, {0, 1, 2, 3}, {0, 1}),
        (dict(temperature=100.0, top_p=1e-6), None, {0, 1, 2, 3}, {0}),
        (dict(temperature=100.0, min_p=1.0), None, {0, 1, 2, 3}, {0}),
        (dict(repeat_penalty=1e6), [1, 0, 0, 0], {0}, {1}),
        (dict(presence_penalty=1e6), [1, 1, 0, 0], {0}, {2}),
        (dict(frequency_penalty=1e6), [1, 1, 1, 0], {0}, {3}),
    ],
)
def test_an_extreme_value_of_each_option_changes_the_answer(fields, counts, without, with_):
    logits, counts = [9.0, 8.0, 7.0, 6.0], counts or 0
    base = {"temperature": fields["temperature"]} if len(fields) > 1 else {}
    assert set(tokens_of(logits, counts=counts, **base)) == without
    assert set(tokens_of(logits, counts=counts, **fields)) == with_


@pytest.mark.parametrize(("top_k", "expected"), [(0, 8), (2, 2), (7, 7), (8, 8), (9, 8), (10**7, 8)])
def test_top_k_off_and_beyond_the_vocabulary_keep_all(top_k, expected):
    logits = 1e-3 * np.arange(8)[::-1]
    assert kept(logits, top_k=top_k) == set(range(expected))
    assert set(np.flatnonzero(frequencies(logits, temperature=1.0, top_k=top_k))) == set(range(expected))


def test_top_k_1_is_argmax_whatever_the_temperature():
    logits = [0.0, 1e-6, 1e-6, 0.0]
    assert set(tokens_of(logits, temperature=100.0, top_k=1)) == {1}


def test_tokens_tied_with_the_last_kept_one_stay():
    assert kept([3, 2, 2, 2, 1], top_k=2) == {0, 1, 2, 3}
    assert kept([3, 2, 2, 2, 1], top_p=0.5) == {0, 1, 2, 3}
    assert kept([0.0, -0.0, -1.0], top_k=2) == {0, 1}
    assert kept([-0.0, 0.0, -1.0], top_p=0.1) == {0, 1}
    assert kept([3, 3, 2], min_p=1.0) == {0, 1}


def test_temperature_comes_before_top_p():
    assert kept([3, 2, 1], temperature=0.5, top_p=0.8) == {0}
    observed = frequencies([3, 2, 1], temperature=0.5, top_p=0.8)
    assert_matches(observed, [1, 0, 0])


def test_min_p_compares_probabilities_with_the_top_one():
    weights = np.exp([0.0, -1.0])
    assert_matches(frequencies([3, 2, 1], temperature=1.0, min_p=0.3), [*weights / weights.sum(), 0])


def test_top_p_is_over_the_renormalised_top_k_set():
    # of [.4 .3 .2 .1], top_k 2 leaves [.571 .429]: 0.5 keeps one; over all four it would keep two
    assert_matches(
        frequencies(np.log([0.4, 0.3, 0.2, 0.1]), temperature=1.0, top_k=2, top_p=0.5), [1, 0, 0, 0]
    )


def test_min_p_comes_after_top_p():
    # top_p .55 keeps [.4 .3], whose ratio passes; min_p first would leave [.571 .429], then top_p only one
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, top_p=0.55, min_p=0.7) == {0, 1}


def test_frequencies_follow_the_softmax_at_each_temperature():
    logits = np.array([1.0, 0.0, 2.0, -1.0, 0.5])
    for temperature in (0.5, 1.0, 2.0):
        weights = np.exp(logits / temperature)
        assert_matches(frequencies(logits, temperature=temperature), weights / weights.sum())


def test_an_unlikely_token_comes_at_its_rate():
    weights = np.array([1, 1e-3, 1e-2])
    assert_matches(frequencies(np.log(weights), temperature=1.0), weights / weights.sum())


def test_the_noise_favours_no_part_of_a_large_vocabulary():
    size, rows, bins = 262_144, 48, 8
    tokens = np.asarray(draw(*batch(np.zeros(size), rows, temperature=1.0)))
    expected = rows / bins
    statistic = np.sum((np.bincount(tokens // (size // bins), minlength=bins) - expected) ** 2) / expected
    assert 0.6 < statistic < 24.3  # 0.1 % and 99.9 % of χ² with 7 degrees of freedom
    assert len(set(tokens)) > 0.95 * rows


# Edges of the floats


@pytest.mark.parametrize("top_p", [1e-300, 1e-45, 1e-12, 1 - 2.0**-24])
def test_some_token_is_kept_whatever_the_mass_rounds_to(top_p):
    logits = np.random.default_rng(1).normal(size=WIDE)
    assert int(logits.argmax()) in kept(logits, top_p=top_p)
    assert kept(np.zeros(WIDE), top_p=top_p) == set(range(WIDE))


def test_excluded_tokens_are_never_drawn():
    logits = [-np.inf, -1e30, np.nan, -1e30, -np.inf]
    assert set(tokens_of(logits, temperature=1e37)) == {1, 3}


def test_a_row_of_nothing_gives_token_0():
    for temperature in (0.0, 1.0):
        assert set(tokens_of([-np.inf] * 4, temperature=temperature, top_k=3, top_p=0.5)) == {0}


def test_infinite_logit_wins():
    assert set(tokens_of([0, np.inf, 5], temperature=1.0)) == {1}


def test_temperature_below_the_smallest_float_is_greedy():
    assert set(tokens_of([1.0, 1.0, 0.0], temperature=1e-300)) == {0}


def test_greedy_takes_the_lowest_of_tied_ids_and_never_nan():
    logits = jnp.array([[1.0, 3.0, 3.0], [jnp.nan, -1.0, -1.0], [-0.0, 0.0, -1.0]])
    assert sampling.greedy(logits).tolist() == [1, 1, 0]
    assert sampling.greedy(logits).dtype == jnp.int32
    counts = jnp.zeros(logits.shape, jnp.int32)
    assert draw(logits, counts, sampling.empty_options(3), jnp.arange(3)).tolist() == [1, 1, 0]


# Fast path against the sorted reference


def sorted_filter(logits, temperature, top_k, top_p, min_p):
    """In float64: the kept ids, and how far the nearest share or ratio is from the limit that cuts there."""
    weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        weights = np.where(logits >= np.sort(logits)[-top_k], weights, 0)
    order = np.argsort(-logits, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    slack = np.abs(shares - top_p).min() if top_p < 1 else 1.0
    if top_p < 1:
        weights = np.where(logits >= logits[order[np.argmax(shares >= top_p)]], weights, 0)
    ratio = weights / weights.max()
    if min_p > 0:
        slack = min(slack, np.abs(ratio[ratio > 0] - min_p).min())
    return set(np.flatnonzero((ratio >= min_p) & (ratio > 0)).tolist()), slack


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.1, 1.0, 3.0]),
    levels=st.sampled_from([0, 3, 20]),
    temperature=st.floats(0.4, 3.0),  # no weight falls below the smallest f32
    top_k=st.one_of(st.just(0), st.integers(2, WIDE + 20)),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 0.9)),
)
def test_kept_set_equals_that_of_a_sort(seed, scale, levels, temperature, top_k, top_p, min_p):
    logits = scale * np.random.default_rng(seed).normal(size=WIDE)
    if levels:  # ties
        logits = np.round(logits / scale * levels) / levels * scale
    logits = logits.astype(np.float32)
    expected, slack = sorted_filter(logits.astype(np.float64), temperature, top_k, top_p, min_p)
    if slack < 1e-5:
        return  # f32 may decide either way
    fields = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert kept(logits, **fields) == expected
    arguments = batch(logits, position=seed % 1000, **fields)
    reference = np.asarray(filtered_weights_reference(arguments[0], arguments[2]))[0]
    assert set(np.flatnonzero(reference).tolist()) == expected
    assert draw(*arguments).tolist() == draw_reference(*arguments).tolist()


@pytest.mark.parametrize("size", [1, 257])
def test_weights_equal_the_reference_at_any_vocabulary_size(size):
    logits = np.random.default_rng(size).normal(size=(1, size)).astype(np.float32) * 3
    row = stack([options(vocab_size=size, temperature=0.8, top_k=40, top_p=0.93)])
    np.testing.assert_array_equal(filtered_weights(logits, row), filtered_weights_reference(logits, row))


# Batches and keys

MIXED = [
    dict(),
    dict(temperature=1.0, top_k=5),
    dict(temperature=0.7, top_p=0.8),
    dict(temperature=1.3, min_p=0.1),
    dict(temperature=1.0, repeat_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2),
    dict(temperature=1.0),
    dict(repeat_penalty=1.2),
    dict(temperature=2.0, top_k=50, top_p=0.9, min_p=0.02),
]


def pick(arguments, rows):
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], arguments)


def test_rows_with_different_options_equal_their_single_runs():
    random, rows = np.random.default_rng(2), len(MIXED)
    packed = stack([options(seed=2**40 + i, vocab_size=WIDE, **fields) for i, fields in enumerate(MIXED)])
    for position in range(10):
        logits = random.normal(size=(rows, WIDE)).astype(np.float32) * 3
        counts = random.integers(0, 3, size=(rows, WIDE), dtype=np.int32)
        arguments = (logits, counts, packed, np.full(rows, position, np.int32))
        together = draw(*arguments).tolist()
        order = random.permutation(rows)
        assert draw(*pick(arguments, order)).tolist() == [together[i] for i in order]
        assert [int(draw(*pick(arguments, [i]))[0]) for i in range(rows)] == together


def seeded_tokens(rows, steps):
    """Draws over flat logits for rows of options, one position after the other. [steps, B]"""
    flat, unseen = np.zeros((len(rows), WIDE), np.float32), np.zeros((len(rows), WIDE), np.int32)
    packed = stack(rows)
    return np.array([draw(flat, unseen, packed, np.full(len(rows), step, np.int32)) for step in range(steps)])


def test_same_seed_gives_the_same_tokens_alone_and_in_any_row():
    seeded, other = (options(seed=seed, temperature=1.0, vocab_size=WIDE) for seed in (0, 9))
    alone = seeded_tokens([seeded], 200)[:, 0]
    together = seeded_tokens([seeded, other, other, seeded, other, other, other, other], 200)
    assert alone.tolist() == together[:, 0].tolist() == together[:, 3].tolist()
    assert together[:, 1].tolist() == together[:, 7].tolist()
    assert np.sum(alone == together[:, 1]) < 10
    assert len(set(alone)) > 150  # 174 expected of 200 draws among 700


def test_every_part_of_the_seed_counts():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**63, 2**64 - 1, 2**64 - 2**32]
    tokens = seeded_tokens([options(seed=seed, temperature=1.0, vocab_size=WIDE) for seed in seeds], 4)
    assert len(set(map(tuple, tokens.T.tolist()))) == len(seeds)


# Window counts


@pytest.mark.parametrize("window", [0, 1, 7, 64, sampling.WHOLE_CONTEXT])
def test_counts_equal_a_brute_force_count_as_the_window_slides(window):
    random = np.random.default_rng(3)
    rows, capacity, size = 3, 150, 12
    history = random.integers(0, size, (rows, capacity), dtype=np.int32)
    windows, length = np.full(rows, window, np.int32), np.array([0, 5, 40], np.int32)
    slide = jax.jit(sampling.slide_counts)
    counts = sampling.window_counts(history, length, windows, size)
    for step in range(110):
        for row, end in enumerate(length):
            inside = history[row, max(0, end - window) : end]
            assert counts[row].tolist() == np.bincount(inside, minlength=size).tolist(), (step, row)
        token = history[np.arange(rows), length]
        active = np.array([True, True, step % 3 != 0])
        counts = slide(counts, history, length, windows, token, active)
        length = length + active
    np.testing.assert_array_equal(counts, sampling.window_counts(history, length, windows, size))


def test_sliding_does_not_need_the_token_in_the_history():
    history, active = np.array([[4, 2, 0, 0]], np.int32), np.array([True])
    length, window = np.array([2], np.int32), np.array([2], np.int32)
    counts = sampling.window_counts(history, length, window, 6)
    counts = sampling.slide_counts(counts, history, length, window, np.array([5]), active)
    assert counts.tolist() == [[0, 0, 1, 0, 0, 1]]


def test_counts_take_any_leading_axes():
    history = np.array([1, 1, 2, 0], np.int32)
    assert sampling.window_counts(history, 3, 2, 4).tolist() == [0, 1, 1, 0]
    assert sampling.window_counts(history[None, None], np.array([[3]]), np.array([[9]]), 4).shape == (1, 1, 4)


def test_slide_updates_the_donated_counts_in_place():
    shapes = [(2, 9), (2, 5), (2,), (2,), (2,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes]
    active = jax.ShapeDtypeStruct((2,), jnp.bool_)
    compiled = jax.jit(sampling.slide_counts, donate_argnums=0).lower(*arguments, active).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 2 * 9 * 4


# Options, stops, log-probabilities


def test_options_pack_every_field():
    params = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.25,
        min_p=0.125,
        repeat_penalty=1.5,
        repeat_last_n=-1,
        presence_penalty=2,
        frequency_penalty=3,
        stop_tokens=(9, 4),
    )
    row = sampling.options(params, end_ids=[4, 2], seed=2**64 - 2, vocab_size=10)
    assert row.reals.tolist() == [0.5, 0.25, 0.125, 1.5, 2, 3] and row.reals.dtype == np.float32
    assert row.integers.tolist() == [3, sampling.WHOLE_CONTEXT, -2, -1] and row.integers.dtype == np.int32
    assert row.stops.tolist() == [9, 4, 2] + [-1] * (MAX_STOP_IDS - 3) and row.stops.dtype == np.int32
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(row))


def test_the_windows_length_is_an_option():
    windows = [options(repeat_last_n=n, vocab_size=9).window for n in (0, 64, 2**40, -1)]
    assert windows == [0, 64, sampling.WHOLE_CONTEXT, sampling.WHOLE_CONTEXT]


def test_ignore_eos_leaves_the_models_own_ids_out():
    row = sampling.options(
        SamplingParams(ignore_eos=True, stop_tokens=(1,)), end_ids=[2], seed=0, vocab_size=3
    )
    assert sampling.is_stop(row, jnp.array(1)) and not sampling.is_stop(row, jnp.array(2))


@pytest.mark.parametrize("token", [10, 2**40])
def test_stop_id_outside_the_vocabulary_is_refused_by_name(token):
    with pytest.raises(ValueError, match=f"{token}.*10"):
        sampling.options(SamplingParams(stop_tokens=(token,)), seed=0, vocab_size=10)
    with pytest.raises(ValueError, match=f"{token}.*10"):
        sampling.options(SamplingParams(), end_ids=[token], seed=0, vocab_size=10)


def test_64_distinct_stop_ids_fit_and_65_do_not():
    params = SamplingParams(stop_tokens=range(63))
    row = sampling.options(params, end_ids=[0, 63], seed=0, vocab_size=100)
    assert row.stops.tolist() == list(range(64))
    with pytest.raises(ValueError, match="65 distinct.*64"):
        sampling.options(params, end_ids=[63, 64], seed=0, vocab_size=100)


def test_stops_belong_to_their_row():
    packed = stack([options(stop_tokens=(3,), vocab_size=9), options(stop_tokens=(5, 7), vocab_size=9)])
    for tokens, expected in ([3, 3], [True, False]), ([7, 5], [False, True]), ([-1, -1], [False, False]):
        assert sampling.is_stop(packed, jnp.array(tokens)).tolist() == expected


def test_empty_options_are_the_defaults_in_arrays_of_their_own():
    empty = sampling.empty_options(3)
    defaults = options(vocab_size=9)
    for leaf, row in zip(jax.tree.leaves(empty), jax.tree.leaves(defaults), strict=True):
        assert leaf.dtype == row.dtype and leaf.tolist() == [row.tolist()] * 3
    assert empty.is_greedy.tolist() == [True] * 3


def test_log_probabilities_are_of_the_raw_logits():
    logits = np.random.default_rng(4).normal(size=(2, 2000)).astype(np.float32)
    token = np.array([3, 1999], np.int32)
    own, ids, values = sampling.log_probabilities(logits, token)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    np.testing.assert_allclose(own, expected[[0, 1], token], rtol=1e-6)
    np.testing.assert_array_equal(ids, np.argsort(-logits, axis=-1, kind="stable")[:, :16])
    np.testing.assert_allclose(values, np.take_along_axis(expected, np.asarray(ids), -1), rtol=1e-6)


@pytest.mark.parametrize("vocab", [65_536, 70_001])
def test_the_likeliest_of_a_large_vocabulary_are_found_in_order(vocab):
    rng = np.random.default_rng(0)
    logits = rng.integers(0, 3000, (3, vocab)).astype(np.float32)  # ties within segments and across them
    logits[1] = -np.inf
    logits[1, [5, 70_000 % vocab]] = 1.0
    _, ids, values = sampling.log_probabilities(jnp.asarray(logits), jnp.array([0, 5, 0]))
    want = np.argsort(-logits, axis=-1, kind="stable")[:, :16]
    np.testing.assert_array_equal(ids[0], want[0])
    np.testing.assert_array_equal(ids[2], want[2])
    np.testing.assert_array_equal(ids[1, :2], want[1, :2])
    assert (np.diff(values[0]) <= 0).all()


def test_log_probabilities_of_a_tiny_vocabulary_are_padded():
    own, ids, values = sampling.log_probabilities(jnp.zeros((1, 4)), jnp.array([2]))
    np.testing.assert_allclose(own, [-np.log(4)], rtol=1e-6)
    assert ids.tolist() == [[0, 1, 2, 3] + [-1] * 12]
    assert np.isneginf(values[0, 4:]).all() and values.shape == (1, 16)


# The compiled program


def test_draw_on_a_gpu_holds_nothing_that_splits_a_graph():
    arguments = batch(np.zeros(2048), 2)

    def lower(function):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()

    text = lower(sampling.draw)
    for operation in ("sort", "while", "custom_call", "top_k"):
        assert f"lo.{operation}" not in text  # stablehlo and chlo
    assert "stablehlo.sort" in lower(sampling.draw_reference)
