"""Triton's model-control API: states and full reloads."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2

RESTARTS_PARAMETER = "restarts"


class ModelControlError(RuntimeError):
    """Triton refused to load a model, or did not answer in time."""


def model_state(http_url: str, name: str, timeout_s: float) -> str:
    """`READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`, or "" for a model that Triton does not know.

    A model whose stub process is dead is still `READY`. Raises `ModelControlError`.
    """
    index = _call(http_url, "POST", "/v2/repository/index", {}, timeout_s)
    return next((str(entry.get("state", "")) for entry in index if entry.get("name") == name), "")


def reload_model(http_url: str, repository: Path, name: str, restarts: int, timeout_s: float) -> None:
    """Loads a model again, fully. Raises `ModelControlError`.

    With the configuration that is in the repository, not the one that runs: since the orchestrator was
    loaded, its instances may have changed (`distserve apply`).
    """
    path = repository / name / "config.pbtxt"
    message: Any = model_config_pb2.ModelConfig()
    try:
        text_format.Parse(path.read_text(), message)
    except (OSError, text_format.ParseError) as error:
        raise ModelControlError(f"{path}: {error}") from None
    message.parameters[RESTARTS_PARAMETER].string_value = str(restarts)
    config = MessageToDict(message, preserving_proto_field_name=True)
    body = {"parameters": {"config": json.dumps(config)}}
    _call(http_url, "POST", f"/v2/repository/models/{name}/load", body, timeout_s)


def _call(url: str, method: str, path: str, body: Any, timeout_s: float) -> Any:
    connection = http.client.HTTPConnection(url, timeout=timeout_s)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        text = response.read().decode()
    except (OSError, http.client.HTTPException) as error:
        raise ModelControlError(f"{method} {path}: {error}") from None
    finally:
        connection.close()
    if response.status != 200:
        raise ModelControlError(f"{method} {path}: {response.status} {text.strip()}")
    return json.loads(text) if text else {}
