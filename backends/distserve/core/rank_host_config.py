"""Configuration of a model that hosts ranks of an instance which another node serves."""

from __future__ import annotations

from dataclasses import dataclass

from distserve.core.config import LogFormat
from distserve.core.parsing import ConfigError, parse

RANKS_PARAMETER = "ranks"


@dataclass(frozen=True)
class RankHostConfig:
    """`ranks` of `instance`; all else comes from rank 0, once it has proved that it knows the secret."""

    instance: str
    ranks: tuple[int, ...]
    transfer_secret_file: str | None = None
    log_format: LogFormat = "text"

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError(f"ranks={list(self.ranks)}: must be different numbers above 0")

    @classmethod
    def load(cls, values: object, where: str = RANKS_PARAMETER) -> RankHostConfig:
        """Parses a mapping; unknown keys are refused by name (`ConfigError`)."""
        return parse(cls, values, where)


def rank_model(instance: str) -> str:
    """The Triton model that hosts further ranks of an instance, on each node that has some."""
    return f"{instance}_ranks"
