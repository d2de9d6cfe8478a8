"""What a request gets back."""

import dataclasses


@dataclasses.dataclass
class PhaseTimings:
    """One request's own times in seconds. A phase that did not run is None.

    queue_s + load_state_s + prefill_s + decode_s ≈ the wall time of the request.
    """

    queue_s: float | None = None  # from the call until a slot was free
    load_state_s: float | None = None  # copying or restoring a prefix; of a whole prompt: to the first token
    prefill_s: float | None = None  # computing the rest of the prompt, first token included
    decode_s: float | None = None  # from the first token to the end
    first_token_s: float | None = None  # from the call until the first id is on the host, waiting included
    prompt_tokens: int = 0
    prefilled_tokens: int = 0  # prompt_tokens minus those found in a cache
    decoded_tokens: int = 0


@dataclasses.dataclass
class Completion:
    """A finished generation."""

    tokens: list[int]  # generated ids; a stop token is never among them
    text: str  # "" for a file without a tokenizer
    finish_reason: str  # "stop" | "length" | "cancelled" | "error"
    prompt_tokens: int
    cached_tokens: int
    route: str  # "resident" | "copied" | "restored" | "prefill"
    timings: PhaseTimings
    logprobs: list["TokenLogprobs"] | None = None
    error: str | None = None  # of a batch's row or a stream that failed; `generate` raises instead


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-softmax at the position that produced a token, before penalties and temperature."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # the N most likely (id, logprob), best first


@dataclasses.dataclass(frozen=True)
class Piece:
    """A step of a stream: the token and the text it released."""

    token: int | None  # None on a last flush of held-back text
    text: str
