"""What a person should look at first in a trace: deadlocks, stragglers, hot workers, unused sends.

``zmqgrad trace findings`` prints them, the report shows them first, and ``stats`` and ``waits`` mention them.
Each module but ``survey``, which reads the job, finds one kind of fault and shows its evidence in numbers.
"""

from __future__ import annotations

from zmqgrad.trace.findings.finding import Finding, Severity
from zmqgrad.trace.findings.hangs import ABOUT_WAITS
from zmqgrad.trace.findings.survey import Survey, find

__all__ = ["ABOUT_WAITS", "Finding", "Severity", "Survey", "find"]
