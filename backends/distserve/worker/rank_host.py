"""Ranks of an instance that another node serves, as this node keeps them: a process each, started when rank 0
asks for them and ended when it asks for new ones.

What lives and dies with rank 0 is the business of the ranks themselves, which are connected to it.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from distserve.core.rank_host_config import RankHostConfig
from distserve.serving.schema import ServingError, decode, error_reply, ok_reply
from distserve.transfer.handle import split_address
from distserve.worker.rank_processes import rank_command

logger = logging.getLogger(__name__)

CHECK_S = 0.5
END_S = 10.0


@dataclass(frozen=True)
class Visit:
    """One start of rank 0, which listens at `leader` (host:port)."""

    leader: str
    id: str


class RankHost:
    """Answers the calls `join` and `status` (see `distserve.worker.remote_ranks`)."""

    def __init__(self, config: RankHostConfig) -> None:
        self._config = config
        self._changed = threading.Condition()
        self._wanted: Visit | None = None
        self._stopping = False
        self._asked = False
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        # a rank dies with the thread that has started it, so there is one for all
        self._thread = threading.Thread(target=self._run, name="rank-host", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def call(self, payload: bytes, reply: Callable[[bytes], None]) -> None:
        """`reply` gets the answer. From any thread."""
        try:
            message = decode(payload)
            if message.get("op") == "join":
                self._join(message)
            elif message.get("op") != "status":
                raise ServingError(
                    "INVALID_ARGUMENT", f"op={message.get('op')!r}: must be 'join' or 'status'"
                )
            reply(ok_reply(**self._status()))
        except ServingError as error:
            reply(error_reply(error))

    def stop(self) -> None:
        """Ends the ranks."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(END_S)

    def _status(self) -> dict[str, Any]:
        with self._changed:
            pids = {str(rank): process.pid for rank, process in self._processes.items()}
            leader = self._wanted.leader if self._wanted is not None else None
        return {"instance": self._config.instance, "pids": pids, "leader": leader}

    def _join(self, message: dict[str, Any]) -> None:
        for field, ours in (("instance", self._config.instance), ("ranks", list(self._config.ranks))):
            if message.get(field) != ours:
                raise ServingError(
                    "INVALID_ARGUMENT", f"{field}={message.get(field)!r}: {ours!r} is hosted here"
                )
        leader, visit = message.get("leader"), message.get("visit")
        try:
            split_address(str(leader))
        except ValueError as error:
            raise ServingError("INVALID_ARGUMENT", f"leader: {error}") from None
        with self._changed:
            self._wanted = Visit(str(leader), str(visit))
            self._asked = True
            self._changed.notify()

    def _run(self) -> None:
        present: Visit | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopping or self._asked, CHECK_S)
                stopping, wanted, asked = self._stopping, self._wanted, self._asked
                self._asked = False
            self._reap()
            if stopping or wanted != present:
                self._end()
            if stopping:
                return
            if wanted is not None and asked:
                self._begin(wanted)
            present = wanted

    def _begin(self, visit: Visit) -> None:
        """Starts the ranks that do not run."""
        for rank in self._config.ranks:
            if rank in self._processes:
                continue
            arguments = ["--leader", visit.leader, "--visit", visit.id, "--rank", str(rank)]
            if self._config.transfer_secret_file is not None:
                arguments += ["--secret-file", self._config.transfer_secret_file]
            process = rank_command(arguments)
            with self._changed:
                self._processes[rank] = process
            logger.info("rank %d is started for %s, process %d", rank, visit.leader, process.pid)

    def _reap(self) -> None:
        for rank, process in list(self._processes.items()):
            code = process.poll()
            if code is not None:
                how = f"with signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
                logger.log(logging.WARNING if code else logging.INFO, "rank %d has ended %s", rank, how)
                with self._changed:
                    del self._processes[rank]

    def _end(self) -> None:
        """Kills what runs: a rank keeps nothing, and its rank 0 has gone or is about to."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        with self._changed:
            self._processes.clear()
