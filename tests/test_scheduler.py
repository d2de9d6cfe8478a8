"""The loop on a fake device: who gets a slot, what is dispatched when, and when its outcome is read."""

from collections import deque

import numpy as np
import pytest

from jaxserve import EngineError, SamplingParams, sampling
from jaxserve.buckets import Buckets
from jaxserve.request import Request
from jaxserve.results import Piece
from jaxserve.reuse import Reuse
from jaxserve.scheduler import Scheduler
from jaxserve.state import BROKEN, FULL, IDLE, MAX_STEPS, RUNNING, STOPPED
from jaxserve.timing import PhaseLog
from tests.engines import scripted

CHUNK = 4
STOP = 99


class FakeMail:
    def __init__(self, runner, value):
        self.runner, self.value, self.number = runner, value, len(runner.calls)

    def read(self):
        self.runner.calls.append(("read", self.number))
        return self.value


class FakeRunner:
    """Draws 100, 101, … in every row; `script` replaces a slot's tokens. Keeps a record of all calls."""

    def __init__(self, slots: int, chunks: tuple[int, ...] = (CHUNK,), burst: int = 1):
        self.slots, self.calls, self.script = slots, [], {}
        self.buckets = Buckets(chunks=chunks, reaches=(1024, 8192), lanes=(slots,), burst=burst)
        self.reset()

    def reset(self):
        self.status, self.left = [IDLE] * self.slots, [0] * self.slots
        self.drawn, self.next = [[] for _ in range(self.slots)], [None] * self.slots

    def admit(self, slot, options, limit):
        self.calls.append(("admit", slot))
        self.status[slot], self.left[slot] = IDLE, limit
        self.next[slot] = iter(self.script.get(slot) or range(100, 200))

    def prefill(self, slot, tokens, start, stop, *, size):
        fed = min(size, stop - start)
        self.calls.append(("prefill", slot, start, fed))
        if start + fed == len(tokens):
            self.drawn[slot] = []
            self._draw(slot)
        return fed

    def copy_row(self, source, target, length):
        self.calls.append(("copy", source, target, length))

    def decode(self, rows, *, sampled, longest, steps):
        self.calls.append(("decode", tuple(rows), longest, *([steps] if steps > 1 else [])))
        for slot in rows:
            self.drawn[slot] = []
            for _ in range(steps):
                if self.status[slot] == RUNNING:
                    self._draw(slot)

    def _draw(self, slot):
        token = next(self.next[slot])
        self.left[slot] -= 1
        self.drawn[slot].append(abs(token))
        self.status[slot] = RUNNING if self.left[slot] else FULL
        self.status[slot] = {STOP: STOPPED, -1: BROKEN}.get(token, self.status[slot])

    def peek(self, *, wide):
        mail = np.full((self.slots, 1 + MAX_STEPS), -1, np.int32)
        mail[:, 0] = self.status
        for slot, drawn in enumerate(self.drawn):
            mail[slot, 1 : 1 + len(drawn)] = drawn
        self.calls.append(("peek",))
        return FakeMail(self, mail)

    def halt(self, slot, length):
        self.calls.append(("halt", slot, length))
        self.status[slot] = IDLE


class Loop:
    """A scheduler, its fake runner, and requests numbered as they come."""

    def __init__(self, slots: int = 1, *, chunks: tuple[int, ...] = (CHUNK,), burst: int = 1, **options):
        self.runner = FakeRunner(slots, chunks, burst)
        reuse = Reuse(self.runner, residency=options.pop("residency", False))
        self.scheduler = Scheduler(self.runner, PhaseLog(enabled=False), reuse, **options)
        self.requests = []

    def submit(self, length: int = 2, limit: int = 3, prompt=None, params=SamplingParams()) -> Request:  # noqa: B008
        options = sampling.options(params, seed=0, vocab_size=1000)
        prompt = [1] * length if prompt is None else prompt
        request = Request(len(self.requests), prompt, params, options, limit)
        self.requests.append(request)
        self.scheduler.submit(request)
        return request

    def step(self, times: int = 1, caller: Request | None = None) -> list[tuple]:
        before = len(self.runner.calls)
        for _ in range(times):
            self.scheduler.step(caller)
        return self.runner.calls[before:]

    def kinds(self, times: int = 1) -> list[str]:
        return [call[0] for call in self.step(times)]


