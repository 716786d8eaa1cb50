"""Prometheus metrics of the orchestrator, in the families of whoever shows them (Triton's /metrics)."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

from distserve.serving.fleet import Fleet
from distserve.serving.router import Router
from distserve.serving.schema import ServingError
from distserve.serving.session import Outcome, Session

_LOG = logging.getLogger(__name__)
Kind = Literal["COUNTER", "GAUGE", "HISTOGRAM"]
_Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    # key of StageTimes.summary: metric name, description
    "ttft_s": ("distserve_ttft_seconds", "Arrival to first token"),
    "tpot_s": ("distserve_tpot_seconds", "Mean time per output token after the first"),
    "e2e_s": ("distserve_e2e_seconds", "Arrival to last token"),
    "prefill_queue_s": ("distserve_prefill_queue_seconds", "Stage: waiting for prefill"),
    "prefill_s": ("distserve_prefill_seconds", "Stage: prefill"),
    "decode_queue_s": ("distserve_decode_queue_seconds", "Stage: waiting for admission to decode"),
    "transfer_s": ("distserve_transfer_seconds", "Stage: KV transfer"),
    "decode_s": ("distserve_decode_seconds", "Stage: decode"),
}
_INSTANCE_GAUGES: Mapping[str, tuple[str, str]] = {
    # key of Fleet.describe: metric name, description
    "usable": ("distserve_instance_usable", "1: up and taking requests"),
    "blocks_total": ("distserve_kv_blocks", "KV blocks in the pool"),
    "blocks_free": ("distserve_kv_blocks_free", "KV blocks free"),
    "queued": ("distserve_instance_queued", "Requests queued at the instance"),
    "queued_tokens": ("distserve_instance_queued_tokens", "Tokens of prefill work queued at the instance"),
    "running": ("distserve_instance_running", "Requests running at the instance"),
    "leases": ("distserve_leases", "KV leases held for decode"),
    "transfers_pending": ("distserve_transfers_pending", "KV transfers in progress"),
    "preemptions": ("distserve_preemptions", "Preemptions since the engine's start"),
    "restarts": ("distserve_engine_restarts", "Engine restarts seen by this orchestrator"),
}


class Metric(Protocol):
    def increment(self, value: float) -> None: ...

    def set(self, value: float) -> None: ...

    def observe(self, value: float) -> None: ...


class MetricBackend(Protocol):
    """Makes metrics; the same (name, labels) is asked for once."""

    def metric(
        self, name: str, description: str, kind: Kind, labels: Mapping[str, str], buckets: list[float]
    ) -> Metric: ...


class Metrics:
    """Counts ends, observes times, shows the state.

    The back end's calls may block (Triton's are a round trip to the server), so a thread of its own makes
    them; when it can't keep up, the oldest updates are dropped rather than memory filled.
    """

    def __init__(self, backend: MetricBackend, max_pending: int = 65536) -> None:
        self._backend = backend
        self._known: dict[_Key, Metric] = {}
        self._shown: dict[_Key, float] = {}
        self._updates: deque[Callable[[], None]] = deque(maxlen=max_pending)
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 2.0) -> None:
        """Make the pending updates and end the thread."""
        self._wake.put(False)
        self._thread.join(timeout_s)

    def refused(self, error: ServingError) -> None:
        """A request was not admitted."""
        self._count("distserve_requests_total", _REQUESTS, {"outcome": "refused", "code": error.code})

    def recovered(self) -> None:
        """A request is continued on another instance."""
        self._count("distserve_recoveries_total", "Continuations after the loss of an instance", {})

    def ended(
        self, outcome: Outcome, error: ServingError | None, times: Mapping[str, float], session: Session
    ) -> None:
        """An admitted request has got its final response."""
        code = error.code if error is not None else "OK"
        self._count("distserve_requests_total", _REQUESTS, {"outcome": outcome, "code": code})
        self._count("distserve_prompt_tokens_total", "Prompt tokens", {}, len(session.prompt))
        self._count("distserve_output_tokens_total", "Output tokens", {}, len(session.output))
        if error is not None:
            return
        for key, (name, description) in _HISTOGRAMS.items():
            if key == "tpot_s" and len(session.output) < 2:
                continue
            self._later(name, description, "HISTOGRAM", {}, "observe", times[key])

    def state(self, fleet: Fleet, router: Router, requests: int) -> None:
        """Gauges of now."""
        gauges = {
            "distserve_ready": ("1: a request would find the instances it needs", float(fleet.ready)),
            "distserve_requests": ("Requests between arrival and final response", float(requests)),
            "distserve_queue_depth": ("Requests waiting for a prefill instance", float(len(router))),
            "distserve_handoffs": ("Requests waiting for a decode instance", float(router.handoffs)),
        }
        for name, (description, value) in gauges.items():
            self._show(name, description, {}, value)
        for entry in fleet.describe():
            labels = {"instance": str(entry["instance"]), "role": str(entry["role"])}
            for key, (name, description) in _INSTANCE_GAUGES.items():
                if entry.get(key) is not None:
                    self._show(name, description, labels, float(entry[key]))

    def _show(self, name: str, description: str, labels: Mapping[str, str], value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        if self._shown.get(key) != value:
            self._shown[key] = value
            self._later(name, description, "GAUGE", labels, "set", value)

    def _count(self, name: str, description: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        self._later(name, description, "COUNTER", labels, "increment", value)

    def _later(
        self, name: str, description: str, kind: Kind, labels: Mapping[str, str], method: str, value: float
    ) -> None:
        def update() -> None:
            key = (name, tuple(sorted(labels.items())))
            metric = self._known.get(key)
            if metric is None:
                buckets = _SECONDS if kind == "HISTOGRAM" else []
                metric = self._known[key] = self._backend.metric(name, description, kind, labels, buckets)
            call: Any = getattr(metric, method)
            call(value)

        self._updates.append(update)
        if len(self._updates) == 1:
            self._wake.put(True)

    def _run(self) -> None:
        going = True
        while going:
            going = self._wake.get()
            while self._updates:
                try:
                    self._updates.popleft()()
                except Exception:  # of the back end: metrics must not end because one of them fails
                    _LOG.exception("metric update failed")


_REQUESTS = "Requests by outcome and error code"
