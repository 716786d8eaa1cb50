"""A workload: what arrives and how long it is, apart from how fast (`schema: workload/1`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from distserve.core.parsing import ConfigError
from distserve_planner.schema_file import dump_document, load_document, parse_document, save_document
from distserve_planner.workload.arrivals import Arrivals, fit_arrivals
from distserve_planner.workload.lengths import JointLengths
from distserve_planner.workload.trace import Trace

WORKLOAD_SCHEMA = "workload/1"


@dataclass(frozen=True)
class Workload:
    """Arrival process and joint length distribution, fitted to history (paper, section 4.1)."""

    name: str
    lengths: JointLengths
    arrivals: Arrivals = field(default_factory=Arrivals)
    source: str = ""

    def resample(self, seed: int, rate_rps: float | None, count: int) -> Trace:
        """A new trace of `count` requests at `rate_rps` (None: the recorded rate).

        Reproducible bit for bit. The same seed gives the same requests in the same order at every rate,
        arrivals scaled, and a shorter trace is the beginning of a longer one (common random numbers).
        """
        rate = self.arrivals.rate_rps if rate_rps is None else rate_rps
        if rate is None:
            raise ConfigError(f"workload {self.name!r} has no rate of its own; give one (--rate)")
        if not rate > 0:
            raise ConfigError(f"rate={rate}: must be above 0")
        if count < 1:
            raise ConfigError(f"requests={count}: must be at least 1")
        times, lengths = (np.random.default_rng(s) for s in np.random.SeedSequence(seed).spawn(2))
        inputs, outputs = self.lengths.sample(lengths, count)
        return Trace(self.arrivals.unit_times(times, count) / rate, inputs, outputs, self.name)

    @classmethod
    def fit(cls, trace: Trace, *, name: str | None = None, max_total_tokens: int | None = None) -> Workload:
        """Fits arrivals and lengths to a trace."""
        lengths = JointLengths.fit(trace, max_total_tokens)
        return cls(name or trace.name, lengths, fit_arrivals(trace), f"fitted to {len(trace)} requests")

    @classmethod
    def load(cls, path: str | Path) -> Workload:
        """Reads a `schema: workload/1` file; raises `ConfigError`."""
        return load_document(path, WORKLOAD_SCHEMA, cls)

    @classmethod
    def parse(cls, text: str, where: str = "workload") -> Workload:
        """From YAML text; raises `ConfigError`."""
        return parse_document(text, WORKLOAD_SCHEMA, cls, where)

    def dump(self) -> str:
        """YAML text that `parse` reads back."""
        return dump_document(self, WORKLOAD_SCHEMA)

    def save(self, path: str | Path) -> None:
        """Writes the workload to `path`."""
        save_document(path, self, WORKLOAD_SCHEMA)
