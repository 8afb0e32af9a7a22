"""One HTML page with all that a trace tells: overview, timeline, latencies, traffic, autograd, waits.

``columns`` and ``activity`` read a job, ``findings`` names what stands out, ``data`` packs it, ``page`` makes
the HTML, and ``script`` shows it. The timeline is a canvas of our own, which zooms through a million
messages; all other charts are plotly's.
"""

from __future__ import annotations

from zmqgrad.trace.report.page import render

__all__ = ["render"]
