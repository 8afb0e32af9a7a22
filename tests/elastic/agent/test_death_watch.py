"""How an agent notices that the process of another one has ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from tests.support.waiting import eventually
from zmqgrad.elastic.agent.death_watch import DeathWatch

WAIT = 20.0


class Watched:
    """A listening socket, as that of an agent, and its watch."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.socket.getsockname()[1])
        self.died = threading.Event()
        self.watch = DeathWatch("127.0.0.1", self.port, self.died.set)

    def accept(self) -> socket.socket:
        self.socket.settimeout(WAIT)
        return self.socket.accept()[0]


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.watch.close()
    made.watch.join()
    made.socket.close()
    assert not [thread for thread in threading.enumerate() if "death-watch" in thread.name]


def test_a_process_that_has_ended(watched: Watched) -> None:
    connection = watched.accept()
    watched.socket.close()
    connection.close()
    assert watched.died.wait(WAIT)


def test_a_connection_that_ends_is_no_death(watched: Watched) -> None:
    watched.accept().close()
    second = watched.accept()
    assert not watched.died.is_set()
    second.close()


def test_an_end_of_the_watch_is_no_death(watched: Watched) -> None:
    connection = watched.accept()
    watched.watch.close()
    watched.watch.close()
    watched.watch.join()
    assert connection.recv(1) == b""
    watched.socket.close()
    connection.close()
    assert not watched.died.is_set()


def test_a_port_that_was_never_reached_says_nothing(watched: Watched) -> None:
    """As behind a firewall."""
    died = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    watch = DeathWatch("127.0.0.1", port, died.set)
    eventually(lambda: sum("death-watch" in thread.name for thread in threading.enumerate()) == 1)
    assert not died.is_set()
    watch.close()
    watch.join()
