"""The Grafana dashboard and the Prometheus configuration name what is there, in those programs' form."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib import resources
from typing import Any

import pytest
import yaml

from distserve.serving.metric_families import FAMILIES

DATA = resources.files("distserve_tools").joinpath("data")
_METRIC = re.compile(r"\b(distserve_[a-z0-9_]+)")
_SELECTOR = re.compile(r"\b(distserve_[a-z0-9_]+)\{([^}]*)\}")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")
_HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DATA.joinpath("grafana_dashboard.json").read_text())
    return document


def family_of(series: str) -> str:
    """The family of a series; only histograms have parts."""
    for part in _HISTOGRAM_PARTS:
        if series.endswith(part) and series[: -len(part)] in FAMILIES:
            assert FAMILIES[series[: -len(part)]].kind == "HISTOGRAM"
            return series[: -len(part)]
    assert FAMILIES[series].kind != "HISTOGRAM", f"{series}: a histogram's series are its parts"
    return series


def expressions(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


def test_every_metric_exists_with_its_labels(dashboard: dict[str, Any]) -> None:
    for title, expression in expressions(dashboard):
        names = _METRIC.findall(expression)
        assert names, f"{title}: no metric of ours"
        families = [family_of(name) for name in names]
        labels = {label for name in families for label in FAMILIES[name].labels} | {"le"}
        for name, selector in _SELECTOR.findall(expression):
            used = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
            assert used <= set(FAMILIES[family_of(name)].labels), f"{title}: {name}: {used}"
        for grouping in _GROUPING.findall(expression):
            assert {label.strip() for label in grouping.split(",")} <= labels, f"{title}: by ({grouping})"


def test_every_metric_is_shown(dashboard: dict[str, Any]) -> None:
    shown = {family_of(name) for _, text in expressions(dashboard) for name in _METRIC.findall(text)}
    assert shown == set(FAMILIES)


def test_counters_are_shown_as_rates_and_gauges_are_not(dashboard: dict[str, Any]) -> None:
    for title, expression in expressions(dashboard):
        for name in _METRIC.findall(expression):
            rated = re.search(rf"(rate|increase)\({name}(\{{[^}}]*\}})?\[\$__rate_interval\]\)", expression)
            assert bool(rated) == (FAMILIES[family_of(name)].kind != "GAUGE"), f"{title}: {name}"


def test_the_dashboard_is_one_that_grafana_takes(dashboard: dict[str, Any]) -> None:
    assert dashboard["schemaVersion"] >= 36
    assert {"title", "uid", "panels", "templating", "time"} <= set(dashboard)
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables == {"datasource", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("row", "stat", "timeseries")
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']}: lies over another panel"
        taken |= cells
        if panel["type"] != "row":
            assert panel["fieldConfig"]["defaults"]["unit"]
            references = [target["refId"] for target in panel["targets"]]
            assert len(set(references)) == len(references) > 0
    for _, expression in expressions(dashboard):
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "[]", "{}"))


def test_legends_name_labels_that_are_left(dashboard: dict[str, Any]) -> None:
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            groupings = _GROUPING.findall(target["expr"])
            if groupings:
                kept = {label.strip() for label in groupings[0].split(",")}
            else:
                kept = set(FAMILIES[family_of(_METRIC.findall(target["expr"])[0])].labels)
            assert wanted <= kept, f"{panel['title']}: {target['legendFormat']}"


def test_prometheus_configuration() -> None:
    config = yaml.safe_load(DATA.joinpath("prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert set(job) <= {
        *("job_name", "metrics_path", "honor_labels", "static_configs", "metric_relabel_configs")
    }
    assert job["honor_labels"] is True  # or the label `instance` would be the target's address
    assert job["metrics_path"] == "/metrics"
    for group in job["static_configs"]:
        for target in group["targets"]:
            host, _, port = target.rpartition(":")
            assert host
            assert 0 < int(port) < 65536
    durations = {key: re.fullmatch(r"(\d+)s", value) for key, value in config["global"].items()}
    assert all(durations.values())
    assert int(durations["scrape_timeout"][1]) <= int(durations["scrape_interval"][1])  # type: ignore[index]
    (rule,) = job["metric_relabel_configs"]
    assert rule["action"] == "keep"
    assert rule["source_labels"] == ["__name__"]
    assert all(re.fullmatch(rule["regex"], name) for name in FAMILIES)
    assert not re.fullmatch(rule["regex"], "process_cpu_seconds_total")
