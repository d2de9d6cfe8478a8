"""One request from the call to its completion: plain host data, no device."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.params import MAX_LOGPROBS, SamplingParams
from jaxserve.policy import Cell
from jaxserve.results import Completion, PhaseTimings, Piece, TokenLogprobs
from jaxserve.sampling import Options
from jaxserve.state import MAX_STEPS

WAITING, PREFILLING, DECODING, DONE = "waiting", "prefilling", "decoding", "done"


class Request:
    """What was asked, how far it is, and what has come out."""

    def __init__(
        self,
        number: int,
        prompt: Sequence[int],
        params: SamplingParams,
        options: Options,
        limit: int,
        text=None,
        *,
        called: float | None = None,
        borders: Sequence[int] = (),
    ):
        self.number, self.prompt, self.params, self.options = number, prompt, params, options
        self.limit = limit  # tokens it may draw: max_tokens, or what the context leaves
        self.text = text  # TextStream, or None for a file without a tokenizer
        self.has_reader = True  # False: nobody wants its pieces, its completion is all
        self.sampled = not params.plain_greedy  # its step needs more than an argmax
        self.ids = np.asarray(prompt, np.int32)
        self.borders = borders  # lengths of the prompt at which a message ends
        self.samples: list[Request] = []  # others that begin from the same prompt's state
        self.phase = WAITING
        self.route, self.cached, self.full_hit = "prefill", 0, False
        self.stops: tuple[int, ...] = ()  # where the feeding of its prompt pauses
        self.cells: tuple[Cell, ...] = ()  # how its prompt is cut, where that is fixed beforehand
        self.shared = len(prompt)  # tokens of its prompt that others may take over, and it from them
        self.checkpoints: list[int] = []  # stored inside its prompt, by length
        self.kept = None  # what its row had at the end of its prompt
        self.slot: int | None = None
        self.fed = 0  # prompt tokens in the slot
        self.asked = 0  # tokens asked of the device so far; it may run ahead of `tokens`
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.pieces: deque[Piece] = deque()  # not read yet
        self.finish_reason: str | None = None
        self.failure: BaseException | None = None
        self.abandoned = False  # nobody will read it: its stream was dropped
        self.called = time.perf_counter() if called is None else called
        self.admitted = self.loaded = self.first = self.finished = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come out."""
        return self.phase == DONE

    @property
    def spells(self) -> bool:
        """Whether its text is made as tokens come: for a reader, or to find stop strings. Else at the end."""
        return self.text is not None and (self.has_reader or bool(self.params.stop))

    @property
    def end(self) -> int:
        """Tokens its row will have fed once everything asked for is drawn."""
        return len(self.prompt) + self.asked

    def start(self, slot: int) -> None:
        """It got its slot."""
        self.slot, self.phase, self.admitted = slot, PREFILLING, time.perf_counter()

    def load(self, route: str, length: int, *, full_hit: bool) -> None:
        """The first `length` tokens of its prompt are in place; on a full hit its first token is drawn."""
        self.route, self.cached, self.fed, self.full_hit = route, length, length, full_hit
        if route in ("copied", "restored"):
            self.loaded = time.perf_counter()
        if full_hit:
            self.phase, self.asked = DECODING, 1

    def next_cell(self, size_of: Callable[[int], int]) -> Cell:
        """The piece of its prompt that is fed next; size_of(remaining): the size of a prefill call."""
        for cell in self.cells:
            if self.fed < cell.stop:
                return cell._replace(start=self.fed)
        stop = next(at for at in self.stops if at > self.fed)
        size = size_of(stop - self.fed)
        return Cell(self.fed, min(stop, self.fed + size), size)

    def receive(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take a drawn token that is not a stop token."""
        if not self.tokens:
            self.first = time.perf_counter()
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        delta = self.text.push(token) if self.spells else ""
        if self.has_reader:
            self.pieces.append(Piece(token, delta))
        if self.text and self.text.stopped:
            self.finish("stop")

    def finish(self, reason: str, failure: BaseException | None = None) -> None:
        """Nothing more comes out. Held-back text is released as a last piece."""
        if self.done:
            return
        rest = self.text.finish() if self.spells else ""
        if rest:
            self.pieces.append(Piece(None, rest))
        self.finish_reason, self.failure = reason, failure
        self.finished = time.perf_counter()
        self.phase = DONE  # last: its reader may be another thread, which looks at this first

    def cut(self, tokens: int, stream) -> None:
        """Cancel with only the first `tokens` tokens delivered; `stream` holds their text."""
        self.pieces.clear()
        del self.tokens[tokens:], self.logprobs[tokens:]
        self.text = stream
        self.phase = DECODING  # it may have ended further on: that end was never seen
        self.finish("cancelled")

    def timings(self) -> PhaseTimings:
        """Times between the marks that were passed."""
        between = lambda a, b: None if a is None or b is None else b - a  # noqa: E731
        start, first = self.admitted, self.first
        loaded = self.loaded if self.loaded is not None else start
        begun = first if first is not None else self.finished
        decoded = max(0, len(self.tokens) - 1)
        return PhaseTimings(
            queue_s=between(self.called, start if start is not None else self.finished),
            load_state_s=between(start, begun if self.full_hit else self.loaded),
            prefill_s=None if self.full_hit else between(loaded, begun),
            decode_s=between(first, self.finished) if self.asked > 1 else None,
            first_token_s=between(self.called, first),
            prompt_tokens=len(self.prompt),
            prefilled_tokens=self.fed - self.cached,
            decoded_tokens=decoded,
        )

    def completion(self) -> Completion:
        """The result of a finished request."""
        if self.text and not self.spells:
            for token in self.tokens:
                self.text.push(token)
            self.text.finish()
            self.has_reader = True  # its text is made
        return Completion(
            tokens=list(self.tokens),
            text=self.text.text if self.text else "",
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=self.cached,
            route=self.route,
            timings=self.timings(),
            logprobs=list(self.logprobs) if self.params.logprobs else None,
            error=None if self.failure is None else str(self.failure),
        )


def read_logprobs(mail: np.ndarray, slot: int, index: int, token: int, top: int) -> TokenLogprobs:
    """The log-probabilities of the `index`-th token of a slot's last dispatch, from a wide mailbox."""
    width = 1 + MAX_LOGPROBS
    first = 1 + MAX_STEPS
    values = mail[slot, first + index * width : first + (index + 1) * width].view(np.float32)
    first += MAX_STEPS * width + index * MAX_LOGPROBS
    ids = mail[slot, first : first + top]
    pairs = tuple((int(i), float(v)) for i, v in zip(ids, values[1:], strict=False) if i >= 0)
    return TokenLogprobs(token, float(values[0]), pairs)
