"""A picture of a token's time: what each layer kind takes beside what it would take at the copy rate."""

from pathlib import Path
from typing import NamedTuple

from jaxserve.trace.report import COPIES, Figures, Phase

SUFFIXES = (".svg", ".png")
BUSY, IDLE = "busy", "idle"
COLOURS = {
    "embed": "#7f7f7f",
    "attention": "#1f77b4",
    "delta": "#17becf",
    "mlp": "#ff7f0e",
    "moe": "#d62728",
    "norm": "#bcbd22",
    "lm_head": "#2ca02c",
    "sampling": "#9467bd",
    COPIES: "#e377c2",
    IDLE: "#dddddd",
}
OTHER_COLOUR = "#8c564b"
LEAST_LABELLED = 0.03  # of the height of the plot


class Part(NamedTuple):
    """One layer kind's share of a step."""

    kind: str
    ms: float  # measured
    floor_ms: float  # its bytes at the copy rate


def parts(named: Phase, busy_ms: float, step_ms: float) -> list[Part]:
    """The layer kinds of `named`, dearest first, scaled to the busy time of a step, then what it idles.

    `named` may come from a trace with graphs off: its shares are used, not its times.
    """
    found = []
    for row in named.layers:
        if row["kind"] == BUSY:
            continue
        floor = row["ms_per_step"] * (row["percent_of_copy"] or 0.0) / 100
        found.append(Part(row["kind"], row["share"] * busy_ms, floor))
    return [*found, Part(IDLE, max(0.0, step_ms - busy_ms), 0.0)]


def check_plot(path: str | Path) -> None:
    """Raise before any work what would make `plot_token` fail after it."""
    if Path(path).suffix not in SUFFIXES:
        raise ValueError(f"plot={str(path)!r}: expected a file name that ends in {' or '.join(SUFFIXES)}")
    try:
        import matplotlib  # noqa: F401  (an extra: only a plot needs it)
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install 'jaxserve[plot]'") from None


def plot_token(named: Phase, step: Figures, path: str | Path, *, step_ms: float, title: str) -> None:
    """Write a .svg or .png: a step's time stacked by layer kind, and the roofline beside it.

    named: a phase with traffic; step: the means of the trace with graphs on; step_ms: what a step takes
    without the profiler. The roofline is the time the step's bytes take at the copy rate, stacked in the same
    order; a line carries it across.
    """
    check_plot(path)
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    stacked = parts(named, step.busy_ms, step_ms)
    roofline = sum(part.floor_ms for part in stacked)
    figure, axes = pyplot.subplots(figsize=(5.5, 6))
    height = max(sum(part.ms for part in stacked), roofline)
    tops = [0.0, 0.0]
    for part in stacked:
        colour = COLOURS.get(part.kind, OTHER_COLOUR)
        for column, ms in enumerate((part.ms, part.floor_ms)):
            axes.bar(column, ms, bottom=tops[column], width=0.6, color=colour, edgecolor="white",
                     label=part.kind if column == 0 else None)  # fmt: skip
            if ms > LEAST_LABELLED * height:
                axes.text(column, tops[column] + ms / 2, f"{part.kind}  {1e3 * ms:,.0f} µs",
                          ha="center", va="center", fontsize=8)  # fmt: skip
            tops[column] += ms
    axes.axhline(roofline, color="black", linestyle="--", linewidth=1)
    axes.text(1.35, roofline, f"{1e3 * roofline:,.0f} µs", ha="left", va="bottom", fontsize=8)
    axes.legend(loc="upper right", fontsize=7)
    axes.set_xticks([0, 1], ["measured", "bytes at the copy rate"])
    axes.set_xlim(-0.5, 1.75)
    axes.set_ylim(0, 1.05 * height or 1.0)
    axes.set_ylabel("ms a step")
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