def test_requests_take_free_slots_in_order_of_arrival():
    loop = Loop(slots=2)
    first, second, third = (loop.submit() for _ in range(3))
    loop.step()
    assert (first.slot, second.slot, third.slot) == (0, 1, None)
    loop.step(20)
    assert [request.tokens for request in loop.requests] == [[100, 101, 102]] * 3
    assert loop.scheduler.slots == [None, None]


def test_a_long_prompt_is_fed_chunk_by_chunk_and_the_last_one_draws():
    loop = Loop()
    request = loop.submit(length=10, limit=1)
    calls = loop.step(4)
    assert [call[2:] for call in calls if call[0] == "prefill"] == [(0, 4), (4, 4), (8, 2)]
    assert [call[0] for call in calls].count("peek") == 1
    assert (request.tokens, request.fed, request.finish_reason) == ([100], 10, "length")


def test_running_rows_decode_between_the_chunks_of_a_new_prompt():
    loop = Loop(slots=2)
    loop.submit(limit=50)
    loop.step(2)
    loop.submit(length=12)
    kinds = loop.kinds(3)
    assert kinds.count("prefill") == 3 and kinds.count("decode") == 3


def test_the_oldest_prompt_is_fed_first():
    loop = Loop(slots=2)
    loop.submit(length=8), loop.submit(length=8)
    assert [call[1] for call in loop.step(4) if call[0] == "prefill"] == [0, 0, 1, 1]


def test_a_long_prompt_holds_up_running_rows_by_one_chunk_a_token():
    loop = Loop(slots=8, chunks=(64, 512))
    streams = [loop.submit(limit=100) for _ in range(7)]
    loop.step(3)
    loop.submit(length=4000)
    before = [len(request.tokens) for request in streams]
    for turn in range(1, 9):
        kinds = loop.kinds()
        assert kinds.count("prefill") == 1 and kinds.count("decode") == 1
        assert [len(request.tokens) for request in streams] == [count + turn for count in before]
    assert loop.requests[-1].fed == 4000


def test_a_step_feeds_as_many_short_prompts_as_one_long_chunk_has_tokens():
    loop = Loop(slots=8, chunks=(4, 16))
    for _ in range(8):
        loop.submit(length=3)
    assert [loop.kinds().count("prefill") for _ in range(3)] == [4, 4, 0]


def test_prompts_that_begin_alike_are_fed_once():
    loop = Loop(slots=4, chunks=(64, 256), residency=True)
    system = list(range(1000))
    for i in range(4):
        loop.submit(prompt=system + [500 + i] * 50)
    calls = loop.step(12)
    fed = sum(call[3] for call in calls if call[0] == "prefill")
    assert fed == 1000 + 4 * 50
    copies = [call[2:] for call in calls if call[0] == "copy"]
    assert copies == [(1, 1000), (2, 1000), (3, 1000)]
    assert all(request.finish_reason == "length" for request in loop.requests)


def test_a_request_that_has_nothing_to_wait_for_overtakes_those_that_have():
    loop = Loop(slots=3, chunks=(64, 256), residency=True)
    system = list(range(1000))
    first, second = (loop.submit(prompt=[*system, i]) for i in range(2))
    other = loop.submit(length=2)
    loop.step()
    assert (first.slot, other.slot, second.slot) == (0, 1, None)


def test_whoever_waits_for_a_prompt_goes_on_when_that_is_cancelled():
    loop = Loop(slots=2, chunks=(64, 256), residency=True)
    system = list(range(1000))
    first, second = (loop.submit(prompt=[*system, i]) for i in range(2))
    loop.step()
    loop.scheduler.cancel(first, 0, None)
    loop.step(12)
    assert second.finish_reason == "length"


def test_reproducible_rows_that_need_other_programs_decode_beside_each_other():
    loop = Loop(slots=3, chunks=(64, 2048), reproducible=True)
    loop.submit(length=2, limit=9), loop.submit(length=1500, limit=9)
    loop.submit(length=2, limit=9, params=SamplingParams(temperature=1.0))
    calls = loop.step(5)
    decodes = [call[1] for call in calls if call[0] == "decode"]
    assert decodes[-3:] == [(0,), (1,), (2,)]
    kinds = [call[0] for call in calls]
    assert kinds[-5:] == ["decode", "decode", "decode", "peek", "read"]
    loop.step(12)
    assert all(len(request.tokens) == 9 for request in loop.requests)


