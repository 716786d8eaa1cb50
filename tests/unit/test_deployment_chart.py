"""The Helm chart, rendered and checked against the schemas of Kubernetes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import yaml

from distserve.core.parsing import ConfigError
from distserve_planner.deployment.chart import values
from distserve_planner.deployment.containers import container_plan
from distserve_planner.deployment.deployment import deployment_files, generate_deployment
from distserve_planner.deployment.settings import SECRET_FILE, Settings
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import default_placement, parse_placement
from distserve_planner.render import render
from distserve_tools.repository import node_repository

helm = pytest.importorskip("helm_python", reason="helm-python-sdk (dev extra) is not installed")
schemas = pytest.importorskip(
    "kubernetes_validate", reason="kubernetes-validate (dev extra) is not installed"
)

OLDEST, NEWEST = "1.25", schemas.latest_version()
TWO_NODES = """\
schema: placement/1
model: /data/llama
dtype: bf16
nodes:
  - {name: a}
  - {name: b, memory_bytes: 68719476736}
instances:
  - {role: prefill, node: a, devices: [cuda:3], kv_bytes: 42949672960}
  - {role: decode, node: b, devices: [cuda:5, cuda:4], tp: 2, kv_bytes: 85899345920}
"""


def write_chart(folder: Path, text: str | None = TWO_NODES) -> Path:
    file = default_placement() if text is None else parse_placement(text)
    generate_deployment(file, "kubernetes", folder, Settings())
    return folder / "chart"


def rendered(chart: Path, name: str = "prod", **changed: Any) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) -> object, each valid for the oldest and the newest release."""
    with helm.Chart.load(chart) as loaded:
        loaded.validate_schema(changed)
        templates = loaded.render(values=changed, name=name, namespace="llm")
    found = {}
    for path, text in templates.items():
        if path.endswith(".yaml"):
            for document in filter(None, yaml.safe_load_all(text)):
                if document["apiVersion"] != "monitoring.coreos.com/v1":  # not of Kubernetes itself
                    for version in (OLDEST, NEWEST):
                        schemas.validate(document, version, strict=True)
                found[document["kind"], document["metadata"]["name"]] = document
    return found


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    return write_chart(tmp_path)


def pod(objects: dict[tuple[str, str], dict[str, Any]], name: str) -> dict[str, Any]:
    spec: dict[str, Any] = objects["StatefulSet", name]["spec"]["template"]["spec"]
    return spec


def test_one_pod_per_node_with_the_gpus_of_the_placement(chart: Path) -> None:
    objects = rendered(chart)
    assert {name for kind, name in objects if kind == "StatefulSet"} == {
        "prod-distserve-a",
        "prod-distserve-b",
    }
    a, b = pod(objects, "prod-distserve-a"), pod(objects, "prod-distserve-b")
    assert [c["name"] for c in a["containers"]] == ["server", "openai"]
    assert [c["name"] for c in b["containers"]] == ["server"]
    assert a["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert b["containers"][0]["resources"] == {
        "limits": {"nvidia.com/gpu": 2},
        "requests": {"cpu": 2, "memory": "68719476736"},
    }
    (apart,) = a["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    labels = objects["StatefulSet", "prod-distserve-b"]["spec"]["template"]["metadata"]["labels"]
    assert set(apart["labelSelector"]["matchLabels"].items()) <= set(labels.items())
    together = rendered(chart, spreadNodes=False)
    assert "podAntiAffinity" not in pod(together, "prod-distserve-a")["affinity"]


def test_pods_generate_their_repository_with_addresses_that_exist(chart: Path, tmp_path: Path) -> None:
    objects = rendered(chart)
    text = objects["ConfigMap", "prod-distserve-placement"]["data"]["placement.yaml"]
    file = parse_placement(text)
    check_placement(file)
    placement = file.placement
    assert [i.limits["kv_bytes"] for i in placement.instances] == [42949672960, 85899345920]
    assert [i.devices for i in placement.instances] == [("cuda:0",), ("cuda:1", "cuda:0")]
    assert placement.model == "/models/llama"
    for node in placement.nodes:
        state, service = f"prod-distserve-{node.name}", "prod-distserve-nodes"
        assert node.host == f"{state}-0.{service}.llm.svc.cluster.local"
        assert ("StatefulSet", state) in objects
        assert objects["StatefulSet", state]["spec"]["serviceName"] == service
        assert objects["Service", service]["spec"]["clusterIP"] == "None"
        assert objects["Service", service]["spec"]["publishNotReadyAddresses"] is True
    for path, content in render(placement).items():
        target = tmp_path / "repository" / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)
    node_b = node_repository(tmp_path / "repository", "b")
    assert node_b.orchestrator == f"{placement.nodes[0].host}:8001"
    assert [spec.name for spec in node_b.instances] == ["decode_0"]


def test_the_channel_key_is_secret_shared_and_replaceable(chart: Path) -> None:
    objects = rendered(chart)
    secret = objects["Secret", "prod-distserve-channel-key"]
    assert len(base64.b64decode(secret["data"]["channel-key"])) == 64
    own = rendered(chart, channelKey={"existingSecret": "mine"})
    assert not [kind for kind, _ in own if kind == "Secret"]
    for found, name in ((objects, "prod-distserve-channel-key"), (own, "mine")):
        for node in "ab":
            spec = pod(found, f"prod-distserve-{node}")
            (volume,) = (v for v in spec["volumes"] if v["name"] == "channel-key")
            assert volume["secret"]["secretName"] == name
            (mount,) = (m for m in spec["containers"][0]["volumeMounts"] if m["name"] == "channel-key")
            assert f"{mount['mountPath']}/channel-key" == SECRET_FILE


