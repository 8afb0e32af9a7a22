"""Errors of backward passes keep their type, become RuntimeErrors, and are told whatever they are."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from zmqgrad import rpc
from zmqgrad.autograd import backward, context
from zmqgrad.autograd.engine.failures import describe_failure, rebuild_failure
from zmqgrad.errors import AutogradError, RemoteError, RpcTimeoutError
from zmqgrad.testing import Cluster, cluster


class Stubborn(Exception):
    """Has rules of its own about how it is made."""

    def __init__(self, code: int, *, text: str = "") -> None:
        super().__init__(code)
        self.code = code
        self.text = text

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class Leaving(Exception):
    def __str__(self) -> str:
        sys.exit("enough")


def travelled(error: BaseException) -> BaseException:
    return rebuild_failure(describe_failure(error, 2, "worker2"))


MADE: list[tuple[Callable[[], Exception], type[Exception]]] = [
    (lambda: Exception("plain words"), AutogradError),
    (lambda: RuntimeError("plain words"), RuntimeError),
    (lambda: LookupError("plain words"), LookupError),
    (lambda: KeyError("plain words"), KeyError),
    (lambda: OSError(2, "plain words"), FileNotFoundError),
    (lambda: UnicodeDecodeError("ascii", b"\xff", 0, 1, "plain words"), UnicodeDecodeError),
    (lambda: Stubborn(3, text="plain words"), Stubborn),
    (lambda: RpcTimeoutError("plain words"), RpcTimeoutError),
    (lambda: StopIteration("plain words"), StopIteration),
]


@pytest.mark.parametrize(("make", "kind"), MADE, ids=lambda x: getattr(x, "__name__", ""))
def test_an_error_keeps_its_type_and_is_a_runtime_error(
    make: Callable[[], Exception], kind: type[Exception]
) -> None:
    error = travelled(make())
    assert isinstance(error, kind)
    assert isinstance(error, RuntimeError)
    assert error.args
    said = f"{error}\n{error.__cause__}"
    assert f"Error on Node 2: {make()}" in said
    assert "plain words" in said
    assert "worker2" in said


def test_attributes_stay() -> None:
    error = travelled(Stubborn(3, text="plain words"))
    assert isinstance(error, Stubborn)
    assert (error.code, error.text) == (3, "plain words")


def test_errors_without_text_or_that_cannot_be_rebuilt_are_reported() -> None:
    assert "Speechless" in str(travelled(Speechless()).__cause__)
    assert "Leaving" in str(travelled(Leaving()).__cause__)
    assert isinstance(travelled(SystemExit(3)), RemoteError)


@pytest.fixture
def c() -> Iterator[Cluster]:
    with cluster(2) as made:
        yield made


def leaves(gradient: Tensor) -> Any:
    sys.exit("enough")


def doubled_with_hook(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(leaves)
    return y * 2


def test_a_hook_that_wants_to_end_the_process_ends_the_pass(c: Cluster) -> None:
    with context() as ctx:
        y = rpc.rpc_sync(1, doubled_with_hook, (torch.ones(1, requires_grad=True),))
        with pytest.raises(RemoteError, match="Error on Node 1: enough"):
            backward(ctx, [y])


class Rebuilt(Exception):
    """Says where it was rebuilt."""

    def __reduce__(self) -> Any:
        return _rebuilt, (str(self),)


def _rebuilt(text: str) -> Rebuilt:
    error = Rebuilt(text)
    error.thread = threading.current_thread()  # type: ignore[attr-defined]
    return error


def raises_rebuilt(gradient: Tensor) -> Any:
    raise Rebuilt("plain words")


def doubled_before_an_error(x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(raises_rebuilt)
    return y


def test_an_error_is_rebuilt_in_the_thread_that_raises_it(c: Cluster) -> None:
    """That may import modules and run other code of the program, for which no other message must wait."""
    with context() as ctx:
        y = rpc.rpc_sync(1, doubled_before_an_error, (torch.ones(1, requires_grad=True),))
        with pytest.raises(Rebuilt, match="plain words") as caught:
            backward(ctx, [y])
    assert caught.value.thread is threading.current_thread()  # type: ignore[attr-defined]
