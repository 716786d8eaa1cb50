"""How fast an instance is: prompts by its steps, output by what is seen of it; and the queue's own rate."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from itertools import permutations
from statistics import median_low

_SAMPLES = 32
_RECENT_S = 30.0
_APART_S = 0.1
_LEAST = 3  # sightings that say something: one stall, as after a cut link, must not count for what is usual
_SPREAD = 1.2  # least ratio of two batch sizes that says something of the share per token


class PrefillPace:
    """Seconds of a prefill step as a constant and a share per token, fitted to the last steps.

    By medians (Theil and Sen's slope), so that a few steps that took long for another reason, as the first
    ones of an engine do, count for nothing. While all steps had about the same size the share per token
    can't be told and counts as zero: a forecast may be too good then, never too bad.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_SAMPLES)  # tokens, seconds
        self._fitted: tuple[float, float] | None = None

    def note(self, steps: int, tokens: int, seconds: float) -> None:
        """So many more steps have been taken, with so many tokens in all."""
        if steps >= 1 and tokens >= 1 and seconds >= 0:
            self._steps.append((tokens / steps, seconds / steps))
            self._fitted = None

    @property
    def known(self) -> bool:
        return bool(self._steps)

    def seconds(self, tokens: float) -> float:
        """Of a step with so many tokens. Only if `known`."""
        if self._fitted is None:
            self._fitted = _fit(self._steps)
        constant, share = self._fitted
        return constant + share * tokens

    def rate(self, batch_tokens: float) -> float:
        """Tokens per second at batches of about `batch_tokens`, or of the usual size if that is more."""
        tokens = max(batch_tokens, median_low(tokens for tokens, _ in self._steps))
        return tokens / max(self.seconds(tokens), 1e-9)


class DecodePace:
    """Seconds from one token of a request to its next one, by how many requests the instance has.

    Seen from outside, so that all that keeps tokens from coming is in it. What was seen long ago says
    nothing: else an instance that was slow for a while, and is given nothing since, would count as slow
    for ever.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque(maxlen=_SAMPLES)  # when, requests, seconds

    def note(self, now: float, requests: int, seconds: float) -> None:
        """Of one request. One in a while is enough, and the last ones are from different times then."""
        if not self._seen or now - self._seen[-1][0] >= _APART_S:
            self._seen.append((now, float(requests), seconds))

    def seconds(self, now: float, requests: int) -> float | None:
        """With so many requests; None: too little has been seen lately."""
        recent = [(count, seconds) for when, count, seconds in self._seen if now - when <= _RECENT_S]
        if len(recent) < _LEAST:
            return None
        constant, share = _fit(recent)
        return constant + share * requests


def _fit(steps: Collection[tuple[float, float]]) -> tuple[float, float]:
    """Constant and slope, neither below zero."""
    pairs = [(small, large) for small, large in permutations(steps, 2) if large[0] > _SPREAD * small[0]]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairs]
    share = max(0.0, median_low(slopes)) if slopes else 0.0
    constant = median_low(y - share * x for x, y in steps)
    return (constant, share) if constant >= 0 else (0.0, median_low(y / x for x, y in steps))


class DrainRate:
    """Tokens per second that leave the queue while it is never empty: what the whole system takes.

    Unlike the pace of prefill it knows of decode instances that are full, of memory, and of everything else.
    """

    def __init__(self, window_s: float = 5.0, least_s: float = 1.0) -> None:
        self._window_s, self._least_s = window_s, least_s
        self._since_s: float | None = None
        self._left: deque[tuple[float, int]] = deque()
        self._tokens = 0

    def left(self, now: float, tokens: int, empty: bool) -> None:
        """`tokens` have left the queue, which is empty now or not."""
        if empty:
            self._since_s, self._tokens = None, 0
            self._left.clear()
        elif self._since_s is None:
            self._since_s = now  # what left before says nothing: the queue had been short
        elif tokens:
            self._left.append((now, tokens))
            self._tokens += tokens
            self._forget(now)

    def rate(self, now: float) -> float | None:
        """None: the queue has not been filled for long enough, or nothing has left it lately."""
        if self._since_s is None:
            return None
        self._forget(now)
        begin = max(self._since_s, now - self._window_s)
        # nothing has left: a long prompt is being computed, which is no sign that nothing ever will
        return self._tokens / (now - begin) if self._tokens and now - begin >= self._least_s else None

    def _forget(self, now: float) -> None:
        while self._left and self._left[0][0] < now - self._window_s:
            self._tokens -= self._left.popleft()[1]
