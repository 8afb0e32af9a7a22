"""What a person should look at first in a trace: deadlocks, stragglers, hot workers, unused results.

``zmqgrad trace DIRECTORY`` prints them, and the report shows them first.
Each module but ``survey``, which reads the job, finds one kind of fault and shows its evidence in numbers.
"""

from __future__ import annotations

from zmqgrad.trace.findings.finding import Finding, Severity
from zmqgrad.trace.findings.survey import Survey, find

__all__ = ["Finding", "Severity", "Survey", "find"]
