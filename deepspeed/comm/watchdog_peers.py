# SPDX-License-Identifier: Apache-2.0
"""How ranks that are out of step still talk: a small socket per process, served by a daemon thread.

The store of torch.distributed is used only to learn the addresses. It lives in one process, and asking it after that
process is gone blocks or fills the log; a socket of our own also tells a dead process (connection refused) from one
that is alive and does not run Python (no answer).
"""

import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from deepspeed.utils.logging import logger

ANSWER_SECONDS = 2.0  # for a state, which a living Python process gives at once
_MOST_BYTES = 64 << 20
_CANDIDATE_LEADERS = 8
_PARALLEL = 32
_ELSEWHERE = "10.255.255.255"  # any address outside: it only chooses the default route

Answer = dict[str, Any]


class Peers:
    """Requests between the ranks' daemon threads, as one JSON line each way.

    Args:
        rank, size: of the world.
        store: where addresses are published, used by one thread at a time.
        answer: gives the answer to a peer's request; called in a thread of its own.
    """

    def __init__(self, rank: int, size: int, store: Any, answer: Callable[[Answer], Answer]) -> None:
        self.rank = rank
        self.size = size
        self._store: Any = store
        self._store_lock = threading.Lock()
        self._answer = answer
        self._token = secrets.token_hex(16)
        self._addresses: dict[int, Answer] = {}
        self._wanted = [r for r in range(size if rank < _CANDIDATE_LEADERS else _CANDIDATE_LEADERS) if r != rank]
        hosts = own_hosts()
        self._server = socket.create_server(("" if hosts != ["127.0.0.1"] else "127.0.0.1", 0), backlog=4096)
        self._wake_up, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        own = {"hosts": hosts, "port": self._server.getsockname()[1], "token": self._token}
        store.set(str(rank), json.dumps(own))

    # This rank's side

    def serve(self, seconds: float) -> None:
        """Answer requests for about ``seconds``; less when woken by :meth:`wake`."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._woken:
                    self._woken.recv(64)
                    return
                connection, _ = self._server.accept()
                threading.Thread(
                    target=self._serve_one, args=(connection,), name="deepspeed-watchdog-answer", daemon=True
                ).start()

    def wake(self) -> None:
        """End the present :meth:`serve`."""
        with suppress(OSError):  # the serving thread is ending by itself
            self._wake_up.send(b"x")

    def _serve_one(self, connection: socket.socket) -> None:
        with connection:
            try:
                connection.settimeout(ANSWER_SECONDS)
                request = json.loads(_receive(connection))
                if not hmac.compare_digest(str(request.pop("token", "")), self._token):
                    return
                connection.sendall(json.dumps(self._answer(request)).encode() + b"\n")
            except (OSError, ValueError) as error:  # the asker has gone, or is none of ours
                logger.debug(f"watchdog of rank {self.rank}: a request was not answered: {error}")

    def close(self) -> None:
        """Give the sockets back. ``serve`` must have returned."""
        self._selector.close()
        for one in (self._server, self._wake_up, self._woken):
            one.close()
        self._store = None

    def forget_in_child(self) -> None:
        """In a forked child: leave the port to the parent, so that its death is seen."""
        self._server.close()

    # Other ranks

    def learn_addresses(self) -> bool:
        """Fetch what peers have published. True: all that this rank normally needs are known."""
        missing = [peer for peer in self._wanted if peer not in self._addresses]
        with self._store_lock:
            if missing and self._store is not None and self._store.check([str(peer) for peer in missing]):
                for peer in missing:
                    self._addresses[peer] = json.loads(self._store.get(str(peer)))
        return all(peer in self._addresses for peer in self._wanted)

    def _address(self, peer: int) -> Answer | None:
        known = self._addresses.get(peer)
        if known is None:
            with self._store_lock:
                if self._store is not None and self._store.check([str(peer)]):
                    known = self._addresses[peer] = json.loads(self._store.get(str(peer)))
        return known

    def ask(self, peer: int, request: Answer, seconds: float) -> Answer | str:
        """The peer's answer, or a sentence that says why there is none."""
        try:
            address = self._address(peer)
        except RuntimeError as error:
            return f"cannot be asked: its address is not known and the store does not tell ({_first_line(error)})"
        if address is None:
            return "never joined: it has not started its watchdog"
        reason = "cannot be asked: it knows of no IPv4 address of its own"
        for host in address["hosts"]:
            try:
                with socket.create_connection((host, address["port"]), timeout=ANSWER_SECONDS) as connection:
                    connection.settimeout(seconds)
                    message = {**request, "token": address["token"]}
                    connection.sendall(json.dumps(message).encode() + b"\n")
                    return json.loads(_receive(connection))
            except ConnectionRefusedError:
                reason = "does not answer: its process has ended (look at its own log)"
            except TimeoutError:
                reason = (
                    "does not answer: its process is stopped, or blocked outside of Python without releasing its lock, "
                    "or its host is gone"
                )
            except (OSError, ValueError) as error:
                reason = f"does not answer: {error}; its process is ending, or its host {host} cannot be reached"
        return reason

    def ask_all(self, peers: list[int], request: Answer, seconds: float) -> dict[int, Answer | str]:
        """:meth:`ask` several ranks, many at a time."""
        if not peers:
            return {}
        with ThreadPoolExecutor(min(_PARALLEL, len(peers)), "deepspeed-watchdog-ask") as pool:
            return dict(zip(peers, pool.map(lambda peer: self.ask(peer, request, seconds), peers), strict=True))

    def others(self) -> list[int]:
        """All ranks but this one."""
        return [peer for peer in range(self.size) if peer != self.rank]

    def leaders(self) -> list[int]:
        """The ranks that may write the report, in the order in which they are asked."""
        return list(range(min(self.size, _CANDIDATE_LEADERS)))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _receive(connection: socket.socket) -> bytes:
    """One line."""
    chunks: list[bytes] = []
    total = 0
    while not (chunks and chunks[-1].endswith(b"\n")):
        chunk = connection.recv(1 << 16)
        total += len(chunk)
        if not chunk or total > _MOST_BYTES:
            raise ValueError("the connection ended before the message did")
        chunks.append(chunk)
    return b"".join(chunks)


def own_hosts() -> list[str]:
    """IPv4 addresses under which other ranks may reach this process, the most likely one first; none: there is none.

    They are those of the interface towards MASTER_ADDR, of the default route, and of the host's name. Loopback is told
    only where the master is on loopback too, i.e. all ranks are on one host, or where there is nothing else.
    """
    master = os.environ.get("MASTER_ADDR", "")
    if master == "localhost" or master.startswith("127."):
        return ["127.0.0.1"]
    found = [_address_towards(name) for name in (master, _ELSEWHERE) if name]
    try:
        found.append(socket.gethostbyname(socket.gethostname()))
    except OSError as error:
        logger.debug(f"the host's name has no address: {error}")
    outside = [address for address in dict.fromkeys(found) if address and not address.startswith("127.")]
    return outside or ([] if master else ["127.0.0.1"])


def _address_towards(host: str) -> str | None:
    """This host's address on the way to ``host``. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, 9))
            return probe.getsockname()[0]
    except OSError as error:
        logger.debug(f"no IPv4 route to {host}: {error}")
        return None
