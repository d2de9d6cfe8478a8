"""What SamplingParams accepts, refuses and derives."""

import dataclasses
import math

import numpy as np
import pytest

from jaxserve.params import MAX_STOP_IDS, SamplingParams


def test_defaults_are_those_of_the_contract():
    assert dataclasses.asdict(SamplingParams()) == dict(
        max_tokens=64,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repeat_penalty=1.0,
        repeat_last_n=64,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        stop_tokens=(),
        stop=(),
        ignore_eos=False,
        seed=None,
        logprobs=0,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.01),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", math.inf),
        ("repeat_last_n", -2),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("logprobs", 17),
        ("logprobs", -1),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop_tokens", (-1,)),
        ("stop_tokens", range(MAX_STOP_IDS + 1)),
    ],
)
def test_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["temperature", "repeat_penalty", "presence_penalty", "frequency_penalty"])
def test_integer_beyond_the_largest_float_is_refused(name):
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: 10**400})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 1.0),
        ("max_tokens", "8"),
        ("max_tokens", None),
        ("temperature", "hot"),
        ("temperature", None),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_k", None),
        ("top_k", True),
        ("seed", 1.0),
        ("ignore_eos", 1),
        ("stop", 3),
        ("stop", (3,)),
        ("stop", b"end"),
        ("stop_tokens", 3),
        ("stop_tokens", "3"),
        ("stop_tokens", (1.0,)),
    ],
)
def test_value_of_a_wrong_type_is_refused_by_name(name, value):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: value})


def test_unknown_option_is_refused():
    with pytest.raises(TypeError, match="topk"):
        SamplingParams(topk=3)


@pytest.mark.parametrize(
    "options",
    [
        dict(max_tokens=0, top_k=10**7, top_p=1e-9, min_p=1.0, repeat_last_n=-1, seed=2**64 - 1, logprobs=16),
        dict(temperature=0, presence_penalty=-3, frequency_penalty=-0.5, repeat_penalty=0.1, repeat_last_n=0),
        dict(seed=0, min_p=0, top_p=1, stop_tokens=range(MAX_STOP_IDS)),
    ],
)
def test_value_at_the_edge_of_its_range_is_kept(options):
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == (tuple(value) if name == "stop_tokens" else value)


def test_numpy_numbers_become_python_numbers():
    params = SamplingParams(max_tokens=np.int64(3), temperature=np.float32(0.5), stop_tokens=np.array([7, 8]))
    assert (params.max_tokens, params.temperature, params.stop_tokens) == (3, 0.5, (7, 8))
    assert [type(x) for x in (params.max_tokens, params.temperature, *params.stop_tokens)] == [
        int,
        float,
        int,
        int,
    ]


def test_one_string_is_one_stop():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")


def test_repeated_stop_ids_count_once():
    assert SamplingParams(stop_tokens=[5, 5, 3] * MAX_STOP_IDS).stop_tokens == (5, 3)


def test_params_are_frozen_and_hashable():
    params = SamplingParams(stop=["a"], stop_tokens=[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    assert hash(params) == hash(SamplingParams(stop=("a",), stop_tokens=(1,)))


def test_replace_validates_again():
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(SamplingParams(), top_p=2.0)


@pytest.mark.parametrize(
    ("options", "greedy", "penalised", "plain_greedy"),
    [
        (dict(), True, False, True),
        (dict(temperature=1.0), False, False, False),
        (dict(temperature=1.0, top_k=1), True, False, True),
        (dict(repeat_penalty=1.1), True, True, False),
        (dict(presence_penalty=-1.0), True, True, False),
        (dict(frequency_penalty=0.1, repeat_last_n=-1), True, True, False),
        (dict(repeat_penalty=1.1, repeat_last_n=0), True, False, True),
        (dict(logprobs=1), True, False, False),
    ],
)
def test_derived_claims_follow_from_the_options(options, greedy, penalised, plain_greedy):
    params = SamplingParams(**options)
    assert (params.greedy, params.penalised, params.plain_greedy) == (greedy, penalised, plain_greedy)
