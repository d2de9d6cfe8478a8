"""Takes a profiler trace and reads it back, without TensorFlow."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
from jax.profiler import ProfileData

from jaxserve.errors import JaxserveError
from jaxserve.trace.events import Event
from jaxserve.trace.report import TraceReport
from jaxserve.trace.scopes import kinds_from_hlo
from jaxserve.trace.summary import summarise


@contextlib.contextmanager
def record(
    directory: str | os.PathLike, hlo: Callable[[], Mapping[str, str]] | None = None
) -> Iterator[TraceReport]:
    """Traces what runs inside; the yielded report is filled when the block ends.

    `hlo` returns the compiled text of the program that ran in each phase ("decode", "prefill"): with it,
    kernels inside a graph get a layer kind. An exception inside the block ends the trace, keeps its file and
    leaves the report empty.
    """
    folder = writable_folder(directory)
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # an event per Python call would be most of the trace, and slow the host
    try:
        jax.profiler.start_trace(folder, profiler_options=options)
    except RuntimeError as error:
        if "already" not in str(error):
            raise
        raise JaxserveError("a profiler trace is already running: end it before starting another") from error
    report = TraceReport()
    try:
        yield report
    finally:
        jax.profiler.stop_trace()
    path = newest_trace(folder)
    events = read_events(path)
    kinds = {phase: kinds_from_hlo(text) for phase, text in hlo().items()} if hlo else {}
    vars(report).update(vars(summarise(events, kinds)))
    report.path = str(path)


def writable_folder(directory: str | os.PathLike) -> Path:
    """The folder, made if need be. `OSError` when nothing can be written there."""
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        return folder


def newest_trace(directory: str | os.PathLike) -> Path:
    """The trace file last written under `directory`."""
    paths = list(Path(directory).glob("plugins/profile/*/*.xplane.pb"))
    if not paths:
        raise FileNotFoundError(f"{directory}: the profiler wrote no .xplane.pb file there")
    return max(paths, key=lambda path: path.stat().st_mtime_ns)


def read_events(path: str | os.PathLike) -> list[Event]:
    """Every event of a .xplane.pb file."""
    return [
        Event(event.name, event.start_ns, event.duration_ns, dict(event.stats), line.name, plane.name)
        for plane in ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    ]
