"""Which clients of a server are counted, and when there is room for another."""

from __future__ import annotations

import pytest

from zmqgrad.transport.query.admission import Admission


@pytest.fixture
def admission() -> Admission:
    return Admission(2, {})


def test_a_tcp_client_counts_from_its_ping_to_its_end(admission: Admission) -> None:
    admission.accepted += 1
    assert (admission.clients, admission.pending) == (0, 1)
    admission.connected += 1
    assert (admission.clients, admission.pending) == (0, 0)
    admission.add_tcp(7)
    assert admission.clients == 1
    admission.disconnected += 1
    assert admission.clients == 0


def test_a_failed_handshake_is_no_client(admission: Admission) -> None:
    admission.accepted += 1
    admission.failed += 1
    admission.disconnected += 1
    admission.add_tcp(7)
    assert (admission.clients, admission.pending) == (0, 0)


def test_a_client_that_changes_to_the_fast_path_counts_once() -> None:
    connections: dict[int, str] = {}
    admission = Admission(2, connections)
    admission.accepted = admission.connected = 1
    admission.add_tcp(7)
    connections[3] = "connection"
    admission.add_local("connection", 7)
    assert admission.clients == 1
    assert admission.knows(7)
    del connections[3]
    admission.remove_local("connection")
    assert admission.clients == 0
    assert not admission.knows(7)


def test_refused_clients_may_try_again_when_there_is_room(admission: Admission) -> None:
    admission.connected = 2
    admission.add_tcp(1)
    admission.add_tcp(2)
    admission.surplus.add(b"route")
    admission.readmit()
    assert admission.surplus
    admission.disconnected = 1
    admission.readmit()
    assert not admission.surplus
