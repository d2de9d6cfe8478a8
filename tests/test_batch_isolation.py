"""Rows beside each other on tiny models in float32: each answers as if it were alone."""

import functools
import itertools

import numpy as np
import pytest

import jaxserve
from jaxserve import SamplingParams
from tests.oracle import tiny_path

MODELS = {"attention": "llama-f32", "hybrid": "qwen35-mtp-bf16"}
VOCABULARY = 384
CONTEXT = 1024  # one reach
OPTIONS = [
    dict(),
    dict(temperature=1.5, top_k=20, seed=1),
    dict(temperature=1.2, top_p=0.8, seed=2),
    dict(temperature=1.5, min_p=0.05, seed=3),
    dict(repeat_penalty=1.7, presence_penalty=0.3, frequency_penalty=0.2),
    dict(temperature=1.0, seed=0),
]
LENGTHS = (1, 3, 17, 64, 65, 600)
ORDERS = [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (3, 5, 0, 4, 1, 2)]

each_model = pytest.mark.parametrize("kind", MODELS)


@functools.cache
def engine(kind: str, *, reproducible: bool = False) -> jaxserve.Engine:
    shape = {"context": CONTEXT, "slots": 4, "kv_dtype": "float32", "weights": "float32"}
    loaded = jaxserve.Engine.load(tiny_path(MODELS[kind]), **shape, reproducible=reproducible)
    loaded._reuse.every = 128  # tokens between recurrent checkpoints
    return loaded


def ids(seed: int, length: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCABULARY, length)]


def params(number: int, count: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=count, ignore_eos=True, **OPTIONS[number])


PROMPTS = [ids(length, length) for length in LENGTHS]


@functools.cache
def alone(kind: str, number: int) -> list[int]:
    return forgetful(kind).generate(PROMPTS[number], params(number)).tokens


def forgetful(kind: str) -> jaxserve.Engine:
    """A reproducible engine that holds nothing."""
    chosen = engine(kind, reproducible=True)
    chosen._reuse.reset()
    if chosen._reuse.tier:
        chosen._reuse.tier.clear()
    return chosen


# -- isolation


@each_model
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_rows_of_any_length_options_and_order_equal_their_single_runs(kind, order):
    batched = engine(kind, reproducible=kind == "hybrid")
    done = batched.generate_batch([PROMPTS[i] for i in order], [params(i) for i in order])
    assert [each.tokens for each in done] == [alone(kind, i) for i in order]


@each_model
def test_rows_that_join_late_equal_their_single_runs(kind):
    batched = engine(kind, reproducible=kind == "hybrid")
    streams = {}
    for number in (5, 2, 4, 0):
        for stream in streams.values():  # those before are some tokens ahead
            [next(stream) for _ in range(2)]
        streams[number] = batched.stream(PROMPTS[number], params(number))
    for number, stream in streams.items():
        list(stream)
        assert stream.completion.tokens == alone(kind, number)


# -- reproducible engines: bit by bit


