"""Writes the configuration of Prometheus and Grafana: scrape targets, alert rules, data source, dashboard."""

from __future__ import annotations

import argparse
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from distserve.core.parsing import ConfigError

_ALERTS = "alerts.yml"
_DASHBOARD = "grafana_dashboard.json"
_DASHBOARDS_FOLDER = "/var/lib/grafana/dashboards"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve monitoring`."""
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--target",
        action="append",
        metavar="HOST:PORT",
        help="metrics of a tritonserver; once per node (default localhost:8002)",
    )
    parser.add_argument(
        "--prometheus",
        default="http://localhost:9090",
        metavar="URL",
        help="as Grafana reaches it (%(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    """Writes the files; returns the exit code."""
    files = monitoring_files(args.target or ["localhost:8002"], args.prometheus)
    for path, text in files.items():
        file = args.output / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    sys.stdout.write("".join(f"{args.output / path}\n" for path in files))
    return 0


def monitoring_files(targets: list[str], prometheus_url: str) -> dict[str, str]:
    """Relative path -> text. Below `prometheus/` what belongs into /etc/prometheus, below `grafana/` the
    folder for /etc/grafana/provisioning and the dashboards.

    Raises `ConfigError` for a target that is not host:port.
    """
    for target in targets:
        host, _, port = target.rpartition(":")
        if not host or not port.isdigit():
            raise ConfigError(f"--target={target}: must be HOST:PORT")
    return {
        "prometheus/prometheus.yml": _dump(_scrape(targets)),
        f"prometheus/{_ALERTS}": _data(_ALERTS),
        "grafana/provisioning/datasources/distserve.yaml": _dump(_data_source(prometheus_url)),
        "grafana/provisioning/dashboards/distserve.yaml": _dump(_provider()),
        "grafana/dashboards/distserve.json": _data(_DASHBOARD),
    }


def _scrape(targets: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(_data("prometheus.yml"))
    config["rule_files"] = [_ALERTS]
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": targets}]
    return config


def _data_source(url: str) -> dict[str, Any]:
    source = {"name": "Prometheus", "type": "prometheus", "access": "proxy", "url": url, "isDefault": True}
    return {"apiVersion": 1, "datasources": [source]}


def _provider() -> dict[str, Any]:
    provider = {"name": "distserve", "type": "file", "options": {"path": _DASHBOARDS_FOLDER}}
    return {"apiVersion": 1, "providers": [provider]}


def _data(name: str) -> str:
    return resources.files("distserve_tools").joinpath("data", name).read_text()


def _dump(value: dict[str, Any]) -> str:
    return str(yaml.safe_dump(value, sort_keys=False, width=110))
