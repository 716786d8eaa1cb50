"""The repository's own tests that need a GPU, if its tests are at hand."""

from __future__ import annotations

import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distserve_tools.device_check.settings import Settings
from distserve_tools.processes import descendants

TESTS = Path(__file__).resolve().parents[3] / "tests"
KERNELS = "unit/test_triton_kernels.py"
RUNS = (  # (file, -k): side by side, since most of the time goes into compiling kernels
    ("unit/test_decode_graphs.py", ""),
    ("unit/test_transfer_gpu.py", ""),
    ("unit/test_triton_runner.py", ""),
    (KERNELS, "float32"),
    (KERNELS, "bfloat16"),
    (KERNELS, "float16 and not bfloat16"),
    (KERNELS, "not float16 and not float32 and not bfloat16"),
)
LARGE = (  # these want the memory for themselves
    ("unit/test_out_of_memory.py", ""),
    ("unit/test_triton_kernels_large.py", ""),
)
LIMIT_S, LARGE_S = 95.0, 37.0  # of all runs side by side, and of those after one another


class NotHere(RuntimeError):
    """Nothing to run, for a reason that is no failure."""


def run(settings: Settings) -> dict[str, Any]:
    """A row per run: passed, failed, skipped, and the first failures. Raises `NotHere`."""
    if not settings.on_gpu:
        raise NotHere("the tests marked gpu need a GPU")
    if not TESTS.is_dir():
        raise NotHere(f"{TESTS}: not there; the tests come with the source repository")
    folder = Path(settings.folder)
    rows = _side_by_side(RUNS, folder, LIMIT_S)
    until = time.monotonic() + LARGE_S
    for test in LARGE:
        rows += _side_by_side((test,), folder, max(1.0, until - time.monotonic()))
    failed = sum(row["failed"] for row in rows)
    return {"rows": rows} | ({"state": "failed", "why": f"{failed} tests failed"} if failed else {})


def _side_by_side(tests: Sequence[tuple[str, str]], folder: Path, limit_s: float) -> list[dict[str, Any]]:
    """Runs of pytest at the same time; what has not ended after `limit_s` is ended and says so."""
    started = []
    for number, (file, chosen) in enumerate(tests):
        report, log = folder / f"tests-{number}.xml", folder / f"tests-{number}.log"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", str(TESTS / file), "-m", "gpu and not slow"]
        command += ["-p", "no:cacheprovider", f"--junitxml={report}", "-k", chosen]
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, cwd=TESTS.parent)
        started.append((f"{file} {chosen}".strip(), process, report, log))
    until = time.monotonic() + limit_s
    rows = []
    for name, process, report, log in started:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            for straggler in descendants(process.pid):  # they would keep the GPU's memory
                straggler.kill()
            process.kill()
            process.wait()
            last = log.read_text(errors="replace").strip()[-200:]
            failures = [f"not done within {limit_s:.0f} s: {last}"]
            rows.append({"file": name, "passed": 0, "failed": 1, "skipped": 0, "failures": failures})
            continue
        rows.append({"file": name} | counts(report, log.read_text(errors="replace")))
    return rows


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
