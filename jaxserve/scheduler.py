"""The loop: admit, dispatch, collect. Sequential, one screen; whoever waits for a result steps for everyone.

    admit      waiting requests take free slots, in order of arrival, unless they wait for a prompt that they
               share; where a whole prompt's state is held, its first token is drawn and read at once
    dispatch   prefill chunks of the oldest requests that need some, within a budget of tokens, then one
               decode step of all rows, or a few where that keeps a fast device from waiting for the host
    collect    read the mail of the dispatch before this one: the device is already busy with the next

A row that ended on a stop id is found out a dispatch late. The device froze it at once: nothing was written.
"""

import contextlib
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import NamedTuple

import jax
import numpy as np

from jaxserve import policy
from jaxserve.errors import EngineError
from jaxserve.policy import Cell, Feeding, Lane
from jaxserve.prefix import Plan
from jaxserve.request import DECODING, PREFILLING, Request, read_logprobs
from jaxserve.reuse import Reuse
from jaxserve.runner import Mail, Runner
from jaxserve.state import BROKEN, MAX_STEPS, STOPPED
from jaxserve.timing import PhaseLog

NON_FINITE = (
    "the model produced non-finite logits: the weights or the kv dtype do not suit it "
    "(try kv_dtype='float32')"
)


class Ticket(NamedTuple):
    """A dispatch whose tokens are on their way."""

    mail: Mail
    requests: tuple[Request, ...]


