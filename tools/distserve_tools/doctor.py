"""Examines this machine, and a model repository or placement if given: what would not run, and the fix."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.markup import escape

from distserve.core.model_config import ModelConfig, cache_folder, resolve_model
from distserve.core.parsing import ConfigError
from distserve_planner.machine_facts import this_machine
from distserve_planner.placement_check import check_placement
from distserve_planner.placement_file import read_placement
from distserve_tools.demo_model import DEMO_MODEL
from distserve_tools.repository import node_repository, orchestrator_config
from distserve_tools.server_files import (
    ServerNotFoundError,
    check_shared_python,
    find_installation,
    python_version,
    server_environment,
)

_SHM_WANTED = 256 << 20
_MARKS = {"ok": "[green]ok  [/green]", "warn": "[yellow]warn[/yellow]", "fail": "[red]FAIL[/red]"}


@dataclass(frozen=True)
class Finding:
    """One thing looked at. `fix` says what to do about a warning or failure."""

    subject: str
    level: Literal["ok", "warn", "fail"]
    detail: str
    fix: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve doctor`."""
    parser.add_argument("--model-repository", type=Path, help="also examine this folder")
    parser.add_argument("--node", help="which node of a repository for several")
    parser.add_argument("--placement", type=Path, help="also examine this placement file")
    parser.add_argument("--tritonserver", metavar="PROGRAM", help="default: on PATH, or the wheel's")


def run(args: argparse.Namespace) -> int:
    """Returns 1 if anything failed."""
    findings = list(machine_findings(args.tritonserver))
    if args.placement is not None:
        findings += _guarded("placement", lambda: _placement(args.placement))
    if args.model_repository is not None:
        findings += _guarded("repository", lambda: _repository(args.model_repository, args.node))
    console = Console(highlight=False)
    for finding in findings:
        console.print(f"{_MARKS[finding.level]} {finding.subject}: {escape(finding.detail)}", soft_wrap=True)
        if finding.fix:
            console.print(f"       fix: {escape(finding.fix)}", soft_wrap=True)
    return 1 if any(finding.level == "fail" for finding in findings) else 0


def machine_findings(tritonserver: str | None = None) -> Iterator[Finding]:
    """What serving needs of a machine."""
    yield from _guarded("python", _python)
    yield from _guarded("tritonserver", lambda: _server(tritonserver))
    yield _numpy()
    yield _shared_memory()
    yield _compiler()
    yield _machine()
    yield from _guarded("model cache", _cache)


def _guarded(subject: str, look: Callable[[], Finding]) -> list[Finding]:
    try:
        return [look()]
    except (ConfigError, ServerNotFoundError) as error:
        return [Finding(subject, "fail", str(error))]


def _python() -> Finding:
    check_shared_python()
    library = Path(str(sysconfig.get_config_var("LIBDIR"))) / str(sysconfig.get_config_var("INSTSONAME"))
    if not library.exists():
        return Finding(
            "python", "fail", f"{library} is missing", "install the shared library of this Python (libpython)"
        )
    return Finding("python", "ok", f"{python_version()} in {sys.prefix}, {library}")


def _server(program: str | None) -> Finding:
    installation = find_installation(program)
    try:
        answer = subprocess.run(
            [str(installation.binary), "--help"],
            env=server_environment(installation, {"PATH": "/usr/bin:/bin"}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("tritonserver", "fail", f"{installation.binary} does not run: {error}")
    if "--model-repository" not in answer.stdout + answer.stderr:
        last = (answer.stderr.strip().splitlines() or ["no output"])[-1]
        return Finding("tritonserver", "fail", f"{installation.binary} does not run: {last}")
    return Finding("tritonserver", "ok", f"{installation.binary} ({installation.origin})")


def _numpy() -> Finding:
    version = metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        return Finding(
            "numpy", "fail", f"{version}: this server's stub corrupts shapes", "pip install 'numpy<2'"
        )
    return Finding("numpy", "ok", version)


def _shared_memory() -> Finding:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        return Finding("/dev/shm", "fail", "is missing", "mount a tmpfs there (docker: --shm-size=1g)")
    free = shutil.disk_usage(shm).free
    if free < _SHM_WANTED:
        return Finding("/dev/shm", "warn", f"{free >> 20} MiB free", "make it larger (docker: --shm-size=1g)")
    return Finding("/dev/shm", "ok", f"{free >> 20} MiB free")


def _compiler() -> Finding:
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return Finding("C compiler", "ok", path)
    return Finding(
        "C compiler", "warn", "none; CPU attention falls back to torch and is slower", "install gcc or clang"
    )


def _machine() -> Finding:
    facts = this_machine()
    gpus = ", ".join(f"{size / 2**30:.0f} GiB" for size in facts.gpu_memory_bytes) or "none"
    memory = facts.memory_available_bytes / 2**30
    return Finding("machine", "ok", f"{len(facts.cores)} cores, {memory:.1f} GiB available, GPUs: {gpus}")


def _cache() -> Finding:
    cache = cache_folder()
    models = sorted(p.name for p in (cache / "models").glob("[!.]*")) if cache.exists() else []
    try:
        resolve_model(DEMO_MODEL)
    except ConfigError:
        return Finding(
            "model cache", "warn", f"{cache}: no demo model", "`distserve demo` fetches it on its first run"
        )
    return Finding("model cache", "ok", f"{cache}: {', '.join(models)}")


def _placement(path: Path) -> Finding:
    file = read_placement(path)
    check_placement(file, ModelConfig.load(resolve_model(file.placement.model)), this_machine())
    return Finding("placement", "ok", f"{path}: {', '.join(file.placement.names)}")


def _repository(folder: Path, node: str | None) -> Finding:
    repository = node_repository(folder, node).folder
    models = sorted(p.parent.name for p in repository.glob("*/config.pbtxt"))
    if not models:
        return Finding("repository", "fail", f"{repository}: no models", "write it with `planner generate`")
    for model in models:
        if not (repository / model / "1/model.py").is_file():
            return Finding(
                "repository", "fail", f"{repository / model}/1/model.py is missing", "generate again"
            )
    orchestrator = orchestrator_config(repository)
    if orchestrator is None:
        return Finding(
            "repository", "ok", f"{repository}: {', '.join(models)} (no orchestrator on this node)"
        )
    try:
        resolve_model(orchestrator.model)
    except ConfigError as error:
        fix = "`distserve demo` fetches it" if orchestrator.model == DEMO_MODEL else "put the model there"
        return Finding("repository", "fail", str(error), fix)
    local = [spec.name for spec in orchestrator.instances if spec.address is None]
    if missing := sorted(set(local) - set(models)):
        return Finding(
            "repository", "fail", f"the orchestrator names {', '.join(missing)}, not there", "generate again"
        )
    return Finding("repository", "ok", f"{repository}: {', '.join(models)}")