def last_logits(chosen: jaxserve.Engine, prompt, slot: int = 0, beside=()) -> bytes:
    """The bits of a row's logits after a prompt and 4 tokens, with other rows beside it."""
    others = [chosen.stream(each, SamplingParams(max_tokens=40, ignore_eos=True)) for each in beside]
    for stream in others:
        next(stream)
    stream = chosen.stream(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    next(stream)
    slot = stream._request.slot
    list(stream)
    bits = np.array(chosen._runner.state.logits[slot]).tobytes()
    for each in others:
        each.close()
    return bits


@each_model
@pytest.mark.parametrize("neighbours", [0, 1, 3])
def test_a_reproducible_row_has_the_same_bits_whatever_runs_beside_it(kind, neighbours):
    chosen = forgetful(kind)
    prompt = ids(50, 90)
    expected = last_logits(chosen, prompt)
    forgetful(kind)
    beside = [ids(60 + i, 5 + 30 * i) for i in range(neighbours)]
    assert last_logits(chosen, prompt, beside=beside) == expected


@each_model
@pytest.mark.parametrize(("shared", "length"), [(300, 340), (300, 700), (520, 530), (256, 257), (130, 900)])
def test_a_reproducible_row_has_the_same_bits_whatever_is_held_of_its_prompt(kind, shared, length):
    chosen, prompt = forgetful(kind), ids(70, length)
    expected = last_logits(chosen, prompt)
    forgetful(kind)
    chosen.generate(prompt[:shared] + ids(71, 200), SamplingParams(max_tokens=3))
    assert last_logits(chosen, prompt) == expected
    done = chosen.generate(prompt, SamplingParams(max_tokens=5, ignore_eos=True))
    assert 0 < done.cached_tokens < length


def test_a_prompt_that_is_held_whole_still_computes_its_last_cell():
    chosen = forgetful("attention")
    prompt = ids(80, 340)
    first, second = (chosen.generate(prompt, params(1)) for _ in range(2))
    assert first.tokens == second.tokens
    assert (first.cached_tokens, second.cached_tokens) == (0, 320)
    longer = chosen.generate(prompt + first.tokens + ids(81, 9), params(0))
    assert longer.cached_tokens == 320  # generated tokens came out of another program


def test_a_reproducible_engine_takes_no_saved_state(tmp_path):
    chosen = engine("hybrid", reproducible=True)
    chosen.save_state(tmp_path / "state")
    with pytest.raises(ValueError, match="reproducible"):
        chosen.load_state(tmp_path / "state")


# -- a common beginning


def computed(chosen: jaxserve.Engine, prompts) -> tuple[int, list]:
    """Prompt tokens that were computed for a batch, and its completions."""
    done = chosen.generate_batch(prompts, SamplingParams(max_tokens=2, ignore_eos=True))
    return sum(each.timings.prefilled_tokens for each in done), done


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_hundred_questions_behind_one_system_prompt_compute_it_once(reproducible):
    chosen = forgetful("attention") if reproducible else engine("attention")
    system = ids(90 + reproducible, 960)
    prompts = [system + ids(1000 + i, 3 + i % 60) for i in range(100)]
    tokens, done = computed(chosen, prompts)
    assert tokens == 960 + sum(len(prompt) - 960 for prompt in prompts)
    assert [each.cached_tokens for each in done] == [0] + [960] * 99
    other = engine("attention") if reproducible else forgetful("attention")
    for i in (0, 1, 50, 99):
        single = other.generate(prompts[i], SamplingParams(max_tokens=2, ignore_eos=True))
        assert done[i].tokens == single.tokens


def test_recurrent_rows_share_up_to_the_end_of_the_system_message():
    chosen = forgetful("hybrid")
    system = ids(91, 300)
    prompts = [system + ids(2000 + i, 30) for i in range(12)]
    requests = [chosen._request(p, SamplingParams(max_tokens=2), borders=(300, 310)) for p in prompts]
    for request in requests:
        chosen._enqueue(request)
    for request in requests:
        chosen._run(request)
    assert [request.cached for request in requests] == [0] + [300] * 11


def test_jobs_compile_one_number_of_lanes():
    names = engine("attention", reproducible=True).programs
    assert {name.split()[1] for name in names if name.startswith("decode")} == {"4"}
    assert len(names) < len(engine("attention").programs)


def test_seeded_rows_of_a_reproducible_engine_do_not_depend_on_when_they_run():
    chosen = engine("attention", reproducible=True)
    system = ids(92, 280)
    prompts = [system[: 280 - 9 * (i % 5)] + ids(3000 + i, 10 + 7 * i) for i in range(12)]
    sampled = [SamplingParams(max_tokens=8, temperature=2.0, seed=i, ignore_eos=True) for i in range(12)]
    rng = np.random.default_rng(0)
    answers = []
    for _ in range(3):
        order = rng.permutation(12)
        done = chosen.generate_batch([prompts[i] for i in order], [sampled[i] for i in order])
        answers.append({int(i): each.tokens for i, each in zip(order, done, strict=True)})
    assert all(a == b for a, b in itertools.pairwise(answers))