class Scheduler:
    """Requests in flight on one runner. Not thread-safe: the engine holds its lock around every call."""

    def __init__(
        self, runner: Runner, log: PhaseLog, reuse: Reuse | None = None, *, reproducible: bool = False
    ):
        """reproducible: a row's programs never depend on what runs beside it."""
        self.runner, self.log, self.reuse = runner, log, reuse or Reuse(runner)
        self.reproducible = reproducible
        self.prefill_budget = runner.buckets.chunks[-1]  # tokens a step
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * runner.slots
        self.tickets: deque[Ticket] = deque()
        self.counters = Counter()
        self.steps = itertools.count()

    def submit(self, request: Request) -> None:
        """Queue a request; its samples follow once its prompt's state stands."""
        self.counters["requests"] += 1 + len(request.samples)
        if request.limit == 0:
            for each in (request, *request.samples):
                each.finish("length")
        else:
            self.waiting.append(request)

    def step(self, caller: Request | None = None) -> None:
        """One turn of the loop."""
        with self._recovering(caller):
            if self._admit():
                self._collect(leave=0)
            else:
                self._collect(leave=1 if self._dispatch() else 0)

    def flush(self) -> None:
        """Store what finished requests left, unless somebody waits for tokens."""
        if not self.waiting and not any(self.slots):
            with self._recovering(None):
                self.reuse.flush()

    def cancel(self, request: Request, tokens: int, stream) -> None:
        """End a request of which only `tokens` tokens were delivered."""
        with self._recovering(request):
            if request.slot is not None:
                self._release(request, delivered=tokens, device_knows=False)
            elif request in self.waiting:
                self.waiting.remove(request)
        request.cut(tokens, stream)

    def fail(self, error: Exception) -> None:
        """End every request, those that wait too."""
        for request in [*self.waiting, *filter(None, self.slots)]:
            self.reuse.abandon(request)
            request.finish("error", error)

    @contextlib.contextmanager
    def _recovering(self, caller: Request | None) -> Iterator[None]:
        """If what runs inside fails or is interrupted half-way, make the state anew.

        What was in a slot ends with EngineError, and so does the caller's request; Ctrl-C reaches the caller
        unchanged. What waits goes on waiting.
        """
        try:
            yield
        except BaseException as error:
            what = f"a step failed on the device ({type(error).__name__}: {error})"
            failed = isinstance(error, Exception)
            own = EngineError(f"{what}; the engine has reset itself") if failed else error
            for request in filter(None, [*self.slots, caller]):
                self.reuse.abandon(request)
                other = EngineError(f"{what} while this request was in flight: submit it again")
                request.slot = None
                request.finish("error", own if request is caller else other)
            self._reset(caller)
            if failed:
                raise own from error
            raise

    def _reset(self, caller: Request | None) -> None:
        """Start from an empty state."""
        self.counters["recoveries"] += 1
        self.tickets.clear()
        if caller in self.waiting:
            self.waiting.remove(caller)
        self.slots = [None] * self.runner.slots
        self.runner.reset()
        self.reuse.reset()

    # -- admit

    def _admit(self) -> bool:
        """Returns whether a first token is on its way."""
        self.reap()
        started: list[Request] = []
        while self.waiting and None in self.slots:
            self.reuse.flush()  # before a slot is taken
            request, chosen = self._next()
            if request is None:
                break
            if self._start(request, chosen):
                started += [request, *self._start_samples(request)]
        for wide in (False, True):  # a hit has filled the mailbox of its kind
            if drawn := tuple(request for request in started if request.sampled == wide):
                self.tickets.append(Ticket(self.runner.post(wide=wide), drawn))
        for request in started:
            self.reuse.established(request)
        return bool(started)

    def _next(self) -> tuple[Request | None, Plan | None]:
        """Who gets a free slot, and how; nobody while all wait for prompts that are being fed."""
        plan = functools.cache(lambda index: self.reuse.plan(self.waiting[index], self.slots))
        ahead = itertools.islice(self.waiting, len(self.slots))
        prompts = (request.ids for request in ahead)
        available = lambda index: plan(index).length  # noqa: E731
        index = policy.next_to_admit(prompts, self._feeding(), available, gain=self.runner.buckets.chunks[0])
        if index is None:
            return None, None
        chosen, request = plan(index), self.waiting[index]
        del self.waiting[index]
        return request, chosen

    def _feeding(self) -> list[Feeding]:
        """The prompts under way that others may begin with before they are done."""
        reuse = self.reuse
        if not (reuse.residency if not reuse.recurrent else reuse.tier):
            return []
        return [
            Feeding(r.ids[: r.shared], r.fed, r.stops[:-1] if reuse.recurrent else None)
            for r in self.slots
            if r is not None and r.phase == PREFILLING
        ]

    def _start(self, request: Request, chosen: Plan) -> bool:
        """Give a request a slot and what is held of its prompt. Returns whether its first token was drawn."""
        request.start(chosen.slot)
        self.slots[chosen.slot] = request
        self.reuse.establish(request, chosen)
        request.load(chosen.route, chosen.length, full_hit=chosen.full_hit)
        self.log.mark(request.number, "queue", request.admitted - request.called, slot=request.slot)
        self.log.mark(
            request.number,
            f"route {chosen.route}",
            time.perf_counter() - request.admitted,
            cached=chosen.length,
            prompt=len(request.prompt),
            why=chosen.why,
        )
        return chosen.full_hit

    def _start_samples(self, request: Request) -> list[Request]:
        """A prompt's state stands: its other samples begin from it in free slots; the rest are next in line.

        Returns those whose first token was drawn.
        """
        samples, request.samples, started = deque(request.samples), [], []
        while samples and None in self.slots and self.reuse.enabled:
            chosen = self.reuse.plan(samples[0], self.slots, ready=request)
            sample = samples.popleft()
            if self._start(sample, chosen):
                started.append(sample)
        self.waiting.extendleft(reversed(samples))
        return started

    def reap(self) -> None:
        """Free the slots of streams that nobody holds any more."""
        for request in [*self.waiting, *filter(None, self.slots)]:
            if request.abandoned:
                self.cancel(request, len(request.tokens), request.text)

    # -- dispatch

    def _dispatch(self) -> bool:
        return self._prefill() | self._decode()

    def _prefill(self) -> bool:
        spent, complete = 0, []
        while needy := [r for r in self.slots if r is not None and r.phase == PREFILLING]:
            request = min(needy, key=lambda r: r.number)
            cell = request.next_cell(self.runner.buckets.chunk)
            if not policy.fits_budget(cell.size, spent, self.prefill_budget):
                break
            spent += cell.size
            self._feed(request, cell)
            if request.phase == DECODING:
                complete += [request, *self._start_samples(request)]
        if complete:
            self._mail(tuple(complete))
        return spent > 0

    def _feed(self, request: Request, cell: Cell) -> None:
        with jax.profiler.StepTraceAnnotation("prefill", step_num=next(self.steps)):
            request.fed += self.runner.prefill(
                request.slot, request.ids, cell.start, cell.stop, size=cell.size
            )
        self.counters["prefill_chunks"] += 1
        self.reuse.fed(request)
        if request.fed == len(request.prompt):
            request.phase, request.asked = DECODING, 1
            self.reuse.established(request)

    def _decode(self) -> bool:
        running = tuple(r for r in self.slots if r is not None and r.phase == DECODING and r.asked < r.limit)
        if not running:
            return False
        lanes = [Lane(r.slot, r.end, r.sampled, r.limit - r.asked) for r in running]
        buckets = self.runner.buckets
        alone = not any(r is not None and r.phase == PREFILLING for r in self.slots)
        for launch in policy.launches(lanes, buckets.reach, reproducible=self.reproducible):
            slots = [lane.slot for lane in launch.lanes]
            steps = policy.steps(launch, buckets.steps(buckets.lane(len(slots))), alone=alone)
            longest = launch.longest + steps - 1
            with jax.profiler.StepTraceAnnotation("decode", step_num=next(self.steps), tokens=steps):
                self.runner.decode(slots, sampled=launch.sampled, longest=longest, steps=steps)
            for slot in slots:
                self.slots[slot].asked += steps
        self._mail(running)
        self.counters["decode_steps"] += steps
        return True

    def _mail(self, requests: tuple[Request, ...]) -> None:
        wide = any(r.params.logprobs for r in requests)
        self.tickets.append(Ticket(self.runner.peek(wide=wide), requests))

    # -- collect

    def _collect(self, leave: int) -> None:
        while len(self.tickets) > leave:
            ticket = self.tickets.popleft()
            mail = ticket.mail.read()
            rows = mail[:, : 1 + MAX_STEPS].tolist()  # at once: indexing an array costs more per row
            for request in ticket.requests:
                if not request.done:
                    self._receive(request, mail, *rows[request.slot])

    def _receive(self, request: Request, mail: np.ndarray, status: int, *drawn: int) -> None:
        drawn = [token for token in drawn if token >= 0]
        text = drawn[:-1] if status in (BROKEN, STOPPED) else drawn
        unread = len(text)
        for index, token in enumerate(text):
            unread -= 1
            top = request.params.logprobs
            request.receive(token, read_logprobs(mail, request.slot, index, token, top) if top else None)
            self.counters["tokens"] += 1
            if len(request.tokens) == 1:
                phase = "first token" if request.full_hit else "prefill"
                fed = request.fed - request.cached
                self.log.mark(request.number, phase, request.first - request.admitted, tokens=fed)
            if request.done:  # a stop string: the device does not know of it
                break
        if status == BROKEN:
            request.finish("error", EngineError(NON_FINITE))
        elif status == STOPPED:
            request.finish("stop")
        elif len(request.tokens) >= request.limit:
            request.finish("length")
        if request.done:
            self.log.mark(request.number, f"done {request.finish_reason}", tokens=len(request.tokens))
            device_knows = not unread and (status == STOPPED or len(request.tokens) >= request.limit)
            self._release(request, delivered=len(request.tokens), device_knows=device_knows)

    def _release(self, request: Request, *, delivered: int, device_knows: bool) -> None:
        """Take a request out of its slot. The row then stands for every token that was fed and delivered."""
        length = len(request.prompt) + min(delivered, max(0, request.asked - 1))
        if not device_knows:
            self.runner.halt(request.slot, length)
        if request.failure is not None or not request.asked or not (device_knows or delivered):
            self.reuse.abandon(request)
        else:
            self.reuse.release(request, length, exact=device_knows)
        self.slots[request.slot] = None
        request.slot = None
