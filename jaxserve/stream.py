"""A generation as an iterator of pieces."""

from typing import TYPE_CHECKING

from jaxserve.request import Request
from jaxserve.results import Completion, Piece

if TYPE_CHECKING:
    from jaxserve.engine import Engine


class Stream:
    """An iterator of pieces. `completion` is there once it has ended, also after `close`."""

    def __init__(self, engine: "Engine", request: Request):
        self._engine, self._request = engine, request
        self._pieces = engine._pieces(request)
        self._delivered = 0
        self.completion: Completion | None = None

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Piece:
        if self.completion is not None:
            raise StopIteration
        try:
            piece = next(self._pieces)
        except StopIteration:
            self.completion = self._request.completion()
            raise
        except BaseException:
            if self._request.failure is None:
                self.close()
            else:
                self.completion = self._request.completion()
            raise
        self._delivered += piece.token is not None
        return piece

    def close(self) -> None:
        """Cancel: the slot is free at once, and the completion holds what was delivered."""
        if self.completion is None:
            self._pieces.close()
            self._engine._cancel(self._request, self._delivered)
            self.completion = self._request.completion()

    def __del__(self):
        self._request.abandoned = True  # no lock here: the collector may run inside a step
