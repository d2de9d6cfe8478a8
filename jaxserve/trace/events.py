"""The events of a trace, and which step each belongs to. Plain data, so that no GPU is needed to test it.

The host opens an annotation around each dispatch: "decode" (its stats: `step_num`, and `tokens`, the number
of steps that it takes: each draws one) or "prefill". Such a dispatch is called a step here: it lasts until
the next annotation opens.

* A host event belongs to the step in which it begins, unless a program of the other phase is being launched
  then. The n-th run of a prefill program belongs to the n-th prefill step, however late another thread
  launches it.
* A device event belongs to the step of the call that launched it (the same `correlation_id`): a queued
  prefill still runs on the device while the first decode steps are being dispatched. The CPU has no such id:
  there the n-th run of a program belongs to the n-th step if it ran as often as there are steps, else its own
  start decides.
"""

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

DECODE, PREFILL = "decode", "prefill"
_PROGRAM = re.compile(r"^(?:jit_)?(.+):XLA GPU module$")  # the host event around one execution of a program


class Event(NamedTuple):
    """One profiler event. `line` is a host thread or a GPU stream, `plane` the host or a device."""

    name: str
    start_ns: float
    duration_ns: float
    stats: Mapping[str, object] = {}
    line: str = ""
    plane: str = ""

    @property
    def end_ns(self) -> float:
        return self.start_ns + self.duration_ns


class Run(NamedTuple):
    """One execution of a program, while it was launched."""

    start_ns: float
    end_ns: float
    program: str


class Timeline:
    """The events of a trace, sorted to the steps they belong to.

    steps: the annotations in order of time; host, device: {index of a step: its events}; index -1 is before
    the first step. On the CPU `host` is empty: nothing is launched there.
    """

    def __init__(self, events: Iterable[Event]):
        host, device = [], []
        for event in events:
            is_device = event.plane.startswith("/device:GPU") and event.line.startswith("Stream")
            (device if is_device else host).append(event)
        self.on_gpu = bool(device)
        self.every_host = [event for event in host if event.plane.startswith("/host:")]
        if not self.on_gpu:  # XLA's CPU executor marks every operation with its program on its thread
            device = [event for event in self.every_host if _is_cpu_operation(event)]
        self.every_device = device
        self.steps = _annotations(self.every_host)
        self._starts = [step.start_ns for step in self.steps]
        self.runs = sorted(
            Run(e.start_ns, e.end_ns, match[1]) for e in self.every_host if (match := _PROGRAM.match(e.name))
        )
        self._run_starts = [run.start_ns for run in self.runs]
        self._prefill_steps = self._steps_of_prefill_runs()
        self.host: dict[int, list[Event]] = defaultdict(list)
        self.device: dict[int, list[Event]] = defaultdict(list)
        for event in self.every_host if self.on_gpu else ():
            self.host[self._step_at(event.start_ns)].append(event)
        launched = self._launches()
        for event in device:
            program = str(event.stats.get("hlo_module", ""))
            self.device[self._step_at(launched(event), program)].append(event)

    def running(self, time_ns: float) -> Run | None:
        """The program being launched at a time."""
        index = bisect.bisect_right(self._run_starts, time_ns) - 1
        return self.runs[index] if index >= 0 and time_ns <= self.runs[index].end_ns else None

    def duration_ns(self, step: int) -> float:
        """From a step's begin to the next one's; the last lasts as long as its annotation."""
        mark = self.steps[step]
        following = self._starts[step + 1] if step + 1 < len(self.steps) else mark.end_ns
        return following - mark.start_ns

    def _step_at(self, time_ns: float, program: str = "") -> int:
        run = self.running(time_ns)
        index = bisect.bisect_right(self._starts, time_ns) - 1
        if PREFILL not in (program or (run.program if run else "")):
            return index
        if run in self._prefill_steps:
            return self._prefill_steps[run]
        while index >= 0 and self.steps[index].name != PREFILL:
            index -= 1
        return index

    def _steps_of_prefill_runs(self) -> dict[Run, int]:
        """{a run of prefill: its step}, where there are as many of one as of the other."""
        runs = [run for run in self.runs if PREFILL in run.program]
        steps = [index for index, step in enumerate(self.steps) if step.name == PREFILL]
        return dict(zip(runs, steps, strict=True)) if len(runs) == len(steps) else {}

    def _launches(self):
        """A function: when the call that launched a device event began."""
        if self.on_gpu:
            link, launched = "correlation_id", _starts_by(self.every_host, "correlation_id")
        else:
            link, launched = "run_id", self._cpu_launches()
        return lambda event: launched.get(event.stats.get(link), event.start_ns)

    def _cpu_launches(self) -> dict[object, float]:
        """{run_id: when its step began} for the programs that ran once in each step of decode."""
        steps = [step.start_ns for step in self.steps if step.name == DECODE]
        launched = {}
        for program in {event.stats["hlo_module"] for event in self.every_device}:
            own = (event for event in self.every_device if event.stats["hlo_module"] == program)
            runs = _starts_by(own, "run_id")
            if len(runs) == len(steps):
                launched |= dict(zip(runs, steps, strict=True))
        return launched


def _is_cpu_operation(event: Event) -> bool:
    return "hlo_module" in event.stats and not event.name.startswith("end: ")


def _annotations(host: list[Event]) -> list[Event]:
    """The annotations of steps in order of time. A decode without `step_num` is something else."""
    found = [e for e in host if e.name == PREFILL or (e.name == DECODE and "step_num" in e.stats)]
    return sorted(found, key=lambda event: event.start_ns)


def _starts_by(events: Iterable[Event], stat: str) -> dict[object, float]:
    """{value of `stat`: start of the first event that has it}."""
    starts = {}
    for event in sorted(events, key=lambda event: event.start_ns):
        if stat in event.stats:
            starts.setdefault(event.stats[stat], event.start_ns)
    return starts
