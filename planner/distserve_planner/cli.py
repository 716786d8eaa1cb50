"""The `planner` command."""

from __future__ import annotations

from collections.abc import Sequence

from distserve_planner.command_line import Command, dispatch

COMMANDS = (
    Command("generate", "distserve_planner.generate", "write a Triton model repository for a placement"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    return dispatch("planner", "Plans disaggregated deployments and writes their files.", COMMANDS, argv)
