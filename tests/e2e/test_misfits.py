"""Instances whose KV does not fit the others' are named, with the field, before a request is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from node_process import until
from serving import write_repository

from distserve_tools.client import Client
from distserve_tools.launch import ServerOptions, TritonServer
from distserve_tools.readiness import NotServingError, wait_until_serving
from model_zoo import Zoo


def test_instances_that_do_not_fit_are_refused_by_field(zoo: Zoo, tmp_path: Path) -> None:
    model, other = zoo("llama"), zoo("llama3-rope")
    roles = [{"role": role} for role in ("prefill", "decode", "decode", "decode")]
    repository = write_repository(tmp_path / "repository", model, roles)
    for name, old, new in (
        ("decode_0", r"\"dtype\":\"fp32\"", r"\"dtype\":\"bf16\""),
        ("decode_1", r"\"block_size\":16", r"\"block_size\":32"),
        ("decode_2", str(model.folder), str(other.folder)),
    ):
        path = repository / name / "config.pbtxt"
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))
    with (
        TritonServer(ServerOptions(repository, log_path=tmp_path / "log")) as server,
        Client(server.grpc_url) as client,
    ):
        with pytest.raises(NotServingError, match=r"decode_\d \(decode\): \w+=.*: prefill_0 has "):
            wait_until_serving(client, 60.0)

        def all_asked() -> dict[str, Any] | None:
            status = client.control("status")
            return status if all(entry["phase"] == "up" for entry in status["instances"]) else None

        status = until(all_asked, 30.0)
        reasons = {entry["instance"]: entry["reason"] for entry in status["instances"]}
        assert reasons["prefill_0"] == ""
        assert reasons["decode_0"] == "dtype='bf16': prefill_0 has 'fp32'"
        assert reasons["decode_1"] == "block_size=32: prefill_0 has 16"
        assert reasons["decode_2"].startswith("model_hash='")
        assert not status["ready"]
