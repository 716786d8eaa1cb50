"""Prometheus metrics of the orchestrator, in the families of whoever shows them (Triton's /metrics)."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from distserve.serving.fleet import Fleet
from distserve.serving.metric_families import FAMILIES, Kind
from distserve.serving.router import Router
from distserve.serving.schema import ServingError
from distserve.serving.session import Outcome, Session

_LOG = logging.getLogger(__name__)
_Key = tuple[str, tuple[tuple[str, str], ...]]  # name and labels

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0]
_HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    # key of StageTimes.summary: metric, and which of the request's instances it is told apart by
    "ttft_s": ("distserve_ttft_seconds", "prefill"),
    "tpot_s": ("distserve_tpot_seconds", "decode"),
    "e2e_s": ("distserve_e2e_seconds", ""),
    "prefill_queue_s": ("distserve_prefill_queue_seconds", "prefill"),
    "prefill_s": ("distserve_prefill_seconds", "prefill"),
    "decode_queue_s": ("distserve_decode_queue_seconds", "decode"),
    "transfer_s": ("distserve_transfer_seconds", "decode"),
    "decode_s": ("distserve_decode_seconds", "decode"),
}
_INSTANCE_GAUGES: Mapping[str, str] = {
    # key of Fleet.describe: metric
    "usable": "distserve_instance_usable",
    "blocks_total": "distserve_kv_blocks",
    "blocks_free": "distserve_kv_blocks_free",
    "queued": "distserve_instance_queued",
    "queued_tokens": "distserve_instance_queued_tokens",
    "running": "distserve_instance_running",
    "leases": "distserve_leases",
    "transfers_pending": "distserve_transfers_pending",
    "hung_calls": "distserve_hung_calls",
    "rss_bytes": "distserve_engine_resident_bytes",
    "step_age_s": "distserve_engine_step_age_seconds",
}
_ENGINE_TOTALS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    # key of Fleet.describe, counted since the engine's start: metric and labels beside the instance's
    "preemptions": ("distserve_preemptions_total", {}),
    "steps": ("distserve_engine_steps_total", {}),
    "busy_s": ("distserve_engine_busy_seconds_total", {}),
    "prompt_tokens": ("distserve_engine_prompt_tokens_total", {}),
    "output_tokens": ("distserve_engine_output_tokens_total", {}),
    "transfers": ("distserve_transfers_total", {"outcome": "ok"}),
    "transfers_failed": ("distserve_transfers_total", {"outcome": "failed"}),
    "transfers_refused": ("distserve_transfers_total", {"outcome": "refused"}),
    "transfers_cancelled": ("distserve_transfers_total", {"outcome": "cancelled"}),
    "transfer_bytes": ("distserve_transfer_bytes_total", {}),
    "transfer_wait_s": ("distserve_transfer_seconds_total", {"part": "wait"}),
    "transfer_wire_s": ("distserve_transfer_seconds_total", {"part": "wire"}),
    "leases_confirmed": ("distserve_leases_ended_total", {"outcome": "confirmed"}),
    "leases_failed": ("distserve_leases_ended_total", {"outcome": "failed"}),
    "leases_expired": ("distserve_leases_ended_total", {"outcome": "expired"}),
    "leases_released": ("distserve_leases_ended_total", {"outcome": "released"}),
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
        self._totals: dict[_Key, tuple[object, float]] = {}  # of what period, and how much
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
        self._count("distserve_requests_total", {"outcome": "refused", "code": error.code})

    def recovered(self, error: ServingError) -> None:
        """A request is continued on another instance."""
        self._count("distserve_recoveries_total", {"code": error.code})

    def ended(
        self, outcome: Outcome, error: ServingError | None, times: Mapping[str, float], session: Session
    ) -> None:
        """An admitted request has got its final response."""
        code = error.code if error is not None else "OK"
        self._count("distserve_requests_total", {"outcome": outcome, "code": code})
        self._count("distserve_prompt_tokens_total", {}, len(session.prompt))
        self._count("distserve_output_tokens_total", {}, len(session.output))
        if error is not None:
            return
        prefill = session.instances.get("prefill", "")
        instances = {"prefill": prefill, "decode": session.instances.get("decode", prefill)}
        for key, (name, role) in _HISTOGRAMS.items():
            if key == "tpot_s" and len(session.output) < 2:
                continue
            self._later(name, {"instance": instances[role]} if role else {}, "observe", times[key])

    def objectives(self, ttft: bool, tpot: bool) -> None:
        """A request with objectives is over, and has met them or not."""
        for name, met in (("ttft", ttft), ("tpot", tpot), ("both", ttft and tpot)):
            self._count("distserve_slo_requests_total", {"objective": name, "met": str(met).lower()})

    def state(self, fleet: Fleet, router: Router, requests: int, attainment: Mapping[str, float]) -> None:
        """What is so now. `attainment`: `Attainment.summary`."""
        self._show("distserve_ready", {}, float(fleet.ready))
        self._show("distserve_requests", {}, float(requests))
        self._show("distserve_queue_depth", {}, float(len(router)))
        self._show("distserve_queue_tokens", {}, float(router.waiting_tokens))
        self._show("distserve_handoffs", {}, float(router.handoffs))
        self._show("distserve_slo_window_requests", {}, attainment["requests"])
        for objective in ("ttft", "tpot", "both"):
            self._show("distserve_slo_attainment", {"objective": objective}, attainment[objective])
        for entry in fleet.stats():
            self._show_instance(entry)

    def dropped(self, lines: int) -> None:
        """Of the request log, since the start."""
        self._total("distserve_request_log_dropped_total", {}, "", lines)

    def server_restarts(self, count: int) -> None:
        """Of the whole server, since its launcher has been running."""
        self._total("distserve_server_restarts_total", {}, "", count)

    def _show_instance(self, entry: Mapping[str, Any]) -> None:
        labels = {"instance": str(entry["instance"]), "role": str(entry["role"])}
        for key, name in _INSTANCE_GAUGES.items():
            if entry.get(key) is not None:
                self._show(name, labels, float(entry[key]))
        self._total("distserve_engine_restarts_total", labels, "", entry["restarts"])
        for code, count in entry["errors"].items():
            self._total("distserve_instance_errors_total", {**labels, "code": code}, "", count)
        for key, (name, more) in _ENGINE_TOTALS.items():
            if entry.get(key) is not None:
                self._total(name, {**labels, **more}, entry["epoch"], float(entry[key]))

    def _show(self, name: str, labels: Mapping[str, str], value: float) -> None:
        key = (name, tuple(sorted(labels.items())))
        if self._shown.get(key) != value:
            self._shown[key] = value
            self._later(name, labels, "set", value)

    def _total(self, name: str, labels: Mapping[str, str], period: object, value: float) -> None:
        """A counter that somebody else keeps, from zero in each `period` (an engine's life)."""
        key = (name, tuple(sorted(labels.items())))
        known_period, known = self._totals.get(key, (period, 0.0))
        more = value - (known if known_period == period else 0.0)
        if more > 0 or key not in self._totals:
            self._totals[key] = period, value
            self._count(name, labels, max(more, 0.0))

    def _count(self, name: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        self._later(name, labels, "increment", value)

    def _later(self, name: str, labels: Mapping[str, str], method: str, value: float) -> None:
        def update() -> None:
            key = (name, tuple(sorted(labels.items())))
            metric = self._known.get(key)
            if metric is None:
                family = FAMILIES[name]
                buckets = _SECONDS if family.kind == "HISTOGRAM" else []
                metric = self._backend.metric(name, family.description, family.kind, labels, buckets)
                self._known[key] = metric
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
