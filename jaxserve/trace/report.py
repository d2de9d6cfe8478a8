"""What a trace says, as plain figures and as tables for people."""

import dataclasses
from collections.abc import Iterable, Mapping

COPIES = "copies"  # memory copies and fills, which have no layer
IN_GRAPH, UNNAMED = "in graph", "unnamed"  # kernels whose layer is not known
HIDDEN_SHARE = 0.02  # of the kernel time: with more than this in no layer, names are called hidden
LONGEST_NAME = 60


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
    device_copies: float = 0  # memory copies and fills that the device ran, in a graph or not
    busy_ms: float = 0.0  # time in which the device ran at least one event
    gap_ms: float = 0.0  # time between the first and the last device event in which it ran none
    dispatch_ms: float = 0.0  # host time inside the annotation
    wall_ms: float = 0.0  # until the next step began


@dataclasses.dataclass
class Phase:
    """The steps of one kind, decode or prefill; `per_step` are the means over the steady ones."""

    steps: int = 0  # in the trace; of prefill: chunks
    steady_steps: int = 0
    per_step: Figures = dataclasses.field(default_factory=Figures)
    totals: Figures = dataclasses.field(default_factory=Figures)  # over the steady steps
    each_dispatch: list[Figures] = dataclasses.field(default_factory=list)  # of the steady steps
    # rows of `layers`: kind, ms_per_step, share, kernels_per_step and, after `add_traffic`, mb_per_step,
    # gb_per_s, percent_of_copy
    layers: list[dict] = dataclasses.field(default_factory=list)
    top_kernels: list[dict] = dataclasses.field(default_factory=list)  # name, kind, calls, ms_per_step, share

    @property
    def hidden_share(self) -> float:
        """Share of the kernel time that no layer kind is known for."""
        return sum(row["share"] for row in self.layers if row["kind"] in (IN_GRAPH, UNNAMED))

    @property
    def hides_names(self) -> bool:
        """Whether much of the time belongs to kernels in a graph whose layer is not known."""
        in_graph = any(row["kind"] == IN_GRAPH for row in self.layers)
        return in_graph and self.hidden_share > HIDDEN_SHARE

    def add_traffic(self, nbytes: Mapping[str, float], bytes_per_second: float) -> None:
        """Set what each layer kind has to move in a step beside the time it takes, and against what the
        device copies (read and write together). The totals are over the time the device is busy.
        """
        for row in self.layers:
            row |= _speed(nbytes.get(row["kind"], 0), row["ms_per_step"], bytes_per_second)
        whole = _speed(sum(nbytes.values()), self.per_step.busy_ms, bytes_per_second)
        count = sum(row["kernels_per_step"] for row in self.layers)
        busy = {"kind": "busy", "ms_per_step": self.per_step.busy_ms, "share": 1.0, "kernels_per_step": count}
        self.layers.append(busy | whole)

    def table(self) -> str:
        """Figures, layer kinds and dearest kernels."""
        figures = [
            (f.name.replace("_", " "), getattr(self.per_step, f.name), getattr(self.totals, f.name))
            for f in dataclasses.fields(Figures)
        ]
        parts = [columns(("", "per step", "total"), figures)]
        if self.layers:
            parts.append(columns(_header(self.layers[0]), map(dict.values, self.layers)))
        if self.top_kernels:
            header = ("most expensive kernels", "layer kind", "calls", "ms/step", "share")
            shortened = ({**row, "name": row["name"][:LONGEST_NAME]} for row in self.top_kernels)
            parts.append(columns(header, map(dict.values, shortened)))
        return "\n\n".join(parts)


@dataclasses.dataclass
class TraceReport(Phase):
    """The figures of decode, and those of the prefill before it. Filled when the trace ends."""

    path: str = ""
    device: str = "cpu"  # "cpu" | "gpu"
    steps_per_dispatch: int = 1  # at most; a step draws a token of each row
    prefill: Phase = dataclasses.field(default_factory=Phase)  # a step is one chunk; all of them are steady
    programs: list[dict] = dataclasses.field(default_factory=list)  # whole trace: name, executions, counts
    whole: dict[str, int] = dataclasses.field(default_factory=dict)  # host counts of the whole trace
    note: str = ""

    def as_dict(self) -> dict:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self)

    def table(self) -> str:
        """The report for people."""
        if not self.steady_steps:
            return "no decode step in this trace"
        parts = [
            f"decode on {self.device}: {self.steady_steps} steady steps of {self.steps}, "
            f"up to {self.steps_per_dispatch} a dispatch, {self.per_step.wall_ms:.3f} ms a step",
            super().table(),
        ]
        if self.prefill.steps:
            parts += [f"prefill: {self.prefill.steps} chunk(s)", self.prefill.table()]
        if self.programs:
            header = [name.replace("_", " ") for name in self.programs[0]]
            parts.append(columns(["program", *header[1:]], map(dict.values, self.programs)))
        return "\n\n".join(filter(None, [*parts, self.note]))


def _speed(nbytes: float, ms: float, bytes_per_second: float) -> dict[str, float | None]:
    """Megabytes, GB/s and percent of a bandwidth; None where nothing has to be moved."""
    if not nbytes or not ms:
        return {"mb_per_step": nbytes / 1e6, "gb_per_s": None, "percent_of_copy": None}
    speed = nbytes / (ms / 1e3)
    return {
        "mb_per_step": nbytes / 1e6,
        "gb_per_s": speed / 1e9,
        "percent_of_copy": 100 * speed / bytes_per_second,
    }


def _header(row: Mapping[str, object]) -> list[str]:
    """Names of a row's columns for people: "ms_per_step" becomes "ms/step"."""
    names = [name.replace("_per_", "/").replace("_", " ") for name in row]
    return ["layer kind", *names[1:]]


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
