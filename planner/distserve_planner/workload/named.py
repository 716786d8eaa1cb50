"""Built-in workloads of the paper's evaluation (Fig. 7), as package data."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from distserve.core.parsing import ConfigError, nearest
from distserve_planner.workload.model import Workload


def workload_names() -> tuple[str, ...]:
    """Names that `named_workload` knows."""
    folder = resources.files("distserve_planner.workload") / "data"
    return tuple(sorted(item.name[:-5] for item in folder.iterdir() if item.name.endswith(".yaml")))


def named_workload(name: str) -> Workload:
    """A built-in workload by name, or a `schema: workload/1` file by path. Raises `ConfigError`."""
    names = workload_names()
    if name in names:
        text = (resources.files("distserve_planner.workload") / "data" / f"{name}.yaml").read_text("utf-8")
        return Workload.parse(text, name)
    if Path(name).is_file():
        return Workload.load(name)
    raise ConfigError(f"workload={name!r}: neither a built-in workload nor a file{nearest(name, names)}")
