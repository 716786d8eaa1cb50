"""`distserve bench transfer` as it is run: real processes on two cores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distserve_tools.cli import main
from model_zoo import Zoo


@pytest.mark.slow
def test_transfers_are_measured_beside_a_stream_and_beside_steps(
    zoo: Zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "transfer.json"
    assert main(["bench", "transfer", "--model", str(zoo("llama").folder), "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert {rate["channel"] for rate in figures["rates"]} == {"memory", "gloo"}
    assert [beside["channel"] for beside in figures["beside"]] == ["memory", "gloo"]
    for beside in figures["beside"]:
        assert beside["decode"] > 0.5
        assert beside["prefill"] > 0.5
        assert beside["decode_bytes_s"] > 0
        assert beside["prefill_bytes_s"] > 0
    assert "decode step, pulling all the time" in capsys.readouterr().out
