"""What all parts of a device check are told."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from distserve.core.config import Dtype
from distserve.core.parsing import parse

Scale = Literal["device", "small"]


@dataclass(frozen=True)
class Settings:
    """`device`: as the engine names it; `scale`: "small" shapes for CPUs; `folder`: for what parts share
    (checkpoints, ceilings), removed at the end.
    """

    device: str
    dtype: Dtype
    scale: Scale
    folder: str

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Settings:
        return parse(cls, json.loads(path.read_text()), str(path))

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")
