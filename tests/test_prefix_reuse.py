"""Prompts through the engine: the route each takes, what is computed, and answers as without any reuse."""

import itertools
import threading

import jax
import numpy as np
import pytest

import jaxserve
from jaxserve import EngineError, SamplingParams, snapshot
from jaxserve.reuse import CHECKPOINT_TOKENS
from jaxserve.state import IDLE, nbytes
from tests.engines import END, SCRIPT, scripted
from tests.oracle import tiny_path
from tests.prefixes import GREEDY, MODELS, chat_engine, checked, cold, engine, ids, passes
from tests.test_compilation import Compilations

each_model = pytest.mark.parametrize("kind", MODELS)


@pytest.fixture
def fresh(monkeypatch):
    """A shared engine that remembers nothing; its tiers and budget may be set for one test."""

    def make(kind: str, *, slots: int = 1, budget: int = 2**40, residency: bool = True) -> jaxserve.Engine:
        chosen = engine(kind, slots=slots)
        reuse = chosen._reuse
        assert chosen.stats()["free_slots"] == slots
        reuse.reset()
        reuse.tier.clear()
        monkeypatch.setattr(reuse, "residency", residency)
        monkeypatch.setattr(reuse.tier.index, "budget", budget)
        return chosen

    return make


# -- answers do not depend on what came before


def test_blocks_that_come_back_in_groups_give_the_same_answers(monkeypatch):
    monkeypatch.setitem(snapshot.BLOCKS_PER_CALL, "cpu", 3)
    model, prompt = tiny_path(MODELS["hybrid"]), ids(70, 1400)  # 6 blocks, sent as 4 and 2: calls of 3, 1, 2
    with jaxserve.Engine.load(model, context=1600, prefix_bytes=2**26, weights="float32") as chosen:
        expected = chosen.generate(prompt, GREEDY)
        chosen.generate(ids(71, 40), GREEDY)
        restored = chosen.generate(prompt, GREEDY)
    assert (restored.route, restored.tokens) == ("restored", expected.tokens)
    assert restored.cached_tokens == len(prompt)


@each_model
def test_answers_stay_the_same_however_often_an_entry_is_used(kind, fresh):
    chosen = fresh(kind)
    a = ids(1, 300)
    b = a[:200] + ids(2, 100)
    for number, prompt in enumerate((a, b, a, b, a)):
        done = checked(chosen, kind, prompt)
        if number:
            assert done.cached_tokens >= (192 if kind == "hybrid" else 200)


@each_model
@pytest.mark.parametrize("length", [1, 2, 17, 64, 256])
def test_a_prompt_held_whole_needs_no_forward_pass(kind, length, fresh):
    chosen, prompt = fresh(kind), ids(3, length)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    checked(chosen, kind, prompt)
    for _ in range(2):
        before = passes(chosen)
        done = checked(chosen, kind, prompt, params)
        assert passes(chosen) == before
        assert done.route in ("resident", "restored") and done.cached_tokens == length
        assert done.timings.prefill_s is None and done.timings.load_state_s > 0
        checked(chosen, kind, prompt)


@each_model
@pytest.mark.parametrize(
    "options",
    [dict(temperature=2.0, seed=4), dict(repeat_penalty=3.0, repeat_last_n=-1), dict(logprobs=3)],
    ids=str,
)
def test_every_option_works_for_the_first_token_of_a_full_hit(kind, options, fresh):
    chosen, prompt = fresh(kind), ids(5, 40)
    params = SamplingParams(max_tokens=3, ignore_eos=True, **options)
    checked(chosen, kind, prompt)
    done = checked(chosen, kind, prompt, params)
    assert done.cached_tokens == 40
    reference = engine(kind, reuse=False).generate(prompt, params)
    if params.logprobs:
        ours, theirs = ([entry.logprob for entry in c.logprobs] for c in (done, reference))
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@each_model
def test_a_generation_is_continued_from_where_it_ended(kind, fresh):
    chosen, prompt = fresh(kind), ids(6, 50)
    done = checked(chosen, kind, prompt)
    fed = prompt + tuple(done.tokens[:-1])  # the last token of a "length" end was never fed
    longer = checked(chosen, kind, fed + ids(7, 20))
    assert (longer.route, longer.cached_tokens) == ("resident", len(fed))


