"""From the events of a trace to its report. Pure."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping

from jaxserve.trace.events import DECODE, PREFILL, Event, Timeline
from jaxserve.trace.report import COPIES, IN_GRAPH, UNNAMED, Figures, Phase, TraceReport
from jaxserve.trace.scopes import Kinds, kernel_name, kind_of

TOP_KERNELS = 10
NO_NAMES = (
    "A graph hides which layer {share:.0%} of the kernel time belongs to. `jaxserve trace` then takes a "
    "second trace with graphs off, for names; timings are those of this one."
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
_SCOPE_STATS = ("tf_op", "long_name", "name", "op_name")


def summarise(events: Iterable[Event], kinds: Mapping[str, Kinds] = {}) -> TraceReport:
    """What decode and prefill cost in a trace.

    kinds: {phase: layer kinds of the kernels of its program}, for kernels whose own stats name none.

    Steady is every decode dispatch that another one follows: between the last one and the next request the
    engine does other work. Every prefill chunk counts.
    """
    timeline = Timeline(events)
    names = [step.name for step in timeline.steps]
    decodes = [index for index, name in enumerate(names) if name == DECODE]
    steady = [index for index in decodes if names[index + 1 : index + 2] == [DECODE]]
    counted = steady or decodes[:1]  # a trace of a single step: better unbounded than empty
    chunks = [index for index, name in enumerate(names) if name == PREFILL]
    decode = _phase(timeline, decodes, counted, kinds.get(DECODE, Kinds()))
    return TraceReport(
        **{field.name: getattr(decode, field.name) for field in dataclasses.fields(Phase)},
        device="gpu" if timeline.on_gpu else "cpu",
        steps_per_dispatch=max((_steps(timeline, index) for index in counted), default=1),
        prefill=_phase(timeline, chunks, chunks, kinds.get(PREFILL, Kinds())),
        programs=_by_program(timeline) if timeline.on_gpu else _cpu_programs(timeline),
        whole=_counts(timeline.every_host) if timeline.on_gpu else {},
        note=NO_NAMES.format(share=decode.hidden_share) if decode.hides_names else "",
    )


def _phase(timeline: Timeline, dispatches: list[int], counted: list[int], kinds: Kinds) -> Phase:
    steps, steady = (sum(_steps(timeline, index) for index in some) for some in (dispatches, counted))
    each = [_figures(timeline, step) for step in counted]
    totals = _total(each)
    unbroken = [[event for step in run for event in timeline.device[step]] for run in _runs(counted)]
    totals.busy_ms = sum(map(_busy, unbroken)) / 1e6  # again, so that gaps between steps count as well
    totals.gap_ms = sum(map(_span, unbroken)) / 1e6 - totals.busy_ms
    named = [pair for step in counted for pair in _named(timeline.device[step], kinds)]
    return Phase(
        steps=steps,
        steady_steps=steady,
        per_step=_mean(totals, steady),
        totals=totals,
        each_dispatch=each,
        layers=_by_kind(named, steady),
        top_kernels=_most_expensive(named, steady),
    )


def _steps(timeline: Timeline, dispatch: int) -> int:
    return int(timeline.steps[dispatch].stats.get("tokens", 1))


def _counts(host: Iterable[Event]) -> dict[str, int]:
    counts = dict.fromkeys(HOST_COUNTS, 0)
    for event in host:
        for field, pattern in HOST_COUNTS.items():
            counts[field] += pattern.match(event.name) is not None
    return counts


def _is_kernel(event: Event) -> bool:
    # a copy in a graph may run as a kernel of the driver's, "memcpy32_post"
    return not event.name.lower().startswith(("memcpy", "memset"))


def _figures(timeline: Timeline, step: int) -> Figures:
    device = timeline.device[step]
    busy, kernels = _busy(device), sum(map(_is_kernel, device))
    return Figures(
        **(_counts(timeline.host[step]) if timeline.on_gpu else {}),
        kernels=kernels,
        device_copies=len(device) - kernels,
        busy_ms=busy / 1e6,
        gap_ms=(_span(device) - busy) / 1e6,
        dispatch_ms=timeline.steps[step].duration_ns / 1e6,
        wall_ms=timeline.duration_ns(step) / 1e6,
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


def _named(events: list[Event], kinds: Kinds) -> list[tuple[Event, str]]:
    """Each event of one step with its layer kind: what its own stats say, else what the program's text says
    of its name, else its place among the calls that have no name of their own there.
    """
    found, unknown = [], []
    for event in events:
        kind = _own_kind(event) or kinds.by_name.get(kernel_name(str(event.stats.get("hlo_op", ""))))
        kind = kind or kinds.by_name.get(kernel_name(event.name))
        if kind is None and _unnamed(event) == IN_GRAPH:  # what is launched beside it is of another program
            unknown.append(event)
        else:
            found.append((event, kind or _unnamed(event)))
    in_order = sorted(unknown, key=lambda event: event.start_ns)
    placed = zip(in_order, kinds.of_calls([event.name for event in in_order]), strict=True)
    return found + [(event, kind or _unnamed(event)) for event, kind in placed]


def _own_kind(event: Event) -> str | None:
    return next(filter(None, (kind_of(str(event.stats.get(stat, ""))) for stat in _SCOPE_STATS)), None)


def _unnamed(event: Event) -> str:
    if not _is_kernel(event):
        return COPIES
    return IN_GRAPH if "cuda_graph_id" in event.stats else UNNAMED


def _by_kind(named: list[tuple[Event, str]], steps: int) -> list[dict]:
    time, count = defaultdict(float), defaultdict(int)
    for event, kind in named:
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


def _most_expensive(named: list[tuple[Event, str]], steps: int) -> list[dict]:
    time, calls = defaultdict(float), defaultdict(int)
    for event, kind in named:
        time[event.name, kind] += event.duration_ns
        calls[event.name, kind] += 1
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


def _by_program(timeline: Timeline) -> list[dict]:
    """Counts per program over the whole trace: exact, whatever the delay of the launching thread."""
    executions, inside = defaultdict(int), defaultdict(list)
    for run in timeline.runs:
        executions[run.program] += 1
    for event in timeline.every_host:
        if run := timeline.running(event.start_ns):
            inside[run.program].append(event)
    return [{"name": name, "executions": runs, **_counts(inside[name])} for name, runs in executions.items()]


def _cpu_programs(timeline: Timeline) -> list[dict]:
    runs = defaultdict(set)
    for event in timeline.every_device:
        runs[str(event.stats["hlo_module"]).removeprefix("jit_")].add(event.stats.get("run_id"))
    return [{"name": name, "executions": len(ids)} for name, ids in runs.items()]
