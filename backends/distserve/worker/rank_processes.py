"""The processes of an instance's further ranks, as the leader (the process of rank 0) sees them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgpack

from distserve.core.config import EngineConfig
from distserve.core.parsing import to_mapping
from distserve.serving import die_with_parent
from distserve.worker.link import Link
from distserve.worker.parallel import RankLost
from distserve.worker.wires import RankWires

END_S = 5.0  # from end of file to SIGKILL
PING: bytes = msgpack.packb({"op": "ping"})  # see `transfer.agent`
PONG: bytes = msgpack.packb({"op": "pong"})


@dataclass(slots=True)
class RankProcess:
    """`steps`: the plan and what comes of it, served by the rank's main thread. `side`: everything else,
    served by a thread that no step keeps busy. `process`: of this host; else `server` hosts it.
    """

    rank: int
    process: subprocess.Popen[bytes] | None
    steps: Link
    side: Link
    server: str = ""

    def ending(self) -> str:
        """How it has ended, for an error message; waits a moment for it."""
        if self.process is None:
            return f"of {self.server} is gone"
        try:
            code = self.process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "does not answer"
        how = f"with signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        return f"has ended {how}"


def spawn_rank(config: EngineConfig, rank: int, wires: RankWires | None = None) -> RankProcess:
    """Starts a rank on this host. It is killed with the calling thread, which must live as long as the
    instance.
    """
    steps, far_steps = socket.socketpair()
    side, far_side = socket.socketpair()
    ends = [far_steps.fileno(), far_side.fileno()]
    with far_steps, far_side:
        process = rank_command(["--fd", *map(str, ends)], [*ends, *(wires.fds if wires is not None else [])])
    limit_s = config.rank_timeout_s
    return RankProcess(rank, process, Link(steps, limit_s), Link(side, limit_s))


def rank_command(arguments: Sequence[str], fds: Sequence[int] = ()) -> subprocess.Popen[bytes]:
    """`python -m distserve.worker.rank` with these arguments and descriptors, tied to the calling thread."""
    command = [sys.executable, "-m", "distserve.worker.rank", *arguments]
    guarded = [sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()), *command]
    return subprocess.Popen(guarded, stdin=subprocess.DEVNULL, pass_fds=fds)


def start_rank(
    rank: RankProcess, config: EngineConfig, wires: RankWires | None = None, store: str | None = None
) -> None:
    """Says what it is to load. `wires`, `store`: how it is to connect; neither: over its side link.

    Raises `OSError` if it is gone.
    """
    start = {
        "config": json.dumps(to_mapping(config)),
        "rank": rank.rank,
        "wires": None if wires is None else wires.to_wire(),
        "store": store,
    }
    rank.steps.send(msgpack.packb(start))


class RankWatch:
    """A thread that reads what the ranks send, and notices when one ends or falls silent.

    `on_step` and `on_side` get (rank, frame) in that thread; `on_lost` gets the reason, once, and is the last
    call. A rank's agent is asked for a sign of life four times within `timeout_s`.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        timeout_s: float,
        on_step: Callable[[int, bytes], None],
        on_side: Callable[[int, bytes], None],
        on_lost: Callable[[RankLost], None],
    ) -> None:
        self._ranks = ranks
        self._timeout_s = timeout_s
        self._on_step, self._on_side, self._on_lost = on_step, on_side, on_lost
        self._heard_s = dict.fromkeys((rank.rank for rank in ranks), time.monotonic())
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends all ranks: end of file first, SIGKILL when that takes too long."""
        self._closing = True
        for rank in self._ranks:
            rank.steps.end()
            rank.side.end()
        self._thread.join(END_S)
        end_ranks(self._ranks)

    def _run(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                for rank in self._ranks:
                    selector.register(rank.steps, selectors.EVENT_READ, (rank, rank.steps, self._on_step))
                    selector.register(rank.side, selectors.EVENT_READ, (rank, rank.side, self._heard))
                asked_s = time.monotonic()
                while True:
                    for key, _ in selector.select(self._timeout_s / 4):  # `close` ends this wait
                        self._read(*key.data)
                    if time.monotonic() - asked_s >= self._timeout_s / 4:
                        asked_s = time.monotonic()
                        self._ask(asked_s)
        except RankLost as error:
            if not self._closing:
                self._on_lost(error)

    def _read(self, rank: RankProcess, link: Link, take: Callable[[int, bytes], None]) -> None:
        try:
            frames = link.read()
        except EOFError:
            if self._closing:
                raise RankLost("closed") from None
            with contextlib.suppress(EOFError, TimeoutError):  # it may have said why
                self._on_step(rank.rank, rank.steps.receive(0.0))
            raise RankLost(f"rank {rank.rank} {rank.ending()}") from None
        for frame in frames:
            take(rank.rank, frame)

    def _heard(self, rank: int, frame: bytes) -> None:
        self._heard_s[rank] = time.monotonic()
        if frame != PONG:
            self._on_side(rank, frame)

    def _ask(self, now: float) -> None:
        for rank in self._ranks:
            if now - self._heard_s[rank.rank] > self._timeout_s:
                raise RankLost(f"rank {rank.rank} has given no sign of life for {self._timeout_s:g} s")
            try:
                rank.side.send(PING)
            except OSError as error:
                raise RankLost(f"rank {rank.rank} does not read ({error})") from None


def end_ranks(ranks: Sequence[RankProcess]) -> None:
    """Waits for the ranks, whose links have been ended, and closes everything."""
    until = time.monotonic() + END_S
    for rank in ranks:
        rank.steps.end()
        rank.side.end()
    for rank in ranks:
        if rank.process is not None:  # else it ends by itself, or its host ends it
            try:
                rank.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait(END_S)
        rank.steps.close()
        rank.side.close()
