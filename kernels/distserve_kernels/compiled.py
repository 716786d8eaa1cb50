"""Builds the C kernels once per machine and loads them.

The shared object is kept in the user's cache under a hash of sources, compiler and CPU features, so that a
home folder shared by different machines is safe. Concurrent builders wait for each other, the file appears
by an atomic rename, and every wait has a limit. Without a compiler, or if the build fails, `library()`
gives None, the reason is logged once, and callers fall back to torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

BUILD_TIMEOUT_S = 120.0
_SOURCES = Path(__file__).with_name("csrc")
_FLAGS = ("-O3", "-std=gnu11", "-fno-math-errno", "-fvisibility=hidden", "-shared", "-fPIC")


class BuildError(RuntimeError):
    """The kernels could not be built; the message says why."""


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where they can't be had."""
    try:
        return ctypes.CDLL(str(build(cache_folder(), find_compiler())))
    except (BuildError, OSError) as error:
        logger.warning("no compiled CPU kernels, torch does their work: %s", error)
        return None


def cache_folder() -> Path:
    """`$DISTSERVE_CACHE/kernels`, by default in the user's cache; a private temporary folder if that can't
    be written.
    """
    folder = Path(os.environ.get("DISTSERVE_CACHE") or "~/.cache/distserve").expanduser() / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="distserve-kernels-"))


def find_compiler() -> str | None:
    """`$CC`, or the first of cc, gcc and clang on the path."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return found
    return None


def build(folder: Path, compiler: str | None, timeout_s: float = BUILD_TIMEOUT_S) -> Path:
    """Path of the shared object in `folder`, compiled now if it isn't there. Raises `BuildError`."""
    if compiler is None:
        raise BuildError("no C compiler found (set CC, or install gcc)")
    sources = sorted(_SOURCES.glob("*.c"))
    target = folder / f"cpu-{_fingerprint(compiler)}.so"
    if target.exists():
        return target
    deadline = time.monotonic() + timeout_s
    with _lock(target.with_suffix(".lock"), deadline):
        if not target.exists():
            _compile(compiler, sources, target, deadline)
    return target


def _fingerprint(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(_SOURCES.glob("*.[ch]")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    stat = os.stat(compiler)
    digest.update(f"{_FLAGS}{compiler}{stat.st_size}{stat.st_mtime_ns}{_cpu_features()}".encode())
    return digest.hexdigest()[:20]


def _cpu_features() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    wanted = ("flags", "Features", "model name", "CPU part")
    first = {line.split(":")[0].strip(): line for line in reversed(lines) if line.startswith(wanted)}
    return platform.machine() + "".join(first[key] for key in sorted(first))


def _compile(compiler: str, sources: Sequence[Path], target: Path, deadline: float) -> None:
    """Tries the machine's own instructions with OpenMP first, then with less."""
    native = ("-march=native",) if platform.machine() in ("x86_64", "AMD64", "i686") else ("-mcpu=native",)
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    message = ""
    try:
        for extra in ((*native, "-fopenmp"), native, ()):
            command = [compiler, *_FLAGS, *extra, "-o", name, *map(str, sources), "-lm"]
            left = max(1.0, deadline - time.monotonic())
            done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
            if done.returncode == 0:
                os.replace(name, target)
                return
            message = done.stderr.strip()[-400:]
        raise BuildError(f"{compiler} failed: {message}")
    except subprocess.TimeoutExpired:
        raise BuildError(f"{compiler} took more than {BUILD_TIMEOUT_S:.0f} s") from None
    finally:
        Path(name).unlink(missing_ok=True)


@contextmanager
def _lock(path: Path, deadline: float) -> Iterator[None]:
    """An advisory file lock; it goes with its holder, so a killed builder blocks nobody."""
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process holds {path}") from None
                time.sleep(0.05)
        yield
