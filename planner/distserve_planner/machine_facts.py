"""What this machine has: cores, memory, GPUs. Read without torch."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MachineFacts:
    """Cores that this process may use, memory that is free for new processes, total memory of each GPU."""

    cores: frozenset[int]
    memory_available_bytes: int
    gpu_memory_bytes: tuple[int, ...]


def this_machine() -> MachineFacts:
    """Reads them now."""
    return MachineFacts(frozenset(os.sched_getaffinity(0)), _memory_available_bytes(), _gpu_memory_bytes())


def _memory_available_bytes() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = int(match[1]) * 1024 if match else 1 << 62
    limit = Path("/sys/fs/cgroup/memory.max")  # a container's own limit, if it has one
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, max(0, int(text) - int(used.read_text())))
    return available


def _gpu_memory_bytes() -> tuple[int, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(int(line) << 20 for line in answer.stdout.split() if line.isdigit())
