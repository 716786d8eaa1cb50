"""What is kept of every request, and the request log that other tools read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distserve_planner.slo import Slo
from distserve_planner.workload.readers import REQUEST_LOG_SCHEMA

STAGES = ("prefill_queue", "prefill", "decode_queue", "transfer", "decode")


@dataclass
class Record:
    """One request as its client saw it. Times in seconds since the start of the run."""

    index: int
    planned_s: float  # when it should have been sent
    input_tokens: int
    sent_s: float = 0.0
    token_s: list[float] = field(default_factory=list)  # arrival of every message with tokens
    token_counts: list[int] = field(default_factory=list)  # tokens in each of them
    end_s: float = 0.0
    error: str | None = None
    stages: Mapping[str, float] = field(default_factory=dict)  # seconds, by `STAGES`

    @property
    def ok(self) -> bool:
        return self.error is None and bool(self.token_s)

    @property
    def lag_s(self) -> float:
        """How late the generator itself was."""
        return self.sent_s - self.planned_s

    @property
    def output_tokens(self) -> int:
        return sum(self.token_counts)

    @property
    def ttft_s(self) -> float:
        return self.token_s[0] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """(last token - first token) / (n - 1); 0 for a one-token output."""
        count = self.output_tokens
        return (self.token_s[-1] - self.token_s[0]) / (count - 1) if count > 1 else 0.0

    def met(self, slo: Slo) -> bool:
        """Both objectives; a failed request misses."""
        return self.ok and self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between messages (ITL)."""
        return [b - a for a, b in zip(self.token_s, self.token_s[1:], strict=False)]

    def to_log(self) -> dict[str, Any]:
        """One line of a request log."""
        entry: dict[str, Any] = {
            "arrived_at_s": round(self.sent_s, 6),
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "outcome": "finished" if self.ok else "failed",
        }
        if self.ok:
            entry |= {"ttft_s": round(self.ttft_s, 6), "tpot_s": round(self.tpot_s, 6)}
        if self.error:
            entry["error"] = self.error
        if self.stages:
            entry["stages_s"] = {k: round(v, 6) for k, v in self.stages.items()}
        return entry


def write_log(path: Path, records: Iterable[Record]) -> None:
    """Writes JSON lines; the first one names the schema."""
    lines = [json.dumps({"schema": REQUEST_LOG_SCHEMA})]
    lines += [json.dumps(r.to_log()) for r in sorted(records, key=lambda r: r.sent_s)]
    path.write_text("\n".join(lines) + "\n")
