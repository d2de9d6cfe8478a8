"""A conversation that remembers itself: tokens and text. Its state is wherever prefix reuse finds it."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxserve.params import SamplingParams
from jaxserve.results import Completion

if TYPE_CHECKING:
    from jaxserve.engine import Engine


class Session:
    """Turns of one conversation, in messages or in token ids.

    What was said before costs nothing as long as a slot or the host tier holds it. `rewind` forgets turns;
    the next one then begins from the prefix that is left.
    """

    def __init__(self, engine: "Engine", **template_variables):
        self._engine, self._variables = engine, template_variables
        self.completions: list[Completion] = []  # one per turn
        self._history: list[dict] | list[int] | None = None  # messages or ids; None: nothing was said yet
        self._ends: list[int] = []  # length of the history after each turn

    @property
    def turns(self) -> int:
        """How many answers were given."""
        return len(self._ends)

    @property
    def messages(self) -> list[dict]:
        """The conversation so far, where it is one of messages."""
        return list(self._history or ()) if not self._of_ids else []

    @property
    def tokens(self) -> list[int]:
        """The conversation so far, where it is one of token ids."""
        return list(self._history) if self._of_ids else []

    def send(
        self,
        content: str | Mapping | Sequence[Mapping] | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
    ) -> Completion:
        """Say something and generate the answer, which becomes part of the conversation.

        content: a user's message, messages with roles, or token ids to append as they are. A turn that fails
        leaves the conversation as it was.
        """
        of_ids, new = _parse(content)
        if self._history is not None and of_ids != self._of_ids:
            kinds = ("token ids", "messages")
            raise ValueError(
                f"this session is one of {kinds[of_ids]}, not of {kinds[not of_ids]}: open another"
            )
        history = [*(self._history or ()), *new]
        if of_ids:
            done = self._engine.generate(history, params)
            history += done.tokens
        else:
            done = self._engine.chat(history, params, **self._variables)
            history.append({"role": "assistant", "content": done.text})
        self._history = history
        self._ends.append(len(history))
        self.completions.append(done)
        return done

    def rewind(self, turn: int) -> None:
        """Go back to where `turn` turns had been taken; 0 is the beginning."""
        if not 0 <= turn <= self.turns:
            raise ValueError(f"turn={turn}: expected 0 ≤ turn ≤ {self.turns}, the turns taken so far")
        self._history = self._history[: self._ends[turn - 1]] if turn else None
        del self._ends[turn:], self.completions[turn:]

    @property
    def _of_ids(self) -> bool:
        return bool(self._history) and not isinstance(self._history[0], Mapping)


def _parse(content) -> tuple[bool, list]:
    """(whether it is ids, what it adds to a history)"""
    if isinstance(content, str):
        return False, [{"role": "user", "content": content}]
    if isinstance(content, Mapping):
        return False, [dict(content)]
    items = list(content)
    if items and all(isinstance(item, Mapping) for item in items):
        return False, [dict(item) for item in items]
    if not items or any(isinstance(item, (Mapping, str)) for item in items):
        raise ValueError(f"content={content!r}: expected a text, messages, or token ids")
    return True, items