def test_a_single_node_needs_no_key_and_no_names(tmp_path: Path) -> None:
    objects = rendered(write_chart(tmp_path, None), name="distserve")
    assert {kind for kind, _ in objects} == {
        *("ConfigMap", "NetworkPolicy", "PodDisruptionBudget", "Service", "StatefulSet")
    }
    spec = pod(objects, "distserve-node0")
    server = spec["containers"][0]
    assert "affinity" not in spec
    assert "limits" not in server["resources"]
    assert server["resources"]["requests"] == {"cpu": 4}  # two cores of instances, orchestrator, server
    assert not [word for word in server["args"] if word.startswith("--node")]
    text = objects["ConfigMap", "distserve-placement"]["data"]["placement.yaml"]
    assert parse_placement(text).placement == default_placement().placement


def test_probes_ask_for_our_readiness_and_stopping_drains(chart: Path) -> None:
    objects = rendered(chart, drainSeconds=120, preStopSeconds=7)
    spec = pod(objects, "prod-distserve-a")
    server, front = spec["containers"]
    assert server["readinessProbe"]["exec"]["command"] == ["distserve", "health", "--http", "127.0.0.1:8000"]
    assert front["readinessProbe"]["httpGet"] == {"path": "/health", "port": "openai"}
    assert server["startupProbe"]["failureThreshold"] * server["startupProbe"]["periodSeconds"] == 900
    for container in (server, front):
        assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "7"]
        assert "--drain-timeout=120" in container["args"]
    assert spec["terminationGracePeriodSeconds"] >= 7 + 120 + 10
    budget = objects["PodDisruptionBudget", "prod-distserve"]["spec"]
    assert budget["maxUnavailable"] == 1
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_only_the_orchestrators_pod_is_behind_the_service(chart: Path) -> None:
    objects = rendered(chart)
    selector = objects["Service", "prod-distserve"]["spec"]["selector"]
    matching = [
        name
        for (kind, name), found in objects.items()
        if kind == "StatefulSet"
        and set(selector.items()) <= set(found["spec"]["template"]["metadata"]["labels"].items())
    ]
    assert matching == ["prod-distserve-a"]


def test_tritons_ports_are_for_named_clients_only(chart: Path) -> None:
    (others, everyone) = rendered(chart)["NetworkPolicy", "prod-distserve"]["spec"]["ingress"]
    assert "ports" not in others
    assert [p["port"] for p in everyone["ports"]] == [9000, 8002]
    client = {"podSelector": {"matchLabels": {"app": "batch"}}}
    changed = rendered(chart, networkPolicy={"clients": [client]})
    rule = changed["NetworkPolicy", "prod-distserve"]["spec"]["ingress"][2]
    assert rule == {"from": [client], "ports": [{"port": 8000}, {"port": 8001}]}


def test_ports_are_changed_in_one_place(chart: Path) -> None:
    objects = rendered(chart, ports={"grpc": 8101, "openai": 80}, podMonitor={"enabled": True})
    placement = parse_placement(objects["ConfigMap", "prod-distserve-placement"]["data"]["placement.yaml"])
    assert {node.grpc_port for node in placement.placement.nodes} == {8101}
    server, front = pod(objects, "prod-distserve-a")["containers"]
    assert "--grpc-port=8101" in server["args"]
    assert "--grpc=127.0.0.1:8101" in front["args"]
    assert objects["PodMonitor", "prod-distserve"]["spec"]["podMetricsEndpoints"][0]["honorLabels"] is True


def test_a_wrong_value_is_refused_by_name(chart: Path) -> None:
    with helm.Chart.load(chart) as loaded:
        with pytest.raises(helm.HelmError, match="drainSecond"):
            loaded.validate_schema({"drainSecond": 5})
        with pytest.raises(helm.HelmError, match=r"ports.*grpc"):
            loaded.validate_schema({"ports": {"grpc": "many"}})


def test_helm_finds_nothing_to_mind(chart: Path) -> None:
    report = helm.lint(str(chart))
    assert report["errors"] == []
    assert [m["error"] for m in report["messages"]] == ["icon is recommended"]


def test_every_value_is_described_or_plain(chart: Path) -> None:
    schema = yaml.safe_load((chart / "values.schema.json").read_text())
    made = values(container_plan(parse_placement(TWO_NODES).placement, Settings()), Settings())
    assert set(made) == set(schema["properties"]) - {"global"}
    assert made == yaml.safe_load((chart / "values.yaml").read_text())


@pytest.mark.parametrize("name", ["Node", "a_b", "-a", "a" * 21])
def test_node_names_that_a_pod_cannot_have_are_refused(name: str) -> None:
    file = parse_placement(
        TWO_NODES.replace("name: a}", f"name: {name}}}").replace("node: a", f"node: {name}")
    )
    with pytest.raises(ConfigError, match=rf"nodes: name='{name}'"):
        deployment_files(file.placement, "kubernetes", Settings())
