"""One part, as a process: `python -m distserve_tools.device_check.worker SETTINGS RESULT MODULE ...`."""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from distserve.worker.device import bind_device, parse_device
from distserve_tools.device_check.gpu_tests import NotHere
from distserve_tools.device_check.parts import run_part
from distserve_tools.device_check.settings import Settings
from distserve_tools.server_files import ServerNotFoundError


def main(settings: str, result: str, module: str, *arguments: str) -> int:
    """Writes the part's figures, or why there are none."""
    told = Settings.read(Path(settings))
    try:
        bind_device(parse_device(told.device))
        found = {"state": "done", **run_part(module, told, arguments)}
    except (NotHere, ServerNotFoundError) as error:
        found = {"state": "skipped", "why": str(error)}
    except Exception as error:
        traceback.print_exc()
        found = {"state": "failed", "why": f"{type(error).__name__}: {error}"[:2000]}
    Path(result).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
