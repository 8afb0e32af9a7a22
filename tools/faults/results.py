"""Results of cells, in one JSON file that is replaced after each cell, so that a run can be resumed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tools.faults.model import Cell, History, Moment, Verdict


class Results:
    """By key of the cell."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.by_key: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}

    def __contains__(self, key: str) -> bool:
        return key in self.by_key

    def add(self, cell: Cell, verdict: Verdict, history: History) -> None:
        """Store what came of a cell."""
        self.by_key[cell.key] = {
            "role": cell.role,
            "fault": cell.fault,
            "moment": cell.moment,
            "moments": sorted(history.moments),
            **verdict.as_json(),
        }
        self._path.parent.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".new")
        draft.write_text(json.dumps(self.by_key, indent=1))
        os.replace(draft, self._path)

    def moments(self, role: str) -> list[Moment]:
        """What the cells without a fault have seen."""
        seen = self.by_key.get(Cell(role, "none").key, {}).get("moments", [])
        return [Moment(*moment) for moment in seen]
