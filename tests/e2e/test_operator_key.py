"""What strangers may not do to a running server, and what everybody may."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable

import grpc
import pytest
from serving import Deployment
from tritonclient.grpc import service_pb2, service_pb2_grpc

from distserve.serving.access import Access
from distserve.serving.schema import encode
from distserve_tools.access_files import found
from distserve_tools.client import Client, RequestError
from distserve_tools.instance_caller import InstanceCaller
from distserve_tools.model_control import GRPC_KEY_HEADER, KEY_HEADER
from model_zoo import prompt

RESTRICTED = (
    ("POST", "/v2/repository/index", {}),
    ("POST", "/v2/repository/models/decode_0/load", {"parameters": {"config": "{}"}}),
    ("POST", "/v2/repository/models/orchestrator/unload", {}),
    ("POST", "/v2/systemsharedmemory/region/x/register", {"key": "/x", "offset": 0, "byte_size": 8}),
    ("GET", "/v2/systemsharedmemory/status", None),
    ("POST", "/v2/trace/setting", {"trace_file": "/tmp/x"}),
    ("POST", "/v2/logging", {"log_verbose_level": 1}),
)
OPEN = (
    "/v2/health/live", "/v2/health/ready", "/v2/models/orchestrator/ready", "/v2/models/orchestrator",
    "/v2/models/orchestrator/config", "/v2/models/orchestrator/stats",
)  # fmt: skip


def ask(deployment: Deployment, method: str, path: str, body: object, key: str | None = None) -> int:
    connection = http.client.HTTPConnection(deployment.server.http_url, timeout=10)
    try:
        headers = {} if key is None else {KEY_HEADER: key}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        return connection.getresponse().status
    finally:
        connection.close()


@pytest.mark.parametrize("call", RESTRICTED, ids=lambda call: call[1])
def test_model_control_over_http_is_for_operators(
    deployment: Deployment, call: tuple[str, str, object]
) -> None:
    for key in (None, "", "0" * 64, Access.made().operator_key):
        assert ask(deployment, *call, key) in (401, 403), key
    assert deployment.client.complete(prompt(4), max_tokens=2, temperature=0.0).token_ids


def test_operators_and_everybody(deployment: Deployment) -> None:
    access = found(deployment.server.grpc_url)  # as a tool of the same user does
    assert access is not None
    assert ask(deployment, "POST", "/v2/repository/index", {}, access.operator_key) == 200
    for path in OPEN:
        assert ask(deployment, "GET", path, None) == 200, path


CALLS: tuple[tuple[str, Callable[[], object]], ...] = (
    ("RepositoryIndex", service_pb2.RepositoryIndexRequest),
    ("RepositoryModelLoad", lambda: service_pb2.RepositoryModelLoadRequest(model_name="decode_0")),
    ("RepositoryModelUnload", lambda: service_pb2.RepositoryModelUnloadRequest(model_name="decode_0")),
    ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest),
    ("SystemSharedMemoryRegister", lambda: service_pb2.SystemSharedMemoryRegisterRequest(name="x", key="/x")),
    ("TraceSetting", service_pb2.TraceSettingRequest),
    ("LogSettings", service_pb2.LogSettingsRequest),
)


@pytest.mark.parametrize(("method", "message"), CALLS, ids=lambda value: value if value else "")
def test_model_control_over_grpc_is_for_operators(
    deployment: Deployment, method: str, message: Callable[[], object]
) -> None:
    with grpc.insecure_channel(deployment.server.grpc_url) as channel:
        call = getattr(service_pb2_grpc.GRPCInferenceServiceStub(channel), method)
        for key in (None, "0" * 64):
            with pytest.raises(grpc.RpcError) as caught:
                call(message(), timeout=10, metadata=[] if key is None else [(GRPC_KEY_HEADER, key)])
            assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.PERMISSION_DENIED)
            assert "restricted" in str(caught.value.details())


def test_operations_of_the_orchestrator_are_for_operators(deployment: Deployment) -> None:
    for access in (None, Access.made()):
        with Client(deployment.server.grpc_url, access=access) as stranger:
            for op, arguments in (("drain", {"instance": "decode_0"}), ("stop", {"drain_s": 0})):
                with pytest.raises(RequestError, match=r"unauthenticated: control\.key") as caught:
                    stranger.control(op, **arguments)
                assert caught.value.code == "FAILED_PRECONDITION"
            assert stranger.control("status")["ready"] is True
    assert not any(entry["draining"] for entry in deployment.status()["instances"])


def test_instances_hear_only_their_own_orchestrators(deployment: Deployment) -> None:
    """A stranger in the orchestrator's name, with a later epoch, would end all its requests."""
    owner = "x"
    with InstanceCaller(deployment.server.grpc_url, "decode_0", owner, Access.made()) as stranger:
        for send in (stranger.raw, stranger.unsigned):
            reply = send(encode({"op": "poll", "owner": owner, "epoch": 1 << 62, "ack": 0}))
            assert b"unauthenticated" in reply
