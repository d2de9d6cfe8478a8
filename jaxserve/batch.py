"""Many requests of one caller: a bounded number of them in flight, handed over as they finish."""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from tqdm import tqdm

from jaxserve.errors import EngineError, JaxserveError
from jaxserve.intake import Prompt
from jaxserve.params import SamplingParams
from jaxserve.request import Request
from jaxserve.results import Completion, PhaseTimings

if TYPE_CHECKING:
    from jaxserve.engine import Engine

Key = TypeVar("Key")
Row = tuple[Key, Callable[[], Request]]  # what to call a row, and what makes its request or refuses to
MAX_HELD = 1024  # finished rows
ROWS_A_STEP = 4  # made, and handed over, between two steps while others run
ROW_ERRORS = (JaxserveError, ValueError, TypeError)  # a row's own: they never harm the others


class Batch(Iterator[tuple[Key, Completion]]):
    """Completions of rows, in the order in which they finish.

    Rows are pulled as slots become free, as many ahead as there are slots: their source may be endless. A row
    that cannot be served becomes a completion with `finish_reason` "error". A failed step does that to all
    rows that were in flight; strict: it is raised instead, and ends the batch. ordered: completions come in
    the order of the rows; then a slow row holds up at most MAX_HELD finished ones, and no more are begun.

    Where many rows end at once, the device goes on between a few that are made or handed over and the next.
    """

    def __init__(self, engine: "Engine", rows: Iterable[Row], *, strict: bool = False, ordered: bool = False):
        self._flying: dict[Request, tuple[int, Key]] = {}
        self._engine, self._rows = engine, enumerate(rows)
        self._strict, self._ordered = strict, ordered
        self._ready: deque[tuple[Key, Request | Exception]] = deque()
        self._handed = 0  # since the last step
        self._held: dict[int, tuple[Key, Request | Exception]] = {}  # that wait for their turn
        self._next_number = 0

    def __next__(self) -> tuple[Key, Completion]:
        try:
            while not self._ready or self._is_due():
                self._launch()
                if self._flying:
                    self._step()
                    self._land()
                elif not self._ready:
                    self._engine._flush()
                    raise StopIteration
                self._handed = 0
            self._handed += 1
            key, ended = self._ready.popleft()
            return key, refusal(ended) if isinstance(ended, Exception) else ended.completion()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Give up what is in flight: the next step of anybody frees its slots."""
        for request in self._flying:
            request.abandoned = True  # no lock here: the collector may run inside a step
        self._flying = {}

    def __del__(self):
        self.abandon()

    def _is_due(self) -> bool:
        """Whether a step comes before the next row is handed over; not if rows have piled up."""
        return self._handed >= ROWS_A_STEP and bool(self._flying) and len(self._ready) < self._engine.slots

    def _launch(self) -> None:
        """Keep every slot busy, and as many requests waiting: those that share a prefix see each other."""
        slots, begun = self._engine.slots, 0
        while (
            len(self._flying) < 2 * slots
            and (len(self._flying) < slots or begun < ROWS_A_STEP)
            and len(self._ready) < slots
            and len(self._held) < MAX_HELD
        ):
            try:
                number, (key, make) = next(self._rows)
            except StopIteration:
                return
            try:
                request = make()
            except ROW_ERRORS as error:
                self._hand_over(number, key, error)
            else:
                request.has_reader = False
                self._flying[request] = number, key
                self._engine._enqueue(request)
            begun += 1

    def _step(self) -> None:
        oldest = next(iter(self._flying))
        try:
            self._engine._turn(oldest, lambda: any(request.done for request in self._flying))
        except EngineError:
            if self._strict:
                raise  # else it stands in the rows that were in flight, `oldest` for one

    def _land(self) -> None:
        for request in [request for request in self._flying if request.done]:
            self._hand_over(*self._flying.pop(request), request)

    def _hand_over(self, number: int, key: Key, ended: Request | Exception) -> None:
        if not self._ordered:
            self._ready.append((key, ended))
            return
        self._held[number] = key, ended
        while self._next_number in self._held:
            self._ready.append(self._held.pop(self._next_number))
            self._next_number += 1


def refusal(error: Exception) -> Completion:
    """The completion of a row that was refused before any work."""
    given = getattr(error, "provided", 0)  # of a prompt that is too long
    return Completion(
        tokens=[],
        text="",
        finish_reason="error",
        prompt_tokens=given,
        cached_tokens=0,
        route="prefill",
        timings=PhaseTimings(),
        error=str(error),
    )


def numbered_rows(
    engine: "Engine", prompts: Iterable[Prompt], params: SamplingParams | Iterable[SamplingParams] | None
) -> Iterator[Row]:
    """The rows of prompts, by their number. params: for all of them, or one for each."""
    if isinstance(prompts, (str, bytes)):
        raise TypeError(f"prompts={prompts!r}: expected several prompts; `generate` takes one")
    if params is None or isinstance(params, SamplingParams):
        pairs = ((prompt, params) for prompt in prompts)
    else:
        if hasattr(prompts, "__len__") and hasattr(params, "__len__") and len(prompts) != len(params):
            raise ValueError(
                f"{len(prompts)} prompts and {len(params)} params: expected one for each, or one"
            )
        pairs = zip(prompts, params, strict=True)
    return ((i, functools.partial(engine._request, *pair)) for i, pair in enumerate(pairs))


class Meter:
    """A progress bar of rows with the speed in generated tokens. shown: None shows it on a terminal only."""

    def __init__(self, total: int | None, *, shown: bool | None):
        disable = None if shown is None else not shown
        self._bar = tqdm(total=total, unit="row", disable=disable, dynamic_ncols=True)
        self._tokens = 0

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def count(self, tokens: int) -> None:
        """One more row of `tokens` generated tokens is there."""
        self._tokens += tokens
        if not self._bar.disable:
            elapsed = self._bar.format_dict["elapsed"]
            self._bar.set_postfix_str(f"{self._tokens / max(elapsed, 1e-9):,.0f} tok/s", refresh=False)
        self._bar.update()
