"""What a trace says about decode. Pure functions over plain events, so that no GPU is needed to test them.

A step is one dispatch of decode: the host opens the annotation "decode" around it (its stats: `step_num`, and
`tokens` when one dispatch draws several). It lasts until the next annotation opens. Steady is every step that
another decode step follows: between the last one and the next request the engine does other work.

Where an event belongs:
* a host event, to the step in which it begins, unless a program named "prefill" is running then;
* a device event, to the step of the call that launched it (the same `correlation_id`): a queued prefill still
  runs on the device while the first decode steps are being dispatched. The CPU has no such id: there the n-th
  run of a program belongs to the n-th step if it ran as often as there are steps, else its own start decides.
"""

import bisect
import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from jaxserve.trace.scopes import kernel_name, kind_of

TOP_KERNELS = 10
LONGEST_NAME = 60
IN_GRAPH, UNNAMED = "in graph", "unnamed"
NO_NAMES = (
    "A graph hides which layer its kernels belong to: `jaxserve trace --named` takes a second trace with "
    "graphs off, for names; take timings from this one."
)

# Field of `Figures` -> host events counted there. cu…: CUDA driver calls; command_buffer::…: XLA's own marks.
HOST_COUNTS = {
    "graph_launches": re.compile(r"cuGraphLaunch"),
    "loose_launches": re.compile(r"cuLaunch(Cooperative)?Kernel"),
    "copies": re.compile(r"cuMem(cpy|set)"),
    "executes": re.compile(r"command_buffer::execute"),
    "updates": re.compile(r"command_buffer::update"),
    "records": re.compile(r"command_buffer::record"),
    "evictions": re.compile(r"EvictCommandBuffers"),
}
_PROGRAM = re.compile(r"^(?:jit_)?(.+):XLA GPU module$")  # the host event around one execution of a program
_SCOPE_STATS = ("tf_op", "long_name", "name", "op_name")


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


@dataclasses.dataclass
class Figures:
    """Counts and times of one step, or of several. None: this platform has no such thing."""

    graph_launches: float | None = None
    loose_launches: float | None = None  # kernels launched outside a graph
    copies: float | None = None  # memory copies and fills launched outside a graph
    executes: float | None = None
    updates: float | None = None  # a graph had to be changed: an address moved
    records: float | None = None
    evictions: float | None = None
    kernels: float = 0
    busy_ms: float = 0.0  # time in which the device ran at least one event
    gap_ms: float = 0.0  # time between the first and the last device event in which it ran none
    dispatch_ms: float = 0.0  # host time inside the annotation
    wall_ms: float = 0.0  # until the next step began