def test_a_generation_that_ended_on_a_stop_token_is_continued_with_its_logits():
    chosen = scripted()
    prompt = [7, SCRIPT.start["greek"]]
    done = chosen.generate(prompt)
    before = passes(chosen)
    again = chosen.generate(prompt + done.tokens, SamplingParams(max_tokens=1, ignore_eos=True))
    assert (again.tokens, again.route, again.cached_tokens) == ([END], "resident", 2 + len(done.tokens))
    assert passes(chosen) == before


@each_model
@pytest.mark.parametrize("split", [1, 63, 64, 65, 149, 150])
def test_a_prompt_may_part_from_the_held_one_anywhere(kind, split, fresh):
    chosen, prompt = fresh(kind), ids(8, 150)
    checked(chosen, kind, prompt)
    checked(chosen, kind, prompt[:split] + ids(9 + split, 30))
    checked(chosen, kind, prompt)


@each_model
def test_a_slot_is_used_again_without_a_trace_of_the_one_before(kind, fresh):
    chosen = fresh(kind)
    long = ids(10, 300)
    for length in (1, 2, 3, 50):
        checked(chosen, kind, long)
        checked(chosen, kind, ids(11, length))
        stream = chosen.stream(long + ids(12, 10), SamplingParams(max_tokens=9))
        next(stream)
        stream.close()
        checked(chosen, kind, ids(13, length))


# -- ends that only the host can see


@each_model
def test_a_refused_generation_serves_only_what_was_delivered(kind, fresh):
    chosen, prompt = fresh(kind), ids(14, 70)
    seen = []
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    chosen.generate(prompt, params, on_token=lambda token: seen.append(token) or len(seen) < 5)
    assert seen == cold(kind, prompt, params)[:5]
    longer = checked(chosen, kind, prompt + tuple(seen) + ids(15, 9))
    assert longer.cached_tokens in ((70,) if kind == "hybrid" else (74, 75))
    assert checked(chosen, kind, prompt).cached_tokens == 70


@each_model
def test_a_prefill_cancelled_half_way_leaves_no_entry(kind, fresh):
    chosen, prompt = fresh(kind, slots=2), ids(16, 300)
    stream = chosen.stream(prompt, GREEDY)
    with jax.no_tracing(True):
        chosen._scheduler.step()
    assert 0 < stream._request.fed < 300
    stream.close()
    stats = chosen.stats()
    assert (stats["prefix_bytes"], stats["prefix_entries"]) == (0, 0)
    assert checked(chosen, kind, prompt).route == "prefill"


