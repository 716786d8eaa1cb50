"""Whether a request that comes now can still be in time."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.serving.fleet import Fleet
from distserve.serving.link import InstanceLink
from distserve.serving.router import Router
from distserve.serving.schema import ServingError
from distserve.serving.session import Session

_RECENT_S = 30.0
_KEEP = 0.9
_SAFE_SHARE = 0.8  # of a limit; what is expected right at it would be late every other time


@dataclass(frozen=True)
class Forecast:
    """Seconds from arrival to the first token, and what they follow from."""

    ttft_s: float
    ahead_tokens: int
    tokens_per_s: float


class Forecaster:
    """Estimates from the tokens that wait and the rates measured; where these are not known, it is silent."""

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._fleet, self._router = fleet, router
        self._tpot_s = 0.0  # of requests that have ended, the last ones most
        self._noted_s: float | None = None

    def ended(self, now: float, tpot_s: float) -> None:
        """A request of several tokens has ended."""
        fresh = self._noted_s is None or now - self._noted_s > _RECENT_S
        self._tpot_s = tpot_s if fresh else _KEEP * self._tpot_s + (1 - _KEEP) * tpot_s
        self._noted_s = now

    def forecast(self, session: Session, now: float) -> Forecast | None:
        """Of a session that is not queued yet."""
        known = session.known_tokens
        links = [choice.link for choice in self._fleet.candidates(known, session.total_tokens)]
        if not links or not all(link.load.pace.known for link in links):
            return None
        ahead = self._router.tokens_ahead(session)
        overtakes = not any(link.in_pieces(known) for link in links)
        for link in links:
            if overtakes and link.load.longs:  # its pieces take turns with what is ahead
                ahead += 2 * link.load.outstanding_charge
            else:
                ahead += link.load.waiting_tokens
        rate = sum(link.load.pace.rate(_batch_tokens(link)) for link in links)
        drain = self._router.drain.rate(now)
        if drain is not None:
            rate = max(min(rate, drain), 1e-9)
        own_s = min(link.load.pace.seconds(known) for link in links)
        waited_s = now - session.times.arrival_s
        return Forecast(waited_s + ahead / rate + own_s, ahead, rate)

    def check(self, session: Session, ttft_limit_s: float | None, now: float) -> None:
        """Raises `ServingError` (RESOURCE_EXHAUSTED) if the session is not going to be in time.

        The limit of its first token is `ttft_limit_s`, that of its last one its deadline; of the tokens
        after the first only those count that are sure to come.
        """
        expected = self.forecast(session, now)
        if expected is None:
            return
        if ttft_limit_s is not None and expected.ttft_s > _SAFE_SHARE * ttft_limit_s:
            raise _unreachable(f"the first token in {ttft_limit_s:g} s", expected)
        recent = self._noted_s is not None and now - self._noted_s <= _RECENT_S
        end_s = expected.ttft_s + (self._tpot_s * (session.certain_tokens - 1) if recent else 0.0)
        allowed_s = session.deadline_s - session.times.arrival_s
        if end_s > _SAFE_SHARE * allowed_s:
            raise _unreachable(f"the end in {allowed_s:g} s, expected after {end_s:.2f} s", expected)


def _batch_tokens(link: InstanceLink) -> int:
    return link.status.max_batch_tokens if link.status is not None else 1


def _unreachable(what: str, expected: Forecast) -> ServingError:
    return ServingError(
        "RESOURCE_EXHAUSTED",
        f"deadline unreachable: {what}; the first token is expected after {expected.ttft_s:.2f} s "
        f"({expected.ahead_tokens} tokens are ahead, {expected.tokens_per_s:.0f} are computed per second)",
    )
