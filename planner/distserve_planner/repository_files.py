"""Writes a generated repository into a folder, touching nothing there but what it wrote before."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distserve.core.parsing import ConfigError

MANIFEST = ".generated.json"
_SCHEMA = "generated/1"


def write_repository(folder: Path, files: Mapping[str, str], force: bool = False) -> list[str]:
    """Makes `folder` hold `files` (relative path -> text), each replaced atomically.

    A manifest remembers what was written. Files that are the same already are not touched; files of an
    earlier run that are not in `files` any more are removed; all others are left alone.

    Returns the paths that were written or removed. Raises `ConfigError` for a folder that has content but
    no manifest, and, without `force`, for generated files that were changed by hand since.
    """
    earlier = _read_manifest(folder)
    if not force:
        _refuse_edited(folder, earlier)
    hashes = {path: _digest(text.encode()) for path, text in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    # first what there will be and what there was, so that a run that is cut short can be repeated
    if earlier != hashes:
        _write_manifest(folder, {**earlier, **hashes}, final=False)
    changed = []
    for path, text in files.items():
        if _digest_of(folder / path) != hashes[path]:
            _replace(folder / path, text)
            changed.append(path)
    for path in sorted(set(earlier) - set(files)):
        _remove(folder, path)
        changed.append(path)
    if _write_manifest(folder, hashes, final=True):
        changed.append(MANIFEST)
    return changed


def _refuse_edited(folder: Path, earlier: Mapping[str, str]) -> None:
    edited = [p for p, digest in earlier.items() if digest and _digest_of(folder / p) not in (None, digest)]
    if edited:
        raise ConfigError(
            f"{folder}: changed by hand since it was generated: {', '.join(sorted(edited))}; move the change "
            "into the placement file, or overwrite it with --force"
        )


def _read_manifest(folder: Path) -> dict[str, str]:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return {}
    if not folder.is_dir():
        raise ConfigError(f"{folder}: is a file; give a folder for the repository")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{folder}: has files that `planner generate` did not write; give an empty or a new folder"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{folder / MANIFEST}: not JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != _SCHEMA:
        raise ConfigError(f"{folder / MANIFEST}: not a manifest of this version ({_SCHEMA})")
    files: dict[str, str] = manifest["files"]
    for path in files:
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(f"{folder / MANIFEST}: path {path!r} leads out of the folder")
    # while a run is under way, the files may hold either text
    return files if manifest["complete"] else dict.fromkeys(files, "")


def _write_manifest(folder: Path, hashes: Mapping[str, str], final: bool) -> bool:
    manifest: dict[str, Any] = {"schema": _SCHEMA, "complete": final, "files": dict(sorted(hashes.items()))}
    text = json.dumps(manifest, indent=1) + "\n"
    if _digest_of(folder / MANIFEST) == _digest(text.encode()):
        return False
    _replace(folder / MANIFEST, text)
    return True


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, staging = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(staging, 0o644)
        os.replace(staging, path)
    except BaseException:
        Path(staging).unlink(missing_ok=True)
        raise


def _remove(folder: Path, path: str) -> None:
    """Removes a file, and the folders that it leaves empty."""
    target = folder / path
    target.unlink(missing_ok=True)
    for parent in target.parents:
        if parent == folder:
            break
        with contextlib.suppress(OSError):  # not empty
            parent.rmdir()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest_of(path: Path) -> str | None:
    try:
        return _digest(path.read_bytes())
    except FileNotFoundError:
        return None
