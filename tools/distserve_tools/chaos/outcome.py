"""What a scenario came to, as a row of the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.table import Table

from distserve_tools.chaos.invariants import Aftermath

COLUMNS = ("requests", "finished", "continued", "refused", "cancelled", "lost")


@dataclass(frozen=True)
class Outcome:
    """Counts of requests by what became of them. `details`: further figures of the scenario."""

    scenario: str
    seed: int
    counts: Counter[str]
    aftermath: Aftermath
    notes: Sequence[str] = ()
    details: dict[str, float] = field(default_factory=dict)
    refusals: Sequence[str] = ()  # what the refused were told

    @property
    def ok(self) -> bool:
        """Nothing was lost and nothing was left."""
        return self.counts["lost"] == 0 and not self.aftermath.left and not self.notes

    def figures(self) -> dict[str, int]:
        return {"requests": self.counts.total(), **{key: self.counts[key] for key in COLUMNS[1:]}}

    def to_json(self) -> dict[str, object]:
        return {
            "scenario": self.scenario,
            "seed": self.seed,
            "ok": self.ok,
            **self.figures(),
            "recovery_s": round(self.aftermath.recovery_s, 3),
            "hung_calls": self.aftermath.hung_calls,
            "left": list(self.aftermath.left),
            "notes": list(self.notes),
            "refusals": list(self.refusals),
            **self.details,
        }


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    table = Table(pad_edge=False)
    table.add_column("scenario")
    for name in (*COLUMNS, "recovery s", "hung calls"):
        table.add_column(name, justify="right")
    table.add_column("")
    for outcome in outcomes:
        figures = [str(value) for value in outcome.figures().values()]
        after = outcome.aftermath
        verdict = "ok" if outcome.ok else "; ".join([*outcome.notes[:3], *after.left][:4])
        table.add_row(outcome.scenario, *figures, f"{after.recovery_s:.1f}", str(after.hung_calls), verdict)
    return table
