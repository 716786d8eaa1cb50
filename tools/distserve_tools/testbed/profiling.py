"""Step times of a model on one core, measured in a process of its own, which binds itself to the core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from distserve.core.parsing import ConfigError
from distserve_tools.testbed.systems import cores

PROFILE_TIMEOUT_S = 3600.0


def profile_on_a_core(model: str, path: Path, say: Callable[[str], None], quick: bool = True) -> Path:
    """Writes the profile to `path`. Raises `ConfigError`."""
    say(f"profiling {model}")
    command = [sys.executable, "-m", "distserve_tools", "profile", "--model", model, "--out", str(path)]
    command += ["--device", f"cpu:{cores()[0]}", *(["--quick"] if quick else [])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=PROFILE_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"profile of {model}: ended with code {done.returncode}")
    return path
