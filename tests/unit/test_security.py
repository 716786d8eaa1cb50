"""What must hold whoever calls: no code in data, nothing reachable without a secret, limits on every size."""

from __future__ import annotations

import ast
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest
import yaml

from distserve.core.model_config import resolve_model
from distserve.core.parsing import ConfigError
from distserve.engine.admission import MAX_ID_CHARS, entry_id
from distserve.serving.client_request import MAX_JSON_BYTES, parse_request
from distserve.serving.frames import read_frame
from distserve.serving.schema import MAX_MESSAGE_BYTES, ServingError, decode, encode
from distserve.transfer.control import LARGEST_GREETING, Control, is_loopback, require_secret
from distserve.transfer.errors import TransferError
from distserve_planner.generate import generate
from distserve_planner.placement_file import parse_placement

ROOT = Path(__file__).parents[2]
RUNTIME = sorted((ROOT / "backends").rglob("*.py")) + sorted((ROOT / "kernels").rglob("*.py"))
CODE_IN_DATA = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
"""Modules that run what they read."""


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_runtime_runs_no_code_from_data(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not {name.partition(".")[0] for name in imports(tree)} & CODE_IN_DATA
    for call in calls(tree):
        name = ast.unparse(call.func)
        assert name not in ("eval", "exec", "yaml.load", "os.system"), f"{path}:{call.lineno}"
        # these pickle whatever they are given
        assert not name.endswith(("object_list", "gather_object", "scatter_object")), f"{path}:{call.lineno}"
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if name == "torch.load":
            assert given.get("weights_only") == "True", f"{path}:{call.lineno}"
        assert given.get("shell", "False") == "False", f"{path}:{call.lineno}"
        assert given.get("trust_remote_code", "False") == "False", f"{path}:{call.lineno}"
        assert given.get("allow_pickle", "False") == "False", f"{path}:{call.lineno}"


def test_the_check_above_can_fail() -> None:
    assert "pickle" in {n.partition(".")[0] for n in imports(ast.parse("from pickle import loads"))}
    assert [ast.unparse(c.func) for c in calls(ast.parse("torch.load(x)"))] == ["torch.load"]


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.2", "example.org", "", "127.0.0.1.evil.org"]
)
def test_other_machines_need_a_secret(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(TransferError, match="secret"):
        require_secret("transfer_host", host, None)
    require_secret("transfer_host", host, b"secret")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
def test_loopback_needs_none(host: str) -> None:
    require_secret("transfer_host", host, None)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, Control]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    control = Control(theirs)
    try:
        yield ours, control
    finally:
        ours.close()
        control.close()


@pytest.mark.parametrize("size", [0, LARGEST_GREETING + 1, 1 << 31, (1 << 32) - 1])
def test_a_stranger_may_not_announce_a_large_frame(pair: tuple[socket.socket, Control], size: int) -> None:
    """It is refused by its length, before any of it is read or room is made for it."""
    ours, control = pair
    ours.sendall(struct.pack("!I", size))
    began_s = time.monotonic()
    with pytest.raises(TransferError, match=f"frame of {size} bytes"):
        control.recv(time.monotonic() + 5.0)
    assert time.monotonic() - began_s < 1.0


def test_an_engine_frame_is_bounded() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        writer = threading.Thread(target=ours.sendall, args=(struct.pack("<I", 0xFFFFFFFF) + bytes(64),))
        writer.start()
        theirs.settimeout(5.0)
        with pytest.raises(ValueError):
            read_frame(theirs)
        writer.join(5.0)


def test_messages_are_bounded() -> None:
    with pytest.raises(ServingError, match="bytes, allowed are"):
        encode({"x": bytes(MAX_MESSAGE_BYTES)})
    with pytest.raises(ServingError, match="bytes, allowed are"):
        decode(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ServingError):
        decode(msgpack.packb(msgpack.ExtType(4, b"code")))
    with pytest.raises(ServingError, match="id="):
        entry_id({"id": "x" * (MAX_ID_CHARS + 1)})
    with pytest.raises(ServingError, match="at most"):
        parse_request({"text_input": "x", "sampling_parameters": " " * (MAX_JSON_BYTES + 1)}, "", 100)


@pytest.mark.parametrize("name", ["../evil", "a/b", "..", ".", "/etc", "a\\b", "orchestrator", "a\0b", "é"])
def test_an_instance_name_is_no_path(name: str, tmp_path: Path) -> None:
    instances = [{"name": name, "role": "unified", "devices": ["cpu:0"]}]
    placement = {
        "schema": "placement/1",
        "model": str(tmp_path),
        "oversubscribe": True,
        "instances": instances,
    }
    with pytest.raises(ConfigError):
        generate(parse_placement(yaml.safe_dump(placement)), tmp_path / "repository", machine_check=False)
    assert not (tmp_path / "repository").exists()


@pytest.mark.parametrize(
    "name", ["cache:../x", "cache:/etc", "cache:a/../../b", "cache:..", "cache:", "cache:a/b"]
)
def test_a_cached_model_stays_in_the_cache(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError):
        resolve_model(name)
