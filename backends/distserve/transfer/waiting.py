"""The host waits for what a device does together with the peer's, and looks after the peer meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

from distserve.transfer.control import Control
from distserve.transfer.errors import peer_gone, timed_out

FIRST_PAUSE_S = 20e-6  # between two looks at an event; doubles up to the longest
LONGEST_PAUSE_S = 1e-3
LOOK_S = 0.01  # between two looks whether the peer still has its end of the control connection


def wait_for_device(done: Callable[[], bool], control: Control, deadline: float) -> None:
    """Until `done()`. Raises `TransferError` at the deadline, or when the peer is gone: what its device was
    to do is then perhaps never done.
    """
    pause, look = FIRST_PAUSE_S, time.monotonic() + LOOK_S
    while not done():
        now = time.monotonic()
        if now >= deadline:
            raise timed_out("message")
        if now >= look:
            if control.gone():
                raise peer_gone("message: the control connection has ended")
            look = now + LOOK_S
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)