@each_model
def test_a_prefill_that_fails_half_way_leaves_no_entry_and_the_host_tier_survives(kind, fresh, monkeypatch):
    chosen, prompt, kept = fresh(kind), ids(17, 300), ids(18, 100)
    checked(chosen, kind, kept)
    entries = chosen.stats()["prefix_entries"]
    prefill, calls = chosen._runner.prefill, itertools.count()

    def fail(*arguments, **named):
        if next(calls):
            raise RuntimeError("the device is on fire")
        return prefill(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(EngineError, match="on fire"):
        patch.setattr(chosen._runner, "prefill", fail)
        chosen.generate(prompt, GREEDY)
    assert chosen.stats()["prefix_entries"] == entries
    assert checked(chosen, kind, kept).route == "restored"
    assert checked(chosen, kind, prompt).route == "prefill"


# -- routes


@each_model
def test_an_overwritten_prompt_comes_back_from_the_host_bit_by_bit(kind, fresh):
    chosen, prompt = fresh(kind), ids(19, 270)
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    chosen.generate(prompt, params)
    before = row(chosen, 270)
    checked(chosen, kind, ids(20, 300))
    passed = passes(chosen)
    done = checked(chosen, kind, prompt, params)
    assert (done.route, done.cached_tokens) == ("restored", 270)
    assert passes(chosen) == passed
    assert all(np.array_equal(a, b) for a, b in zip(before, row(chosen, 270), strict=True))


def row(chosen: jaxserve.Engine, length: int) -> list[np.ndarray]:
    """Slot 0 as host arrays: keys and values up to `length`, recurrent state, logits."""
    state = jax.tree.map(np.array, chosen._runner.state)
    memory = state.memory
    cut = [leaf[:, 0, :, :length] for leaf in (memory.keys, memory.values)]
    return [*cut, *[leaf[:, 0] for leaf in (memory.delta, memory.conv) if leaf is not None], state.logits[0]]


@each_model
def test_another_slots_prefix_is_copied(kind, fresh):
    chosen, prompt = fresh(kind, slots=2, budget=0), ids(21, 120)
    done = checked(chosen, kind, prompt)
    fed = prompt + tuple(done.tokens[:-1])
    running = chosen.stream(fed + ids(22, 5), SamplingParams(max_tokens=20, ignore_eos=True))
    next(running)
    if kind == "hybrid":  # the running row has left every checkpoint behind, and no host tier holds one
        assert checked(chosen, kind, fed + ids(23, 5)).route == "prefill"
    else:
        other = checked(chosen, kind, fed + ids(23, 5))
        assert (other.route, other.cached_tokens) == ("copied", len(fed))
        assert other.timings.load_state_s > 0 and other.timings.prefill_s > 0
    running.close()


def test_without_residency_a_repeated_prompt_is_restored(fresh):
    chosen, prompt = fresh("attention", residency=False), ids(24, 40)
    checked(chosen, "attention", prompt)
    assert checked(chosen, "attention", prompt).route == "restored"


def test_without_a_host_tier_a_repeated_prompt_computes_its_last_token(fresh):
    chosen, prompt = fresh("attention", budget=0), ids(25, 40)
    checked(chosen, "attention", prompt)
    done = checked(chosen, "attention", prompt)
    assert (done.route, done.cached_tokens) == ("resident", 39)
    checked(chosen, "attention", ids(26, 40))
    assert checked(chosen, "attention", prompt).route == "prefill"


def test_both_tiers_off_compute_everything_and_compile_nothing_for_them():
    chosen, prompt = engine("attention", reuse=False), ids(27, 40)
    for _ in range(2):
        done = chosen.generate(prompt, GREEDY)
        assert (done.route, done.cached_tokens, done.timings.load_state_s) == ("prefill", 0, None)
    assert len(chosen.programs) < len(engine("attention").programs)


def test_residency_is_switched_off_by_the_environment(monkeypatch):
    monkeypatch.setenv("JAXSERVE_RESIDENCY", "0")
    with jaxserve.Engine.load(tiny_path("llama-f32"), context=64, prefix_bytes=2**20) as chosen:
        prompt = ids(28, 20)
        routes = [chosen.generate(prompt, GREEDY).route for _ in range(2)]
    assert routes == ["prefill", "restored"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (dict(residency=1), TypeError),
        (dict(prefix_bytes=-1), ValueError),
        (dict(prefix_bytes=1.5), TypeError),
    ],
    ids=str,
)
def test_wrong_switches_are_refused(options, error):
    with pytest.raises(error, match="residency|prefix_bytes"):
        jaxserve.Engine.load(tiny_path("llama-f32"), **options)


def test_the_trace_names_the_route_and_its_reason(fresh, monkeypatch, capsys):
    chosen, prompt = fresh("attention"), ids(29, 30)
    monkeypatch.setattr(chosen._log, "enabled", True)
    checked(chosen, "attention", prompt)
    checked(chosen, "attention", prompt)
    lines = [line for line in capsys.readouterr().err.splitlines() if "route" in line]
    assert 'cached=0 prompt=30 why="no snapshot' in lines[0]
    assert "route resident" in lines[1] and 'holds 30 of 30 prompt tokens, with logits"' in lines[1]


# -- checkpoints


def test_hybrid_prompts_share_up_to_the_deepest_checkpoint(fresh):
    chosen, shared = fresh("hybrid"), ids(30, 200)
    checked(chosen, "hybrid", shared + ids(31, 60))
    before = chosen.stats()
    done = checked(chosen, "hybrid", shared + ids(32, 60))
    assert done.cached_tokens == 192  # the last multiple of 64
    assert chosen.stats()["checkpoints"] > before["checkpoints"]


def test_hybrid_prompts_that_share_800_of_1000_tokens_begin_at_the_deepest_checkpoint():
    chosen, shared = chat_engine(), ids(61, 800)
    chosen._reuse.reset()
    assert chosen.generate(shared + ids(62, 200), GREEDY).route == "prefill"
    prompt = shared + ids(63, 200)
    done = chosen.generate(prompt, GREEDY)
    assert done.tokens == chat_engine(reuse=False).generate(prompt, GREEDY).tokens
    assert done.cached_tokens == 800 // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS > 0
    assert done.timings.prefilled_tokens == 1000 - done.cached_tokens


