"""`planner search`, `planner simulate` and `planner bench`: options, JSON, files, and errors that help."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distserve_planner.cli import main
from distserve_planner.placement_file import read_placement

CASE = [
    *("--model", "opt-13b", "--device", "a100-80g", "--devices-per-node", "3", "--workload", "humaneval"),
    *("--ttft", "0.3", "--tpot", "0.1", "--quick", "--jobs", "1"),
]


def output(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main([*words]) == 2
    return capsys.readouterr().err


def test_simulate_reports_what_the_issue_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", *CASE, "--prefill", "1,1", "--decode", "2:1,1", "--rate", "4", "--requests", "300"]
    found = output(capsys, *args, "--json")
    assert found["schema"] == "simulation/1"
    attainment = found["attainment"]
    assert isinstance(attainment, dict)
    low, high = attainment["interval"]
    assert low <= attainment["both"] <= high
    assert {"ttft_s", "tpot_s", "stages_s", "usage", "queues"} <= set(found)
    assert output(capsys, *args, "--json") == found  # bit for bit
    assert main(args) == 0
    text = capsys.readouterr().out
    assert "both objectives" in text
    assert "prefill queue" in text


def test_simulate_replays_a_trace(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{0.2 * i},{100 + i},{10 + i % 7}\n" for i in range(200))
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + rows)
    case = ["simulate", *CASE, "--prefill", "1,1", "--decode", "1,1", "--json"]
    found = output(capsys, *case, "--replay", str(trace))
    assert found["rate_rps"] == pytest.approx(5.0)
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n")
    assert "empty trace" in refusal(capsys, *case, "--replay", str(trace))


def test_simulate_keeps_to_the_limits_of_a_placement(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What the engines would not admit is not predicted: one request at a time here, and memory for few."""
    file = tmp_path / "placement.yaml"
    limited = "    max_batch_size: 1\n    num_blocks: 60\n"
    results = []
    for limits in ("", limited):
        file.write_text(
            "schema: placement/1\nmodel: some/folder\ndtype: fp16\ninstances:\n"
            "  - role: prefill\n    devices: [cuda:0]\n"
            f"  - role: decode\n    devices: [cuda:1]\n{limits}"
        )
        case = ["simulate", *CASE, "--placement", str(file), "--rate", "2", "--requests", "300", "--json"]
        results.append(output(capsys, *case))
    free, kept = (r["attainment"] for r in results)
    assert isinstance(free, dict)
    assert isinstance(kept, dict)
    assert free["both"] > 0.9 > kept["both"]
    assert kept["tpot"] < 0.5


def test_simulate_under_the_authors_rules(capsys: pytest.CaptureFixture[str]) -> None:
    case = ["simulate", *CASE, "--rules", "simdistserve", "--rate", "3", "--requests", "200", "--json"]
    apart = output(capsys, *case, "--prefill", "1,1", "--decode", "1,1")
    together = output(capsys, *case, "--unified", "1,1")
    for found in (apart, together):
        ttft = found["ttft_s"]
        assert isinstance(ttft, dict)
        assert 0 < ttft["p50"] < ttft["p99"]
    assert "leave out the counts" in refusal(capsys, *case, "--prefill", "2:1,1", "--decode", "1,1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rate", "3"], "--prefill and --decode: give both"),
        (["--prefill", "1,1", "--decode", "1,1"], "--rate=None: give requests per second"),
        (["--prefill", "1x1", "--decode", "1,1", "--rate", "3"], "--prefill=1x1: expected COUNT:TP,PP"),
        (["--prefill", "4:1,1", "--decode", "1,1", "--rate", "3"], "needs 5 devices"),
        (["--unified", "1,1", "--prefill", "1,1", "--rate", "3"], "--unified: either colocated"),
        (["--prefill", "1,1", "--decode", "2:1,1", "--paired", "--rate", "1"], "--paired: needs as many"),
        (["--prefill", "1,1", "--decode", "1,1", "--rate", "3", "--requests", "0"], "--requests=0"),
        (["--placement", "x.yaml", "--order", "shortest"], "--order=shortest: the placement file says it"),
        (["--prefill", "1,1", "--decode", "1,1", "--ageing", "5"], "--ageing=5: belongs to --order shortest"),
        (["--order", "shortest", "--ageing", "0"], "--ageing=0: must be above 0"),
        (["--prefill-chunk-tokens", "0"], "--prefill-chunk-tokens=0: must be at least 1"),
    ],
)
def test_simulate_names_option_and_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(capsys, "simulate", *CASE, *words)


