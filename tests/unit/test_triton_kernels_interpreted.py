"""Runs `test_triton_kernels` in Triton's interpreter, on the CPU, in a process of its own.

The interpreter is chosen when Triton is first imported, for good: here it would be in the way of other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(marks: str, timeout_s: float, file: str = "test_triton_kernels.py", *options: str) -> None:
    """Fails with the child's output if one of its tests fails, or if it has none."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-m", marks, "-p", "no:cacheprovider", *options]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    child = subprocess.run(
        [*command, str(HERE / file)],
        env=environment,
        cwd=HERE.parent,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"
    assert "skipped" not in child.stdout, child.stdout


def test_kernels_equal_their_twins() -> None:
    run("gpu and not slow", 280.0, "test_triton_kernels.py", "--noconftest")


def test_the_runner_over_them_decodes_the_same_tokens() -> None:
    run("gpu and not slow", 200.0, "test_triton_runner.py")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kernels_equal_their_twins_in_every_shape() -> None:
    run("gpu and slow", 1700.0, "test_triton_kernels.py", "--noconftest")
    run("gpu and slow", 600.0, "test_triton_runner.py")
