"""Proxy: a relay on loopback between a process and its PostgreSQL server, which loses an answer when it is told to.

A COMMIT whose reply is lost leaves a client that does not know whether it happened. This room makes that moment, and
its twin, in which the connection is cut before the COMMIT was sent. It knows of the protocol what it needs for that,
and changes nothing of what it lets through.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum

COMMITTED = b"C\x00\x00\x00\x0bCOMMIT\x00"
"""What a server answers a COMMIT that has happened."""

CHUNK_BYTES = 2**16


class Loss(StrEnum):
    """What is lost: the reply to a COMMIT that has happened, or the connection before it was asked for."""

    REPLY = "the reply to the commit"
    CONNECTION = "the connection before the commit"


@dataclass(frozen=True, slots=True)
class _Trap:
    statement: bytes
    loss: Loss
    then: Callable[[], object]
    sprung: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Relays whoever connects to ``127.0.0.1:port`` to a server: a host and a port, or the path of its socket."""

    def __init__(self, server: tuple[str, int] | str) -> None:
        self._server = server
        self._trap: _Trap | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def lose(self, loss: Loss, after: str, then: Callable[[], object] = bool) -> threading.Event:
        """Once a client has sent a statement that contains `after`, lose something of that transaction, and only once.

        `then` is called before the client can notice; the event is set after that. A statement that a session has
        prepared is sent without its text, and not recognized.
        """
        self._trap = _Trap(after.encode(), loss, then)
        return self._trap.sprung

    def close(self) -> None:
        """Take no more connections; those that there are go on."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                _Relay(self, client, self._server).start()

    def trap_for(self, sent: bytes) -> _Trap | None:
        """The trap that these bytes spring, if any: it is theirs from now on."""
        trap = self._trap
        if trap is None or trap.statement not in sent:
            return None
        self._trap = None
        return trap


class _Relay:
    """One client and its session on the server, a thread each way."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: tuple[str, int] | str) -> None:
        self._proxy = proxy
        self._client = client
        self._address = server
        self._trap: _Trap | None = None

    def start(self) -> None:
        """Connect to the server, and begin to relay."""
        try:
            self._session = socket.socket(socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET)
            self._session.connect(self._address)
        except OSError:  # the server is not there; so is nobody here
            self._cut()
            return
        for pump in (self._requests, self._replies):
            threading.Thread(target=pump, name="relay", daemon=True).start()

    def _requests(self) -> None:
        with suppress(OSError):
            while sent := self._client.recv(CHUNK_BYTES):
                self._trap = self._trap or self._proxy.trap_for(sent)
                self._session.sendall(sent)
        self._cut()

    def _replies(self) -> None:
        with suppress(OSError):
            while reply := self._session.recv(CHUNK_BYTES):
                trap = self._trap
                if trap and (trap.loss is Loss.CONNECTION or COMMITTED in reply):
                    self._spring(trap)
                    break
                self._client.sendall(reply)
        self._cut()

    def _spring(self, trap: _Trap) -> None:
        if trap.loss is Loss.CONNECTION:
            self._session.shutdown(socket.SHUT_RDWR)
        trap.then()
        self._cut()
        trap.sprung.set()

    def _cut(self) -> None:
        for end in (self._client, self._session):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
