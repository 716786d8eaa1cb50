"""The wheel: what is in it, and that it serves from environments that have nothing of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from distserve_tools import die_with_parent
from distserve_tools.client import Client
from distserve_tools.health import server_problem
from distserve_tools.processes import free_ports
from model_zoo import Zoo, prompt

ROOT = Path(__file__).parents[2]
SOURCES = ("backends", "kernels", "planner", "tools")
STEP_S = 600.0
OTHER_PYTHONS = ("3.10", "3.12")  # numpy 1.26 has no wheels for later ones


def run(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """Runs outside of the checkout and without its variables; returns stdout."""
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=env | environment,
        capture_output=True,
        text=True,
        timeout=STEP_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(
        [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT],
        folder,
        PIP_DISABLE_PIP_VERSION_CHECK="1",
    )
    (found,) = folder.glob("*.whl")
    return found


def test_everything_is_in_it_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"distserve_triton-{metadata.version('distserve-triton')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    found = {name for name in names if ".dist-info/" not in name}
    there = {
        str(path.relative_to(ROOT / source))
        for source in SOURCES
        for path in (ROOT / source).glob("distserve*/**/*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert found == there
    assert "distserve_planner/deployment/data/chart/templates/nodes.yaml" in found
    assert "distserve_tools/data/grafana_dashboard.json" in found


def make_environment(python: str | Path, folder: Path) -> Path:
    """A new virtual environment; returns its folder of programs."""
    run([python, "-m", "venv", folder], folder.parent)
    return folder / "bin"


def install(programs: Path, *what: str | Path) -> None:
    quiet = ["-q", "--disable-pip-version-check", "--no-input"]
    run([programs / "python", "-m", "pip", "install", *quiet, *what], programs.parent)


def borrow_packages(programs: Path) -> None:
    """Makes this environment's packages importable there, but not the checkout: `.pth` files of a folder
    that is itself added by one are not read.
    """
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    here = run([programs / "python", "-c", code], programs).strip()
    mine = {p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")}
    (Path(here) / "borrowed.pth").write_text("\n".join(sorted(mine)) + "\n")


def test_it_serves_from_an_environment_of_its_own(wheel: Path, zoo: Zoo, tmp_path: Path) -> None:
    programs = make_environment(sys.executable, tmp_path / "environment")
    borrow_packages(programs)
    install(programs, "--no-deps", "--no-index", wheel)
    code = "import distserve, distserve_tools, distserve_planner as p; print(distserve.__file__, p.__file__)"
    for place in run([programs / "python", "-c", code], tmp_path).split():
        assert Path(place).is_relative_to(tmp_path / "environment")

    (tmp_path / "cache/models").mkdir(parents=True)
    (tmp_path / "cache/models/m").symlink_to(zoo("llama").folder)
    core = f"cpu:{min(os.sched_getaffinity(0))}"
    instances = [{"role": role, "devices": [core], "num_blocks": 64} for role in ("prefill", "decode")]
    placement = {"schema": "placement/1", "model": "cache:m", "oversubscribe": True, "instances": instances}
    (tmp_path / "placement.yaml").write_text(yaml.safe_dump(placement))
    cache = {"DISTSERVE_CACHE": str(tmp_path / "cache")}
    run([programs / "planner", "generate", "-p", "placement.yaml", "-o", "repository"], tmp_path, **cache)

    http, grpc, metrics = free_ports(3)
    words = ["serve", "--no-openai", "--echo-log", "--model-repository", "repository"]
    words += ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
    guard = [sys.executable, die_with_parent.__file__, str(os.getpid())]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | cache
    log_path = tmp_path / "serve.log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [*guard, str(programs / "distserve"), *words], cwd=tmp_path, env=env, stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 120.0
        while (problem := server_problem(f"127.0.0.1:{http}", 5.0)) is not None:
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < deadline, problem + log_path.read_text()
            time.sleep(0.2)
        with Client(f"127.0.0.1:{grpc}") as client:
            answer = client.complete(prompt(20), max_tokens=8, temperature=0.0, ignore_eos=True)
            assert len(answer.token_ids) == 8
        run([programs / "distserve", "health", "--http", f"127.0.0.1:{http}"], tmp_path)
        modules = modules_of_engines(process.pid)
        assert len(modules) == 2, modules
        assert all(Path(m).is_relative_to(tmp_path / "environment") for m in modules)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60.0) == 0, log_path.read_text()


def modules_of_engines(pid: int) -> list[str]:
    """The interpreter of each engine below a launcher, as its command line has it."""
    found, parents = [], {pid}
    rows = [line.split(None, 2) for line in run(["ps", "-eo", "pid=,ppid=,args="], ROOT).splitlines()]
    grown = True
    while grown:
        below = {int(p) for p, parent, *_ in rows if int(parent) in parents} - parents
        parents |= below
        grown = bool(below)
    for child, _, *args in rows:
        words = args[0].split() if args else []
        if int(child) in parents and "distserve.engine" in words:
            found.append(words[0])
    return found


def other_python() -> Path:
    """Another version of Python with a shared library; skips the test if there is none."""
    code = "import sysconfig; print(bool(sysconfig.get_config_var('Py_ENABLE_SHARED')))"
    for version in OTHER_PYTHONS:
        if version == f"{sys.version_info.major}.{sys.version_info.minor}":
            continue
        pyenv = (Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python{version}")
        for python in filter(None, [shutil.which(f"python{version}"), *pyenv]):
            done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
            if done.returncode == 0 and done.stdout.strip() == "True":
                return Path(python)
    pytest.skip(f"no Python {' or '.join(OTHER_PYTHONS)} with a shared library on this machine")


REPLAY = """
import json, sys
from pathlib import Path
from distserve_tools.client import Client
from distserve_tools.testbed.replay_server import replay_server
with replay_server(Path(sys.argv[1]), sys.argv[2], 1) as server, Client(server.grpc_url) as client:
    answer = client.complete("hello", max_tokens=8, ignore_eos=True)
    print(json.dumps([sys.version_info[:2], len(answer.token_ids), answer.text, "torch" in sys.modules]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_another_python_plans_and_runs_triton(wheel: Path, zoo: Zoo, tmp_path: Path) -> None:
    """All dependencies but torch, whose wheels for GPUs are gigabytes: the planner, and a tritonserver with
    this Python's stub, the orchestrator, and instances that only replay tokens.
    """
    python = other_python()
    programs = make_environment(python, tmp_path / "environment")
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        lines = archive.read(path).decode().splitlines()
    needed = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    plain = [n for n in needed if ";" not in n and not n.startswith("torch")]
    server = [n.partition(";")[0].strip() for n in needed if re.search(r"extra == ['\"]server['\"]", n)]
    assert plain
    assert server
    install(programs, *plain, *server)
    install(programs, "--no-deps", "--no-index", wheel)
    for target in ("docker", "compose", "kubernetes"):
        command = ["generate", "--target", target, "-o", tmp_path / target, "--no-machine-check"]
        assert "files written" in run([programs / "planner", *command], tmp_path)
    run([programs / "distserve", "monitoring", "-o", tmp_path / "monitoring"], tmp_path)
    model = str(zoo("llama").folder)
    cache = {"DISTSERVE_CACHE": str(tmp_path / "cache")}
    out = run([programs / "python", "-c", REPLAY, tmp_path / "replay", model], tmp_path, **cache)
    version, tokens, _, torch = json.loads(out.splitlines()[-1])
    assert f"{version[0]}.{version[1]}" in OTHER_PYTHONS
    assert (tokens, torch) == (8, False)
