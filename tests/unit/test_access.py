"""Keys of a server: what they open, where they come from, and who can read them."""

from __future__ import annotations

import dataclasses
import json
import stat
from pathlib import Path

import pytest
import yaml

from distserve.core.parsing import ConfigError
from distserve.serving.access import TAG_BYTES, Access
from distserve.serving.control import run_control
from distserve.serving.schema import ServingError
from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement
from distserve_tools.access_files import access_of, found, left_for_tools
from model_zoo import Zoo
from orchestrator_bench import CONFIG, Bench, scenario

GRPC = "127.0.0.1:7"


def test_a_message_is_taken_only_with_its_tag() -> None:
    access = Access.made()
    for message in (b"", b"x", b"\x81\xa1v\x01" * 1000):
        signed = access.sign(message)
        assert access.verified(signed) == message
        forged = bytearray(signed)
        forged[-1] ^= 1
        for wrong in (message, signed[:-1], bytes(forged), signed + b"\0", Access.made().sign(message)):
            with pytest.raises(ServingError, match="unauthenticated") as caught:
                access.verified(wrong)
            assert caught.value.code == "FAILED_PRECONDITION"


def test_keys_differ_and_hosts_with_one_secret_agree() -> None:
    here, there = Access.shared(b"0123456789abcdef"), Access.shared(b"0123456789abcdef")
    assert here.operator_key == there.operator_key
    assert there.verified(here.sign(b"poll")) == b"poll"
    assert here.operator_key != Access.shared(b"another secret..").operator_key
    tag = here.sign(b"")[:TAG_BYTES].hex()
    assert here.secret.hex() not in (tag, here.operator_key)
    assert here.secret != b"0123456789abcdef"
    assert Access.given(here.environment) == here
    assert Access.given({}) is None


@scenario(config=dataclasses.replace(CONFIG, drain_s=0.0))
async def test_only_operators_operate(bench: Bench) -> None:
    access = Access.made()
    calls = [
        {"op": "drain", "instance": "decode_0"},
        {"op": "attach", "instance": {"name": "decode_9", "role": "decode"}, "wait_s": 0},
        {"op": "stop"},
    ]
    for call in calls:
        for key in ({}, {"key": "0" * 64}, {"key": 7}, {"key": Access.made().operator_key}):
            with pytest.raises(ServingError, match=r"unauthenticated: control\.key is"):
                await run_control(bench.orchestrator, json.dumps({**call, **key}), access)
    assert json.loads(await run_control(bench.orchestrator, '{"op": "status"}', access))["ok"]
    assert set(bench.orchestrator.fleet.links) == {"prefill_0", "decode_0"}
    for call in calls:
        text = json.dumps({**call, "key": access.operator_key})
        assert json.loads(await run_control(bench.orchestrator, text, access))["ok"]


def test_a_launcher_leaves_the_secret_for_its_user_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path))
    access = Access.made()
    assert found(GRPC) is None
    with left_for_tools(GRPC, Access.made()), left_for_tools(GRPC, access) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert found(GRPC) == found("localhost:7") == access
        assert found("127.0.0.1:8") is None
    assert not path.exists()
    monkeypatch.setenv("DISTSERVE_CACHE", str(path.parent / "file" / "cache"))
    (path.parent / "file").write_text("")
    with left_for_tools(GRPC, access):  # nowhere to leave it: the server serves all the same
        assert found(GRPC) is None


def test_servers_of_one_deployment_share_their_keys(zoo: Zoo, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef\n")
    values = {
        "schema": "placement/1",
        "model": str(zoo("llama").folder),
        "oversubscribe": True,
        "instances": [{"role": role, "devices": ["cpu:0"]} for role in ("prefill", "decode")],
    }
    apart = {
        "nodes": [{"name": "a", "host": "127.0.0.1"}, {"name": "b", "host": "127.0.0.2", "grpc_port": 7}],
        "instances": [{"role": role, "devices": ["cpu:0"], "node": "b"} for role in ("prefill", "decode")],
        "transfer_secret_file": str(secret),
    }
    generate(parse_placement(yaml.safe_dump({**values, **apart})), tmp_path / "two", machine_check=False)
    here, there = (access_of(tmp_path / "two" / node) for node in ("a", "b"))  # a: the orchestrator alone
    assert here == there
    keys = []
    for name, more in (("a", {"transfer_secret_file": str(secret)}), ("b", {})):
        generate(parse_placement(yaml.safe_dump({**values, **more})), tmp_path / name)
        keys.append([access_of(tmp_path / name).operator_key for _ in range(2)])
    assert keys[0] == [found(GRPC, secret).operator_key] * 2  # type: ignore[union-attr]
    assert len({*keys[0], *keys[1]}) == 3
    secret.write_text("short")
    with pytest.raises(ConfigError, match=r"transfer_secret_file=.*: 5 bytes; must have at least 16"):
        access_of(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"--secret-file="):
        found(GRPC, secret)
