"""Reads tritonserver's log: which models load, and why a start failed.

`start`: bytes at the log's beginning that are of another start.
"""

from __future__ import annotations

import re
from pathlib import Path

_LOADING = re.compile(r'\] "?loading: ([^:"]+):')
_LOADED = re.compile(r"\] \"?successfully loaded '([^']+)'")
_ENGINE_READY = re.compile(r"engine of (\S+) \(\w+\) is ready")
_ERROR = re.compile(r"^E\d{4} |^error: ")
_RAISED = re.compile(r"^[\w.]+(Error|Exception): ")
_FRAME = re.compile(r'^\s+File "(.+)", line (\d+)')
_NOISE = re.compile(r"CudaDriverHelper has not been initialized")  # on every host without a GPU
_PREFIX = re.compile(r"^[IWE]\d{4} [\d:.]+ \d+ \S+\] ")
_PORT_TAKEN = re.compile(
    r"Address already in use|Socket '[^']*' already in use|failed to start .* service|Unable to bind",
    re.IGNORECASE,
)


def model_states(log: Path, start: int = 0) -> dict[str, str]:
    """Model -> "loading" or "ready", in the order in which loading began."""
    states: dict[str, str] = {}
    for line in _lines(log, start):
        if match := _LOADING.search(line):
            states[match[1]] = "loading"
        elif match := _LOADED.search(line):
            states[match[1]] = "ready"
    return states


def engines_ready(log: Path, start: int = 0) -> set[str]:
    """Models whose stub says that its engine is: what is left of their loading is Triton's."""
    return {match[1] for line in _lines(log, start) if (match := _ENGINE_READY.search(line))}


def first_errors(log: Path, start: int = 0, count: int = 12) -> list[str]:
    """The first distinct error lines without their time stamps; the log's end if there is none.

    A Python exception gets the place that it was raised at.
    """
    lines = _lines(log, start)
    errors: list[str] = []
    place = ""
    for line in lines:
        if frame := _FRAME.match(line):
            place = f" ({frame[1]}:{frame[2]})"
        if _RAISED.match(line):
            text = line + place
        elif _ERROR.match(line) and not _NOISE.search(line):
            text = _PREFIX.sub("", line).strip().strip('"').replace("\\n", "\n    ").strip()
        else:
            continue
        if text[:800] not in errors:
            errors.append(text[:800])
    return errors[:count] or lines[-count:]


def port_was_taken(log: Path) -> bool:
    """Whether the server ended because a port that was free a moment ago had been taken."""
    return any(_PORT_TAKEN.search(line) for line in _lines(log))


def _lines(log: Path, start: int = 0) -> list[str]:
    try:
        with log.open("rb") as file:
            # emptied meanwhile, once it had been copied elsewhere: then it begins anew
            file.seek(start if file.seek(0, 2) >= start else 0)
            return file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