def test_a_dispatch_is_read_after_the_next_one_left():
    loop = Loop()
    loop.submit(limit=4)
    assert loop.kinds() == ["admit", "prefill", "peek", "decode", "peek", "read"]
    for _ in range(2):
        assert loop.kinds() == ["decode", "peek", "read"]
    assert loop.kinds() == ["read"]


def test_no_step_is_asked_beyond_the_limit_and_the_longest_row_is_told():
    loop = Loop()
    request = loop.submit(length=2, limit=3)
    calls = loop.step(5)
    assert [call for call in calls if call[0] == "decode"] == [("decode", (0,), 3), ("decode", (0,), 4)]
    assert request.finish_reason == "length" and not [call for call in calls if call[0] == "halt"]


def test_several_steps_go_into_a_dispatch_until_fewer_are_left():
    loop = Loop(burst=4)
    request = loop.submit(length=2, limit=8)
    calls = loop.step(9)
    decodes = [call for call in calls if call[0] == "decode"]
    assert decodes == [("decode", (0,), 6, 4), *[("decode", (0,), 7 + i) for i in range(3)]]
    assert request.tokens == list(range(100, 108)) and request.finish_reason == "length"
    assert loop.scheduler.counters["decode_steps"] == 7


def test_one_step_goes_into_a_dispatch_while_a_prompt_is_being_fed():
    loop = Loop(slots=2, burst=4)
    streaming = loop.submit(limit=99)
    loop.step(2)
    loop.submit(length=5 * CHUNK, limit=2)
    taken = [call[3:] for call in loop.step(8) if call[0] == "decode"]
    assert taken == [()] * 5 + [(4,)] * 3
    assert len(streaming.tokens) == 1 + 2 * 4 + 5 + 2 * 4  # the last is on its way


@pytest.mark.parametrize(("last", "reason"), [(STOP, "stop"), (-1, "error")])
def test_what_ends_a_row_in_the_middle_of_a_dispatch_ends_it_behind_the_tokens_before(last, reason):
    loop = Loop(slots=2, burst=4)
    loop.runner.script[0] = [5, 6, 7, last, 8, 9]
    ended, other = loop.submit(limit=9), loop.submit(limit=9)
    loop.step(12)
    assert (ended.tokens, ended.finish_reason) == ([5, 6, 7], reason)
    assert other.tokens == list(range(100, 109))


def test_a_row_that_the_host_ends_in_the_middle_of_a_dispatch_is_cut_where_it_ended(monkeypatch):
    """Even if the device ended it later in the same dispatch: it holds tokens that were not delivered."""
    loop = Loop(burst=4)
    loop.runner.script[0] = [5, 6, 7, STOP]
    request = loop.submit(length=2, limit=9)
    receive = request.receive

    def stop_at_6(token, logprobs):
        receive(token, logprobs)
        if token == 6:
            request.finish("stop")

    monkeypatch.setattr(request, "receive", stop_at_6)
    calls = loop.step(4)
    assert (request.tokens, request.finish_reason) == ([5, 6], "stop")
    assert [call for call in calls if call[0] == "halt"] == [("halt", 0, 4)]


def test_a_stop_token_ends_a_row_without_a_halt_and_is_left_out():
    loop = Loop()
    loop.runner.script[0] = [5, 6, STOP, 7, 8]
    request = loop.submit(limit=9)
    calls = loop.step(6)
    assert (request.tokens, request.finish_reason) == ([5, 6], "stop")
    assert [call[0] for call in calls].count("decode") == 3  # one ran ahead, on a frozen row
    assert not [call for call in calls if call[0] == "halt"]


def test_a_stop_token_at_the_limit_is_a_stop():
    loop = Loop()
    loop.runner.script[0] = [5, STOP]
    request = loop.submit(limit=2)
    loop.step(4)
    assert (request.tokens, request.finish_reason) == ([5], "stop")


