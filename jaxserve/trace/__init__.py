"""Profiler traces: record one, and read from it what a decode step costs."""

from jaxserve.trace.profiler import read_events, record
from jaxserve.trace.report import Event, Figures, TraceReport, summarise
from jaxserve.trace.scopes import LAYER_KINDS, kind_of, kinds_from_hlo

__all__ = [
    "LAYER_KINDS",
    "Event",
    "Figures",
    "TraceReport",
    "kind_of",
    "kinds_from_hlo",
    "read_events",
    "record",
    "summarise",
]
