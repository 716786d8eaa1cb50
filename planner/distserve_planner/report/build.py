"""Computes every section of a report and writes page and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from distserve_planner.report.ablation import ablation, ablation_section
from distserve_planner.report.attainment_curves import attainment_curves, curves_section
from distserve_planner.report.breakdown import breakdown, breakdown_section
from distserve_planner.report.crossover import crossover_section
from distserve_planner.report.decode_parallelism import decode_parallelism_section
from distserve_planner.report.effort import Effort
from distserve_planner.report.goodputs import deployment_goodputs
from distserve_planner.report.interference import interference_sections
from distserve_planner.report.lengths import lengths, lengths_section
from distserve_planner.report.overview import overview, title
from distserve_planner.report.page import page
from distserve_planner.report.ratio import ratio, ratio_section
from distserve_planner.report.scaling import scaling, scaling_section
from distserve_planner.report.search_time import search_time, search_time_section
from distserve_planner.report.section import Section
from distserve_planner.report.style import drawing, new_figure, save_png, settle, svg_text
from distserve_planner.report.systems import Case
from distserve_planner.report.throughput import throughput_section
from distserve_planner.search.deployment import Deployment
from distserve_planner.search.workers import Workers

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Report:
    """Everything that a page is made of. goodputs: requests/s of all devices of each compared deployment."""

    case: Case
    effort: Effort
    goodputs: dict[Deployment, float]
    sections: tuple[Section, ...]


def build(
    case: Case, effort: Effort, timed_cores: int | None = None, progress: Progress | None = None
) -> Report:
    """Computes all sections. timed_cores: measure the search time too, with up to that many processes."""
    tell = progress or (lambda stage, done, total: None)

    def stage(name: str) -> Callable[[int, int], None]:
        tell(name, 0, 1)
        return lambda done, total: tell(name, done, total)

    with Workers(case.problem, case.jobs) as workers:
        stage("goodput")
        goodputs = deployment_goodputs(case, [s.deployment for s in case.systems], workers)
        stage("goodput against devices")
        scaled = scaling_section(scaling(case, effort, goodputs, workers))
        stage("prefill to decode ratio")
        mixed = ratio_section(ratio(case, effort, workers))
    curves = attainment_curves(case, effort, goodputs, stage("attainment"))
    requests = case.problem.requests
    sections = [
        curves_section(curves),
        ablation_section(ablation(curves), curves),
        breakdown_section(breakdown(case, curves)),
        mixed,
        scaled,
        lengths_section(lengths(case.workload, requests.inputs, requests.outputs)),
        *interference_sections(case, effort, stage("interference")),
        throughput_section(case.problem, case.result.shapes.fitting),
    ]
    stage("parallelism")
    sections += [crossover_section(case.problem, effort), decode_parallelism_section(case.problem)]
    timed = None
    if timed_cores is not None:
        timed = search_time(case, effort, timed_cores, stage("search time"))
    sections.append(search_time_section(timed))
    return Report(case, effort, goodputs, tuple(sections))


def write(report: Report, folder: Path, footer: str, progress: Progress | None = None) -> Path:
    """Writes `report.html` and `figures/*.png` into `folder`; returns the page. Footer: plain text."""
    from html import escape

    pictures = folder / "figures"
    pictures.mkdir(parents=True, exist_ok=True)
    drawn = draw(report.sections, pictures, progress)
    html = page(
        title(report.case),
        overview(report.case, report.goodputs),
        report.sections,
        drawn,
        escape(footer),
    )
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    return path


def draw(
    sections: Sequence[Section], folder: Path, progress: Progress | None = None
) -> dict[tuple[str, str], str]:
    """Every panel as SVG text, and as a PNG file in `folder`."""
    drawn = {}
    total = sum(len(section.panels) for section in sections)
    with drawing():
        for section in sections:
            for panel in section.panels:
                figure, axes = new_figure(panel.size)
                panel.draw(axes)
                settle(figure)
                name = f"{section.key}-{panel.name}"
                save_png(figure, folder / f"{name}.png")
                drawn[section.key, panel.name] = svg_text(figure, name)
                if progress is not None:
                    progress("figures", len(drawn), total)
    return drawn
