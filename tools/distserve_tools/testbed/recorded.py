"""Campaigns as a file: all that was measured, so that it can be simulated and reported again."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from distserve.core.parsing import ConfigError
from distserve.engine.step_times import from_wire, to_wire
from distserve_planner.profile_file import Profile
from distserve_planner.slo import Slo
from distserve_planner.workload import Trace
from distserve_tools.load.record import Record
from distserve_tools.testbed.campaign import Campaign, add_predictions, with_whole_rates
from distserve_tools.testbed.cpu_account import CpuSeconds
from distserve_tools.testbed.engine_counters import EngineCount
from distserve_tools.testbed.plan import ScaledWorkload
from distserve_tools.testbed.runs import Run
from distserve_tools.testbed.systems import EngineLimits

SCHEMA = "testbed/3"
OTHERS, WALL = "other processes", "wall"


def read_campaigns(path: Path) -> list[Campaign]:
    """As they were measured, without predictions; the last may be under way. Raises `ConfigError` naming the
    file.
    """
    try:
        document = json.loads(path.read_text())
        if document["schema"] != SCHEMA:
            raise ConfigError(f"{path}: schema={document['schema']!r}; this version reads {SCHEMA!r}")
        return [_campaign_from_dict(entry) for entry in document["campaigns"]]
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: not a results.json of `distserve testbed` ({error!r})") from None


class Recording:
    """The campaigns of a file, in the order in which they were begun."""

    def __init__(self, path: Path, campaigns: Iterable[Campaign] = ()) -> None:
        self._path = path
        self._campaigns = list(campaigns)

    def __iter__(self) -> Iterator[Campaign]:
        return iter(self._campaigns)

    def keep(self, campaign: Campaign) -> None:
        """It has grown; the file has it instead of what it had of this model and workload."""
        key = (campaign.model, campaign.workload.label)
        others = [c for c in self._campaigns if (c.model, c.workload.label) != key]
        self._campaigns = [*others, campaign]
        self.save(self._path)

    def save(self, path: Path) -> None:
        """Every request, measured and perhaps simulated. The file is whole at any time, or the one before."""
        document = {"schema": SCHEMA, "campaigns": [_campaign_to_dict(c) for c in self._campaigns]}
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps(document))
        os.replace(fresh, path)

    def finished(self) -> list[Campaign]:
        """To be reported: simulated, and without rates that not every system was measured at.

        Raises `ConfigError` naming the file if nothing is left.
        """
        whole = [c for c in map(with_whole_rates, self._campaigns) if c is not None]
        if not whole:
            raise ConfigError(f"{self._path}: holds no rate that every system was measured at")
        for campaign in whole:
            if not campaign.terms:
                add_predictions(campaign)
        return whole


def _campaign_to_dict(campaign: Campaign) -> dict[str, Any]:
    return {
        "model": campaign.model,
        "workload": dataclasses.asdict(campaign.workload),
        "profile": campaign.profile.dump(),
        "limits": dataclasses.asdict(campaign.limits),
        "blocks": dict(campaign.blocks),
        "slos": {label: dataclasses.asdict(slo) for label, slo in campaign.slos.items()},
        "rates_rps": list(campaign.rates),
        "repeated_rate_rps": campaign.repeated_rate,
        "background_cores": campaign.background_cores,
        "terms": {name: dataclasses.asdict(terms) for name, terms in campaign.terms.items()},
        "lone": [_run_to_dict(run) for run in campaign.lone.values()],
        "runs": [_run_to_dict(run) for run in campaign.runs],
    }


def _campaign_from_dict(entry: Mapping[str, Any]) -> Campaign:
    lone = [_run_from_dict(run) for run in entry["lone"]]
    return Campaign(
        model=entry["model"],
        workload=ScaledWorkload(**entry["workload"]),
        profile=Profile.parse(entry["profile"]),
        limits=EngineLimits(**entry["limits"]),
        blocks=entry["blocks"],
        lone={run.system: run for run in lone},
        slos={label: Slo(**slo) for label, slo in entry["slos"].items()},
        terms={},
        rates=entry["rates_rps"],
        repeated_rate=entry["repeated_rate_rps"],
        background_cores=entry["background_cores"],
        runs=[_run_from_dict(run) for run in entry["runs"]],
    )


def _run_to_dict(run: Run) -> dict[str, Any]:
    requests = [{"planned_s": round(record.planned_s, 6), **record.to_log()} for record in run.records]
    for key, seen in (("predicted", run.predicted), ("predicted_at_pace", run.predicted_at_pace)):
        if seen is not None:
            for request, ttft, tpot in zip(requests, seen.ttft_s, seen.tpot_s, strict=True):
                request[key] = {"ttft_s": round(float(ttft), 6), "tpot_s": round(float(tpot), 6)}
    return {
        "system": run.system,
        "rate_rps": run.rate_rps,
        "repeat": run.repeat,
        "generator_lag_p99_s": run.lag_p99_s,
        "engines": {
            name: {"totals": dict(count.totals), "step_times": to_wire(count.step_times)}
            for name, count in run.engines.items()
        },
        "paces": {name: dataclasses.asdict(pace) for name, pace in run.paces.items()},
        "cpu_s": {**run.cpu.parts, OTHERS: run.cpu.others, WALL: run.cpu.wall},
        # what was asked: a failed request has fewer tokens
        "asked_output_tokens": run.trace.output_tokens.tolist(),
        "requests": requests,
    }


def _run_from_dict(entry: Mapping[str, Any]) -> Run:
    records = [_record(i, request) for i, request in enumerate(entry["requests"])]
    trace = Trace(
        np.array([record.planned_s for record in records]),
        np.array([record.input_tokens for record in records], np.int64),
        np.array(entry["asked_output_tokens"], np.int64),
        f"{entry['system']} {entry['rate_rps']:g}/s",
    )
    cpu = dict(entry["cpu_s"])
    others, wall = cpu.pop(OTHERS), cpu.pop(WALL)
    engines = {
        name: EngineCount(count["totals"], from_wire(count["step_times"]))
        for name, count in entry["engines"].items()
    }
    return Run(
        entry["system"],
        entry["rate_rps"],
        entry["repeat"],
        trace,
        records,
        CpuSeconds(cpu, others, wall),
        engines,
    )


def _record(index: int, request: Mapping[str, Any]) -> Record:
    """With its first and its last token; those between were not kept."""
    sent, count = request["arrived_at_s"], request["output_tokens"]
    record = Record(index, request["planned_s"], request["input_tokens"], sent, error=request.get("error"))
    if "ttft_s" in request:
        first = sent + request["ttft_s"]
        record.token_s, record.token_counts = [first], [1]
        if count > 1:
            record.token_s.append(first + request["tpot_s"] * (count - 1))
            record.token_counts.append(count - 1)
        record.end_s = record.token_s[-1]
    record.stages = request.get("stages_s", {})
    return record
