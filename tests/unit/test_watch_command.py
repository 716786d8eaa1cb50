"""`planner watch`: over a log to advice and to the applier, and over a table of rates."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from distserve_planner.cli import main
from distserve_planner.folder_lock import exclusive
from distserve_planner.placement_file import read_placement

CASE = [
    *("--model", "opt-13b", "--device", "a100-80g", "--devices-per-node", "4", "--workload", "humaneval"),
    *("--ttft", "1.0", "--tpot", "0.1", "--quick", "--jobs", "1", "--families", "high"),
]
PLACEMENT = """
schema: placement/1
model: some/folder
dtype: fp16
instances:
  - {role: prefill, devices: [cuda:0], num_blocks: 1500}
  - {role: prefill, devices: [cuda:1], num_blocks: 1500}
  - {role: prefill, devices: [cuda:2], num_blocks: 1500}
  - {role: decode, devices: [cuda:3], num_blocks: 1500}
"""


BEGIN_S = 1_700_000_000.0  # a server's log has Unix time


def write_log(path: Path, turn_s: float = 1200.0) -> None:
    """Long prompts, then from `turn_s` on long answers, at 5 requests/s."""
    rng = np.random.default_rng(0)
    lines = [json.dumps({"schema": "request_log/1"})]
    for arrived in np.sort(rng.uniform(0, 1600, 8000)):
        before = arrived < turn_s
        lines.append(
            json.dumps(
                {
                    "arrived_at_s": BEGIN_S + float(arrived),
                    "input_tokens": int(rng.integers(900, 1500) if before else rng.integers(60, 200)),
                    "output_tokens": int(rng.integers(5, 20) if before else rng.integers(400, 600)),
                    "outcome": "finished",
                    "ttft_s": 0.2,
                    "tpot_s": 0.04 if before else 0.15,
                    "stages_s": {"prefill_queue": 0.01, "decode_queue": 0.0 if before else 0.1},
                }
            )
        )
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("turn_s", [1200.0, 1235.0, 1250.0])  # windows of 60 s: at the end of one, or within
def test_a_turned_mix_turns_roles(tmp_path: Path, capsys: pytest.CaptureFixture[str], turn_s: float) -> None:
    log, placement, advice = tmp_path / "log.jsonl", tmp_path / "placement.yaml", tmp_path / "advice"
    write_log(log, turn_s)
    placement.write_text(PLACEMENT)
    applier = tmp_path / "applier.py"  # stands for `distserve apply`: notes its arguments and saves
    applier.write_text(
        "import json, pathlib, shutil, sys\n"
        f"pathlib.Path({str(tmp_path / 'called')!r}).write_text(json.dumps(sys.argv[1:]))\n"
        "shutil.copy(sys.argv[1], sys.argv[sys.argv.index('--save') + 1])\n"
    )
    words = ["--log", str(log), "--placement", str(placement), "--fixed-devices", "--until-end", "--json"]
    words += ["--advice", str(advice), "--window-s", "60", "--apply", "--grpc", "127.0.0.1:1"]
    words += ["--model-repository", str(tmp_path), "--applier", f"{sys.executable} {applier}"]
    assert main(["watch", *CASE, *words]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(item["schema"] == "advice/1" for item in found)
    assert all(item["at_s"] > BEGIN_S + turn_s for item in found)  # nothing before the mix turned
    (change,) = [item for item in found if item["action"] == "change"]
    assert change["at_s"] <= BEGIN_S + 1321  # at the latest in the first whole window of the new mix
    assert {e["test"] for e in found[0]["evidence"]} >= {"input length", "output length"}
    assert change["present"]["expected_attainment"] < 0.9 <= change["wanted"]["expected_attainment"]
    called = json.loads((tmp_path / "called").read_text())
    assert called[1:5] == ["--grpc", "127.0.0.1:1", "--model-repository", str(tmp_path)]
    roles = [i.role for i in read_placement(placement).placement.instances]
    assert roles.count("decode") > 1
    assert len(roles) == 4
    page = advice.with_suffix(".html").read_text()
    assert "placement" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing to load


def test_a_change_that_could_not_be_applied_is_tried_again(tmp_path: Path) -> None:
    log, placement, calls = tmp_path / "log.jsonl", tmp_path / "placement.yaml", tmp_path / "calls"
    write_log(log)
    placement.write_text(PLACEMENT)
    applier = tmp_path / "applier.py"  # refuses once, as where another change is under way
    applier.write_text(
        "import pathlib, shutil, sys\n"
        f"calls = pathlib.Path({str(calls)!r})\n"
        "first = not calls.exists()\n"
        "calls.open('a').write('called\\n')\n"
        "first and sys.exit(1)\n"
        "shutil.copy(sys.argv[1], sys.argv[sys.argv.index('--save') + 1])\n"
    )
    words = ["--log", str(log), "--placement", str(placement), "--fixed-devices", "--until-end"]
    words += ["--settle-s", "60", "--apply", "--grpc", "127.0.0.1:1", "--model-repository", str(tmp_path)]
    assert main(["watch", *CASE, *words, "--applier", f"{sys.executable} {applier}"]) == 0
    assert calls.read_text() == "called\n" * 2
    roles = [i.role for i in read_placement(placement).placement.instances]
    assert roles.count("decode") > 1


def test_one_watch_applies_to_a_repository(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "placement.yaml").write_text(PLACEMENT)
    words = ["--log", str(tmp_path / "log"), "--placement", str(tmp_path / "placement.yaml"), "--until-end"]
    apply = ["--apply", "--grpc", "127.0.0.1:1", "--model-repository", str(tmp_path)]
    with exclusive(tmp_path, "watched"):
        assert main(["watch", *CASE, *words, *apply]) == 2
        assert "is being watched by process" in capsys.readouterr().err
        assert main(["watch", *CASE, *words]) == 0  # one that only advises may look on
    assert main(["watch", *CASE, *words, *apply]) == 0


def test_rates_are_replayed_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "rates.csv"
    rows = [f"a,{600 * i},{100 if 60 <= i < 100 else 20 if i != 30 else 0}" for i in range(144)]
    table.write_text("model,t_s,rate_rps\n" + "\n".join(rows) + "\n")
    words = ["--rates", str(table), "--series", "a", "--mixes", "humaneval,sharegpt", "--peak-rate", "5"]
    assert main(["watch", *CASE, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    static, *scalers, watch = found["policies"]
    assert [p["policy"] for p in found["policies"]] == [
        "static for the peak",
        "autoscaler on averages, set up for humaneval",
        "autoscaler on averages, set up for sharegpt",
        "planner watch",
    ]  # fmt: skip
    assert len(static["steps"]) == 143  # the window that reads 0 is dropped
    assert static["changes"] == 0
    assert static["steps_below_target"] == 0
    assert watch["device_hours"] < static["device_hours"]
    assert watch["attainment"] > 0.9
    assert all(scaler["device_hours"] > 0 for scaler in scalers)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--log and --placement: give both"),
        (["--rates", "nothing.csv"], "nothing.csv: No such file"),
        (["--window-s", "0"], "window_s=0"),
        (["--log", "a", "--placement", "b", "--apply"], "--apply: needs --grpc"),
    ],
)
def test_watch_names_option_and_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["watch", *CASE, *words]) == 2
    assert message in capsys.readouterr().err
