"""Regions in shared memory belong to those who hold their claim, and go when nobody does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from distserve_tools.shared_regions import SharedRegions, sweep


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def region(folder: Path, regions: SharedRegions, name: str = "a") -> str:
    path = folder / f"{regions.prefix}{name}"
    path.write_bytes(b"x" * 100)
    return path.name


def test_what_is_claimed_stays_until_it_is_released(tmp_path: Path) -> None:
    regions, other = SharedRegions(tmp_path), SharedRegions(tmp_path)
    regions.claim()
    kept = region(tmp_path, regions)
    other.claim()  # sweeps
    sweep(tmp_path)
    assert kept in names(tmp_path)
    regions.clear()
    assert names(tmp_path) == {f"{regions.prefix}claim", f"{other.prefix}claim"}
    again = region(tmp_path, regions, "b")
    sweep(tmp_path)
    assert again in names(tmp_path)  # a server that has been started again
    for claimed in (regions, other, other):
        claimed.release()
    assert names(tmp_path) == set()


def test_a_claim_lasts_as_long_as_a_process_that_inherited_it(tmp_path: Path) -> None:
    regions = SharedRegions(tmp_path)
    regions.claim()
    left = region(tmp_path, regions)
    wait = [sys.executable, "-c", "input()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=regions.inherited) as server:
        for lock in regions.inherited:
            os.close(lock)  # as if the launcher had died
        sweep(tmp_path)
        assert left in names(tmp_path)
        server.kill()
    sweep(tmp_path)
    assert names(tmp_path) == set()


def test_regions_without_a_claim_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "distserve_1_abc_x").touch()
    (tmp_path / "other_claim").touch()
    sweep(tmp_path)
    assert names(tmp_path) == {"distserve_1_abc_x", "other_claim"}
