"""What a figure module hands to the page: panels to draw, what to read from them, and their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

WIDE = (9.4, 3.4)
NORMAL = (4.7, 3.3)


@dataclass(frozen=True)
class Panel:
    """One picture. draw: fills matplotlib axes. size: inches. description: for readers who do not see it."""

    name: str
    draw: Callable[[Any], None]
    description: str
    size: tuple[float, float] = NORMAL


@dataclass(frozen=True)
class Table:
    """Numbers for people; the cells are text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """A group of panels. Plain text throughout; the page escapes it.

    paper: where the paper has this figure. reading: what to see in it. basis: what is predicted, computed or
    measured. data: a dataclass with the numbers behind the panels. missing: why there are no panels.
    """

    key: str
    title: str
    paper: str
    reading: str
    basis: str
    data: Any
    panels: tuple[Panel, ...] = ()
    table: Table | None = None
    missing: str | None = None


def missing(key: str, title: str, paper: str, why: str) -> Section:
    """A section that says why it has no figure."""
    return Section(key, title, paper, "", "", None, missing=why)


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table from any sequences."""
    return Table(tuple(columns), tuple(tuple(row) for row in rows))
