"""What is kept of requests that are over: counts, times, attainment, log lines."""

from __future__ import annotations

import logging
import time
from collections import Counter

from distserve.serving.attainment import Attainment, Objectives
from distserve.serving.client_request import ClientRequest
from distserve.serving.metrics import Metrics
from distserve.serving.orchestrator_config import OrchestratorConfig
from distserve.serving.params import Parameters
from distserve.serving.request_log import RequestLog, log_entry
from distserve.serving.schema import ErrorCode, ServingError
from distserve.serving.session import Outcome, Session

_LOG = logging.getLogger(__name__)
_REFUSALS_S = 5.0  # refusals may come by the thousand: one line for all of so many seconds
_OF_CLIENTS: tuple[ErrorCode, ...] = ("INVALID_ARGUMENT", "CANCELLED")


class Accounts:
    """Told of every end and every refusal.

    Args:
        config: the objectives of requests without their own, and the window of attainment.
        request_log: closed by its maker.
    """

    def __init__(self, config: OrchestratorConfig, metrics: Metrics, request_log: RequestLog | None) -> None:
        self.attainment = Attainment(config.slo_window_s)
        self._objectives = Objectives(config.slo_ttft_s, config.slo_tpot_s)
        self._metrics, self._request_log = metrics, request_log
        self._refusals: Counter[str] = Counter()
        self._last_refusal = ""
        self._told_s = 0.0

    def objectives_of(self, params: Parameters) -> Objectives:
        return Objectives(params.ttft_slo, params.tpot_slo).or_else(self._objectives)

    def refused(self, request: ClientRequest, error: ServingError, arrival_s: float, now: float) -> None:
        """A request that was not admitted."""
        self._metrics.refused(error)
        self._refusals[error.code] += 1
        self._last_refusal = error.message
        if error.code not in _OF_CLIENTS and self.objectives_of(request.params).any:
            self._attained(now, False, False)
        if self._request_log is not None:
            tokens = len(request.ids) if request.ids is not None else 0
            text = f"{error.code}: {error.message}"
            unix_s = time.time() - (now - arrival_s)
            self._request_log.write(log_entry(unix_s, tokens, 0, {}, text, "", request.client_id))

    def recovered(self, session: Session, error: ServingError) -> None:
        """A request that goes on elsewhere."""
        self._metrics.recovered(error)
        _LOG.warning(
            "request continued after %d tokens: %s",
            len(session.output),
            error.message,
            extra=_ids(session, error),
        )

    def ended(self, session: Session, outcome: Outcome, error: ServingError | None, now: float) -> None:
        """An admitted request has got its final response."""
        tokens = len(session.output)
        times = session.times.summary(tokens)
        self._metrics.ended(outcome, error, times, session)
        objectives = self.objectives_of(session.params)
        if outcome != "cancelled" and objectives.any:
            met = objectives.met(times["ttft_s"], times["tpot_s"], tokens)
            self._attained(now, *(met if error is None else (False, False)))
        if error is not None and error.code not in _OF_CLIENTS:
            _LOG.warning("request failed: %s: %s", error.code, error.message, extra=_ids(session, error))
        if self._request_log is not None:
            text = f"{error.code}: {error.message}" if error is not None else None
            unix_s = time.time() - (now - session.times.arrival_s)
            prompt = len(session.prompt)
            self._request_log.write(
                log_entry(unix_s, prompt, tokens, times, text, session.id, session.client_id)
            )

    def tick(self, now: float) -> None:
        """Tell of the refusals since the last time, if it was long enough ago."""
        if self._request_log is not None:
            self._metrics.dropped(self._request_log.dropped)
        if self._refusals and now - self._told_s >= _REFUSALS_S:
            counts = ", ".join(f"{count} {code}" for code, count in sorted(self._refusals.items()))
            _LOG.info("requests refused: %s; the last: %s", counts, self._last_refusal)
            self._refusals.clear()
            self._told_s = now

    def _attained(self, now: float, ttft: bool, tpot: bool) -> None:
        self.attainment.note(now, ttft, tpot)
        self._metrics.objectives(ttft, tpot)


def _ids(session: Session, error: ServingError) -> dict[str, str]:
    client = {"client_id": session.client_id} if session.client_id else {}
    return {"request": session.id, "code": error.code, **client}
