"""The report's page: everything on it, nothing to load, and errors that say what to do."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest

from distserve_planner.cli import main
from distserve_planner.goodput import Precision
from distserve_planner.report import effort
from distserve_planner.report.effort import Effort
from distserve_planner.report.page import page, section_html
from distserve_planner.report.section import Panel, Section, missing, table
from distserve_planner.report.style import COLOURS, colour, drawing, new_figure, svg_text

pytest.importorskip("matplotlib")

CASE = [
    "report", "--model", "opt-13b", "--device", "a100-80g", "--devices-per-node", "2",
    "--workload", "sharegpt", "--ttft", "0.4", "--tpot", "0.1", "--quick", "--jobs", "1",
]  # fmt: skip
SECTIONS = {
    "attainment", "ablation", "breakdown", "ratio", "scaling", "lengths", "interference", "steps",
    "throughput", "crossover", "decode-parallelism", "search-time",
}  # fmt: skip
VOID = {"meta", "br", "img", "link", "hr", "input"}


class Tags(HTMLParser):
    """Checks nesting and collects ids, references and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.note(attrs)

    def note(self, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href") and value:
                self.references.append(value)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tiny() -> Effort:
    small = Precision(100, 200, 100, step=0.15)
    return Effort("quick", small, small, 2500, 4, 120, 2, 1.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, object]]:
    folder = tmp_path_factory.mktemp("report")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(effort.Effort, "quick", classmethod(lambda cls: tiny()))
        result, output = folder / "result.json", folder / "numbers.json"
        searched = ["search", *CASE[1:], "--json"]
        drawn = ["report", "--result", str(result), "--jobs", "1", "-o", str(folder), "--json"]
        for words, path in ((searched, result), (drawn, output)):
            with path.open("w") as file:
                patch.setattr("sys.stdout", file)
                assert main(words) == 0
    return folder, json.loads(output.read_text())


def test_the_page_has_every_section_and_needs_nothing_else(written: tuple[Path, dict[str, object]]) -> None:
    html = (written[0] / "report.html").read_text()
    assert "http:" not in html
    assert "https:" not in html
    assert not re.search(r"<script|<link|@import|url\((?!#)", html)
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert len(tags.ids) == len(set(tags.ids))
    assert set(tags.ids) >= SECTIONS
    assert all(reference.startswith("#") for reference in tags.references)
    assert {reference[1:] for reference in tags.references} <= set(tags.ids)
    assert "prefers-color-scheme:dark" in html
    assert 'name="viewport"' in html


def test_a_saved_result_is_drawn_as_it_was_found(written: tuple[Path, dict[str, object]]) -> None:
    found = json.loads((written[0] / "result.json").read_text())
    search = written[1]["search"]
    assert isinstance(search, dict)
    assert search["winner"]["placement"] == found["winner"]["placement"]
    assert {row["reason"] for row in search["rows"]} == {row["reason"] for row in found["candidates"]}
    assert search["statistics"]["seconds"] == found["result"]["statistics"]["seconds"]  # not searched again


