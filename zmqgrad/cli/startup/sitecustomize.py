"""Imported by each Python process of a program that ``zmqgrad run --replace-torch-rpc`` runs.

Imports the module of this name that it shadows, if there is one, and then :mod:`zmqgrad`, which finds
ZMQGRAD_REPLACE_TORCH_RPC set and replaces torch's RPC as soon as torch has been imported. Must stay light.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _import_shadowed() -> None:
    """Import the ``sitecustomize`` that comes next on the path, in place of this one."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]  # PYTHONPATH keeps it
try:
    importlib.import_module("zmqgrad")
except ImportError as error:  # another interpreter, started by a worker
    sys.stderr.write(f"{sys.executable} cannot import zmqgrad ({error}): torch's RPC is not replaced there\n")
_import_shadowed()
