"""Calls a function once certain modules have been imported completely."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each process of a program imports this, and importlib.abc takes long
    from importlib.machinery import ModuleSpec


class AfterImport:
    """A meta path finder that calls ``action`` after each import of a matching module.

    If the import of one matching module causes the import of others, ``action`` is called once, after the
    outermost one has been executed. It is not called after an import that failed.

    Args:
        matches: whether a module, given by its full name, matches.
        action: must be idempotent.
    """

    def __init__(self, matches: Callable[[str], bool], action: Callable[[], object]) -> None:
        self._matches = matches
        self._action = action
        self._lock = threading.Lock()  # guards _depth
        self._depth = 0

    def install(self) -> None:
        """Act on all imports that begin from now on."""
        sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Ignore all imports that begin from now on."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return what the finders behind this one find, with a loader that reports the import."""
        if not self._matches(fullname) or self not in sys.meta_path:
            return None
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            if not hasattr(finder, "find_spec"):  # Python ignores it, too
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _ReportingLoader(spec.loader, self._executing)  # type: ignore[assignment]
                return spec
        return None

    @contextmanager
    def _executing(self) -> Iterator[None]:
        with self._lock:
            self._depth += 1
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            with self._lock:
                self._depth -= 1
                outermost = self._depth == 0
            if succeeded and outermost:
                self._action()


class _ReportingLoader:
    """Loads a module by its own loader, within a context manager. The loaded module has its own loader."""

    def __init__(self, loader: Any, executing: Callable[[], AbstractContextManager[None]]) -> None:
        self._loader = loader
        self._executing = executing

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        with self._executing():
            self._loader.exec_module(module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)  # runpy, for example, loads only the code of a module
