"""The report as one page that needs no network: its data, packed, with the script that shows it."""

from __future__ import annotations

import base64
import gzip
from importlib import resources

from zmqgrad.errors import TraceError
from zmqgrad.trace.job import Job
from zmqgrad.trace.report.data import Report

_SCRIPTS = ("data.js", "filter.js", "timeline.js", "details.js", "charts.js", "page.js")
"""In their order: the last one begins to show the page."""


def render(job: Job) -> bytes:
    """Renders the report of ``job`` as HTML.

    Raises:
        TraceError: if there are more messages than a page can show, or plotly is not installed.
    """
    charts = _charts()  # first, for an error after a minute would be a nuisance
    return _page(Report(job).packed(), charts)


def _charts() -> bytes:
    """Plotly's script (MIT), which its package for Python brings along."""
    try:
        return resources.files("plotly").joinpath("package_data").joinpath("plotly.min.js").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as e:
        raise TraceError(f"a report needs plotly: pip install 'zmqgrad[trace]' ({e})") from e


def _page(data: bytes, charts: bytes) -> bytes:
    files = resources.files("zmqgrad.trace.report")
    page = files.joinpath("page.html").read_bytes()
    for name, content in (
        ("page.css", files.joinpath("page.css").read_bytes()),
        ("script", b"".join(files.joinpath("script").joinpath(name).read_bytes() for name in _SCRIPTS)),
        ("data", _pack(data)),
        ("charts", _pack(charts)),
    ):
        before, after = page.split(b"{{" + name.encode() + b"}}")
        page = before + content + after
    return page


def _pack(data: bytes) -> bytes:
    return base64.b64encode(gzip.compress(data, 6, mtime=0))
