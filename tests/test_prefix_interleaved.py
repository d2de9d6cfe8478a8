"""Random interleavings of everything that can happen to a prefix: answers as without any reuse, and every row
that is copied, restored or loaded equal, bit by bit, to what it was taken from.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import jaxserve
from jaxserve import SamplingParams
from tests.prefixes import CONTEXT, GREEDY, MODELS, checked, cold, engine, ids
from tests.shadows import Shadows

FAMILIES = 3  # prompts begin like one of as many
LONGEST = 300  # longer than a block, so that blocks are shared, grow and come back
BUDGETS = (2**40, 600_000, 90_000, 0)  # bytes: for everything, for a few prefixes, for hardly one, for none


class Uses:
    """Does things to an engine, and checks every answer."""

    def __init__(self, kind: str, chosen: jaxserve.Engine, file: Path):
        self.kind, self.chosen, self.file = kind, chosen, file
        self.session = chosen.session()

    def generate(self, prompt):
        checked(self.chosen, self.kind, prompt)

    def sample(self, prompt):
        params = SamplingParams(max_tokens=3, temperature=1.5, seed=len(prompt), ignore_eos=True)
        checked(self.chosen, self.kind, prompt, params)

    def partial(self, prompt):
        checked(self.chosen, self.kind, prompt[: 1 + len(prompt) // 2] + ids(len(prompt), 7))

    def fork(self, prompt):
        for sample in self.chosen.generate_n(prompt, GREEDY, n=3):
            assert sample.tokens == cold(self.kind, prompt)

    def say(self, prompt):
        new = prompt[-10:]
        if len(self.session.tokens) + len(new) + GREEDY.max_tokens > CONTEXT:
            self.session.rewind(0)
        before = (*self.session.tokens, *new)
        assert self.session.send(list(new), GREEDY).tokens == cold(self.kind, before)

    def rewind(self, prompt):
        self.session.rewind(len(prompt) % (self.session.turns + 1))
        self.say(prompt)

    def refuse(self, prompt):
        self.chosen.generate(prompt, GREEDY, on_token=lambda token: False)

    def cancel(self, prompt):
        self.chosen.stream(prompt, GREEDY).close()
        stream = self.chosen.stream(prompt, GREEDY)
        next(stream)
        stream.close()

    def interrupt(self, prompt):
        stream = self.chosen.stream(prompt, GREEDY)
        with jax.no_tracing(True):
            self.chosen._scheduler.step()
        stream.close()

    def evict(self, prompt):
        index = self.chosen._reuse.tier.index
        index._make_room(max(0, index.budget - index.nbytes // 2))

    def forget(self, prompt):
        self.chosen._reuse.reset()

    def save(self, prompt):
        self.chosen.save_state(self.file)

    def load(self, prompt):
        if self.file.exists():
            self.chosen.load_state(self.file)

    def empty(self, prompt):
        self.chosen._reuse.tier.clear()


ACTIONS = [name for name in vars(Uses) if not name.startswith("_")]
steps = st.lists(
    st.tuples(
        st.sampled_from(ACTIONS), st.integers(0, FAMILIES - 1), st.sampled_from([1, 2, 63, 64, 130, 257, 300])
    ),
    min_size=4,
    max_size=16,
)


def run(kind: str, budget: int, sequence, file: Path) -> Shadows:
    """Do one thing after the other to an engine that remembers nothing yet."""
    chosen = engine(kind, slots=2)
    file.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        reuse, index = chosen._reuse, chosen._reuse.tier.index
        reuse.reset()
        reuse.tier.clear()
        patch.setattr(index, "budget", budget)
        shadows, uses = Shadows(chosen, patch), Uses(kind, chosen, file)
        for action, family, length in sequence:
            getattr(uses, action)(ids(900 + family, LONGEST)[:length])
            assert index.nbytes <= index.budget
        checked(chosen, kind, ids(900, LONGEST))
        assert chosen.stats()["free_slots"] == 2
    return shadows


each_model = pytest.mark.parametrize("kind", MODELS)


@each_model
@given(sequence=steps, budget=st.sampled_from(BUDGETS))
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_sequence_of_uses_gives_the_answers_of_an_engine_without_reuse(kind, sequence, budget, tmp_path):
    run(kind, budget, sequence, tmp_path / "state")


@each_model
def test_copied_restored_and_loaded_rows_are_among_what_is_compared(kind, tmp_path):
    everything = [("generate", 0, 300), ("generate", 1, 130), ("generate", 2, 64), ("generate", 0, 300)]
    everything += [("fork", 1, 257), ("say", 1, 64), ("say", 2, 64), ("rewind", 0, 1), ("save", 0, 1)]
    everything += [
        ("empty", 0, 1),
        ("forget", 0, 1),
        ("load", 0, 1),
        ("partial", 0, 300),
        ("generate", 1, 130),
    ]
    shadows = run(kind, BUDGETS[0], everything, tmp_path / "state")
    assert all(shadows.compared[name] for name in ("copied", "restored", "loaded")), shadows.compared


def test_a_wrong_bit_in_a_restored_row_is_noticed(tmp_path, monkeypatch):
    runner = engine("attention", slots=2)._runner
    write_blocks = runner.write_blocks
    spoil = lambda *place: write_blocks(*place[:3], [np.nextafter(block, 9) for block in place[3]])  # noqa: E731
    monkeypatch.setattr(runner, "write_blocks", spoil)
    with pytest.raises(jaxserve.EngineError, match="AssertionError"):
        run("attention", BUDGETS[0], [("generate", 0, 64), ("forget", 0, 1)] * 2, tmp_path / "state")
