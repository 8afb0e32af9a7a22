"""What a forked child does first: it lets go of what it inherited of its parent.

A fork gets copies of all sockets. While it lives, the kernel would keep the connections of its parent open,
and no peer would see the parent end.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def in_forks(owner: T, let_go: Callable[[T], object]) -> None:
    """Calls ``let_go(owner)``, a function that does not refer to it, in each forked child while it lives."""
    _owners[owner] = let_go


def _in_child() -> None:
    for owner, let_go in list(_owners.items()):
        let_go(owner)


os.register_at_fork(after_in_child=_in_child)
