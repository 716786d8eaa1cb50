"""The `planner` command: one sub-command per module of `distserve_planner.commands`."""

from __future__ import annotations

from collections.abc import Sequence

from distserve_planner.command_line import commands_in, dispatch


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    about = "Plans disaggregated deployments and writes their files."
    return dispatch("planner", about, commands_in("distserve_planner.commands"), argv)
