"""Prefix reuse that never changes a bit of an answer.

Two programs round differently, so a position's keys and values depend on the program that computed it. Here
every prompt is cut into cells that depend on nothing but itself, whatever is reused; one that begins inside a
cell runs that cell's program for the rest of it. A prompt takes over only what was computed with the programs
it would have run itself, and nothing of a last cell, whose program also draws, nor of a generation. So the
last cell is a small one, of a single token where a large one would have been the last.
"""

from collections.abc import Sequence

from jaxserve.buckets import Buckets
from jaxserve.policy import Cell, agreement, cells
from jaxserve.prefix import Holding, Plan, plan
from jaxserve.request import Request
from jaxserve.reuse import Reuse


class ReproducibleReuse(Reuse):
    """Prefix reuse for a runner with one number of lanes (`Runner(pinned=True)`)."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._cells: dict[int, tuple[Cell, ...]] = {}  # of what a slot remembers

    def reset(self) -> None:
        """The state was made anew: forget what slots held, keep what reached the host."""
        super().reset()
        self._cells.clear()

    def plan(self, request: Request, slots: Sequence[Request | None], ready: Request | None = None) -> Plan:
        """The cheapest way to the shared part of a prompt's state."""
        if not request.cells:
            request.cells = fixed_cells(self._stops(request, 0), self.runner.buckets)
            request.shared = request.cells[-1].start
        held = [self._held(request, slot, other) for slot, other in enumerate(slots)]
        index = None if self.tier is None else self.tier.index
        return plan(request.ids[: request.shared + 1], held, index, recurrent=self.recurrent)

    def established(self, request: Request) -> None:
        """Nothing is kept of a prompt's end."""

    def release(self, request: Request, length: int, *, exact: bool) -> None:
        """The slot remembers the shared part of the prompt."""
        if self.residency:
            shared = request.ids[: request.shared]
            self._holdings[request.slot] = Holding(shared, exact=False, used=next(self._clock))
            self._cells[request.slot] = request.cells

    def _held(self, request: Request, slot: int, other: Request | None) -> Holding:
        """What a slot, or a row that runs in it, has for a request."""
        if other is None:
            holding, cut = self._holdings[slot], self._cells.get(slot)
        else:
            tokens = other.ids[: min(other.fed, other.shared)] if self.residency else ()
            holding, cut = Holding(tokens, exact=False, busy=True), other.cells
        if not len(holding.tokens):
            return holding
        return holding._replace(tokens=holding.tokens[: agreement(request.cells, cut)])


def fixed_cells(stops: Sequence[int], buckets: Buckets) -> tuple[Cell, ...]:
    """The cells of a prompt of stops[-1] tokens with borders at `stops`, the last one small."""
    cut = cells(stops, buckets.chunk)
    length = stops[-1]
    if cut[-1].size == buckets.chunks[0] or length == 1:
        return cut
    return cells((*stops[:-1], length - 1, length), buckets.chunk)
