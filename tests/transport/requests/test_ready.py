"""Poll takes the place of epoll where there is none: a server cannot tell them apart."""

from __future__ import annotations

import select
import socket
from typing import Any

import pytest

from tests.transport.requests.test_requests import PATIENCE, RequestClientContext, Running
from zmqgrad.transport.requests import server as request_server
from zmqgrad.transport.requests.ready import READ, WRITE, Poll
from zmqgrad.wire.messages import StoreGet, StoreValue

POLLERS = [Poll, *([select.epoll] if hasattr(select, "epoll") else [])]


@pytest.mark.parametrize("kind", POLLERS)
def test_what_is_ready_is_told(kind: Any) -> None:
    poller = kind()
    one, other = socket.socketpair()
    with one, other:
        poller.register(one.fileno(), READ)
        assert poller.poll(0.0, 2) == []
        other.send(b"x")
        assert poller.poll(PATIENCE, 2) == [(one.fileno(), READ)]
        poller.modify(one.fileno(), WRITE)
        assert poller.poll(PATIENCE, 2) == [(one.fileno(), WRITE)]
        poller.unregister(one.fileno())
        assert poller.poll(0.0, 2) == []
    poller.close()


@pytest.mark.parametrize("kind", POLLERS)
def test_a_server_serves_by_either(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_server, "Poller", kind)
    running = Running()
    try:
        with RequestClientContext(running.server.endpoint) as client:
            for key in ("a", "b" * 50_000):
                assert client.request(StoreGet(key, 1.0), PATIENCE) == StoreValue(key.encode())
        assert running.service.gone_clients.acquire(timeout=PATIENCE), "it hears of those who leave, too"
    finally:
        running.stop()
