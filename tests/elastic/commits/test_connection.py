"""The connection of a worker to its agent, which a thread of the test stands in for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from types import FrameType

import pytest

from zmqgrad.elastic.commits.agreement import Choice
from zmqgrad.elastic.commits.connection import (
    MAX_PACKET_BYTES,
    AgentCommits,
    Begin,
    Chosen,
    Done,
    Place,
    Room,
    decode_request,
    encode,
)

WAIT = 20.0


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it is closed with its process
def test_the_reply_to_a_request_that_was_interrupted_is_not_taken_for_the_next(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "agent"))
    listener.listen()
    main = threading.get_ident()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            number, _ = decode_request(connection.recv(MAX_PACKET_BYTES))
            connection.send(encode((number, Done())))
            interrupted, _ = decode_request(connection.recv(MAX_PACKET_BYTES))
            signal.pthread_kill(main, signal.SIGUSR1)
            number, request = decode_request(connection.recv(MAX_PACKET_BYTES))
            assert isinstance(request, Begin)
            connection.send(encode((interrupted, Chosen(Choice(7)))))
            socket.send_fds(connection, [encode((number, Room(3, 4096)))], [listener.fileno()])

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    agent = threading.Thread(target=serve)
    agent.start()
    try:
        commits = AgentCommits(Place(), 0, str(tmp_path / "agent"))
        with pytest.raises(KeyboardInterrupt):
            commits.restore((), WAIT)
        segment = commits.begin(1, 10, WAIT)
        os.close(segment.fd)
        assert (segment.segment, segment.size) == (3, 4096)
    finally:
        signal.signal(signal.SIGUSR1, before)
        agent.join(WAIT)
        listener.close()
