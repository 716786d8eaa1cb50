"""What must be true after every scenario: nothing is left behind, and the server still answers rightly."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distserve_tools.chaos.deployment import Deployment
from distserve_tools.chaos.load import Job, difference
from distserve_tools.client import RequestError

MAX_HUNG_CALLS = 16
"""Per instance: Triton 24.10 never returns a call of a model whose stub process dies."""

_PAUSE_S = 0.05
_AT_ORCHESTRATOR = ("requests", "queued", "queued_tokens", "handoffs")
_AT_INSTANCE = (
    "queued",
    "queued_tokens",
    "running",
    "leases",
    "transfers_pending",
    "requests",
    "leases_held",
)


@dataclass(frozen=True)
class Recovery:
    """From the fault until every instance was usable and a probe got the right text; or what was wrong."""

    seconds: float
    problem: str = ""


@dataclass(frozen=True)
class Aftermath:
    """`left`: what was not as it must be; empty when all is well."""

    recovery_s: float
    hung_calls: int
    left: tuple[str, ...]


def recover(
    deployment: Deployment,
    probe: Job,
    expected: tuple[int, ...],
    since_s: float,
    replaced: tuple[str, int] | None = None,
    timeout_s: float = 60.0,
) -> Recovery:
    """Waits until every instance is usable and a probe gets the right text.

    `replaced`: an instance (or "orchestrator") and its epoch; another one must be there by then.
    """
    end = time.monotonic() + timeout_s
    while True:
        problem = _unusable(deployment, replaced) or _probe(deployment, probe, expected)
        now = time.monotonic()
        if not problem or problem.startswith("wrong text") or now > end:
            return Recovery(now - since_s, problem)
        time.sleep(_PAUSE_S)


def settle(deployment: Deployment, recovery: Recovery, timeout_s: float = 30.0) -> Aftermath:
    """Waits, after the last request has ended, until nothing is left of them."""
    left = (recovery.problem,) if recovery.problem else _wait_idle(deployment, time.monotonic() + timeout_s)
    return Aftermath(recovery.seconds, hung_calls(deployment), left)


def hung_calls(deployment: Deployment) -> int:
    """Calls that Triton will never answer, as the orchestrator counts them."""
    try:
        status = deployment.status()
    except RequestError:
        return 0
    return sum(int(entry.get("hung_calls") or 0) for entry in status["instances"])


def _probe(deployment: Deployment, probe: Job, expected: tuple[int, ...]) -> str:
    try:
        answer = deployment.client.complete(probe.prompt, 5.0, **probe.sampling)
    except RequestError as error:
        return f"probe: {error}"
    if answer.token_ids != expected:
        return f"wrong text of the probe: {difference(answer.token_ids, expected)}"
    return ""


def epochs(status: Mapping[str, Any]) -> dict[str, int]:
    """The epoch of the orchestrator and of each instance: another one after every start."""
    return {"orchestrator": status["epoch"], **{e["instance"]: e["epoch"] for e in status["instances"]}}


def _unusable(deployment: Deployment, replaced: tuple[str, int] | None) -> str:
    try:
        status = deployment.status()
    except RequestError as error:
        return f"status: {error}"
    if replaced is not None and epochs(status).get(replaced[0]) == replaced[1]:
        return f"{replaced[0]} has not been started again"
    down = [entry["instance"] for entry in status["instances"] if not entry["usable"]]
    if set(deployment.boot_blocks) != {entry["instance"] for entry in status["instances"]}:
        return "instances are missing"
    return f"not usable: {', '.join(down)}" if down or not status["ready"] else ""


def _wait_idle(deployment: Deployment, end: float) -> tuple[str, ...]:
    while True:
        try:
            left = left_over(deployment.status(), deployment.boot_blocks, deployment.boot_tasks)
        except RequestError as error:
            left = [f"status: {error}"]
        if not left or time.monotonic() > end:
            return tuple(left)
        time.sleep(_PAUSE_S)


def left_over(status: Mapping[str, Any], boot: Mapping[str, int], tasks: int) -> list[str]:
    """Everything in an orchestrator's status that an idle, healthy server does not have."""
    left = [f"{key}={status[key]}" for key in _AT_ORCHESTRATOR if status[key]]
    if status["tasks"] > tasks:
        left.append(f"tasks={status['tasks']}, {tasks} at the start")
    for entry in status["instances"]:
        name = entry["instance"]
        if entry["blocks_free"] != boot.get(name):
            left.append(f"{name}: {entry['blocks_free']} blocks free, {boot.get(name)} at the start")
        for key in _AT_INSTANCE:
            if entry[key]:
                left.append(f"{name}: {key}={entry[key]}")
        if (entry.get("hung_calls") or 0) > MAX_HUNG_CALLS:
            left.append(f"{name}: {entry['hung_calls']} hung calls, at most {MAX_HUNG_CALLS}")
    return left


def resident_mb(deployment: Deployment) -> dict[str, float]:
    """Resident memory of the server, its stubs and its engines, by name."""
    page_mb = resource.getpagesize() / 1e6
    found = {}
    for name, process in deployment.processes().items():
        try:
            found[name] = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * page_mb
        except OSError:
            continue  # it has just ended
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Least squares slope of (x, y) pairs; 0 for fewer than two different x."""
    if not points:
        return 0.0
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
