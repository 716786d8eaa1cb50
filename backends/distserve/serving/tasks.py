"""Ending asyncio tasks for sure."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.1


async def end_task(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task until it has ended.

    Once is not enough before Python 3.12: `asyncio.wait_for` loses a cancellation that comes
    together with the result it waits for.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=_AGAIN_S)
