"""The parts of a device check, in their order."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distserve_tools.device_check.settings import Scale, Settings
from distserve_tools.device_check.shapes import MODELS

PACKAGE = "distserve_tools.device_check"


@dataclass(frozen=True)
class Part:
    """`run` of `module` gets the settings and `arguments`; `limit_s` bounds its process."""

    name: str
    module: str
    limit_s: float
    arguments: tuple[str, ...] = ()


def parts(scale: Scale) -> tuple[Part, ...]:
    """Ceilings first, as the others are measured by them; together their limits stay below nine minutes."""
    models = [Part(f"engine {name}", "engine", 70.0, (name,)) for name in MODELS[scale]]
    return (
        Part("ceilings", "ceilings", 25.0),
        Part("kernels", "kernels", 70.0),
        *models,
        Part("transfers", "transfers", 40.0),
        Part("profile", "profiling", 45.0),
        Part("serving", "serving", 70.0),
        Part("gpu tests", "gpu_tests", 135.0),
    )


def run_part(module: str, settings: Settings, arguments: tuple[str, ...]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = importlib.import_module(f"{PACKAGE}.{module}").run(settings, *arguments)
    return found
