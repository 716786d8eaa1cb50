"""Ranks that other nodes host: rank 0 asks the models there to start them, and they come to it.

A request to a model says only where rank 0 listens. What a rank needs to know goes over the two connections
that it opens (steps and side, as for a rank of this host), once both ends have proved that they know the
secret.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping

import msgpack

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError
from distserve.core.rank_host_config import rank_model
from distserve.serving.schema import STAGE_INPUTS, STAGE_OUTPUTS, ServingError, decode_reply, encode
from distserve.transfer.control import Control, connect, require_secret, welcome
from distserve.transfer.errors import TransferError
from distserve.transfer.handle import join_address, split_address
from distserve.worker.link import Link
from distserve.worker.parallel import RankLost

logger = logging.getLogger(__name__)

WAIT_S = 300.0  # for the other nodes; an engine that gives up is started again
GREET_S = 10.0  # from connecting to being known
CALL_S = 5.0
AGAIN_S = 1.0
LINKS = ("steps", "side")

Links = dict[str, Link]


def call_ranks(
    config: EngineConfig, secret: bytes | None, wait_s: float = WAIT_S
) -> list[tuple[int, str, Links]]:
    """(rank, server, links by name) of all ranks on other nodes, once they have come.

    Raises `ConfigError` for an address that cannot be had, `RankLost` if some do not come within `wait_s`.
    """
    try:
        require_secret("transfer_host", config.transfer_host, secret)
        listener = socket.create_server((config.transfer_host, 0))
    except (TransferError, OSError) as error:
        raise ConfigError(f"transfer_host={config.transfer_host!r}: {error}") from None
    with listener:
        return _Gathering(config, secret, listener).run(wait_s)


class _Gathering:
    def __init__(self, config: EngineConfig, secret: bytes | None, listener: socket.socket) -> None:
        self._config, self._secret, self._listener = config, secret, listener
        self._visit = secrets.token_hex(8)  # which of rank 0's starts this is
        self._changed = threading.Condition()
        self._links: dict[int, Links] = {rank: {} for ranks in config.remote_ranks.values() for rank in ranks}
        self._reasons: dict[str, str] = {}
        self._over = False

    def run(self, wait_s: float) -> list[tuple[int, str, Links]]:
        servers = self._config.remote_ranks
        workers = [threading.Thread(target=self._listen, name="rank-gate", daemon=True)]
        for server in servers:
            workers.append(threading.Thread(target=self._ask, args=(server,), name="rank-call", daemon=True))
        for worker in workers:
            worker.start()
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._missing(servers), wait_s):
                    raise RankLost(self._complaint(wait_s))
                found = self._links
                self._links = {}
        finally:
            with self._changed:
                self._over = True
                left = [link for links in self._links.values() for link in links.values()]
                self._changed.notify_all()
            for link in left:
                link.close()
            for worker in workers:
                worker.join(CALL_S)
        return [(rank, server, found[rank]) for server, ranks in servers.items() for rank in ranks]

    def _missing(self, servers: Mapping[str, tuple[int, ...]]) -> list[int]:
        ranks = [rank for ranks in servers.values() for rank in ranks]
        return [rank for rank in ranks if len(self._links.get(rank, ())) < len(LINKS)]

    def _complaint(self, wait_s: float) -> str:
        parts = []
        for server, ranks in self._config.remote_ranks.items():
            if missing := self._missing({server: ranks}):
                parts.append(f"ranks {missing} of {server} ({self._reasons.get(server, 'no answer')})")
        return f"not there after {wait_s:g} s: {'; '.join(parts)}"

    # -- one thread per server

    def _ask(self, server: str) -> None:
        """Asks until its ranks are there."""
        ranks = self._config.remote_ranks[server]
        message = encode(
            {
                "op": "join",
                "instance": self._config.instance,
                "ranks": list(ranks),
                "leader": join_address(self._config.transfer_host, self._listener.getsockname()[1]),
                "visit": self._visit,
            }
        )
        model = rank_model(self._config.instance)
        there = False
        while not there:
            try:
                decode_reply(ask_server(server, model, message))
                self._note(server, "its ranks have not come yet")
            except ServingError as error:
                self._note(server, error.message)
            with self._changed:
                there = self._changed.wait_for(
                    lambda: self._over or not self._missing({server: ranks}), AGAIN_S
                )

    def _note(self, server: str, reason: str) -> None:
        with self._changed:
            news = self._reasons.get(server) != reason
            self._reasons[server] = reason
        if news:
            ranks = list(self._config.remote_ranks[server])
            logger.info("waits for ranks %s of %s: %s", ranks, server, reason)

    # -- the ranks come

    def _listen(self) -> None:
        self._listener.settimeout(AGAIN_S / 4)
        while not self._over:
            try:
                sock = self._listener.accept()[0]
            except TimeoutError:
                continue
            except OSError:
                return
            threading.Thread(target=self._admit, args=(sock,), name="rank-gate", daemon=True).start()

    def _admit(self, sock: socket.socket) -> None:
        control = Control(sock)
        try:
            welcome(control, self._secret, time.monotonic() + GREET_S)
            link = Link.over(control, self._config.rank_timeout_s)
            hello = msgpack.unpackb(link.receive(GREET_S))
        except (TransferError, EOFError, TimeoutError, ValueError) as error:
            logger.warning("a caller at the port for ranks was sent away: %s", error)
            control.close()
            return
        rank, kind = hello.get("rank"), hello.get("link")
        with self._changed:
            expected = hello.get("visit") == self._visit and rank in self._links and kind in LINKS
            if not expected or self._over:
                link.close()
                return
            earlier = self._links[rank].get(kind)
            self._links[rank][kind] = link
            self._changed.notify_all()
        if earlier is not None:  # of a process that its host has replaced
            earlier.close()


def ask_server(server: str, model: str, message: bytes) -> bytes:
    """One call of a model at a gRPC address. Raises `ServingError` (UNAVAILABLE)."""
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.utils import InferenceServerException

    from distserve.serving.access import Access

    access = Access.given(os.environ)
    tensor = triton.InferInput(STAGE_INPUTS[0].name, [1], "BYTES")
    signed = message if access is None else access.sign(message)
    tensor.set_data_from_numpy(np.array([signed], dtype=np.object_))
    outputs = [triton.InferRequestedOutput(STAGE_OUTPUTS[0].name)]
    try:
        with triton.InferenceServerClient(server) as client:
            result = client.infer(model, [tensor], outputs=outputs, client_timeout=CALL_S)
    except InferenceServerException as error:
        raise ServingError("UNAVAILABLE", error.message() or str(error)) from None
    return bytes(result.as_numpy(STAGE_OUTPUTS[0].name).flat[0])


def come_to(leader: str, visit: str, rank: int, secret: bytes | None, send_timeout_s: float) -> Links:
    """A rank's end: its connections to rank 0 at `leader` (host:port). Raises `TransferError`, `OSError`."""
    host, port = split_address(leader)
    deadline = time.monotonic() + GREET_S
    links = {}
    for kind in LINKS:
        link = Link.over(connect(host, port, secret, deadline), send_timeout_s)
        link.send(msgpack.packb({"visit": visit, "rank": rank, "link": kind}))
        links[kind] = link
    return links
