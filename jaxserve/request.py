"""One request from the call to its completion: plain host data, no device."""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from jaxserve.params import MAX_LOGPROBS, SamplingParams
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
    ):
        self.number, self.prompt, self.params, self.options = number, prompt, params, options
        self.limit = limit  # tokens it may draw: max_tokens, or what the context leaves
        self.text = text  # TextStream, or None for a file without a tokenizer
        self.phase = WAITING
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
        self.admitted = self.first = self.finished = None

    @property
    def done(self) -> bool:
        """Whether nothing more will come out."""
        return self.phase == DONE

    @property
    def sampled(self) -> bool:
        """Whether its step needs more than an argmax."""
        return not self.params.plain_greedy

    @property
    def end(self) -> int:
        """Tokens its row will have fed once everything asked for is drawn."""
        return len(self.prompt) + self.asked

    def start(self) -> None:
        """It got its slot."""
        self.phase, self.admitted = PREFILLING, time.perf_counter()

    def receive(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take a drawn token that is not a stop token."""
        if not self.tokens:
            self.first = time.perf_counter()
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self.pieces.append(Piece(token, self.text.push(token) if self.text else ""))
        if self.text and self.text.stopped:
            self.finish("stop")

    def finish(self, reason: str, failure: BaseException | None = None) -> None:
        """Nothing more comes out. Held-back text is released as a last piece."""
        if self.done:
            return
        rest = self.text.finish() if self.text else ""
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
        decoded = max(0, len(self.tokens) - 1)
        return PhaseTimings(
            queue_s=between(self.called, start if start is not None else self.finished),
            prefill_s=between(start, first if first is not None else self.finished),
            decode_s=between(first, self.finished) if self.asked > 1 else None,
            first_token_s=between(self.called, first),
            prompt_tokens=len(self.prompt),
            prefilled_tokens=self.fed,
            decoded_tokens=decoded,
        )

    def completion(self) -> Completion:
        """The result of a finished request."""
        return Completion(
            tokens=list(self.tokens),
            text=self.text.text if self.text else "",
            finish_reason=self.finish_reason,
            prompt_tokens=len(self.prompt),
            cached_tokens=0,
            route="prefill",
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