@pytest.mark.parametrize(
    ("edit", "words", "message"),
    [
        ({}, ["--ttft", "0.4"], "--ttft=0.4: "),
        ({}, ["--objective", "cluster"], "--objective=cluster: the search of --result had its own"),
        ({"schema": "report/1"}, [], "expected the output of planner search --json"),
        ({"options": {"modle": "opt-13b"}}, [], "unknown key 'modle'; did you mean 'model'?"),
        ({"options": {"ttft": 0.4}}, [], "--model: is needed"),
        ({"result": {"objective": {"kind": "throughput"}}}, [], "objective=throughput: a report needs"),
        ({"result": {"objective": {"kind": "cluster"}}}, [], "missing key 'problem'"),
    ],
)
def test_a_result_that_cannot_be_drawn_names_the_reason(
    written: tuple[Path, dict[str, object]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    edit: dict[str, object],
    words: list[str],
    message: str,
) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps({**json.loads((written[0] / "result.json").read_text()), **edit}))
    assert main(["report", "--result", str(file), "-o", str(tmp_path / "out"), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_result_of_another_problem_is_refused(
    written: tuple[Path, dict[str, object]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = json.loads((written[0] / "result.json").read_text())
    found["options"]["tpot"] = 0.11
    file = tmp_path / "result.json"
    file.write_text(json.dumps(found))
    assert main(["report", "--result", str(file), "-o", str(tmp_path)]) == 2
    assert "have changed since this search" in capsys.readouterr().err


def test_the_page_says_what_was_assumed(written: tuple[Path, dict[str, object]]) -> None:
    html = (written[0] / "report.html").read_text()
    assert "<dd>first come, first served</dd>" in html
    assert "<dd>computed whole, alone</dd>" in html


def test_figures_are_on_the_page_and_in_the_folder(written: tuple[Path, dict[str, object]]) -> None:
    html = (written[0] / "report.html").read_text()
    pictures = list((written[0] / "figures").glob("*.png"))
    assert html.count("<svg") == len(pictures) >= 15
    assert all(picture.read_bytes()[:4] == b"\x89PNG" for picture in pictures)


def test_json_has_the_numbers_of_every_figure(written: tuple[Path, dict[str, object]]) -> None:
    document = written[1]
    assert document["schema"] == "report/1"
    figures, search = document["figures"], document["search"]
    assert isinstance(figures, dict)
    assert isinstance(search, dict)
    assert set(figures) == SECTIONS
    assert figures["search-time"]["missing"]
    assert search["winner"]["placement"] == search["rows"][0]["placement"]
    rates = figures["attainment"]["swept"][0]["points"]
    assert len(rates) == 4
    for point in rates:
        assert 0 <= point["low"] <= point["both"] + 1e-9
        assert point["both"] <= point["high"] + 1e-9 <= 1 + 1e-8


def test_text_from_outside_is_escaped() -> None:
    section = Section("k", "<i>", "a & b", "x < y", "", None, table=table(["<th>"], [["<td>"]]))
    html = page("<title>", "", [section], {}, "")
    assert "<i>" not in html
    assert "x &lt; y" in html
    assert "<th>&lt;th&gt;</th>" in html
    assert "<title>&lt;title&gt;</title>" in html


def test_a_section_without_a_figure_says_why() -> None:
    html = section_html(missing("k", "Title", "Fig. 1", "it is too small"), {})
    assert "No figure: it is too small." in html
    assert "<figure" not in html


def test_a_drawing_becomes_a_themed_element_with_its_own_ids() -> None:
    panel = Panel("p", lambda axes: axes.plot([1, 2], [3, 4], color=colour("high"), label="a"), "d")
    with drawing():
        figure, axes = new_figure(panel.size)
        panel.draw(axes)
        text = svg_text(figure, "one")
    root = ElementTree.fromstring(text)
    assert root.tag == "svg"
    assert "viewBox" in root.attrib
    assert "width" not in root.attrib
    assert all(node.attrib["id"].startswith("one-") for node in root.iter() if "id" in node.attrib)
    assert "var(--high)" in text
    assert not any(light in text for light, _ in COLOURS.values())


def test_each_colour_stands_for_one_role() -> None:
    for theme in (0, 1):
        assert len({pair[theme] for pair in COLOURS.values()}) == len(COLOURS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--jobs 0", "--jobs=0"),
        ("--nodes 0", "--nodes=0"),
        ("--ttft 0", "ttft_s=0"),
        ("--ttft 0.001", "impossible even for a lone request"),
        ("--workload shargpt", "sharegpt"),
        ("--device a100", "a100-80g"),
        ("--model opt-13", "opt-13b"),
        ("--vllm-shape 3", "--vllm-shape=3"),
        ("--objective least-devices", "--rate"),
        ("--placement none.yaml", "none.yaml"),
        ("--device-memory-gib 2", "cannot hold"),
    ],
)
def test_errors_name_the_option_and_the_fix(
    options: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(effort.Effort, "quick", classmethod(lambda cls: tiny()))
    assert main([*CASE, "-o", str(tmp_path), *options.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_without_matplotlib_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(CASE) == 2
    assert "distserve-triton[bench]" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    assert "planner report --model opt-66b" in capsys.readouterr().out


def test_a_profile_without_memory_needs_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from distserve_planner.devices.catalog import shipped_profile

    profile = shipped_profile("a100-80g", "opt-13b")
    assert profile is not None
    path = tmp_path / "profile.yaml"
    path.write_text(re.sub(r"device_memory_bytes: \d+\n", "", profile.dump()))
    words = [str(path) if word == "a100-80g" else word for word in CASE]
    assert main([*words, "-o", str(tmp_path)]) == 2
    assert "--device-memory-gib" in capsys.readouterr().err
