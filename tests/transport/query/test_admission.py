"""Which clients of a server are counted, and when there is room for another."""

from __future__ import annotations

import pytest

from zmqgrad.transport.query.admission import Admission

FD = 5


@pytest.fixture
def admission() -> Admission:
    return Admission(2)


def connect(admission: Admission, client: int, fd: int) -> bool:
    admission.on_accepted(fd)
    return admission.admit_tcp(client, fd)


def test_a_tcp_client_counts_from_its_ping_to_its_end(admission: Admission) -> None:
    admission.on_accepted(FD)
    assert admission.clients == 0
    assert admission.admit_tcp(7, FD)
    assert admission.clients == 1
    admission.on_disconnected(FD)
    assert admission.clients == 0


def test_a_failed_handshake_is_no_client(admission: Admission) -> None:
    admission.on_accepted(FD)
    admission.on_disconnected(FD)
    assert admission.clients == 0


def test_a_client_that_changes_to_the_fast_path_counts_once(admission: Admission) -> None:
    assert connect(admission, 7, FD)
    admission.add_local("connection", 7)
    assert admission.clients == 1
    assert admission.admit_tcp(7, FD)  # for large messages
    assert admission.clients == 1
    admission.remove_local("connection")
    assert admission.clients == 0


def test_a_client_is_known_from_its_admission_on_by_whichever_path(admission: Admission) -> None:
    assert not admission.knows(7)
    assert connect(admission, 7, FD)
    assert admission.knows(7)
    admission.add_local("connection", 7)
    admission.on_disconnected(FD)
    assert admission.knows(7)
    admission.remove_local("connection")
    assert connect(admission, 1, FD)
    assert connect(admission, 2, FD + 1)
    assert admission.knows(7)
    assert connect(admission, 7, FD + 2), "it comes back when there is no room for others"


def test_the_place_of_one_who_left_is_free(admission: Admission) -> None:
    for client in range(10):
        assert connect(admission, client, FD)
        assert connect(admission, 100 + client, FD + 1)
        assert not connect(admission, 200 + client, FD + 2)
        for fd in range(FD, FD + 3):
            admission.on_disconnected(fd)


def test_a_ping_that_is_read_after_the_end_takes_no_place(admission: Admission) -> None:
    assert connect(admission, 1, FD)
    admission.on_disconnected(FD)
    admission.admit_tcp(2, FD)
    assert admission.clients == 0
    assert connect(admission, 3, FD + 1)
    assert connect(admission, 4, FD)
    admission.on_disconnected(FD)
    admission.on_accepted(FD)
    assert admission.admit_tcp(2, FD)  # of an earlier connection with this descriptor
    assert admission.admit_tcp(5, FD)
    assert admission.clients == 2


def test_a_refused_client_may_try_again_by_another_connection(admission: Admission) -> None:
    assert connect(admission, 1, FD)
    assert connect(admission, 2, FD + 1)
    assert not connect(admission, 3, FD + 2)
    admission.on_disconnected(FD)
    assert not admission.admit_tcp(3, FD + 2), "it has been told, and may have left"
    assert admission.clients == 1
    assert connect(admission, 3, FD + 3)


def test_a_client_that_reconnects_is_served_beyond_the_limit(admission: Admission) -> None:
    assert connect(admission, 1, FD)
    admission.on_disconnected(FD)
    assert connect(admission, 2, FD)
    assert connect(admission, 3, FD + 1)
    assert connect(admission, 1, FD + 2)


def test_a_client_that_is_connected_is_known_however_many_come_and_go(admission: Admission) -> None:
    assert connect(admission, 1, FD)
    for client in range(100, 110):
        admission.add_local("connection", client)
        admission.remove_local("connection")
        assert connect(admission, 100 + client, FD + 1)
        admission.on_disconnected(FD + 1)
    assert admission.knows(1)
    assert not admission.knows(100)
    admission.on_disconnected(FD)
    assert connect(admission, 2, FD)
    assert connect(admission, 3, FD + 1)
    assert connect(admission, 1, FD + 2), "its connection broke, and others took the place"
