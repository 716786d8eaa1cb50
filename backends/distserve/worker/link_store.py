"""The `torch.distributed` store of an instance over several nodes: its ranks tell one another where they are
over the links that they have to rank 0, whose ends are known to each other.

A store of torch's own would be a port that anybody can write to.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Sequence

import msgpack
import torch.distributed as dist

from distserve.worker.link import Link
from distserve.worker.parallel import RankLost


class NamedStore(dist.Store):  # type: ignore[name-defined,misc]
    """Keys of one process group. Subclasses say where they are."""

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self._name = name

    def part(self, name: str) -> NamedStore:
        """The same store for the group `name`."""
        raise NotImplementedError

    def _set(self, key: str, value: bytes) -> None:
        raise NotImplementedError

    def _get(self, key: str) -> bytes:
        raise NotImplementedError

    def set(self, key: str, value: str | bytes) -> None:
        self._set(f"{self._name}/{key}", value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """Waits for it. Raises `RankLost`."""
        return self._get(f"{self._name}/{key}")

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        for key in keys:
            self.get(key)


class Values:
    """What the ranks have set, in rank 0's process; safe for threads."""

    def __init__(self, timeout_s: float) -> None:
        self._deadline = time.monotonic() + timeout_s
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._lost: str | None = None

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        """Raises `RankLost` once a rank is lost, and at the deadline."""
        with self._changed:
            left = self._deadline - time.monotonic()
            self._changed.wait_for(lambda: key in self._values or self._lost is not None, max(0.0, left))
            if key in self._values:
                return self._values[key]
            raise RankLost(self._lost or f"not all ranks have come to the group (waited for {key!r})")

    def check(self) -> None:
        """Raises `RankLost` if a rank is lost."""
        if self._lost is not None:
            raise RankLost(self._lost)

    def lose(self, why: str) -> None:
        with self._changed:
            self._lost = self._lost or why
            self._changed.notify_all()


class LeaderStore(NamedStore):
    """Rank 0's end: `values` and the threads that serve them to the other ranks."""

    def __init__(self, values: Values, name: str = "") -> None:
        super().__init__(name)
        self._values = values
        self._parts: list[LeaderStore] = []  # NCCL comes back to them with its first operation

    def part(self, name: str) -> LeaderStore:
        self._parts.append(LeaderStore(self._values, name))
        return self._parts[-1]

    def _set(self, key: str, value: bytes) -> None:
        self._values.set(key, value)

    def _get(self, key: str) -> bytes:
        return self._values.get(key)


class RankStore(NamedStore):
    """Another rank's end."""

    def __init__(self, link: Link, timeout_s: float, name: str = "") -> None:
        super().__init__(name)
        self._link = link
        self._timeout_s = timeout_s
        self._parts: list[RankStore] = []

    def part(self, name: str) -> RankStore:
        self._parts.append(RankStore(self._link, self._timeout_s, name))
        return self._parts[-1]

    def close(self) -> None:
        """All groups are made: the link is free for other use."""
        self._call("made")

    def _set(self, key: str, value: bytes) -> None:
        self._call("set", key, value)

    def _get(self, key: str) -> bytes:
        value: bytes = self._call("get", key)
        return value

    def _call(self, *words: str | bytes) -> bytes:
        try:
            self._link.send(msgpack.packb(words))
            reply: bytes = self._link.receive(self._timeout_s)
        except (OSError, EOFError) as error:
            raise RankLost(f"rank 0 is gone ({error})") from None
        return reply


class Serving:
    """Threads that answer the `RankStore`s at the other ends of `links`, by the number of their rank."""

    def __init__(self, values: Values, links: Sequence[tuple[int, Link]], timeout_s: float) -> None:
        self._values = values
        self._timeout_s = timeout_s
        self._threads = [
            threading.Thread(target=self._serve, args=pair, name="rank-store", daemon=True) for pair in links
        ]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Until all ranks have made their groups. Raises `RankLost`."""
        for thread in self._threads:
            thread.join()
        self._values.check()

    def _serve(self, rank: int, link: Link) -> None:
        try:
            while True:
                op, *arguments = msgpack.unpackb(link.receive(self._timeout_s))
                if op == "set":
                    self._values.set(*arguments)
                link.send(self._values.get(*arguments) if op == "get" else b"")
                if op == "made":
                    return
        except (OSError, EOFError, RankLost) as error:
            self._values.lose(f"rank {rank}: {error or type(error).__name__}")
            link.end()  # it may wait for another one
