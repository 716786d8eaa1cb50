"""Notices that the orchestrator was started again, so that requests to the one before end at once.

Nobody knows them any more, and Triton 24.10 never ends the requests of a stub that was killed: without this
their clients would wait for their deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from distserve_tools.openai_api.errors import ApiError

_INTERVAL_S = 1.0


@dataclass(eq=False)
class Watched:
    """One request. `lost` is done once it is known that nobody is going to answer."""

    begun_s: float
    lost: asyncio.Future[None]


@dataclass
class RestartWatch:
    """`ask` has `told` called with the orchestrator's status; it is asked as long as requests are under way.

    A request is lost if it was begun before an orchestrator was asked that has been replaced since. Of those
    begun in between nothing is said, and nothing at all where a server has several orchestrators.
    """

    ask: Callable[[], Awaitable[Mapping[str, Any]]]
    interval_s: float = _INTERVAL_S
    _watched: set[Watched] = field(default_factory=set)
    _epochs: dict[str, tuple[int, float]] = field(default_factory=dict)  # by orchestrator: epoch, when asked
    _task: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[Watched]:
        """Watched while the block runs. On the event loop."""
        watched = Watched(time.monotonic(), asyncio.get_running_loop().create_future())
        self._watched.add(watched)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            yield watched
        finally:
            self._watched.discard(watched)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._watched:
            with contextlib.suppress(ApiError):  # it may be on its way back
                await self.ask()
            await asyncio.sleep(self.interval_s)

    def told(self, status: Mapping[str, Any], asked_s: float) -> None:
        """A status that was asked for at that time."""
        name, epoch = str(status["name"]), int(status["epoch"])
        before = self._epochs.get(name)
        self._epochs[name] = epoch, asked_s
        if before is None or before[0] == epoch or len(self._epochs) > 1:
            return
        for watched in self._watched:
            if watched.begun_s < before[1] and not watched.lost.done():
                watched.lost.set_result(None)
