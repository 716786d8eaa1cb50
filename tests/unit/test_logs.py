"""Log lines as JSON, and the request log that `planner workload` reads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from distserve.core.logs import JsonFormatter
from distserve.core.parsing import ConfigError
from distserve.serving.request_log import RequestLog, log_entry
from distserve_planner.workload.readers import read_trace
from distserve_tools.load.record import Record
from orchestrator_bench import CONFIG, Bench, scenario

TIMES = {
    "ttft_s": 0.25, "tpot_s": 0.01, "prefill_queue_s": 0.1, "prefill_s": 0.15, "decode_queue_s": 0.0,
    "transfer_s": 0.02, "decode_s": 0.3,
}  # fmt: skip


def line(entry_id: str = "a", arrived_at_s: float = 100.0, error: str | None = None) -> dict[str, object]:
    return log_entry(arrived_at_s, 30, 7, TIMES, error, entry_id, "")


def test_json_lines() -> None:
    logger = logging.getLogger("distserve.test")
    record = logger.makeRecord(
        logger.name, logging.WARNING, "f.py", 1, "lost %d of \"it\"\n", (3,), None, extra={"request": "7-1"}
    )  # fmt: skip
    fields = json.loads(JsonFormatter("decode_0").format(record))
    assert fields.pop("time").endswith("Z")
    assert fields == {
        "level": "WARNING",
        "logger": "distserve.test",
        "instance": "decode_0",
        "message": 'lost 3 of "it"\n',
        "request": "7-1",
    }
    try:
        raise ValueError("why")
    except ValueError:
        record.exc_info = sys.exc_info()
    text = JsonFormatter("decode_0").format(record)
    assert "\n" not in text
    assert "ValueError: why" in json.loads(text)["exception"]


def test_a_process_that_logs_json_has_nothing_else_on_stderr() -> None:
    program = (
        "import logging; from distserve.core.logs import log_to_stderr; log_to_stderr('json', 'prefill_0');"
        "logging.getLogger('a').info('one', extra={'request': 'r'}); logging.getLogger('b').warning('two')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    lines = [json.loads(text) for text in done.stderr.splitlines()]
    assert [(entry["message"], entry.get("request")) for entry in lines] == [("one", "r"), ("two", None)]


def test_keys_are_those_of_the_load_generators_log() -> None:
    stages = {stage: 0.1 for stage in ("prefill_queue", "prefill", "decode_queue", "transfer", "decode")}
    theirs = Record(0, 0.0, 30, 1.0, [1.2, 1.3], [1, 6], 1.3, None, stages).to_log()
    ours = line(error=None)
    assert set(ours) - {"id"} == set(theirs)
    assert set(ours["stages_s"]) == set(theirs["stages_s"])  # type: ignore[arg-type]
    failed = Record(0, 0.0, 30, 1.0, error="UNAVAILABLE: gone").to_log()
    assert set(line(error="UNAVAILABLE: gone")) - {"id", "stages_s"} == set(failed)


def test_the_planner_reads_every_file_of_a_rotated_log(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "requests.jsonl"
    log = RequestLog(path, 2000, 3)
    for i in range(60):
        # lines come in the order of the ends, not of the arrivals
        log.write(line(str(i), 1000.0 + (i ^ 1), "CANCELLED: gone" if i % 10 == 5 else None))
    log.close()
    assert log.dropped == 0
    files = sorted(path.parent.iterdir())
    assert [file.name for file in files] == ["requests.jsonl", "requests.jsonl.1", "requests.jsonl.2"]
    assert all(file.stat().st_size <= 2000 for file in files)
    seen = []
    for file in reversed(files):
        seen += [json.loads(text).get("id") for text in file.read_text().splitlines()[1:]]
        trace = read_trace(file)
        assert len(trace) == sum('"finished"' in text for text in file.read_text().splitlines())
        assert set(trace.input_tokens) == {30}
    assert seen == [str(i) for i in range(60 - len(seen), 60)]


def test_a_log_is_continued_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for i in range(2):
        log = RequestLog(path, 1 << 20, 1)
        log.write(line(str(i), 10.0 + i))
        log.close()
    assert [json.loads(text).get("id") for text in path.read_text().splitlines()] == [None, "0", "1"]
    tight = RequestLog(path, 100, 1)  # one file only: what is in it gives way
    tight.write(line("2"))
    tight.close()
    assert [json.loads(text).get("id") for text in path.read_text().splitlines()] == [None, "2"]


def test_a_log_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="request_log="):
        RequestLog(tmp_path / "file" / "requests.jsonl", 1000, 2)
    log = RequestLog(tmp_path / "requests.jsonl", 1000, 2)
    (tmp_path / "requests.jsonl.1").mkdir()  # the file can't be put aside
    (tmp_path / "requests.jsonl.1" / "x").write_text("")
    for i in range(10):
        log.write(line(str(i)))
    log.close()
    assert log.dropped > 0
    assert not log._thread.is_alive()


@scenario(config=CONFIG)
async def test_ends_and_refusals_are_logged(bench: Bench) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.jsonl"
        log = RequestLog(path, 1 << 20, 1)
        bench.orchestrator.accounts._request_log = log
        good = await bench.request([1, 2, 3], 4)
        await good.end()
        gone = await bench.request([1, 2], 4000)
        await gone.tokens(1)
        bench.orchestrator.cancel(bench.session)
        long = await bench.request([1] * 5000, 4)
        assert long.error is not None
        log.close()
        entries = [json.loads(text) for text in path.read_text().splitlines()[1:]]
    assert [(e["outcome"], e["input_tokens"]) for e in entries] == [
        ("finished", 3), ("failed", 2), ("failed", 5000),
    ]  # fmt: skip
    assert entries[0]["output_tokens"] == 4
    assert sum(entries[0]["stages_s"].values()) == pytest.approx(good.final.stage_times["e2e_s"], abs=1e-4)
    assert entries[1]["error"].startswith("CANCELLED: ")
    assert entries[2]["error"].startswith("INVALID_ARGUMENT: ")
    assert entries[0]["id"] != entries[1]["id"]
    assert entries[0]["arrived_at_s"] <= entries[1]["arrived_at_s"]
    bench.orchestrator.accounts._request_log = None
