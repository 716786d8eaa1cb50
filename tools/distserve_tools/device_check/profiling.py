"""`distserve profile` on this device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from distserve.worker.device import parse_device
from distserve.worker.runner import TORCH_DTYPE
from distserve_tools.device_check.settings import Settings
from distserve_tools.device_check.shapes import ON_DISK, write_checkpoint


def checkpoint(settings: Settings) -> Path:
    """The model that is loaded from a folder, written if it is not there."""
    name = ON_DISK[settings.scale]
    device = parse_device(settings.device).torch_device
    return write_checkpoint(name, Path(settings.folder) / name, TORCH_DTYPE[settings.dtype], device)


def run(settings: Settings) -> dict[str, Any]:
    """The profile, as the planner reads it. Raises `RuntimeError` with what the command has said."""
    command = [sys.executable, "-m", "distserve_tools", "profile", "--model", str(checkpoint(settings))]
    command += ["--device", settings.device, "--dtype", settings.dtype, "--quick", "--json"]
    if settings.scale == "small":
        command += ["--repeats", "2", "--kv-bytes", str(16 << 20)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    profile = json.loads(done.stdout)
    rows = [
        {"phase": entry["phase"], "tp": entry["tp"], "points": entry["points"], "p50": entry["p50"]}
        for entry in profile["residuals"]
    ]
    return {"rows": rows, "lm_tokens": profile["lm_tokens"], "profile": profile}