def test_twenty_turns_of_a_hybrid_chat_compute_only_the_new_messages():
    session, reference = chat_engine().session(), chat_engine(reuse=False)
    params, before, computed = SamplingParams(max_tokens=8, ignore_eos=True), 0, 0
    for turn in range(20):
        done = session.send(f"What is {turn} + {turn}?", params)
        assert done.tokens == reference.chat(session.messages[:-1], params).tokens
        assert done.timings.prefilled_tokens <= done.prompt_tokens - before
        before, computed = done.prompt_tokens, computed + done.timings.prefilled_tokens
    assert computed <= done.prompt_tokens


def test_a_conversation_computes_only_its_new_messages(fresh):
    chosen, text = fresh("hybrid"), ids(33, 20)
    for turn in range(9):
        done = checked(chosen, "hybrid", text)
        if turn:
            assert done.timings.prefilled_tokens <= 12
        text = text + tuple(done.tokens) + ids(34 + turn, 11)


def test_messages_end_at_checkpoints(fresh, monkeypatch):
    chosen = fresh("hybrid")
    prompt = ids(45, 60)
    chosen._run(chosen._submit(prompt, GREEDY, borders=(23, 41)))
    done = checked(chosen, "hybrid", prompt[:41] + ids(46, 10))
    assert done.cached_tokens == 41


def test_a_chat_passes_on_where_its_messages_end(monkeypatch):
    chosen, seen = scripted(), []
    submit = chosen._submit
    monkeypatch.setattr(
        chosen, "_submit", lambda *given, borders: seen.append(borders) or submit(*given, borders=borders)
    )
    chosen.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1))
    assert seen == [(10,)]


# -- samples of one prompt


@each_model
@pytest.mark.parametrize("slots", [1, 2])
def test_samples_share_one_prefill_and_are_what_their_seeds_give(kind, slots, fresh):
    chosen, prompt = fresh(kind, slots=slots), ids(47, 100)
    params = SamplingParams(max_tokens=6, temperature=2.0, seed=2**64 - 2, ignore_eos=True)
    before = chosen.stats()["prefill_chunks"]
    samples = chosen.generate_n(prompt, params, n=4)
    chunks = chosen.stats()["prefill_chunks"] - before
    assert chunks <= 6
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    for sample, seed in zip(samples, seeds, strict=True):
        one = SamplingParams(max_tokens=6, temperature=2.0, seed=seed, ignore_eos=True)
        assert sample.tokens == cold(kind, prompt, one)
    assert [sample.cached_tokens for sample in samples] == [0, 100, 100, 100]
    if slots == 2:
        assert samples[1].route == "copied"
    assert chosen.stats()["free_slots"] == slots


@pytest.mark.parametrize(("kind", "again"), [("attention", 1), ("hybrid", 100)])
def test_without_a_host_tier_a_sample_that_waits_begins_from_what_its_slot_still_has(kind, again, fresh):
    chosen, prompt = fresh(kind, budget=0), ids(64, 100)
    samples = chosen.generate_n(prompt, GREEDY, n=3)
    assert [sample.timings.prefilled_tokens for sample in samples] == [100, again, again]
    assert all(sample.tokens == cold(kind, prompt) for sample in samples)


def test_samples_work_without_any_reuse():
    samples = engine("attention", reuse=False).generate_n(ids(48, 9), SamplingParams(max_tokens=3), n=2)
    assert samples[0].tokens == samples[1].tokens


