"""The check as one Markdown table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = tuple[str, str, str, str, str]
AIMS: Mapping[str, float] = {"decode": 0.80, "prefill": 0.60, "memory": 0.85}  # of the ceilings, on an H200


def markdown(document: Mapping[str, Any]) -> str:
    """Everything that was measured in one table, after a few lines on the machine."""
    about = document["about"]
    aims = AIMS if about["device"].startswith("cuda") else {}  # small shapes live in a CPU's caches
    lines = [
        f"# Device check of {about['device_name']}",
        "",
        f"{document['schema']}, {about['date']}, {document['seconds']:.0f} s; {about['dtype']}; "
        f"torch {about['torch']}, CUDA {about['cuda']}, Triton language {about['triton']}, "
        f"flash-attn {about['flash_attn']}, Python {about['python']}.",
        "",
        "| part | case | time | rate | share of the ceiling |",
        "|---|---|---:|---:|---:|",
    ]
    for name, part in document["parts"].items():
        lines += ["| " + " | ".join(row) + " |" for row in _rows(name, part, aims)]
    return "\n".join(lines) + "\n"


def _rows(name: str, part: Mapping[str, Any], aims: Mapping[str, float]) -> list[Row]:
    told: list[Row] = []
    if part["state"] != "done":
        told = [(name, f"**{part['state']}**: {_cell(part['why'])}", "", "", "")]
    if "rows" not in part:
        return told
    kind = name.split()[0]
    if kind == "kernels":
        rows = _kernels(part, aims)
    elif kind == "engine":
        rows = _engine(part, aims)
    else:
        plain = {
            "ceilings": _ceilings,
            "transfers": _transfers,
            "profile": _profile,
            "serving": _serving,
            "gpu": _tests,
        }
        rows = plain[kind](part)
    return [*told, *((name, *row) for row in rows)]


def _ceilings(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    return [
        (f"copy of {part['copy_bytes'] / 1e6:.0f} MB", "", f"{part['copy_bytes_s'] / 1e9:.1f} GB/s", ""),
        (f"matrix product, {part['matrix']}", "", f"{part['matrix_flops_s'] / 1e12:.2f} TFLOP/s", ""),
    ]


def _kernels(part: Mapping[str, Any], aims: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    rows = []
    for row in part["rows"]:
        aim = aims.get("memory") if row["bound"] == "memory" else None
        rows.append(
            (f"{row['kernel']} ({row['bound']})", _time(row["seconds"]), "", _share(row["share"], aim))
        )
    return rows


def _engine(part: Mapping[str, Any], aims: Mapping[str, float]) -> list[tuple[str, str, str, str]]:
    rows = []
    for row in part["rows"]:
        what = row["what"]
        case = f"{what} {row['batch']} x {row['context']}" if what == "decode" else f"{what} {row['context']}"
        if what == "decode":
            case += f"; without graphs {_time(row['without_graphs_s'])}"
            if row["outside_kernels"] is not None:
                case += f"; outside kernels {row['outside_kernels']:.1%}"
        rows.append(
            (
                case,
                _time(row["step_s"]),
                f"{row['tokens_s']:.0f} tokens/s",
                _share(row["share"], aims.get(what)),
            )
        )
    return rows + [(f"left out: {_cell(reason)}", "", "", "") for reason in part["left_out"]]


def _transfers(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = [
        (
            f"{row['channel']}, {row['bytes'] / 1e6:.1f} MB",
            _time(row["seconds"]),
            f"{row['bytes_s'] / 1e9:.2f} GB/s",
            _share(row["share"], None),
        )
        for row in part["rows"]
    ]
    return rows + [(f"**failed**: {_cell(reason)}", "", "", "") for reason in part["failed"]]


def _profile(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = [
        (f"fit of {row['phase']}, {row['points']} points: error p50 {row['p50']:.1%}", "", "", "")
        for row in part["rows"]
    ]
    return [*rows, (f"Lm: {part['lm_tokens']} tokens", "", "", "")]


def _serving(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    same = f"{part['tokens_like_one_engine']} of {part['tokens_compared']} tokens as from one engine"
    return [
        (f"TTFT, {part['requests']} requests at once", f"{part['ttft_ms']:.1f} ms", "", ""),
        (f"TPOT; {same}", f"{part['tpot_ms']:.2f} ms", "", ""),
        ("transfer", f"{part['transfer_ms']:.2f} ms", "", ""),
    ]


def _tests(part: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for row in part["rows"]:
        case = f"{row['file']}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
        rows.append((case, "", "", ""))
        rows += [(f"**{_cell(failure)}**", "", "", "") for failure in row["failures"]]
    return rows


def _share(share: float, aim: float | None) -> str:
    if aim is None:
        return f"{share:.0%}"
    return f"{share:.0%} ({'met' if share >= aim else 'below'} {aim:.0%})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:400]
