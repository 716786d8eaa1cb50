"""`model_repository/` is what `planner generate` writes for the default placement, to the byte."""

from __future__ import annotations

from pathlib import Path

from distserve_planner.placement_file import default_placement
from distserve_planner.render import render
from distserve_planner.repository_files import write_repository

REPOSITORY = Path(__file__).parents[2] / "model_repository"


def test_the_committed_repository_is_the_generated_one(tmp_path: Path) -> None:
    write_repository(tmp_path, render(default_placement().placement))
    assert contents(REPOSITORY) == contents(tmp_path)


def test_no_path_of_a_machine_is_in_it() -> None:
    for path, data in contents(REPOSITORY).items():
        if path.endswith(".pbtxt"):
            assert b"cache:smollm2-135m-instruct" in data, path
            assert b'\\"/' not in data, path


def contents(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes; what a server leaves behind (`__pycache__`) left out."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
