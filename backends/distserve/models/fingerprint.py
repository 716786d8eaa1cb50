"""A short hash that tells two checkpoints apart, cheap enough for every start. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

from distserve.core.model_config import ModelConfig
from distserve.models.loader import weight_files
from distserve.models.weights import ModelLoadError

_SAMPLE_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def model_fingerprint(folder: str | Path) -> str:
    """32 hexadecimal digits over the configuration, every tensor's name, dtype and shape, and 3 x 64 of its
    bytes.

    Independent of sharding and of files that do not change the computation. Instances may exchange KV cache
    only if their fingerprints agree. Raises `ModelLoadError`, or `ConfigError` for config.json.
    """
    folder = Path(folder)
    config = dataclasses.asdict(ModelConfig.load(folder))
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    tensors: dict[str, tuple[Path, int, dict[str, Any]]] = {}
    for file in weight_files(folder):
        start, header = _header(folder / file)
        for name, entry in header.items():
            tensors[name] = (folder / file, start, entry)
    for name in sorted(tensors):
        path, start, entry = tensors[name]
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        digest.update(_sample(path, start, entry["data_offsets"]))
    return digest.hexdigest()[:32]


def _header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data starts, and the tensors' entries (the format: u64 length, JSON, data)."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"header of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(size))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a readable safetensors file ({error})") from error
    header.pop("__metadata__", None)
    return 8 + size, header


def _sample(path: Path, start: int, offsets: list[int]) -> bytes:
    begin, end = offsets
    size = end - begin
    places = {0, size // 2, max(0, size - _SAMPLE_BYTES)}
    descriptor = os.open(path, os.O_RDONLY)
    try:
        parts = [
            os.pread(descriptor, min(_SAMPLE_BYTES, size - p), start + begin + p) for p in sorted(places)
        ]
    finally:
        os.close(descriptor)
    return b"".join(parts)
