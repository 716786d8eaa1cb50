"""Measures this device with kernels, engine, transfers and a real server, beside what it could do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console

from distserve.core.config import DTYPE_BYTES
from distserve.core.parsing import ConfigError, nearest
from distserve.worker.device import parse_device
from distserve_tools.device_check.parts import Part, parts
from distserve_tools.device_check.report import markdown
from distserve_tools.device_check.settings import Settings

SCHEMA = "device-check/1"
LIMIT_S = 530.0
END_S = 5.0
LOG_TAIL = 1500
EXAMPLES = """\
examples:
  distserve device-check                       # the first GPU; under nine minutes, offline
  distserve device-check --device cuda:1 --out results
  distserve device-check --device cpu:0        # small shapes: is everything in place?
  distserve device-check --only kernels,transfers
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `distserve device-check`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    parser.add_argument("--device", default="cuda:0", help="cuda:0, or cpu:0 for small shapes (%(default)s)")
    parser.add_argument("--dtype", choices=tuple(DTYPE_BYTES), help="default: bf16 on a GPU, fp32 on a CPU")
    parser.add_argument(
        "--out", type=Path, default=Path(), metavar="FOLDER", help="for device-check.json and .md"
    )
    parser.add_argument("--only", metavar="PARTS", help="comma-separated; the ceilings are always measured")


def run(args: argparse.Namespace) -> int:
    """0 if no part has failed. Raises `ConfigError` for anything refused."""
    device = parse_device(args.device)
    on_gpu = device.kind == "cuda"
    about = _about(args.device, args.dtype or ("bf16" if on_gpu else "fp32"))
    console = Console(stderr=True)
    began = time.monotonic()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="distserve-check-") as folder:
        settings = Settings(args.device, about["dtype"], "device" if on_gpu else "small", folder)
        path = Path(folder) / "settings.json"
        settings.save(path)
        for part in _chosen(parts(settings.scale), args.only):
            left_s = LIMIT_S - (time.monotonic() - began)
            found[part.name] = _run(part, path, min(part.limit_s, left_s), console)
    document = {"schema": SCHEMA, "about": about, "seconds": time.monotonic() - began, "parts": found}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "device-check.json").write_text(json.dumps(document, indent=2) + "\n")
    (args.out / "device-check.md").write_text(markdown(document))
    sys.stdout.write(markdown(document))
    return int(any(part["state"] == "failed" for part in found.values()))


def _chosen(every: tuple[Part, ...], only: str | None) -> list[Part]:
    if only is None:
        return list(every)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = [part.name for part in every]
    for name in names:
        if name not in known:
            raise ConfigError(
                f"--only {name!r}: not a part{nearest(name, known)}; allowed: {', '.join(known)}"
            )
    return [part for part in every if part.name in names or part.name == "ceilings"]


def _run(part: Part, settings: Path, limit_s: float, console: Console) -> dict[str, Any]:
    """One part in a process group of its own, which ends with it."""
    if limit_s <= 0:
        return {"state": "skipped", "why": f"no time left of {LIMIT_S:.0f} s"}
    result, log = settings.with_name("result.json"), settings.with_name("log")
    result.unlink(missing_ok=True)
    module = "distserve_tools.device_check.worker"
    command = [sys.executable, "-m", module, str(settings), str(result), part.module, *part.arguments]
    began = time.monotonic()
    with log.open("w") as file, console.status(part.name):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            late = process.poll() is None
            _end(process)
    seconds = time.monotonic() - began
    if result.exists() and not late:
        found: dict[str, Any] = json.loads(result.read_text())
    elif late:
        found = {"state": "failed", "why": f"not done within {limit_s:.0f} s"}
    else:
        found = {"state": "failed", "why": f"ended with code {process.returncode}"}
    if found["state"] == "failed":
        found["log"] = log.read_text(errors="replace")[-LOG_TAIL:]
    console.print(f"{part.name}: {found['state']}, {seconds:.1f} s {found.get('why', '')}", highlight=False)
    return found | {"seconds": seconds}


def _end(process: subprocess.Popen[bytes]) -> None:
    """The part is over: whatever it has started ends, too."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _about(device: str, dtype: str) -> dict[str, Any]:
    """Device and versions. Raises `ConfigError` for a GPU that is not there."""
    import torch

    name = platform.processor() or platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    parsed = parse_device(device)
    if parsed.kind == "cuda":
        if parsed.index >= torch.cuda.device_count():
            raise ConfigError(
                f"device={device!r}: this host has {torch.cuda.device_count()} CUDA devices; "
                "--device cpu:0 checks the installation with small shapes"
            )
        properties = torch.cuda.get_device_properties(parsed.index)
        name, memory = properties.name, properties.total_memory
    return {
        "device": device,
        "device_name": name,
        "memory_bytes": memory,
        "dtype": dtype,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "flash_attn": _version("flash_attn"),
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
