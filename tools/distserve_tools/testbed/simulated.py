"""The comparison without a server: goodput of all systems and workloads by the planner's simulator alone."""

from __future__ import annotations

from collections.abc import Sequence

from distserve_planner.profile_file import Profile
from distserve_tools.testbed.campaign import blocks_of, grid, simulated_lone, sizing
from distserve_tools.testbed.comparison import goodput_rps, winner
from distserve_tools.testbed.plan import OBJECTIVES, ScaledWorkload
from distserve_tools.testbed.prediction import Predictor
from distserve_tools.testbed.report import DEVICES, TARGETS
from distserve_tools.testbed.report_table import table
from distserve_tools.testbed.systems import SYSTEMS, EngineLimits
from distserve_tools.testbed.traces import requests_at

RATES = 7
REQUESTS = 2000
SEED = 1


def simulated_goodputs(profile: Profile, workloads: Sequence[ScaledWorkload], limits: EngineLimits) -> str:
    """A Markdown table, requests/s per core; engines alone, nothing that a server adds."""
    rows = []
    for workload in workloads:
        chosen, top = sizing(profile, workload, limits)
        blocks = blocks_of(profile, chosen)
        predictors = {name: Predictor(name, profile, chosen, blocks) for name in SYSTEMS}
        context = profile.model.max_context
        ttft, tpot, _ = simulated_lone(profile, workload, chosen)
        traces = {rate: requests_at(workload, rate, REQUESTS, SEED, context) for rate in grid(top, RATES)}
        seen = {
            name: {rate: predictor.predict(trace) for rate, trace in traces.items()}
            for name, predictor in predictors.items()
        }
        for objective in OBJECTIVES:
            slo = objective.slo(ttft, tpot)
            for target in TARGETS:
                goodputs = {
                    name: goodput_rps([(r, float(p.met(slo).mean())) for r, p in by_rate.items()], target)
                    / DEVICES
                    for name, by_rate in seen.items()
                }
                cells = [f"{value:.2f}" for value in goodputs.values()]
                rows.append([workload.title, objective.label, f"{target:.0%}", *cells, winner(goodputs)])
    return table(["workload", "objective", "attained", *SYSTEMS, "best"], rows)
