"""What a request log tells of the past: arrivals, lengths, queueing, objectives met."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from distserve_planner.workload.trace import Trace, TraceError

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class History:
    """Requests in order of arrival, all arrays of one length n.

    arrival_s: seconds, from the log's origin. input_tokens, output_tokens: int64; output 0 where a request
    failed. queue_s: waiting for prefill and for decode; NaN where the log does not say. met: 1 if both
    objectives were, else 0; NaN where the client went away.
    """

    arrival_s: Floats
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    queue_s: Floats
    met: Floats

    def __len__(self) -> int:
        return len(self.arrival_s)

    @classmethod
    def empty(cls) -> History:
        ints = np.zeros(0, np.int64)
        return cls(np.zeros(0), ints, ints, np.zeros(0), np.zeros(0))

    def between(self, start_s: float, end_s: float) -> History:
        """Requests that arrived from `start_s` to before `end_s`."""
        first, last = np.searchsorted(self.arrival_s, [start_s, end_s])
        return self.take(slice(int(first), int(last)))

    def take(self, index: slice | NDArray[np.int64]) -> History:
        return History(
            self.arrival_s[index],
            self.input_tokens[index],
            self.output_tokens[index],
            self.queue_s[index],
            self.met[index],
        )

    def followed_by(self, other: History) -> History:
        """Both, put in order of arrival: a log has its requests in the order of their ends."""
        joined = History(
            np.concatenate([self.arrival_s, other.arrival_s]),
            np.concatenate([self.input_tokens, other.input_tokens]),
            np.concatenate([self.output_tokens, other.output_tokens]),
            np.concatenate([self.queue_s, other.queue_s]),
            np.concatenate([self.met, other.met]),
        )
        if len(self) and len(other) and other.arrival_s.min() < self.arrival_s[-1]:
            return joined.take(np.argsort(joined.arrival_s, kind="stable"))
        return joined

    @property
    def served(self) -> History:
        """Requests whose answers came, so that their lengths are known."""
        return self.take(np.flatnonzero(self.output_tokens > 0))

    def trace(self, name: str = "recent") -> Trace:
        """For fitting. Raises `TraceError` if nothing was served."""
        served = self.served
        if not len(served):
            raise TraceError(f"{name}: no request was served")
        return Trace(served.arrival_s - served.arrival_s[0], served.input_tokens, served.output_tokens, name)


@dataclass(frozen=True)
class Profile:
    """A window in numbers. Rates per second; `cv` of the gaps; NaN where there is nothing to tell from."""

    start_s: float
    end_s: float
    requests: int
    rate_rps: float
    gap_cv: float
    mean_input: float
    mean_output: float
    correlation: float  # of the lengths' logarithms
    attainment: float
    mean_queue_s: float


def profile(history: History, start_s: float, end_s: float) -> Profile:
    """The window from `start_s` to `end_s`."""
    part = history.between(start_s, end_s)
    served, gaps = part.served, np.diff(part.arrival_s)
    nan = float("nan")
    known, judged = part.queue_s[~np.isnan(part.queue_s)], part.met[~np.isnan(part.met)]
    logs = np.log([served.input_tokens + 1.0, served.output_tokens + 1.0])
    varied = len(served) > 2 and bool((logs.std(axis=1) > 0).all())
    return Profile(
        start_s,
        end_s,
        len(part),
        len(part) / (end_s - start_s),
        float(gaps.std() / gaps.mean()) if len(gaps) > 1 and gaps.mean() > 0 else nan,
        float(served.input_tokens.mean()) if len(served) else nan,
        float(served.output_tokens.mean()) if len(served) else nan,
        float(np.corrcoef(logs)[0, 1]) if varied else nan,
        float(judged.mean()) if len(judged) else nan,
        float(known.mean()) if len(known) else nan,
    )
