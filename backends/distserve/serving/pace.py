"""How fast prompts are computed: fitted to an instance's steps, and measured at the queue."""

from __future__ import annotations

from collections import deque

_KEEP = 0.98  # weight of a step after the next one
_SPREAD = 0.02  # least relative variance of batch sizes from which a slope can be told


class PrefillPace:
    """Seconds of a prefill step as a constant and a share per token, by least squares over recent steps.

    While all steps had about the same size the share per token can't be told and counts as zero: a
    forecast may be too good then, never too bad.
    """

    def __init__(self) -> None:
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def note(self, steps: int, tokens: int, seconds: float) -> None:
        """So many more steps have been taken, with so many tokens in all."""
        if steps < 1 or seconds < 0:
            return
        keep, x, y = _KEEP**steps, tokens / steps, seconds / steps
        self._weight = keep * self._weight + steps
        self._x = keep * self._x + steps * x
        self._y = keep * self._y + steps * y
        self._xx = keep * self._xx + steps * x * x
        self._xy = keep * self._xy + steps * x * y

    @property
    def known(self) -> bool:
        return self._weight > 0

    def seconds(self, tokens: float) -> float:
        """Of a step with so many tokens. Only if `known`."""
        constant, share = self._fit()
        return constant + share * tokens

    def rate(self, batch_tokens: float) -> float:
        """Tokens per second at batches of about `batch_tokens`, or of the usual size if that is more."""
        tokens = max(batch_tokens, self._x / self._weight)
        return tokens / max(self.seconds(tokens), 1e-9)

    def _fit(self) -> tuple[float, float]:
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance <= _SPREAD * x * x:
            return y, 0.0
        share = (self._xy / self._weight - x * y) / variance
        share = min(max(share, 0.0), y / x)
        return y - share * x, share


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
        """None: the queue has not been filled for long enough."""
        if self._since_s is None:
            return None
        self._forget(now)
        begin = max(self._since_s, now - self._window_s)
        return self._tokens / (now - begin) if now - begin >= self._least_s else None

    def _forget(self, now: float) -> None:
        while self._left and self._left[0][0] < now - self._window_s:
            self._tokens -= self._left.popleft()[1]
