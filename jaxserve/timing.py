"""Where a request's time went, in words: a line per phase as it happens, and a summary at the end."""

import os
import sys
from typing import TextIO

from jaxserve.results import Completion, PhaseTimings

TRACE_VARIABLE = "JAXSERVE_TTFT_TRACE"


class PhaseLog:
    """Prints one line per phase of a request when `JAXSERVE_TTFT_TRACE` is set (`--timings` sets it).

    jaxserve: request 3: route resident 0.2 ms cached=96 why="slot 0 holds 96 of 96 tokens"
    """

    def __init__(self, enabled: bool | None = None, stream: TextIO | None = None):
        self.enabled = os.environ.get(TRACE_VARIABLE, "0") not in ("", "0") if enabled is None else enabled
        self._stream = stream

    def mark(self, request_id: int, phase: str, seconds: float | None = None, **facts: object) -> None:
        """Prints a phase that has just ended, how long it took, and facts about it."""
        if not self.enabled:
            return
        words = [f"jaxserve: request {request_id}: {phase}"]
        words += [] if seconds is None else [f"{seconds * 1e3:.1f} ms"]
        words += [f"{name}={_fact(value)}" for name, value in facts.items()]
        print(*words, file=self._stream or sys.stderr, flush=True)


def rate(tokens: int, seconds: float | None) -> float | None:
    """Tokens per second; None where nothing ran."""
    return tokens / seconds if seconds and tokens else None


def summary_line(timings: PhaseTimings, completion: Completion) -> str:
    """One line: first token, prompt and decode speed, why it ended, how the prompt's state came about."""
    cached = f", {completion.cached_tokens} cached" if completion.cached_tokens else ""
    first = "n/a" if timings.first_token_s is None else f"{timings.first_token_s:.3f} s"
    return (
        f"first token {first}; prompt {_speed(timings.prefilled_tokens, timings.prefill_s)} "
        f"({timings.prompt_tokens} tokens{cached}); "
        f"decode {_speed(timings.decoded_tokens, timings.decode_s)} "
        f"({len(completion.tokens)} tokens); finish {completion.finish_reason}; route {completion.route}"
    )


def _speed(tokens: int, seconds: float | None) -> str:
    speed = rate(tokens, seconds)
    return "n/a" if speed is None else f"{speed:,.1f} tok/s"


def _fact(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return f'"{text}"' if " " in text else text
