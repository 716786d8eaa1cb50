"""What the device can do at most: a large copy and a large matrix product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from distserve.worker.device import parse_device
from distserve.worker.runner import TORCH_DTYPE
from distserve_tools.device_check.settings import Settings
from distserve_tools.device_check.stopwatch import Stopwatch

FILE = "ceilings.json"
COPY_BYTES = {"device": 2 << 30, "small": 32 << 20}
MATRIX = {"device": 8192, "small": 384}


def run(settings: Settings) -> dict[str, Any]:
    """Bytes per second, read and written together, and FLOPs per second; kept for the parts to come."""
    device, dtype = parse_device(settings.device).torch_device, TORCH_DTYPE[settings.dtype]
    stopwatch = Stopwatch(device)
    size = COPY_BYTES[settings.scale]
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = stopwatch.seconds(lambda: target.copy_(source))
    n = MATRIX[settings.scale]
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product_s = stopwatch.seconds(lambda: a @ b)
    found = {
        "copy_bytes_s": 2 * size / copy_s,
        "matrix_flops_s": 2.0 * n**3 / product_s,
        "copy_bytes": size,
        "matrix": n,
    }
    (Path(settings.folder) / FILE).write_text(json.dumps(found))
    return {"rows": [], **found}


def read(settings: Settings) -> tuple[float, float]:
    """(bytes per second, FLOPs per second). Raises `FileNotFoundError` if they have not been measured."""
    found = json.loads((Path(settings.folder) / FILE).read_text())
    return float(found["copy_bytes_s"]), float(found["matrix_flops_s"])