def test_search_saves_a_placement_and_its_repository(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved, repository = tmp_path / "placement.yaml", tmp_path / "repository"
    found = output(
        capsys, "search", *CASE, "--families", "low,prefill_first", "--save", str(saved), "--generate",
        str(repository), "--json",
    )  # fmt: skip
    winner = found["winner"]
    assert isinstance(winner, dict)
    assert winner["attainment"]["both"] >= 0.9
    placement = read_placement(saved).placement
    assert sum(i.tp * i.pp for i in placement.instances) == winner["devices"]
    assert placement.predicted is not None
    assert {p.name for p in repository.iterdir()} >= {"orchestrator", *placement.names}
    candidates = found["candidates"]
    assert isinstance(candidates, list)
    assert all(row["reason"] for row in candidates)


def test_a_saved_placement_has_the_orders_and_pieces_that_were_simulated(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved = tmp_path / "placement.yaml"
    rules = ["--order", "shortest", "--ageing", "500", "--prefill-chunk-tokens", "64"]
    case = [*CASE, "--families", "low", "--objective", "cluster", "--devices-per-node", "4"]
    found = output(capsys, "search", *case, *rules, "--save", str(saved), "--json")
    placement = read_placement(saved).placement
    prefill = placement.engine_config([i.role for i in placement.instances].index("prefill"))
    assert (prefill.prefill_order, prefill.ageing_tokens_per_s) == ("shortest", 500.0)
    assert prefill.prefill_chunk_tokens == 64
    assert placement.orchestrator_config().scheduling == "shortest"
    pairs = [(i.role, i.group) for i in placement.instances]
    assert sorted(pairs) == [(r, f"pair_{n}") for r in ("decode", "prefill") for n in (0, 1)]
    assert [spec.group for spec in placement.orchestrator_config().instances] == [g for _, g in pairs]
    # what is simulated of the file is what was searched
    winner = found["winner"]
    assert isinstance(winner, dict)
    rate = str(winner["rate_rps"])
    again = output(capsys, "simulate", *CASE, "--devices-per-node", "4", "--placement", str(saved), "--rate",
                   rate, "--requests", "2500", "--json")  # fmt: skip
    assert again["placement"] == winner["placement"]
    attainment = again["attainment"]
    assert isinstance(attainment, dict)
    assert attainment["both"] == pytest.approx(winner["attainment"]["both"], abs=0.01)


def test_generate_searches_first_if_asked_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    words = ["generate", "-o", str(repository)]
    assert main([*words, "--search", *CASE, "--families", "prefill_first"]) == 0
    assert "on the cluster" in capsys.readouterr().out
    assert (repository / "unified_0" / "config.pbtxt").is_file()
    assert "either a saved placement" in refusal(capsys, *words, "-p", "x.yaml", "--search", *CASE)


def test_search_prints_tables_and_the_authors_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", *CASE, "--families", "low"]) == 0
    text = capsys.readouterr().out
    assert "best first" in text
    assert "on the cluster" in text
    found = output(capsys, "search", *CASE, "--rules", "simdistserve", "--rules-requests", "60", "--json")
    rows = found["rows"]
    assert isinstance(rows, list)
    assert max(row["rate_per_device"] for row in rows) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--families", "low,hihg"], "'hihg' is not a family of placements; did you mean 'high'?"),
        (["--objective", "least-devices"], "--rate"),
        (["--jobs", "0"], "--jobs=0"),
        (["--chunk-tokens", "256;512"], "--chunk-tokens=256;512: expected whole numbers"),
        (["--rules", "simdistserve", "--save", "x.yaml"], "--rules=simdistserve"),
        (["--ttft", "0.001"], "ttft_s=0.001: impossible even for a lone request; the best reachable P90"),
        (["--model", "opt-14b"], "did you mean 'opt-13b'"),
        (["--device", "a200"], "a200"),
    ],
)
def test_search_names_option_and_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert message in refusal(capsys, "search", *CASE, *words)


def test_bench_names_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert "13B ShareGPT" in refusal(capsys, "bench", "table3", "--only", "7B Mystery")


@pytest.mark.parametrize("command", ["search", "simulate", "bench", "generate", "report", "workload"])
def test_help_has_examples(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert "examples:" in capsys.readouterr().out
