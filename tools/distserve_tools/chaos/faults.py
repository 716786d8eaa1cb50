"""Scenarios in which a part of the deployment dies or falls silent under load."""

from __future__ import annotations

import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Literal

from distserve_tools.chaos.deployment import Deployment, send_signal
from distserve_tools.chaos.freeze import freeze_at_work, wait_for_work
from distserve_tools.chaos.invariants import Recovery, epochs, recover, resident_mb, settle
from distserve_tools.chaos.load import Expectation, Streams, jobs, references, streaming
from distserve_tools.chaos.outcome import Outcome
from distserve_tools.processes import ProcessId

STREAMS = 20
ROUNDS = 2  # requests of each client, so that some come while the part is gone
OUTPUT_TOKENS = 300  # long enough to be under way when the fault comes
_FAULT_WINDOW_S = 0.1

Part = Literal["engine", "stub", "rank"]

ENDED_BY_CLIENT = Expectation(
    ("UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"), within_s=21.0, client_timeout_s=20.0
)
"""A killed orchestrator stub takes the knowledge of its streams along: Triton never ends them, so the
client's own deadline does. INTERNAL: Triton's own words for a stub that is not healthy."""


def kill(
    name: str,
    deployment: Deployment,
    seed: int,
    model: str,
    part: Part,
    expectation: Expectation | None = None,
) -> Outcome:
    """kill -9 of one process of a Triton model (an instance or the orchestrator), at a random moment at which
    it has requests. Recovery includes that its successor is there.
    """
    load = _Load(deployment, seed)
    victim, epoch = find(deployment, model, part), epochs(deployment.status())[model]
    with ThreadPoolExecutor(1) as watch:
        with load.streaming(expectation) as streams:
            load.strike_at_work(model, victim)
            streams.fault_s = time.monotonic()
            send_signal(victim, signal.SIGKILL)
            recovery = watch.submit(load.recovered, streams.fault_s, (model, epoch))
        return load.outcome(name, streams, recovery.result())


def kill_server(name: str, deployment: Deployment, seed: int) -> Outcome:
    """kill -9 of tritonserver, with all its streams; the supervisor starts it again at the same addresses."""
    load = _Load(deployment, seed)
    victim, epoch = ProcessId.of(deployment.server.pid), epochs(deployment.status())["orchestrator"]
    with ThreadPoolExecutor(1) as watch:
        with load.streaming(Expectation()) as streams:
            load.strike_at_work("orchestrator", victim)
            streams.fault_s = time.monotonic()
            send_signal(victim, signal.SIGKILL)
            recovery = watch.submit(load.recovered, streams.fault_s, ("orchestrator", epoch))
        return load.outcome(name, streams, recovery.result())


def stop(name: str, deployment: Deployment, seed: int, instance: str) -> Outcome:
    """SIGSTOP of an engine: alive but silent until all streams have ended. Recovery: from its SIGCONT."""
    load = _Load(deployment, seed)
    victim = find(deployment, instance, "engine")
    try:
        with load.streaming(None) as streams:
            load.strike_at_work(instance, victim)
            streams.fault_s = time.monotonic()
            send_signal(victim, signal.SIGSTOP)
    finally:
        send_signal(victim, signal.SIGCONT)
    return load.outcome(name, streams, load.recovered(time.monotonic()))


def find(deployment: Deployment, model: str, part: Part) -> ProcessId:
    """Raises `LookupError`."""
    return {"engine": deployment.engine, "stub": deployment.stub, "rank": deployment.rank}[part](model)


class _Load:
    """The streams of one scenario: their references are computed when it is made."""

    def __init__(self, deployment: Deployment, seed: int) -> None:
        self._deployment, self._seed, self._rng = deployment, seed, random.Random(seed)
        self._jobs = jobs(STREAMS * ROUNDS, seed, OUTPUT_TOKENS)
        self._expected = references(deployment, self._jobs)
        self._before = resident_mb(deployment)

    def streaming(self, expectation: Expectation | None) -> AbstractContextManager[Streams]:
        return streaming(self._deployment, self._jobs, self._expected, STREAMS, expectation)

    def strike_at_work(self, model: str, victim: ProcessId) -> None:
        """A random moment, and on until the model has requests. The process of an instance is stopped then;
        an orchestrator's, which could not be asked any more, is not.
        """
        time.sleep(self._rng.uniform(0.0, _FAULT_WINDOW_S))
        client = self._deployment.client
        if model == "orchestrator":
            wait_for_work(client, model)
        else:
            freeze_at_work(client, victim, model)

    def recovered(self, since_s: float, replaced: tuple[str, int] | None = None) -> Recovery:
        probe = self._jobs[0]
        return recover(self._deployment, probe, self._expected[probe], since_s, replaced)

    def outcome(self, name: str, streams: Streams, recovery: Recovery) -> Outcome:
        errors = [result.error_after_s for result in streams.results if result.fate == "refused"]
        after = resident_mb(self._deployment)
        grown = max((after[n] - mb for n, mb in self._before.items() if n in after), default=0.0)
        details = {"slowest_error_s": round(max(errors, default=0.0), 2), "most_grown_mb": round(grown, 1)}
        aftermath = settle(self._deployment, recovery)
        return Outcome(
            name, self._seed, streams.counts, aftermath, streams.why("lost"), details, streams.why("refused")
        )