@pytest.mark.parametrize(("n", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_wrong_number_of_samples_is_refused(n, error):
    with pytest.raises(error, match="n="):
        engine("attention").generate_n([1], n=n)


def test_no_tokens_asked_of_samples_gives_none(fresh):
    samples = fresh("attention").generate_n([1, 2], SamplingParams(max_tokens=0), n=3)
    assert [(sample.tokens, sample.finish_reason) for sample in samples] == [([], "length")] * 3


# -- saved state


@each_model
def test_a_saved_state_serves_another_engine(kind, fresh, tmp_path):
    chosen, prompt = fresh(kind), ids(49, 280)
    checked(chosen, kind, prompt)
    chosen.save_state(tmp_path / "state")
    chosen = fresh(kind)
    assert checked(chosen, kind, ids(50, 5)).route == "prefill"
    chosen.load_state(tmp_path / "state")
    done = checked(chosen, kind, prompt + ids(51, 10))
    assert done.cached_tokens == 280 and done.route in ("restored", "resident")


def test_residents_are_saved_without_a_host_tier(fresh, tmp_path):
    chosen, prompt = fresh("attention", budget=0), ids(52, 30)
    checked(chosen, "attention", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    chosen.save_state(tmp_path / "state")
    chosen = fresh("attention")
    chosen.load_state(tmp_path / "state")
    before = passes(chosen)
    done = checked(chosen, "attention", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
    assert (done.route, passes(chosen)) == ("restored", before)


def test_a_damaged_or_foreign_state_is_refused_and_changes_nothing(fresh, tmp_path):
    chosen, path = fresh("attention"), tmp_path / "state"
    checked(chosen, "attention", ids(53, 30))
    chosen.save_state(path)
    held = chosen.stats()["prefix_entries"]
    with pytest.raises(jaxserve.InvalidState, match="model"):
        engine("sliding window").load_state(path)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(jaxserve.InvalidState, match="damaged"):
        chosen.load_state(path)
    path.write_bytes(data[:-9])
    with pytest.raises(jaxserve.InvalidState):
        chosen.load_state(path)
    with pytest.raises(FileNotFoundError):
        chosen.load_state(tmp_path / "absent")
    with pytest.raises(ValueError, match="prefix_bytes"):
        engine("attention", reuse=False).load_state(path)
    assert chosen.stats()["prefix_entries"] == held


# -- the budget, and many at once


@each_model
def test_many_prompts_stay_under_the_budget_and_oversized_ones_are_answered(kind, fresh):
    chosen = fresh(kind)
    checked(chosen, kind, ids(54, 100))
    budget = int(2.5 * chosen.stats()["prefix_bytes"])
    chosen = fresh(kind, budget=budget)
    arrays = []
    for seed in range(50):
        checked(chosen, kind, ids(100 + seed, 40 + seed))
        index = chosen._reuse.tier.index
        held = [(n.payload if hasattr(n, "payload") else (n.recurrent, n.logits)) for n in index.items()]
        assert nbytes(held) == index.nbytes <= budget
        arrays.append(len(jax.live_arrays()))
    assert chosen.stats()["prefix_evictions"] > 40
    assert max(arrays[25:]) <= max(arrays[:25])
    fresh(kind, budget=1000)
    checked(chosen, kind, ids(55, 300))
    assert chosen.stats()["prefix_bytes"] == 0


@each_model
def test_no_route_compiles_anything(kind, fresh):
    chosen, prompt = fresh(kind, slots=2), ids(56, 290)
    before = chosen.stats()["routes"]
    with Compilations() as compilations, jax.no_tracing(True):
        for params in (GREEDY, SamplingParams(max_tokens=3, temperature=1.0, logprobs=2)):
            for length in (290, 290, 17, 5, 160, 290):
                chosen.generate(prompt[:length], params)
                chosen.generate(ids(length, 20), params)
            chosen.generate_n(prompt[:50], params, n=3)
            chosen._reuse.reset()
            done = chosen.generate(prompt, params)
            chosen.generate((*prompt, *done.tokens, 5), params)
    assert not compilations.events
    assert all(count > before[route] for route, count in chosen.stats()["routes"].items())


def test_warming_up_runs_every_program_for_rows_and_leaves_them_idle(fresh, monkeypatch):
    chosen = fresh("hybrid", slots=2)
    runner, ran = chosen._runner, []

    def noted(name):
        program = runner.programs[name]
        return lambda *arguments: ran.append(name) or program(*arguments)

    with monkeypatch.context() as patch, jax.no_tracing(True):
        patch.setattr(runner, "programs", {name: noted(name) for name in runner.programs})
        runner._warm_up_rows()
        runner.halt(0, 0)
    kinds = ("hit", "copy_row", "read_block", "read_end", "write_blocks", "write_end")
    assert {name for name in runner.programs if name in kinds or name[0] in kinds} == set(ran) - {"halt"}
    assert (int(runner.state.status[0]), int(runner.state.length[0])) == (IDLE, 0)
    checked(chosen, "hybrid", ids(65, 70))


def test_threads_that_share_prefixes_get_their_own_answers(fresh):
    chosen, base, wrong = fresh("hybrid", slots=2), ids(57, 150), []
    prompts = [base[:cut] + ids(58 + cut, 8) for cut in (10, 64, 100, 128, 149)]
    expected = [cold("hybrid", prompt) for prompt in prompts]

    def work(thread: int) -> None:
        for turn in range(8):
            number = (thread + turn) % len(prompts)
            done = chosen.generate(prompts[number], GREEDY)
            if done.tokens != expected[number]:
                wrong.append((number, done))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and not any(thread.is_alive() for thread in threads)
