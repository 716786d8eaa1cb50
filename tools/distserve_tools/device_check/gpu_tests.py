"""The repository's own tests that need a GPU, if its tests are at hand."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from distserve_tools.device_check.settings import Settings

TESTS = Path(__file__).resolve().parents[3] / "tests"
FILES = (
    "unit/test_decode_graphs.py",
    "unit/test_transfer_gpu.py",
    "unit/test_out_of_memory.py",
    "unit/test_triton_kernels.py",
    "unit/test_triton_kernels_large.py",
)


class NotHere(RuntimeError):
    """Nothing to run, for a reason that is no failure."""


def run(settings: Settings) -> dict[str, Any]:
    """A row per file: passed, failed, skipped, and the first failures. Raises `NotHere`."""
    if not settings.on_gpu:
        raise NotHere("the tests marked gpu need a GPU")
    if not TESTS.is_dir():
        raise NotHere(f"{TESTS}: not there; the tests come with the source repository")
    rows = []
    for file in FILES:
        report = Path(settings.folder) / "tests.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", str(TESTS / file), "-m", "gpu and not slow"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=TESTS.parent)
        rows.append({"file": file} | counts(report, done.stdout))
    return {"rows": rows}


def counts(report: Path, output: str) -> dict[str, Any]:
    """Of a JUnit report; where there is none, what pytest has said last."""
    if not report.exists():
        return {"passed": 0, "failed": 1, "skipped": 0, "failures": [output[-500:]]}
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    broken = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {
        "passed": len(cases) - len(broken) - skipped,
        "failed": len(broken),
        "skipped": skipped,
        "failures": [f"{case.get('name')}: {_why(case)}" for case in broken[:5]],
    }


def _why(case: ElementTree.Element) -> str:
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return "" if found is None else str(found.get("message"))[:300]
