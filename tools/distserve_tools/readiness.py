"""Whether a server can take requests: the orchestrator's `status`, which also starts its poll loops."""

from __future__ import annotations

import time
from typing import Any

from distserve_tools.client import Client, RequestError

_PAUSE_S = 0.2
_PROBE = (0, 1, 2, 3)  # token ids that every vocabulary has


class NotServingError(RuntimeError):
    """Instances are missing or do not fit together; the message has a line per instance."""


def wait_until_serving(client: Client, timeout_s: float) -> dict[str, Any]:
    """Asks until every instance is usable; returns the orchestrator's `status`.

    Raises `NotServingError` with the reason that each unusable instance gives. If instances do not fit
    together, which no waiting mends, as soon as all have been asked: then it is known what they have to fit.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        status: dict[str, Any] = {}
        try:
            status = client.control("status", timeout_s=max(1.0, min(10.0, deadline - time.monotonic())))
            problems = [_problem(entry) for entry in status["instances"] if not entry["usable"]]
            if not problems:
                return status
        except RequestError as error:
            problems = [f"orchestrator: {error}"]
        entries = status.get("instances", ())
        misfits = any(entry["misfit"] for entry in entries)
        if (misfits and all(map(_asked, entries))) or time.monotonic() > deadline:
            raise NotServingError("\n".join(["not every instance can be used:", *problems]))
        time.sleep(_PAUSE_S)


def probe(client: Client, timeout_s: float = 60.0) -> None:
    """Sends one short request through prefill, transfer and decode, before any client's.

    It pays for what is made at first use (buffers, the connection between two instances), and finds
    instances that do not fit together when they meet. An instance that is lost just then comes back: the
    request is sent again until the time is over. Raises `NotServingError`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = max(1.0, deadline - time.monotonic())
        try:
            client.complete(_PROBE, left_s, max_tokens=2, temperature=0.0, ignore_eos=True)
            return
        except RequestError as error:
            if error.code != "UNAVAILABLE" or time.monotonic() + _PAUSE_S > deadline:
                raise NotServingError(f"a first request failed: {error}") from None
        time.sleep(_PAUSE_S)


def _asked(entry: dict[str, Any]) -> bool:
    return bool(entry["phase"] != "connecting")


def _problem(entry: dict[str, Any]) -> str:
    return f"  {entry['instance']} ({entry['role']}): {entry.get('reason') or entry.get('phase')}"
