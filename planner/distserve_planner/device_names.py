"""Names of devices in a placement: `cpu:0` (a core), `cpu:0-3` (a set of cores), `cuda:1` (a GPU)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from distserve.core.parsing import ConfigError

_NAME = re.compile(r"(cpu|cuda):(\d+)(?:-(\d+))?")


@dataclass(frozen=True)
class Device:
    """What one rank runs on: the ids of its cores, or of its GPU."""

    kind: Literal["cpu", "cuda"]
    ids: range

    def overlap(self, other: Device) -> range:
        """Ids that both use."""
        if self.kind != other.kind:
            return range(0)
        return range(max(self.ids.start, other.ids.start), min(self.ids.stop, other.ids.stop))


def parse_device(name: str) -> Device:
    """Raises `ConfigError` for anything but the three forms above."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ConfigError(f"device {name!r}: must be cpu:CORE, cpu:FIRST-LAST or cuda:INDEX")
    kind, first, last = match[1], int(match[2]), int(match[3] or match[2])
    if kind == "cuda":
        if match[3] is not None:
            raise ConfigError(f"device {name!r}: one GPU per rank; list them as [cuda:{first}, cuda:{last}]")
        return Device("cuda", range(first, first + 1))
    if last < first:
        raise ConfigError(f"device {name!r}: the last core is before the first")
    return Device("cpu", range(first, last + 1))
