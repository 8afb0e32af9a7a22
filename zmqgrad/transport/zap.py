"""Sockets of libzmq that are for the job's own alone: CURVE, and ZAP, by which libzmq asks whom to let in.

Of whom the job's own are, :mod:`~zmqgrad.transport.security` tells.
"""

from __future__ import annotations

import logging
import threading

import zmq

from zmqgrad.transport.security import Keys

logger = logging.getLogger(__name__)

HANDSHAKE_MS = 10_000
"""How long a connection may take to say who it is."""

_DOMAIN = b"zmqgrad"
_ZAP = "inproc://zeromq.zap.01"


def key_listener(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let ``socket`` take nobody but the job's at the addresses that it binds from now on.

    A :class:`ZapAuthenticator` must have been opened in its context.
    """
    socket.curve_server = True
    socket.curve_secretkey = keys.listener.private
    socket.zap_domain = _DOMAIN


def key_caller(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """Let ``socket`` talk to none but the job's at the addresses that it connects to from now on."""
    socket.curve_serverkey = keys.listener.public
    socket.curve_publickey = keys.caller.public
    socket.curve_secretkey = keys.caller.private


class ZapAuthenticator:
    """Tells libzmq, in a thread named ``<name>-zap``, whom to let in. It ends with ``context``."""

    def __init__(self, name: str, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._caller = keys.caller.public
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        try:
            self._socket.bind(_ZAP)
        except BaseException:
            self._socket.close()
            raise
        self._thread = threading.Thread(target=self._run, name=f"{name}-zap", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                # RFC 27: version, request, domain, address, identity, mechanism, credentials
                version, request, _, address, _, mechanism, *credentials = self._socket.recv_multipart()
                welcome = mechanism == b"CURVE" and credentials == [self._caller]
                if not welcome:
                    logger.warning(
                        "refused %s, which has not the job's key", address.decode(errors="replace")
                    )
                code, text = (b"200", b"OK") if welcome else (b"400", b"another secret")
                self._socket.send_multipart([version, request, code, text, b"", b""])
        except zmq.ContextTerminated:
            pass  # as everything in that context ends
        finally:
            self._socket.close(linger=0)
