"""Checks the architecture: import directions, who uses zmq, torch and pickle, and what an import loads."""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from importlinter import cli

import zmqgrad
from tests.support.interpreter import run_python

ROOT = Path(zmqgrad.__file__).parent
MODULES = {
    path.relative_to(ROOT.parent).with_suffix("").as_posix().replace("/", "."): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """Top-level names of the packages that a module imports, wherever in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


IMPORTED = {name: frozenset(imported(tree)) for name, tree in TREES.items()}


SIMULATION = "zmqgrad.testing.simulation"
"""It stands in for the clock, the environment and zmq, so it must import what nothing else may."""


def importers(package: str) -> set[str]:
    """The modules that import ``package``, apart from the simulation."""
    return {
        name for name, packages in IMPORTED.items() if package in packages and not within({name}, SIMULATION)
    }


def within(names: set[str], *rooms: str) -> bool:
    """Is each of ``names`` one of ``rooms``, or inside one?"""
    return all(any(name == room or name.startswith(f"{room}.") for room in rooms) for name in names)


@pytest.mark.slow
def test_arrows_point_downwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT.parent)
    # It would disable the loggers that exist, and later tests would read their lines in vain.
    monkeypatch.setattr("importlinter.cli.logging_config.dictConfig", lambda settings: None)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        status = cli.lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert status == cli.EXIT_STATUS_SUCCESS, said.getvalue()


def test_only_the_clock_module_imports_time() -> None:
    assert importers("time") == {"zmqgrad.runtime.clock"}
    # A timedelta is a length of time, which is what users of torch pass for a timeout.
    for name in importers("datetime"):
        froms = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.ImportFrom) and n.module == "datetime"]
        assert {alias.name for n in froms for alias in n.names} == {"timedelta"}, name


def test_one_module_reads_the_environment() -> None:
    readers = {
        name
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if (isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"})
        or (isinstance(node, ast.alias) and node.name in {"environ", "environb", "getenv"})
    }
    assert within(readers, "zmqgrad.environment", SIMULATION)


def test_only_transport_imports_zmq() -> None:
    assert within(importers("zmq"), "zmqgrad.transport")


def test_only_upper_layers_import_torch() -> None:
    packages = ("wire.tensors", "interop", "rpc", "autograd", "optim", "nn", "testing", "replacement")
    upper = [f"zmqgrad.{package}" for package in packages]
    assert within(importers("torch"), *upper)


def test_only_serialization_pickles() -> None:
    """Unpickling stays in few modules, so that P4 of docs/guarantees.md can be reviewed."""
    assert importers("pickle") | importers("cloudpickle") <= {
        "zmqgrad.rpc.serialization.pickler",
        "zmqgrad.rpc.serialization.serializer",
        "zmqgrad.rpc.serialization.deserializer",
        "zmqgrad.rpc.remote_errors",
        "zmqgrad.elastic.agent.functions",  # results of its own child processes, by a private directory
    }


LOADERS = {
    f"{module}.{name}"
    for module in (
        "pickle",
        "cloudpickle",
        "marshal",
        "dill",
        "joblib",
        "torch",
        "torch.jit",
        "torch.package",
    )
    for name in ("load", "loads", "Unpickler", "PackageImporter")
}
"""What may run code that is in the bytes that it reads."""


def loading(tree: ast.Module) -> Iterator[str]:
    """The names of the functions and classes of a module that use one of LOADERS."""
    for statement in tree.body:
        for node in ast.walk(statement):
            used = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
            if isinstance(node, ast.ImportFrom):
                used = [f"{node.module}.{alias.name}" for alias in node.names]
            if any(each in LOADERS for each in used):
                yield getattr(statement, "name", "<module>")


def test_what_unpickles_is_listed_with_what_guards_it() -> None:
    """The table of docs/security.md has every place of this library that reads pickles, and no other."""
    _, _, text = (ROOT.parent / "docs" / "security.md").read_text().partition("Pickles that are read before")
    rows = [line.split("|")[1:-1] for line in text.split("\n\n")[1].splitlines()[2:]]
    listed = {place for _, where, _ in rows for place in named(where)}
    assert listed == {
        (name.removeprefix("zmqgrad.").replace(".", "/") + ".py", function)
        for name, tree in TREES.items()
        for function in loading(tree)
    }
    for path, function in (place for row in rows for cell in row[1:] for place in named(cell)):
        defined = ast.walk(ast.parse((ROOT / path).read_text()))
        assert any(getattr(node, "name", None) == function for node in defined), (path, function)


def named(cell: str) -> list[tuple[str, str]]:
    """The functions that a cell of the table names, as ``file: function``."""
    return re.findall(r"`([\w/]+\.py)`: `(\w+)`", cell)


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["zmqgrad", "zmqgrad.store", "zmqgrad.rendezvous", "zmqgrad.cli", "zmqgrad.wire.codec"]
)
def test_an_import_leaves_torch_unloaded(module: str) -> None:
    """A store server must not load torch; import-linter does not see what runs."""
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print('torch' in sys.modules)"
    assert run_python(code, module).strip() == "False"


@pytest.mark.slow
@pytest.mark.parametrize("module", ["zmqgrad.cli.run", "zmqgrad.elastic.launching"])
def test_an_agent_starts_without_a_store(module: str) -> None:
    """The workers of a single host start that much sooner, and its agent needs no store."""
    code = "import importlib, sys; importlib.import_module(sys.argv[1]); print(*sys.modules)"
    assert "zmqgrad.store" not in run_python(code, module).split()


def test_every_module_has_a_docstring() -> None:
    assert [name for name, tree in TREES.items() if not (ast.get_docstring(tree) or "").strip()] == []


def test_every_public_function_and_class_has_a_docstring() -> None:
    silent = [
        f"{name}.{node.name}"
        for name, tree in TREES.items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
        and not any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list)
    ]
    assert silent == []


def swallows(handler: ast.ExceptHandler) -> bool:
    """Is it a bare ``except``, or one of ``Exception`` or wider that does nothing about it?"""
    wide = isinstance(handler.type, ast.Name) and handler.type.id in {"Exception", "BaseException"}
    idle = all(isinstance(node, (ast.Pass, ast.Continue)) for node in handler.body)
    return handler.type is None or (wide and idle)


def test_no_exception_is_swallowed() -> None:
    places = [
        f"{name}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler) and swallows(node)
    ]
    assert places == []


def last_name(node: ast.expr) -> str:
    """The last part of the name of what an expression refers to."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def test_no_condition_is_entered() -> None:
    """Ctrl-C between its ``__enter__``, which is in Python, and the body would keep its lock held for ever.

    A lock is entered in one step, so what waits by ``Condition(lock)`` enters the lock.
    """
    nodes = [(name, node) for name, tree in TREES.items() for node in ast.walk(tree)]
    conditions = {
        last_name(target)
        for _, node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
        for target in node.targets
        if last_name(node.value.func) == "Condition"
    }
    assert "_changed" in conditions
    entered = [
        f"{name}:{node.lineno}"
        for name, node in nodes
        if isinstance(node, ast.With)
        if any(last_name(item.context_expr) in conditions for item in node.items)
    ]
    assert entered == []


def test_errors_of_the_system_that_connections_raise_have_a_number() -> None:
    """One without is taken for what a signal handler of the program raised, and given to the caller."""
    raised = [
        (f"{name}:{node.lineno}", node.exc)
        for name, tree in TREES.items()
        if name.startswith(("zmqgrad.transport.links", "zmqgrad.transport.local", "zmqgrad.transport.query"))
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    ]
    of_system = [
        (place, call)
        for place, call in raised
        if issubclass(getattr(builtins, last_name(call.func), Exception), OSError)
        and last_name(call.func) != "TimeoutError"  # which no handler of OSError is meant to get
    ]
    assert len(of_system) > 5
    assert [place for place, call in of_system if len(call.args) < 2] == []
