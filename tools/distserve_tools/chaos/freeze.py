"""A fault that comes while its part has requests, however fast they are."""

from __future__ import annotations

import signal
import time

from distserve_tools.chaos.deployment import send_signal
from distserve_tools.client import Client
from distserve_tools.processes import ProcessId

_UNDER_WAY_S = 0.2  # what was sent before the signal has arrived by then


def requests_at(client: Client, model: str) -> int:
    """Requests that the orchestrator has at an instance; of another name: that it has at all."""
    status = client.control("status")
    at = {entry["instance"]: int(entry["requests"]) for entry in status["instances"]}
    return at.get(model, int(status["requests"]))


def wait_for_work(client: Client, model: str, timeout_s: float = 10.0) -> bool:
    """Whether it has requests before the time is over."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if requests_at(client, model):
            return True
    return False


def freeze_at_work(client: Client, victim: ProcessId, instance: str, timeout_s: float = 10.0) -> bool:
    """SIGSTOP of a process of an instance that has requests, and keeps them: it can finish none any more.

    Between a look and a signal a fast instance may have given all that it had. False: time is over, and the
    process runs on.
    """
    end = time.monotonic() + timeout_s
    while wait_for_work(client, instance, end - time.monotonic()):
        send_signal(victim, signal.SIGSTOP)
        time.sleep(_UNDER_WAY_S)
        if requests_at(client, instance):
            return True
        send_signal(victim, signal.SIGCONT)
    return False
