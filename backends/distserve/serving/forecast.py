"""Whether a request that comes now can still be in time."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.serving.attainment import Objectives
from distserve.serving.fleet import Fleet
from distserve.serving.link import InstanceLink
from distserve.serving.router import Router
from distserve.serving.schema import ServingError
from distserve.serving.session import Session

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

    def tpot(self, session: Session, now: float) -> tuple[float, int] | None:
        """Seconds per token where it would be decoded fastest, among so many requests there.

        Those that come there before it, from the prefill instances, are counted as there.
        """
        links = [link for link in self._fleet if self._fleet.usable(link)]
        coming = self._router.handoffs + sum(len(li.targets) for li in links if li.spec.role == "prefill")
        decoding = self._decoding(session)
        expected = []
        for link in decoding:
            most = link.status.max_batch_size if link.status is not None else 1
            requests = min(most, len(link.targets) + coming // len(decoding) + 1)
            seconds = link.load.decode_pace.seconds(now, requests)
            if seconds is None:  # perhaps it is fast
                return None
            expected.append((seconds, requests))
        return min(expected, default=None)

    def _decoding(self, session: Session) -> list[InstanceLink]:
        """The instances that may decode the session."""
        choices = self._fleet.candidates(session.known_tokens, session.total_tokens)
        whole = [choice.link for choice in choices if choice.to_end or choice.link.spec.role != "prefill"]
        if len(whole) == len(choices):
            return whole
        decodes = (link for link in self._fleet if link.spec.role == "decode" and self._fleet.usable(link))
        return whole + [link for link in decodes if _room(link) >= session.total_tokens]

    def check(self, session: Session, limits: Objectives, now: float) -> None:
        """Raises `ServingError` (RESOURCE_EXHAUSTED) if the session is not going to be in time.

        The limits of its first token and per token after it are `limits`, that of its last one its deadline;
        of the tokens after the first only those count for that which are sure to come.
        """
        self._check_tpot(session, limits.tpot_s, now)
        self._check_times(session, limits.ttft_s, now)

    def _check_tpot(self, session: Session, limit_s: float | None, now: float) -> None:
        if limit_s is None or session.max_tokens < 2:
            return
        expected = self.tpot(session, now)
        if expected is not None and expected[0] > limit_s:
            seconds, requests = expected
            raise ServingError(
                "RESOURCE_EXHAUSTED",
                f"deadline unreachable: {limit_s:g} s per token; {seconds:.4f} s are expected "
                f"({requests} requests at a time where it would be decoded)",
            )

    def _check_times(self, session: Session, ttft_limit_s: float | None, now: float) -> None:
        expected = self.forecast(session, now)
        if expected is None:
            return
        if ttft_limit_s is not None and expected.ttft_s > _SAFE_SHARE * ttft_limit_s:
            raise _unreachable(f"the first token in {ttft_limit_s:g} s", expected)
        decoded = self.tpot(session, now) if session.certain_tokens > 1 else None
        end_s = expected.ttft_s + (decoded[0] * (session.certain_tokens - 1) if decoded is not None else 0.0)
        allowed_s = session.deadline_s - session.times.arrival_s
        if end_s > _SAFE_SHARE * allowed_s:
            raise _unreachable(f"the end in {allowed_s:g} s, expected after {end_s:.2f} s", expected)


def _room(link: InstanceLink) -> int:
    return min(link.status.max_context, link.status.pool_tokens) if link.status is not None else 0


def _batch_tokens(link: InstanceLink) -> int:
    return link.status.max_batch_tokens if link.status is not None else 1


def _unreachable(what: str, expected: Forecast) -> ServingError:
    return ServingError(
        "RESOURCE_EXHAUSTED",
        f"deadline unreachable: {what}; the first token is expected after {expected.ttft_s:.2f} s "
        f"({expected.ahead_tokens} tokens are ahead, {expected.tokens_per_s:.0f} are computed per second)",
    )
