"""Every command line of a deployment is one that the programs take; what `distserve monitoring` writes."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import shlex
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from distserve.core.parsing import ConfigError
from distserve.serving.metric_families import FAMILIES
from distserve_planner.deployment.deployment import deployment_files
from distserve_planner.deployment.docker import image_files
from distserve_planner.deployment.settings import Settings
from distserve_planner.placement_file import default_placement, parse_placement
from distserve_tools.cli import COMMANDS, main
from distserve_tools.launch import TritonServer
from distserve_tools.monitoring import monitoring_files
from distserve_tools.repository import NodeRepository
from distserve_tools.serve import server_options
from distserve_tools.server_files import Installation

TWO_HOSTS = """\
schema: placement/1
model: cache:m
transfer_secret_file: /etc/distserve/secret
nodes: [{name: a, host: 10.0.0.1}, {name: b, host: 10.0.0.2}]
instances:
  - {role: prefill, node: a, devices: [cuda:0]}
  - {role: decode, node: b, devices: [cuda:0]}
"""


def parsed(words: list[str]) -> argparse.Namespace:
    """By the command's own parser; fails for an option that it does not have."""
    (command,) = (c for c in COMMANDS if c.name == words[0])
    module = importlib.import_module(command.module)
    parser = argparse.ArgumentParser(prog=" ".join(words), exit_on_error=False)
    module.add_arguments(parser)
    try:
        return parser.parse_args(words[1:])
    except SystemExit:
        pytest.fail(f"refused: {words}")


def after_distserve(command: list[str]) -> list[str]:
    return command[command.index("distserve") + 1 :]


def docker_commands() -> list[list[str]]:
    placements = (default_placement().placement, parse_placement(TWO_HOSTS).placement)
    found = []
    for placement in placements:
        for path, text in deployment_files(placement, "docker", Settings(image="llm:1")).items():
            if path.endswith(".sh"):
                words = shlex.split(text.partition("exec ")[2].replace("\\\n", " "))
                found.append(words[words.index("llm:1") + 1 :])
                found += [
                    w.partition("=distserve ")[2].split() for w in words if w.startswith("--health-cmd")
                ]
    return found


def dockerfile_commands() -> list[list[str]]:
    text = image_files(monitoring=True)["Dockerfile"].replace("\\\n", "")
    words = [yaml.safe_load(line) for line in re.findall(r"^\s*(?:CMD|RUN) (\[.*\])$", text, re.MULTILINE)]
    health = yaml.safe_load(re.findall(r"^HEALTHCHECK .*CMD (\[.*\])$", text, re.MULTILINE)[0])
    return [after_distserve(health), *(after_distserve(w) if "distserve" in w else w for w in words)]


def compose_commands() -> list[list[str]]:
    text = deployment_files(default_placement().placement, "compose", Settings())["compose.yaml"]
    services = yaml.safe_load(text)["services"]
    commands = [s["command"] for s in services.values() if "command" in s]
    return [*commands, after_distserve(services["openai"]["healthcheck"]["test"])]


def chart_commands(folder: Path) -> list[list[str]]:
    helm = pytest.importorskip("helm_python", reason="helm-python-sdk (dev extra) is not installed")
    for path, text in deployment_files(
        parse_placement(TWO_HOSTS).placement, "kubernetes", Settings()
    ).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    with helm.Chart.load(folder / "chart") as chart:
        text = chart.render(name="x")["distserve/templates/nodes.yaml"]
    containers = [
        container
        for document in filter(None, yaml.safe_load_all(text))
        for container in document["spec"]["template"]["spec"]["containers"]
    ]
    probes = [c["readinessProbe"]["exec"]["command"] for c in containers if "exec" in c["readinessProbe"]]
    return [c["args"] for c in containers] + [after_distserve(p) for p in probes]


def test_every_command_line_is_taken(tmp_path: Path) -> None:
    commands = [*docker_commands(), *dockerfile_commands(), *compose_commands(), *chart_commands(tmp_path)]
    assert {c[0] for c in commands} == {"serve", "openai", "health", "monitoring"}
    assert len(commands) >= 14
    for command in commands:
        parsed(command)


def test_what_triton_is_given() -> None:
    (words,) = (c for c in compose_commands() if c[0] == "serve")
    options = server_options(parsed(words), NodeRepository(Path("/model_repository")))
    server = TritonServer(options)
    server.ports = type(server.ports)(options.http_port, options.grpc_port, options.metrics_port)
    root = Path("/opt/tritonserver")
    flags = server.command(Installation(root / "bin/tritonserver", root / "backends", (), str(root)))
    assert flags[0] == "/opt/tritonserver/bin/tritonserver"
    for flag in (
        "--model-repository=/model_repository",
        "--backend-directory=/opt/tritonserver/backends",
        "--model-control-mode=explicit",
        "--backend-config=python,thread-pool-size=128",
        "--exit-timeout-secs=60",
        "--http-address=0.0.0.0",
        "--http-port=8000",
        "--grpc-port=8001",
        "--metrics-port=8002",
    ):
        assert flag in flags
    assert any(f.startswith("--backend-config=python,shm-region-prefix-name=distserve_") for f in flags)


def test_monitoring_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["monitoring", "-o", str(tmp_path), "--target", "a:8002", "--target", "b:8002"]) == 0
    assert str(tmp_path / "prometheus/alerts.yml") in capsys.readouterr().out
    prometheus = yaml.safe_load((tmp_path / "prometheus/prometheus.yml").read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["a:8002", "b:8002"]}]
    assert [(tmp_path / "prometheus" / name).is_file() for name in prometheus["rule_files"]] == [True]
    dashboard = json.loads((tmp_path / "grafana/dashboards/distserve.json").read_text())
    assert dashboard["uid"] == "distserve"
    image = image_files(monitoring=True)["Dockerfile"]
    provider = yaml.safe_load((tmp_path / "grafana/provisioning/dashboards/distserve.yaml").read_text())
    assert f"/monitoring/grafana/dashboards {provider['providers'][0]['options']['path']}\n" in image
    for folder in ("prometheus", "grafana/provisioning", "grafana/dashboards"):
        assert f"/var/cache/distserve/monitoring/{folder} " in image
    with pytest.raises(ConfigError, match="--target=a: must be HOST:PORT"):
        monitoring_files(["a"], "http://localhost:9090")


def alerts() -> list[dict[str, Any]]:
    text = resources.files("distserve_tools").joinpath("data/alerts.yml").read_text()
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def test_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    for rule in alerts():
        names = re.findall(r"\bdistserve_\w+", rule["expr"])
        assert names or "up{" in rule["expr"]
        assert set(names) <= set(FAMILIES), rule["alert"]
        labels = {label for name in names for label in FAMILIES[name].labels} | {"job", "instance"}
        assert set(re.findall(r"(\w+)=~?\"", rule["expr"])) <= labels, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        for label in re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]):
            assert label in labels
            assert "sum(" not in rule["expr"]


def test_the_documentation_explains_each_alert() -> None:
    text = (Path(__file__).parents[2] / "docs/operate.md").read_text()
    assert re.findall(r"`(Distserve\w+)`", text) == [rule["alert"] for rule in alerts()]