@dataclasses.dataclass
class TraceReport:
    """Filled when the trace ends; `per_step` are the means over the steady steps."""

    path: str = ""
    device: str = "cpu"  # "cpu" | "gpu"
    steps: int = 0  # dispatches of decode in the trace
    steady_steps: int = 0
    tokens_per_step: int = 1
    per_step: Figures = dataclasses.field(default_factory=Figures)
    totals: Figures = dataclasses.field(default_factory=Figures)  # over the steady steps
    each_step: list[Figures] = dataclasses.field(default_factory=list)  # of the steady steps
    layers: list[dict] = dataclasses.field(default_factory=list)  # kind, ms_per_step, share, kernels_per_step
    top_kernels: list[dict] = dataclasses.field(default_factory=list)  # name, kind, calls, ms_per_step, share
    programs: list[dict] = dataclasses.field(default_factory=list)  # whole trace: name, executions, counts
    note: str = ""

    def as_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The report for people."""
        if not self.steady_steps:
            return "no decode step in this trace"
        head = (
            f"decode on {self.device}: {self.steady_steps} steady steps of {self.steps}, "
            f"{self.tokens_per_step} token(s) each, {self.per_step.wall_ms:.3f} ms a step"
        )
        figures = [
            (
                field.name.replace("_", " "),
                getattr(self.per_step, field.name),
                getattr(self.totals, field.name),
            )
            for field in dataclasses.fields(Figures)
        ]
        parts = [head, columns(("", "per step", "total"), figures)]
        if self.layers:
            parts.append(
                columns(("layer kind", "ms/step", "share", "kernels/step"), map(dict.values, self.layers))
            )
        if self.top_kernels:
            header = ("most expensive kernels", "layer kind", "calls", "ms/step", "share")
            shortened = ({**row, "name": row["name"][:LONGEST_NAME]} for row in self.top_kernels)
            parts.append(columns(header, map(dict.values, shortened)))
        if self.programs:
            header = [name.replace("_", " ") for name in self.programs[0]]
            parts.append(columns(["program", *header[1:]], map(dict.values, self.programs)))
        return "\n\n".join(filter(None, [*parts, self.note]))


def summarise(events: Iterable[Event], kinds: Mapping[str, str] = {}) -> TraceReport:
    """What decode costs in a trace. `kinds` gives the layer kind of kernels whose own stats name none."""
    host, device = [], []
    for event in events:
        is_device = event.plane.startswith("/device:GPU") and event.line.startswith("Stream")
        (device if is_device else host).append(event)
    on_gpu = bool(device)
    host = [event for event in host if event.plane.startswith("/host:")]
    if not on_gpu:  # XLA's CPU executor marks every operation with its program on the thread that ran it
        device = [
            event for event in host if "hlo_module" in event.stats and not event.name.startswith("end: ")
        ]
    running = _programs_running(host)
    marks, starts = _marks(host)
    if on_gpu:
        link, launched = "correlation_id", _starts_by(host, "correlation_id")
    else:
        link, launched = "run_id", _cpu_launches(device, marks)

    def launch_of(event: Event) -> float:
        return launched.get(event.stats.get(link), event.start_ns)

    steady = [step for step, mark in enumerate(marks[:-1]) if mark.name == marks[step + 1].name == "decode"]
    only = [step for step, mark in enumerate(marks) if mark.name == "decode"]
    counted = steady or only[:1]  # a trace of a single step: better unbounded than empty

    def step_of(time_ns: float, program: str) -> int:
        return -1 if "prefill" in program else bisect.bisect_right(starts, time_ns) - 1

    host_of, device_of = defaultdict(list), defaultdict(list)
    for event in host if on_gpu else ():
        host_of[step_of(event.start_ns, running(event.start_ns))].append(event)
    for event in device:
        program = str(event.stats.get("hlo_module", "")) or running(launch_of(event))
        device_of[step_of(launch_of(event), program)].append(event)

    each = [_figures(marks, step, host_of[step] if on_gpu else None, device_of[step]) for step in counted]
    kernels = [event for step in counted for event in device_of[step]]
    totals = _total(each)
    unbroken = [[event for step in run for event in device_of[step]] for run in _runs(counted)]
    totals.busy_ms = sum(map(_busy, unbroken)) / 1e6  # again, so that gaps between steps count as well
    totals.gap_ms = sum(map(_span, unbroken)) / 1e6 - totals.busy_ms
    layers = _by_kind(kernels, kinds, len(each))
    return TraceReport(
        device="gpu" if on_gpu else "cpu",
        steps=len(only),
        steady_steps=len(each),
        tokens_per_step=max((int(marks[step].stats.get("tokens", 1)) for step in counted), default=1),
        per_step=_mean(totals, len(each)),
        totals=totals,
        each_step=each,
        layers=layers,
        top_kernels=_most_expensive(kernels, kinds, len(each)),
        programs=_by_program(host, running) if on_gpu else _cpu_programs(device),
        note=NO_NAMES if any(row["kind"] == IN_GRAPH for row in layers) else "",
    )


def _marks(host: list[Event]) -> tuple[list[Event], list[float]]:
    """The annotations "decode" and "prefill" in order of time, and when each begins."""
    marks = [e for e in host if e.name == "prefill" or (e.name == "decode" and "step_num" in e.stats)]
    marks.sort(key=lambda event: event.start_ns)
    return marks, [mark.start_ns for mark in marks]


def _starts_by(events: Iterable[Event], stat: str) -> dict[object, float]:
    """{value of `stat`: start of the first event that has it}."""
    starts = {}
    for event in sorted(events, key=lambda event: event.start_ns):
        if stat in event.stats:
            starts.setdefault(event.stats[stat], event.start_ns)
    return starts


def _cpu_launches(device: list[Event], marks: list[Event]) -> dict[object, float]:
    """{run_id: when its step began} for the programs that ran once in each step."""
    steps = [mark.start_ns for mark in marks if mark.name == "decode"]
    launched = {}
    for program in {event.stats["hlo_module"] for event in device}:
        runs = _starts_by((event for event in device if event.stats["hlo_module"] == program), "run_id")
        if len(runs) == len(steps):
            launched |= dict(zip(runs, steps, strict=True))
    return launched


def _programs_running(host: list[Event]) -> Callable[[float], str]:
    """A function: the program being launched at a time, "" for none."""
    found = sorted((e.start_ns, e.end_ns, match[1]) for e in host if (match := _PROGRAM.match(e.name)))
    starts = [start for start, _, _ in found]

    def running(time_ns: float) -> str:
        index = bisect.bisect_right(starts, time_ns) - 1
        return found[index][2] if index >= 0 and time_ns <= found[index][1] else ""

    return running


def _counts(host: Iterable[Event]) -> dict[str, int]:
    counts = dict.fromkeys(HOST_COUNTS, 0)
    for event in host:
        for field, pattern in HOST_COUNTS.items():
            counts[field] += pattern.match(event.name) is not None
    return counts


def _is_kernel(event: Event) -> bool:
    return not event.name.lower().startswith(("memcpy", "memset"))


def _figures(marks: list[Event], step: int, host: list[Event] | None, device: list[Event]) -> Figures:
    mark = marks[step]
    following = marks[step + 1].start_ns if step + 1 < len(marks) else mark.end_ns
    busy = _busy(device)
    return Figures(
        **(_counts(host) if host is not None else {}),
        kernels=sum(map(_is_kernel, device)),
        busy_ms=busy / 1e6,
        gap_ms=(_span(device) - busy) / 1e6,
        dispatch_ms=mark.duration_ns / 1e6,
        wall_ms=(following - mark.start_ns) / 1e6,
    )


def _busy(events: list[Event]) -> float:
    """Nanoseconds in the union of the events' intervals: streams overlap."""
    busy = reached = 0.0
    for event in sorted(events, key=lambda e: e.start_ns):
        busy += max(0.0, event.end_ns - max(reached, event.start_ns))
        reached = max(reached, event.end_ns)
    return busy


