"""Finds a tritonserver and lays out what it needs to run models in this Python.

A server that is already on the machine (an NGC container) is used as it is; its Python backend has one
stub, built for that machine's own python3, so this interpreter must be of that version. Otherwise the one
inside the `nvidia-pytriton` wheel is: its Python backend and the stub for this Python version are copied
side by side into the user's cache, since the server looks for them in one folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from distserve.core.model_config import cache_folder

_CONTAINER_ROOT = Path("/opt/tritonserver")
_STUB = "triton_python_backend_stub"
_BACKEND_FILES = ("libtriton_python.so", "triton_python_backend_utils.py", _STUB)
_SYSTEM_LIBRARIES = (Path("/usr/lib"), Path("/lib"))  # where the loader looks by itself


class ServerNotFoundError(RuntimeError):
    """No tritonserver that can run here. The message says what is missing and how to get it."""


@dataclass(frozen=True)
class Installation:
    """One tritonserver: its program, and where its backends and shared libraries lie."""

    binary: Path
    backends: Path
    libraries: tuple[Path, ...]
    origin: str  # for messages: "nvidia-pytriton wheel", or the folder


def find_installation(binary: str | None = None) -> Installation:
    """The server to start: `binary` if given, else one on PATH or in /opt/tritonserver, else the wheel's.

    Raises `ServerNotFoundError`.
    """
    if binary is not None:
        return _installed(Path(binary))
    found = shutil.which("tritonserver")
    if found is not None:
        return _installed(Path(found))
    if (_CONTAINER_ROOT / "bin/tritonserver").is_file():
        return _installed(_CONTAINER_ROOT / "bin/tritonserver")
    return _from_wheel()


def _installed(binary: Path) -> Installation:
    binary = binary.resolve()
    if not os.access(binary, os.X_OK):
        raise ServerNotFoundError(f"tritonserver={binary}: not an executable file")
    root = binary.parent.parent
    backends = root / "backends"
    if not (backends / "python/libtriton_python.so").is_file():
        raise ServerNotFoundError(f"tritonserver={binary}: no Python backend in {backends / 'python'}")
    wanted = _stub_python(backends / "python" / _STUB)
    if wanted not in (None, python_version()):
        raise ServerNotFoundError(
            f"tritonserver={binary}: its Python backend embeds Python {wanted}, and {sys.executable} is "
            f"{python_version()}; make the virtual environment with python{wanted} (in a container: its "
            "python3), or give another server"
        )
    return Installation(binary, backends, (root / "lib",), str(root))


def _stub_python(stub: Path) -> str | None:
    """The version of the Python that a stub is linked to; `None` if it does not say."""
    try:
        found = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    except OSError:
        return None
    return found[1].decode() if found else None


def _from_wheel() -> Installation:
    spec = importlib.util.find_spec("pytriton")  # located, not imported: the import starts threads
    if spec is None or spec.origin is None:
        raise ServerNotFoundError(
            "no tritonserver on PATH, none in /opt/tritonserver, and the nvidia-pytriton wheel is not "
            f"installed in {sys.prefix}; fix: pip install 'distserve-triton[server]'"
        )
    check_shared_python()
    package = Path(spec.origin).parent
    server = package / "tritonserver"
    version = python_version()
    stub = server / "python_backend_stubs" / version / _STUB
    if not stub.is_file():
        have = sorted(p.name for p in (server / "python_backend_stubs").glob("3.*"))
        raise ServerNotFoundError(
            f"the nvidia-pytriton wheel has no stub for Python {version}; it has {', '.join(have)}"
        )
    return Installation(
        binary=server / "bin/tritonserver",
        backends=_copy_backends(server / "backends/python", stub),
        libraries=(package.parent / "nvidia_pytriton.libs",),
        origin="nvidia-pytriton wheel",
    )


def python_version() -> str:
    """`3.11` for this interpreter: the name of the stub that embeds it."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def check_shared_python() -> None:
    """The stub embeds Python as a shared library; raises `ServerNotFoundError` if this one has none."""
    library = sysconfig.get_config_var("INSTSONAME") or ""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED") or ".so" not in library:
        raise ServerNotFoundError(
            f"{sys.executable} (Python {python_version()}) was built without a shared library, which "
            "Triton's Python backend needs. Use the system's python3, or build one with --enable-shared "
            "(pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install ...), and make the virtual "
            "environment again with it."
        )


def _copy_backends(backend: Path, stub: Path) -> Path:
    """Copies the three files side by side below the cache, once per content; returns the backends folder."""
    sources = [stub if name == stub.name else backend / name for name in _BACKEND_FILES]
    digest = hashlib.sha256()
    for source in sources:
        stat = source.stat()
        digest.update(f"{source}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
    folder = cache_folder() / "tritonserver" / f"py{python_version()}-{digest.hexdigest()[:12]}"
    target = folder / "backends"
    if all((target / "python" / name).is_file() for name in _BACKEND_FILES):
        return target
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        (staging / "backends/python").mkdir(parents=True)
        for source in sources:
            shutil.copy(source, staging / "backends/python" / source.name)
        try:
            staging.rename(folder)
        except OSError:
            # another launcher was first, or an older copy lost a file
            if not all((target / "python" / name).is_file() for name in _BACKEND_FILES):
                shutil.rmtree(folder)
                staging.rename(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def server_environment(installation: Installation, base: Mapping[str, str]) -> dict[str, str]:
    """Environment for tritonserver and its stubs, from `base` (usually `os.environ`).

    The stub finds its packages through the first `python3` on PATH, so this interpreter's folder comes
    first; it loads libpython, which must be this interpreter's and not another build of the same version.
    Without `PYTHONDONTWRITEBYTECODE` a stub changes its model's folder, and the next load of that model
    becomes a full reload. System folders are not put on LD_LIBRARY_PATH: in a container they would come
    before the CUDA compatibility libraries that are there for older drivers.
    """
    env = dict(base)
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    libraries = [str(p) for p in installation.libraries]
    libdir = sysconfig.get_config_var("LIBDIR")
    if libdir and not any(Path(libdir).is_relative_to(folder) for folder in _SYSTEM_LIBRARIES):
        libraries.insert(0, str(libdir))
    if env.get("LD_LIBRARY_PATH"):
        libraries.append(env["LD_LIBRARY_PATH"])
    env["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["PYTHONUNBUFFERED"] = "1"
    return env
