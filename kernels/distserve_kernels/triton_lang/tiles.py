"""Tile shapes of the attention kernels: a table (`tiles.yaml`) and what `tuning` has measured on this GPU."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import triton
import yaml

TABLE_SCHEMA = "kernel-tiles/1"
MEASURED_SCHEMA = "measured-tiles/1"


@dataclass(frozen=True, slots=True)
class Tile:
    """Block sizes and launch options: `n` tokens of K and V per step, `m` rows of queries (prefill only)."""

    n: int
    warps: int
    stages: int
    m: int | None = None

    @classmethod
    def parse(cls, mapping: Mapping[str, Any], where: str) -> Tile:
        """Raises `ValueError` naming what is wrong."""
        allowed = [f.name for f in fields(cls)]
        for key, value in mapping.items():
            if key not in allowed:
                raise ValueError(f"{where}: unknown key {key!r}; allowed: {', '.join(allowed)}")
            if key == "m" and value is None:
                continue
            powers = key in ("n", "m", "warps")
            if not isinstance(value, int) or value < 1 or (powers and value & (value - 1)):
                kind = "a power of two" if powers else "a positive integer"
                raise ValueError(f"{where}: {key}={value!r} must be {kind}")
        missing = {"n", "warps", "stages"} - set(mapping)
        if missing:
            raise ValueError(f"{where}: {min(missing)} is missing")
        return cls(**mapping)


@dataclass(frozen=True)
class Chip:
    """What the launch depends on. `sm`: compute capability x 10."""

    name: str
    sm: int
    multiprocessors: int

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        """The chip of a CUDA device."""
        found = torch.cuda.get_device_properties(device)
        return cls(found.name, found.major * 10 + found.minor, found.multi_processor_count)


@dataclass(frozen=True)
class Case:
    """The shapes that a tile is chosen by. `group`: query heads per KV head; `page`: tokens per block."""

    kernel: str
    dtype: torch.dtype
    head_dim: int
    page: int
    group: int

    @property
    def key(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel}/{dtype}/dim{self.head_dim}/page{self.page}/group{self.group}"


class TileTable:
    """The shipped tiles of every kernel, element size, head size and GPU generation."""

    def __init__(self, entries: Mapping[tuple[str, int, int, int], tuple[Tile, ...]]) -> None:
        self._entries = entries  # (kernel, bytes, largest head_dim, lowest sm) -> tiles

    @classmethod
    def shipped(cls) -> TileTable:
        text = resources.files(__package__).joinpath("tiles.yaml").read_text()
        return cls.parse(yaml.safe_load(text), "tiles.yaml")

    @classmethod
    def parse(cls, document: Mapping[str, Any], where: str) -> TileTable:
        """Raises `ValueError` naming what is wrong."""
        if document.get("schema") != TABLE_SCHEMA:
            raise ValueError(f"{where}: schema={document.get('schema')!r} must be {TABLE_SCHEMA!r}")
        entries: dict[tuple[str, int, int, int], tuple[Tile, ...]] = {}
        for number, entry in enumerate(document["entries"]):
            tiles = tuple(Tile.parse(tile, f"{where}: entry {number}") for tile in entry["tiles"])
            entries[entry["kernel"], entry["bytes"], entry["head_dim"], entry["sm"]] = tiles
        return cls(entries)

    def candidates(self, case: Case, sm: int) -> Sequence[Tile]:
        """The tiles to choose from, the default first. Raises `ValueError` if the table has none."""
        fitting = [
            (-low_sm, head_dim, tiles)
            for (kernel, size, head_dim, low_sm), tiles in self._entries.items()
            if kernel == case.kernel
            and size == case.dtype.itemsize
            and head_dim >= case.head_dim
            and low_sm <= sm
        ]
        if not fitting:
            raise ValueError(f"no tile for {case.key} on sm_{sm}")
        _, _, tiles = min(fitting, key=lambda entry: entry[:2])
        return tiles

    @property
    def largest_head_dim(self) -> int:
        return max(head_dim for _, _, head_dim, _ in self._entries)


class MeasuredTiles:
    """The winners of earlier measurements, in a JSON file of their own per GPU model and Triton version."""

    def __init__(self, folder: Path, chip: Chip) -> None:
        slug = re.sub(r"[^a-z0-9]+", "-", chip.name.lower()).strip("-")
        self._path = folder / f"tiles-{slug}-triton-{triton.__version__}.json"
        self._tiles: dict[str, Tile] = {}
        if self._path.exists():
            self._tiles = self._read()

    def get(self, case: Case) -> Tile | None:
        return self._tiles.get(case.key)

    def put(self, case: Case, tile: Tile) -> None:
        """Keeps the tile, also on disk; what other processes have added meanwhile stays."""
        if self._path.exists():
            self._tiles = self._read() | self._tiles
        self._tiles[case.key] = tile
        self._path.parent.mkdir(parents=True, exist_ok=True)
        document = {"schema": MEASURED_SCHEMA, "tiles": {k: asdict(t) for k, t in self._tiles.items()}}
        with tempfile.NamedTemporaryFile("w", dir=self._path.parent, delete=False) as file:
            json.dump(document, file, indent=1)
        Path(file.name).replace(self._path)

    def _read(self) -> dict[str, Tile]:
        document = json.loads(self._path.read_text())
        if document.get("schema") != MEASURED_SCHEMA:
            raise ValueError(f"{self._path}: schema={document.get('schema')!r} must be {MEASURED_SCHEMA!r}")
        return {key: Tile.parse(tile, f"{self._path}: {key}") for key, tile in document["tiles"].items()}


def cache_folder() -> Path:
    """Where measurements are kept: `DISTSERVE_CACHE`/kernels, by default in the user's cache folder."""
    root = os.environ.get("DISTSERVE_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "distserve") / "kernels"
