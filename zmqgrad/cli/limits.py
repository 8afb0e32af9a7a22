"""The limit on open files of a command that needs many: a server of its clients, a view of its logs."""

from __future__ import annotations

import resource


def allow_many_files() -> None:
    """Raise this process's limit on open files to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