def _span(events: list[Event]) -> float:
    return max(e.end_ns for e in events) - min(e.start_ns for e in events) if events else 0.0


def _runs(steps: list[int]) -> list[list[int]]:
    """Consecutive numbers together: [1, 2, 5] -> [[1, 2], [5]]."""
    runs = []
    for step in steps:
        if runs and runs[-1][-1] == step - 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return runs


def _total(each: list[Figures]) -> Figures:
    columns = {f.name: [getattr(one, f.name) for one in each] for f in dataclasses.fields(Figures)}
    return Figures(**{name: None if None in values else sum(values) for name, values in columns.items()})


def _mean(totals: Figures, steps: int) -> Figures:
    values = dataclasses.asdict(totals).items()
    return Figures(**{name: None if value is None else value / max(steps, 1) for name, value in values})


def _kind(event: Event, kinds: Mapping[str, str]) -> str:
    for stat in _SCOPE_STATS:
        if kind := kind_of(str(event.stats.get(stat, ""))):
            return kind
    named = kinds.get(kernel_name(str(event.stats.get("hlo_op", "")))) or kinds.get(kernel_name(event.name))
    return named or (IN_GRAPH if "cuda_graph_id" in event.stats else UNNAMED)


def _by_kind(kernels: list[Event], kinds: Mapping[str, str], steps: int) -> list[dict]:
    time, count = defaultdict(float), defaultdict(int)
    for event in kernels:
        kind = _kind(event, kinds)
        time[kind] += event.duration_ns
        count[kind] += 1
    whole = sum(time.values()) or 1.0
    return [
        {
            "kind": kind,
            "ms_per_step": ns / 1e6 / steps,
            "share": ns / whole,
            "kernels_per_step": count[kind] / steps,
        }
        for kind, ns in sorted(time.items(), key=lambda item: -item[1])
    ]


def _most_expensive(kernels: list[Event], kinds: Mapping[str, str], steps: int) -> list[dict]:
    time, calls = defaultdict(float), defaultdict(int)
    for event in kernels:
        key = event.name, _kind(event, kinds)
        time[key] += event.duration_ns
        calls[key] += 1
    whole = sum(time.values()) or 1.0
    first = sorted(time, key=lambda key: -time[key])[:TOP_KERNELS]
    return [
        {
            "name": name,
            "kind": kind,
            "calls": calls[name, kind],
            "ms_per_step": time[name, kind] / 1e6 / steps,
            "share": time[name, kind] / whole,
        }
        for name, kind in first
    ]


def _by_program(host: list[Event], running: Callable[[float], str]) -> list[dict]:
    """Counts per program over the whole trace: exact, whatever the delay of the launching thread."""
    executions, inside = defaultdict(int), defaultdict(list)
    for event in host:
        if match := _PROGRAM.match(event.name):
            executions[match[1]] += 1
        inside[running(event.start_ns)].append(event)
    return [{"name": name, "executions": runs, **_counts(inside[name])} for name, runs in executions.items()]


def _cpu_programs(device: list[Event]) -> list[dict]:
    runs = defaultdict(set)
    for event in device:
        runs[str(event.stats["hlo_module"]).removeprefix("jit_")].add(event.stats.get("run_id"))
    return [{"name": name, "executions": len(ids)} for name, ids in runs.items()]


def columns(header: Iterable[str], rows: Iterable[Iterable]) -> str:
    """Rows under a header, first column to the left, numbers to the right."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def _cell(value: object) -> str:
    if value is None:
        return "n/a"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
