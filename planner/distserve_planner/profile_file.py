"""Profile files: a fitted latency model, its residuals and the KV transfer (`schema: profile/1`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from distserve.core.model_config import ModelConfig
from distserve.core.parsing import ConfigError
from distserve_planner.cluster import Link
from distserve_planner.coefficients import Degree
from distserve_planner.instance_latency import Overhead
from distserve_planner.latency import LatencyModel
from distserve_planner.schema_file import dump_document, load_document, parse_document, save_document

PROFILE_SCHEMA = "profile/1"


@dataclass(frozen=True, slots=True)
class Residual:
    """Relative error of one fit: |predicted - measured| / measured over its points."""

    tp: int
    phase: str
    p50: float
    p95: float
    points: int


@dataclass(frozen=True)
class Profile:
    """What `distserve profile` measures, or what ships for a known device.

    transfer: KV between two instances as measured (bytes per second, latency); None if not measured.
    """

    device: str
    model_name: str
    model: ModelConfig
    dtype: str
    degrees: tuple[Degree, ...]
    overhead: Overhead = field(default_factory=Overhead)
    lm_tokens: int | None = None
    transfer: Link | None = None
    residuals: tuple[Residual, ...] = ()
    device_memory_bytes: int | None = None
    source: str = ""
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.lm_tokens is not None and self.lm_tokens < 1:
            raise ConfigError(f"lm_tokens={self.lm_tokens}: must be at least 1")

    def latency_model(self) -> LatencyModel:
        """The model that the simulator uses."""
        return LatencyModel(
            self.model_name, self.model, self.device, self.dtype, self.degrees, self.overhead, self.lm_tokens,
            self.source,
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile; raises `ConfigError` naming file, field and value."""
        return load_document(path, PROFILE_SCHEMA, cls)

    @classmethod
    def parse(cls, text: str, where: str = "profile") -> Profile:
        """From YAML text; raises `ConfigError`."""
        return parse_document(text, PROFILE_SCHEMA, cls, where)

    def dump(self) -> str:
        """YAML text that `parse` reads back."""
        return dump_document(self, PROFILE_SCHEMA)

    def save(self, path: str | Path) -> None:
        """Writes the profile to `path`."""
        save_document(path, self, PROFILE_SCHEMA)
