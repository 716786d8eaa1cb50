"""What a watch advises, for people and for programs."""

from __future__ import annotations

import time
from html import escape
from importlib import resources
from typing import Any

from distserve_planner.report.document import plain
from distserve_planner.report.page import table_html
from distserve_planner.report.section import Table
from distserve_planner.report.style import theme_css
from distserve_planner.slo import Slo, seconds
from distserve_planner.watch.history import Profile
from distserve_planner.watch.watcher import Advice

SCHEMA = "advice/1"
_UNIX_TIMES_S = 1e9


def document(advice: Advice, slo: Slo) -> dict[str, Any]:
    """`schema: advice/1`, plain JSON values."""
    seen = advice.comparison
    return {
        "schema": SCHEMA,
        "at_s": advice.at_s,
        "action": "change" if advice.change else "stay",
        "reason": advice.decision.reason,
        "slo": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "attainment": slo.attainment},
        "evidence": [{**plain(item), "false_alarm_level": item.level} for item in advice.evidence],
        "workload": {"before": plain(advice.before), "latest": plain(advice.latest)},
        "expected_rate_rps": advice.rate_rps,
        "present": {
            "placement": str(advice.present),
            "devices": seen.present_devices,
            "expected_attainment": seen.present,
        },
        "wanted": {
            "placement": str(advice.wanted),
            "devices": seen.wanted_devices,
            "expected_attainment": seen.wanted,
        },
        "switch": {
            "seconds": seen.switch.seconds,
            "attainment_meanwhile": seen.during,
            "extra_devices": seen.switch.extra_devices,
        },
        "deployments_tried": advice.tried,
    }


def summary(advice: Advice) -> str:
    """One line."""
    what = f"change to {advice.wanted}" if advice.change else f"stay with {advice.present}"
    return f"{moment(advice.at_s)}: {what}: {advice.decision.reason}"


def moment(at_s: float) -> str:
    """Of the log's clock: a server's has Unix time, a replay's begins at 0."""
    if at_s < _UNIX_TIMES_S:
        return f"{at_s:.0f} s"
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at_s))


def page(advice: Advice, slo: Slo, title: str) -> str:
    """The advice as one HTML file without anything to load."""
    css = resources.files("distserve_planner.report").joinpath("page.css").read_text("utf-8")
    evidence = "".join(f"<li>{escape(str(item))}</li>" for item in advice.evidence)
    evidence = evidence or "<li>no new drift: a saving that had to wait, or a rate that goes on changing</li>"
    head = "Change the placement" if advice.change else "Keep the placement"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{theme_css()}
{css}</style>
</head>
<body>
<main>
<h1>{head}</h1>
<p>{escape(advice.decision.reason)}.</p>
<section><h2>Both placements, simulated on the latest requests</h2>
<p>Expected rate {advice.rate_rps:.3g} requests/s; objectives TTFT {seconds(slo.ttft_s)}, TPOT
{seconds(slo.tpot_s)}, both met by {100 * slo.attainment:g} %.</p>
{table_html(_placements(advice))}</section>
<section><h2>What has changed</h2><ul>{evidence}</ul>
{table_html(_workload(advice))}</section>
<footer>{escape(title)}</footer>
</main>
</body>
</html>
"""


def _placements(advice: Advice) -> Table:
    seen = advice.comparison
    rows = [
        ("present", str(advice.present), str(seen.present_devices), _percent(seen.present)),
        ("new", str(advice.wanted), str(seen.wanted_devices), _percent(seen.wanted)),
        ("during the change", f"{seen.switch.seconds:.0f} s", "", _percent(seen.during)),
    ]
    return Table(("", "placement", "devices", "expected attainment"), tuple(rows))


def _workload(advice: Advice) -> Table:
    def row(name: str, get: str, form: str) -> tuple[str, ...]:
        return (name, *(format(getattr(p, get), form) for p in (advice.before, advice.latest)))

    def span(p: Profile) -> str:
        return f"{moment(p.start_s)} to {moment(p.end_s)}"

    rows = [
        ("period", span(advice.before), span(advice.latest)),
        row("requests", "requests", "d"),
        row("requests/s", "rate_rps", ".3g"),
        row("CV of the gaps", "gap_cv", ".2f"),
        row("mean tokens in", "mean_input", ".0f"),
        row("mean tokens out", "mean_output", ".0f"),
        row("correlation of lengths", "correlation", ".2f"),
        row("mean queueing delay (s)", "mean_queue_s", ".3g"),
        row("attainment as logged", "attainment", ".1%"),
    ]
    return Table(("", "before", "latest"), tuple(rows))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