def test_an_ended_row_leaves_the_next_decode_and_its_slot_is_given_on():
    loop = Loop(slots=2)
    loop.runner.script[0] = [STOP]
    for _ in range(3):
        loop.submit(limit=9)
    calls = loop.step(16)
    assert [call[1] for call in calls if call[0] == "admit"] == [0, 1, 0]
    assert [call[1] for call in calls if call[0] == "decode"][-1] == (1,)
    assert [len(request.tokens) for request in loop.requests] == [0, 9, 0]  # slot 0 is scripted to stop


def test_a_row_with_a_non_finite_logit_fails_alone():
    loop = Loop(slots=2)
    loop.runner.script[0] = [5, -1]
    broken, good = loop.submit(limit=4), loop.submit(limit=4)
    loop.step(9)
    assert broken.finish_reason == "error" and isinstance(broken.failure, EngineError)
    assert broken.tokens == [5] and good.tokens == [100, 101, 102, 103]


def test_cancelling_halts_the_row_at_what_was_delivered():
    loop = Loop()
    request = loop.submit(length=2, limit=9)
    loop.step(4)
    assert len(request.tokens) == 4
    loop.scheduler.cancel(request, 2, None)
    assert loop.runner.calls[-1] == ("halt", 0, 4)
    assert (request.tokens, request.finish_reason) == ([100, 101], "cancelled")
    assert not request.pieces and loop.scheduler.slots == [None]


def test_cancelling_in_the_middle_of_a_prompt_frees_the_slot():
    loop = Loop()
    request, following = loop.submit(length=12), loop.submit()
    loop.step()
    loop.scheduler.cancel(request, 0, None)
    loop.step(5)
    assert (request.finish_reason, request.fed) == ("cancelled", 4)
    assert following.tokens == [100, 101, 102]


def test_cancelling_what_waits_touches_no_slot():
    loop = Loop()
    running, waiting = loop.submit(), loop.submit()
    loop.step()
    before = len(loop.runner.calls)
    loop.scheduler.cancel(waiting, 0, None)
    assert len(loop.runner.calls) == before and not loop.scheduler.waiting
    loop.step(5)
    assert running.finish_reason == "length"


def test_abandoned_requests_are_cancelled_before_anything_is_admitted():
    loop = Loop()
    running, waiting, following = (loop.submit(limit=9) for _ in range(3))
    loop.step(3)
    running.abandoned = waiting.abandoned = True
    assert loop.kinds()[:2] == ["halt", "admit"]
    assert [request.finish_reason for request in loop.requests] == ["cancelled", "cancelled", None]
    assert following.slot == 0


def test_mail_on_its_way_is_not_given_to_the_next_request_of_a_slot():
    loop = Loop()
    request, following = loop.submit(limit=9), loop.submit(limit=2)
    loop.step(3)  # one dispatch is unread
    loop.scheduler.cancel(request, 0, None)
    loop.step(5)
    assert (request.tokens, following.tokens) == ([], [100, 101])


def test_a_request_for_no_tokens_is_done_at_once():
    loop = Loop()
    request = loop.submit(limit=0)
    assert (request.done, request.finish_reason, loop.step()) == (True, "length", [])


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_a_failed_step_ends_what_is_in_flight_and_keeps_what_waits(error, monkeypatch):
    loop = Loop(slots=2)
    caller, other, waiting = (loop.submit(limit=9) for _ in range(3))
    loop.step(2)

    def fail(rows, **_):
        raise error

    with monkeypatch.context() as patch, pytest.raises(BaseException) as caught:
        patch.setattr(loop.runner, "decode", fail)
        loop.step(caller=caller)
    raised = caught.value
    if isinstance(error, KeyboardInterrupt):
        assert raised is error
    else:
        assert isinstance(raised, EngineError) and raised.__cause__ is error
    assert caller.failure is raised
    assert isinstance(other.failure, EngineError) and other.failure is not raised
    assert loop.scheduler.counters["recoveries"] == 1
    loop.step(12)
    assert not waiting.failure and len(waiting.tokens) == 9


def test_pieces_that_another_thread_adds_at_the_last_moment_are_not_lost():
    request = Request(0, [1], SamplingParams(), None, 3)

    class Raced(deque):
        """Another thread adds the last piece and ends the request just after it was seen to be empty."""

        def __len__(self):
            seen = super().__len__()
            if not seen and not request.done:
                self.append(Piece(7, "x"))
                request.finish("length")
            return seen

    request.pieces = Raced()
    assert [piece.token for piece in scripted()._pieces(request)] == [7]
