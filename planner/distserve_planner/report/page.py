"""The HTML page: one file without scripts or anything to load, light and dark, wide and narrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from distserve_planner.report.section import Section, Table
from distserve_planner.report.style import theme_css

Drawn = Mapping[tuple[str, str], str]  # (section, panel) -> SVG


def page(title: str, overview: str, sections: Sequence[Section], drawn: Drawn, footer: str) -> str:
    """overview: HTML of the first part; everything else is escaped here."""
    css = resources.files("distserve_planner.report").joinpath("page.css").read_text("utf-8")
    parts = "\n".join(section_html(section, drawn) for section in sections)
    links = "".join(f'<a href="#{escape(s.key)}">{escape(s.title)}</a>' for s in sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{theme_css()}
{css}</style>
</head>
<body>
<main>
{overview}
<nav aria-label="figures">{links}</nav>
{parts}
<footer>{footer}</footer>
</main>
</body>
</html>
"""


def section_html(section: Section, drawn: Drawn) -> str:
    """One figure group: heading, what to read, panels, what it rests on, numbers."""
    head = (
        f'<section id="{escape(section.key)}"><h2>{escape(section.title)}'
        f' <span class="paper">paper: {escape(section.paper)}</span></h2>'
    )
    if section.missing is not None:
        return f'{head}<p class="missing">No figure: {escape(section.missing)}.</p></section>'
    panels = "".join(
        f'<figure role="img" aria-label="{escape(panel.description)}">'
        f"{drawn[section.key, panel.name]}</figure>"
        for panel in section.panels
    )
    numbers = ""
    if section.table is not None:
        numbers = f"<details><summary>Numbers</summary>{table_html(section.table)}</details>"
    return (
        f'{head}<p>{escape(section.reading)}</p><div class="panels">{panels}</div>'
        f'<p class="basis">{escape(section.basis)}</p>{numbers}</section>'
    )


def table_html(table: Table) -> str:
    """A table that scrolls by itself where it is too wide."""
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in table.rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
