"""Traces: what a job sends, receives, runs and waits for, recorded in a log per process.

Start reading with :mod:`~zmqgrad.trace.events` (what is recorded) and :mod:`~zmqgrad.trace.log` (the format).
"""

from __future__ import annotations

from zmqgrad.trace.job import Job
from zmqgrad.trace.model import Actor, Call, Message, Process, Stamped
from zmqgrad.trace.recorder import Recorder, launch_environment, record

__all__ = [
    "Actor",
    "Call",
    "Job",
    "Message",
    "Process",
    "Recorder",
    "Stamped",
    "launch_environment",
    "record",
]
