"""The demo's placement, fitted to the cores of this machine."""

from __future__ import annotations

import os

from distserve_planner.placement_file import PlacementFile, default_placement, parse_placement


def demo_placement() -> PlacementFile:
    """The default placement on the first two cores that this process may use, or sharing a single one."""
    default = default_placement()
    cores = sorted(os.sched_getaffinity(0))
    if cores[:2] == [0, 1]:
        return default
    text = default.placement.dump()
    for index in (1, 0):
        text = text.replace(f"- cpu:{index}\n", f"- cpu:{cores[min(index, len(cores) - 1)]}\n")
    if len(cores) == 1:
        text += "oversubscribe: true\n"
    return parse_placement(text, default.document.name)
