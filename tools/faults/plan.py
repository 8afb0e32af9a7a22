"""Which cells there are: the product of roles, faults and moments, less what is infeasible."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from tools.faults.faults import FAULTS, infeasible
from tools.faults.model import Cell, Moment
from tools.faults.roles import ROLES

AT_EVERY_MOMENT = "SIGKILL"
"""The fault that strikes at every moment of a role even without ``--all-moments``."""


def all_cells(moments: Callable[[str], Iterable[Moment]], every: bool) -> list[Cell]:
    """The feasible cells, those without a fault first: they find the moments of each role."""
    cells = [Cell(role, "none") for role in ROLES]
    for role in ROLES.values():
        for fault in FAULTS.values():
            if fault.name == "none" or infeasible(role, fault):
                continue
            main = [role.moment]
            if every or fault.name == AT_EVERY_MOMENT:
                main += [m for m in moments(role.name) if m != role.moment]
            cells += [Cell(role.name, fault.name, moment) for moment in main]
    return cells


def choose(cells: Iterable[Cell], patterns: str) -> list[Cell]:
    """The cells whose key matches one of the patterns."""
    wanted = [p.strip() for p in patterns.split(",") if p.strip()]
    return [c for c in cells if not wanted or any(fnmatchcase(c.key, pattern) for pattern in wanted)]


QUICK = {
    "caller": ("out of shared memory", "no descriptors"),
    "callee": ("SIGKILL", "SIGSTOP 2 s", "partition 2 s", "garbage", "power failure of the host"),
    "child of a fork": ("reset",),
    "stage": ("slow consumer",),
    "optimizer owner": ("clock jump",),
    "store host": ("SIGKILL", "full disk", "wrong secret"),
    "agent": ("SIGKILL",),
    "agent with the store": ("SIGKILL",),
}
"""Each kind of fault. Simulated jobs lose the other roles: owners, users, roots, stages and watchers."""


def quick_cells() -> list[Cell]:
    """The part of the table that fits a minute or two."""
    return [
        Cell(role, fault, ROLES[role].moment)
        for role, faults in QUICK.items()
        for fault in faults
        if not infeasible(ROLES[role], FAULTS[fault])
    ]
