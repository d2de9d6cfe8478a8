"""A stand-in for an engine with a clock of its own: a step takes 2 ms, a token of a prompt 10 ms."""

import contextlib
from types import SimpleNamespace

import jax

from jaxserve.results import Completion, PhaseTimings
from jaxserve.trace import TraceReport

STEP_S, PROMPT_TOKEN_S = 0.002, 0.01


class Clockwork:
    """Draws token 7 for every open stream in each step, and remembers what it was asked."""

    def __init__(self, *, context: int = 4096, slots: int = 64):
        self.context, self.slots = context, slots
        self.config = SimpleNamespace(vocab_size=1000, architecture="llama")
        self.weights_nbytes, self.state_nbytes = 8 * 10**6, 10**6
        self.device = jax.devices()[0]
        self.now, self.steps, self.tokens = 0.0, 0, 0
        self.asked, self.open, self.closed = [], [], 0
        self.hides_names = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed += 1

    def perf_counter(self) -> float:
        return self.now

    def generate(self, prompt, params):
        self.asked.append((prompt, params))
        count, decoded = len(prompt), params.max_tokens - 1
        seconds = PROMPT_TOKEN_S * count
        self.now += seconds + STEP_S * decoded
        timings = PhaseTimings(0.0, None, seconds, STEP_S * decoded, seconds, count, count, decoded)
        return Completion([7], "", "length", count, 0, "prefill", timings)

    def stream(self, prompt, params):
        self.asked.append((prompt, params))
        return Rows(self, prompt, min(params.max_tokens, self.context - len(prompt) + 1))

    def step(self) -> None:
        self.now += STEP_S
        self.steps += 1
        for rows in self.open:
            if rows.drawn < rows.limit:
                rows.drawn += 1
                self.tokens += 1

    def stats(self):
        return {"tokens": self.tokens, "decode_steps": self.steps}

    @contextlib.contextmanager
    def trace(self, directory):
        report = TraceReport(path=str(directory))
        yield report
        report.steps = report.steady_steps = 3
        report.per_step.busy_ms, report.per_step.wall_ms = 2.0, 2.5
        kind = "in graph" if self.hides_names else "mlp"
        report.layers = [{"kind": kind, "ms_per_step": 2.0, "share": 1.0, "kernels_per_step": 4.0}]


class Rows:
    """A stream: one row that is stepped together with all others."""

    def __init__(self, engine: Clockwork, prompt, limit: int):
        self.engine, self.prompt, self.limit, self.drawn, self.read = engine, prompt, limit, 0, 0
        engine.open.append(self)

    def __iter__(self):
        return self

    def __next__(self):
        if self.read == self.limit:
            raise StopIteration
        while self.read == self.drawn:
            self.engine.step()
        self.read += 1
        return 7

    @property
    def completion(self):
        decoded = self.read - 1
        timings = PhaseTimings(decode_s=STEP_S * decoded, decoded_tokens=decoded)
        return Completion([7] * self.read, "", "length", len(self.prompt), 0, "prefill", timings)

    def close(self):
        if self in self.engine.open:
            self.engine.open.remove(self)
