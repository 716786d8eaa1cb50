"""Which requests are lost with an orchestrator that was started again, and which are not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from distserve_tools.openai_api.errors import ApiError
from distserve_tools.openai_api.restart_watch import RestartWatch


def status(epoch: int, name: str = "orchestrator_0_0") -> Mapping[str, Any]:
    return {"name": name, "epoch": epoch}


async def never() -> Mapping[str, Any]:
    raise ApiError(503, "nobody")


def test_only_what_was_begun_before_the_old_one_was_last_seen_is_lost() -> None:
    async def scenario() -> None:
        watch = RestartWatch(never)
        with watch.request() as old, watch.request() as between:
            seen_s = time.monotonic()
            between.begun_s = seen_s + 1.0
            watch.told(status(1), seen_s)
            watch.told(status(1), seen_s + 0.5)
            assert not old.lost.done()
            watch.told(status(2), seen_s + 2.0)
            assert (old.lost.done(), between.lost.done()) == (True, False)
            with watch.request() as new:
                new.begun_s = seen_s + 3.0
                watch.told(status(2), seen_s + 4.0)
                assert not new.lost.done()
        await watch.close()

    asyncio.run(scenario())


def test_of_several_orchestrators_nothing_is_said() -> None:
    async def scenario() -> None:
        watch = RestartWatch(never)
        with watch.request() as request:
            seen_s = time.monotonic()
            watch.told(status(1), seen_s)
            watch.told(status(2, "orchestrator_0_1"), seen_s)
            watch.told(status(3), seen_s + 1.0)
            assert not request.lost.done()
        await watch.close()

    asyncio.run(scenario())


def test_it_asks_while_requests_are_under_way_and_no_longer() -> None:
    asked: list[float] = []

    async def ask() -> Mapping[str, Any]:
        asked.append(time.monotonic())
        raise ApiError(503, "it is on its way back")

    async def scenario() -> int:
        watch = RestartWatch(ask, interval_s=0.001)
        with watch.request():
            while len(asked) < 3:
                await asyncio.sleep(0.001)
        while watch._task is not None and not watch._task.done():
            await asyncio.sleep(0.001)
        count = len(asked)
        with watch.request():
            while len(asked) == count:
                await asyncio.sleep(0.001)
        await watch.close()
        return count

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) >= 3
