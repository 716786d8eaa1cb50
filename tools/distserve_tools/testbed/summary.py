"""All campaigns of a report on one page: who serves how much, and how near the predictions come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distserve_tools.testbed.campaign import Campaign
from distserve_tools.testbed.comparison import POINTS, best_systems, pairs, repeat_noise
from distserve_tools.testbed.report import TARGETS, goodputs
from distserve_tools.testbed.report_table import table


def summary(campaigns: Sequence[Campaign]) -> str:
    """Tables in Markdown."""
    parts = ["## In short", _goodputs(campaigns), _called(campaigns), _predictions(campaigns)]
    return "\n\n".join(parts) + "\n"


def _name(campaign: Campaign) -> str:
    return f"{campaign.workload.title}, {campaign.model.removeprefix('cache:')}"


def _goodputs(campaigns: Sequence[Campaign]) -> str:
    systems = list(dict.fromkeys(name for campaign in campaigns for name in campaign.systems))
    rows = []
    for campaign in campaigns:
        for label, slo in campaign.slos.items():
            found = [goodputs(campaign, slo, target, predicted=False) for target in TARGETS]
            cells = [
                "/".join(f"{at[name]:.2f}" for at in found) if name in campaign.systems else "-"
                for name in systems
            ]
            rows.append([_name(campaign), label, *cells])
    of = " and ".join(f"{target:.0%}" for target in TARGETS)
    head = ["workload, model", "objective", *systems]
    return f"Goodput, requests/s per core with {of} attained:\n\n" + table(head, rows)


def _called(campaigns: Sequence[Campaign]) -> str:
    """How often the simulation names the best of our systems, and by how much what it names falls short."""
    rows = [
        (goodputs(campaign, slo, target, False), goodputs(campaign, slo, target, True))
        for campaign in campaigns
        for slo in campaign.slos.values()
        for target in TARGETS
    ]
    ours = [({name: measured[name] for name in simulated}, simulated) for measured, simulated in rows]
    attained = [(measured, simulated) for measured, simulated in ours if max(measured.values()) > 0]
    if not attained:
        return "No system attains any of the targets."
    served = [
        max((measured[name] for name in best_systems(simulated)), default=0.0) / max(measured.values())
        for measured, simulated in attained
    ]
    named = sum(
        not set(best_systems(measured)).isdisjoint(best_systems(simulated))
        for measured, simulated in attained
    )
    return (
        f"The simulation names the best of the systems it knows, or one of several within 5 %, in {named} of "
        f"{len(attained)} rows and targets that have one; what it names serves {np.mean(served):.0%} of what "
        "the best does, on average."
    )


def _predictions(campaigns: Sequence[Campaign]) -> str:
    rows = []
    for at_pace in (False, True):
        every: list[tuple[float, float]] = []
        for campaign in campaigns:
            found = _errors(campaign, at_pace)
            every += found
            rows.append([_name(campaign) + _suffix(at_pace), *_row(found)])
        if len(campaigns) > 1:
            rows.append(["all" + _suffix(at_pace), *_row(every)])
    head = ["workload, model", "predictions", "mean error", "median", "bias"]
    head += [f"within {POINTS:g} points", "or the noise", "or twice the noise"]
    return "Attainment, predicted less measured, in points, over systems, rates and objectives:\n\n" + table(
        head, rows
    )


def _suffix(at_pace: bool) -> str:
    return ", at the run's pace" if at_pace else ""


def _errors(campaign: Campaign, at_pace: bool) -> list[tuple[float, float]]:
    """(error, noise) of each prediction, in points."""
    found = []
    for slo in campaign.slos.values():
        noise = repeat_noise(campaign.runs, campaign.systems, slo) or 0.0
        for name in campaign.terms:
            for pair in pairs(campaign.runs, name, slo):
                error = pair.error_at_pace if at_pace else pair.error
                if error is not None:
                    found.append((error, noise))
    return found


def _row(found: Sequence[tuple[float, float]]) -> list[str]:
    errors = np.array([error for error, _ in found])
    within = [sum(abs(e) <= max(POINTS, times * n) for e, n in found) for times in (0, 1, 2)]
    return [
        str(len(found)),
        f"{np.abs(errors).mean():.1f}",
        f"{np.median(np.abs(errors)):.1f}",
        f"{errors.mean():+.1f}",
        *map(str, within),
    ]
