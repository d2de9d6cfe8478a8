"""Profiler traces: record one, and read from it what a decode step costs."""

from jaxserve.trace.events import Event
from jaxserve.trace.named import graphs_off
from jaxserve.trace.profiler import read_events, record
from jaxserve.trace.report import Figures, Phase, TraceReport
from jaxserve.trace.scopes import LAYER_KINDS, Call, Kinds, kind_of, kinds_from_hlo
from jaxserve.trace.summary import summarise

__all__ = [
    "LAYER_KINDS",
    "Call",
    "Event",
    "Figures",
    "Kinds",
    "Phase",
    "TraceReport",
    "graphs_off",
    "kind_of",
    "kinds_from_hlo",
    "read_events",
    "record",
    "summarise",
]
