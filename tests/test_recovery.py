"""Steps that fail: the caller is told, the engine makes its state anew and serves the next call."""

import signal

import pytest

from jaxserve import EngineError, SamplingParams
from tests.engines import SCRIPT, scripted

GREEK = [SCRIPT.start["greek"]]


class DeviceError(RuntimeError):
    pass


@pytest.fixture(params=[1, 2], ids=["one slot", "two slots"])
def engine(request):
    engine = scripted(slots=request.param)
    yield engine
    stats = engine.stats()
    assert (stats["free_slots"], stats["waiting"]) == (stats["slots"], 0)
    done = engine.generate(GREEK, SamplingParams())
    assert (done.tokens, done.finish_reason) == (SCRIPT.tokens["greek"], "stop")


def break_once(engine, monkeypatch, kind: str, effect, runs: int = 0) -> None:
    """After `runs` runs of a kind of program the effect comes right after the next: its state is donated."""
    left = [runs]

    def wrapped(program):
        def run(*arguments):
            result = program(*arguments)
            left[0] -= 1
            if left[0] == -1:
                effect()
            return result

        return run

    for name, program in list(engine._runner.programs.items()):
        if name == kind or name[0] == kind:
            monkeypatch.setitem(engine._runner.programs, name, wrapped(program))


def fail() -> None:
    raise DeviceError("the device is on fire")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("start", [SCRIPT.overflow, SCRIPT.late_overflow])
@pytest.mark.parametrize("options", [{}, dict(temperature=1.0, seed=0), dict(logprobs=2)], ids=str)
def test_non_finite_logits_are_an_error(engine, start, options):
    before = engine.stats()["recoveries"]
    with pytest.raises(EngineError, match="non-finite"):
        engine.generate([start], SamplingParams(**options))
    assert engine.stats()["recoveries"] == before  # only its row was affected


def test_non_finite_logits_of_one_row_leave_its_neighbour_alone():
    engine = scripted(slots=2)
    stream = engine.stream(GREEK)
    first = next(stream)
    with pytest.raises(EngineError):
        engine.generate([SCRIPT.late_overflow])
    assert [first.token, *[piece.token for piece in stream]] == SCRIPT.tokens["greek"]


def test_a_stream_delivers_what_came_before_the_error():
    stream = scripted().stream([SCRIPT.late_overflow])
    assert next(stream).token == SCRIPT.overflow
    with pytest.raises(EngineError, match="non-finite"):
        next(stream)
    done = stream.completion
    assert (done.tokens, done.finish_reason) == ([SCRIPT.overflow], "error") and "non-finite" in done.error
    assert next(stream, "nothing") == "nothing"


def test_an_error_behind_the_token_that_stopped_is_never_seen():
    done = scripted().generate([SCRIPT.late_overflow], on_token=lambda token: False)
    assert (done.tokens, done.finish_reason, done.error) == ([SCRIPT.overflow], "cancelled", None)


@pytest.mark.parametrize(
    ("kind", "runs"),
    [("admit", 0), ("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 3), ("peek", 2)],
)
def test_a_step_that_fails_after_donating_is_an_engine_error(engine, monkeypatch, kind, runs):
    before = engine.stats()["recoveries"]
    break_once(engine, monkeypatch, kind, fail, runs)
    with pytest.raises(EngineError, match="DeviceError: the device is on fire") as caught:
        engine.generate([7] * 40, SamplingParams(max_tokens=9))
    assert isinstance(caught.value.__cause__, DeviceError)
    assert engine.stats()["recoveries"] == before + 1


@pytest.mark.parametrize("kind", ["admit", "prefill", "decode", "peek"])
def test_ctrl_c_in_a_step_reaches_the_caller_unchanged(engine, monkeypatch, kind):
    break_once(engine, monkeypatch, kind, interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([7] * 40, SamplingParams(max_tokens=9))


def test_a_cancellation_that_fails_on_the_device_is_an_engine_error(engine, monkeypatch):
    break_once(engine, monkeypatch, "halt", fail)
    with pytest.raises(EngineError, match="on fire"):
        engine.generate(GREEK, on_token=lambda token: False)


def test_others_in_flight_fail_too_and_are_told_why(monkeypatch):
    engine = scripted(slots=2)
    other = engine.stream([5], SamplingParams(max_tokens=30))
    first = next(other)
    break_once(engine, monkeypatch, "decode", fail)
    with pytest.raises(EngineError, match="has reset itself"):
        engine.generate(GREEK)
    with pytest.raises(EngineError, match="on fire.*in flight: submit it again"):
        list(other)
    assert other.completion.finish_reason == "error" and other.completion.tokens[0] == first.token
    assert engine.generate(GREEK).tokens == SCRIPT.tokens["greek"]


def test_what_waits_for_a_slot_goes_on_waiting(monkeypatch):
    engine = scripted()
    running = engine.stream([5], SamplingParams(max_tokens=30))
    next(running)
    waiting = engine.stream(GREEK)
    break_once(engine, monkeypatch, "decode", fail)
    with pytest.raises(EngineError, match="on fire"):
        list(running)
    assert [piece.token for piece in waiting] == SCRIPT.tokens["greek"]


def test_a_failed_stream_raises_once_and_ends(monkeypatch):
    break_once(scripted(), monkeypatch, "decode", fail)
    stream = scripted().stream(GREEK)
    with pytest.raises(EngineError):
        list(stream)
    assert list(stream) == [] and stream.completion.finish_reason == "error"


def test_logits_work_after_a_recovery(engine, monkeypatch):
    break_once(engine, monkeypatch, "decode", fail)
    with pytest.raises(EngineError):
        engine.generate(GREEK)
    assert int(engine.logits(GREEK)[0].argmax()) == SCRIPT.tokens["greek"][0]
