"""What a deployment in containers fixes: ports, folders, times."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib import metadata

from distserve.core.parsing import ConfigError

DISTRIBUTION = "distserve-triton"
REPOSITORY_FOLDER = "/model_repository"
MODELS_FOLDER = "/models"
CACHE_FOLDER = "/var/cache/distserve"
SECRET_FILE = "/run/secrets/distserve/channel-key"


@dataclass(frozen=True)
class Ports:
    """Ports inside a container."""

    http: int = 8000
    grpc: int = 8001
    metrics: int = 8002
    openai: int = 9000


@dataclass(frozen=True)
class Settings:
    """`image` is name:tag. Times in whole seconds."""

    image: str = ""  # default: the distribution and its version
    ports: Ports = field(default_factory=Ports)
    start_timeout_s: int = 900  # loading weights included
    drain_s: int = 60  # for requests in flight, on stop
    pre_stop_s: int = 10  # until load balancers have noticed
    stop_margin_s: int = 30  # from the end of the drain to SIGKILL

    @property
    def image_parts(self) -> tuple[str, str]:
        """Name and tag. Raises `ConfigError`."""
        name, _, tag = (self.image or f"{DISTRIBUTION}:{metadata.version(DISTRIBUTION)}").rpartition(":")
        if not name or not tag or "/" in tag:
            raise ConfigError(f"image={self.image!r}: must be NAME:TAG")
        return name, tag

    @property
    def image_name(self) -> str:
        return ":".join(self.image_parts)
