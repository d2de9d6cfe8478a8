"""What a request asks for."""

import dataclasses
import math
from collections.abc import Sequence
from numbers import Integral, Real

MAX_STOP_IDS = 64
MAX_LOGPROBS = 16


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when a generation ends.

    Order: penalties, temperature, top-k, top-p, min-p, draw. 0 and 1.0 mean off.
    Temperature 0 or top_k 1 is greedy; ties go to the lowest id.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64  # tokens (prompt + generated) the penalties look at; 0 off, -1 the whole context
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stop_tokens: Sequence[int] = ()
    stop: str | Sequence[str] = ()
    ignore_eos: bool = False  # the model's end tokens are ordinary tokens
    seed: int | None = None  # None: drawn anew for each request
    logprobs: int = 0  # top log-probabilities kept for each token

    def __post_init__(self):
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  (frozen)
        for name, low, high in (
            ("max_tokens", 0, None),
            ("top_k", 0, None),
            ("repeat_last_n", -1, None),
            ("logprobs", 0, MAX_LOGPROBS),
        ):
            put(name, _integer(name, getattr(self, name), low, high))
        if self.seed is not None:
            put("seed", _integer("seed", self.seed, 0, 2**64 - 1))
        for name, valid, range_ in (
            ("temperature", lambda x: x >= 0, "a finite number ≥ 0"),
            ("top_p", lambda x: 0 < x <= 1, "0 < top_p ≤ 1"),
            ("min_p", lambda x: 0 <= x <= 1, "0 ≤ min_p ≤ 1"),
            ("repeat_penalty", lambda x: x > 0, "a finite number > 0"),
            ("presence_penalty", lambda x: True, "a finite number"),
            ("frequency_penalty", lambda x: True, "a finite number"),
        ):
            put(name, _real(name, getattr(self, name), valid, range_))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r}: expected True or False")
        put("stop", (self.stop,) if isinstance(self.stop, str) else tuple(_sequence("stop", self.stop)))
        for text in self.stop:
            if not isinstance(text, str):
                raise TypeError(f"stop={text!r}: expected strings")
            if not text:
                raise ValueError("stop='': an empty stop string would end every generation at once")
        ids = tuple(_integer("stop_tokens", i, 0, None) for i in _sequence("stop_tokens", self.stop_tokens))
        put("stop_tokens", tuple(dict.fromkeys(ids)))
        if len(self.stop_tokens) > MAX_STOP_IDS:
            count = len(self.stop_tokens)
            raise ValueError(f"stop_tokens has {count} distinct ids, the limit is {MAX_STOP_IDS}")

    @property
    def greedy(self) -> bool:
        """Whether the draw is an argmax (penalties may still move it)."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """Whether any penalty changes the logits."""
        active = self.repeat_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return active and self.repeat_last_n != 0

    @property
    def plain_greedy(self) -> bool:
        """Whether the lean argmax-only step serves this request: no penalties, no log-probabilities."""
        return self.greedy and not self.penalised and not self.logprobs


def _sequence(name, value):
    if isinstance(value, (str, bytes)) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name}={value!r}: expected a sequence")
    return value


def _integer(name, value, low, high):
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}={value!r}: expected an integer")
    value = int(value)
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name}={value}: expected {low} ≤ {name}" + ("" if high is None else f" ≤ {high}"))
    return value


def _real(name, value, valid, range_):
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}={value!r}: expected a number")
    try:
        value = float(value)
    except OverflowError:  # an integer beyond the largest float
        value = math.inf
    if not math.isfinite(value) or not valid(value):
        raise ValueError(f"{name}={value}: expected {range_}")
    return value
