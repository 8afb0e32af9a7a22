"""What all sockets share: the memory of large frames is sent without a copy."""

from __future__ import annotations

from tests.support.interpreter import run_python

PROGRAM = """
import threading
import zmq
from zmq.utils.garbage import gc
from zmqgrad.transport.sockets import ZERO_COPY_BYTES, send_split

made, second = [], threading.Event()

class Context(zmq.Context):
    def socket(self, kind, **kwargs):
        if kind == zmq.PUSH:  # where libzmq says that memory is free
            made.append(kind)
            if len(made) == 2:
                second.set()
            second.wait(0.5)  # lets another thread find none, too
        return super().socket(kind, **kwargs)

def send(to):
    with context.socket(zmq.DEALER) as socket:
        socket.connect(to)
        send_split(socket, bytes(ZERO_COPY_BYTES))

gc.context = Context()
with zmq.Context() as context, context.socket(zmq.ROUTER) as receiver:
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    threads = [threading.Thread(target=send, args=(f"tcp://127.0.0.1:{port}",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        receiver.recv_multipart()
    for thread in threads:
        thread.join()
print(len(made))
"""


def test_the_first_large_frames_of_two_threads_share_one_socket() -> None:
    assert run_python(PROGRAM, timeout=30) == "1\n"
