"""Triton's model-control API: states and full reloads, and the key that it asks for."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2

from distserve.serving.access import Access

RESTARTS_PARAMETER = "restarts"
KEY_HEADER = "distserve-key"
GRPC_KEY_HEADER = f"triton-grpc-protocol-{KEY_HEADER}"
_OF_OPERATORS = "model-repository,shared-memory,trace,logging"
"""What lets a caller load code, read and write the server's memory, or write files."""


class ModelControlError(RuntimeError):
    """Triton refused to load a model, or (`silent`) did not answer in time."""

    def __init__(self, message: str, silent: bool = False) -> None:
        super().__init__(message)
        self.silent = silent


def restricted(access: Access) -> list[str]:
    """Options that make a tritonserver ask for the operator's key where it could be harmed."""
    key = access.operator_key
    return [
        f"--http-restricted-api={_OF_OPERATORS}:{KEY_HEADER}={key}",
        f"--grpc-restricted-protocol={_OF_OPERATORS}:{KEY_HEADER}={key}",
    ]


@dataclass(frozen=True)
class ModelControl:
    """The API of the server whose HTTP is at `url` (host:port). Calls raise `ModelControlError`."""

    url: str
    access: Access
    timeout_s: float

    def state(self, name: str) -> str:
        """`READY`, `LOADING`, `UNLOADING`, `UNAVAILABLE`, or "" for a model that Triton does not know.

        A model whose stub process is dead is still `READY`.
        """
        index = self._post("/v2/repository/index", {})
        return next((str(entry.get("state", "")) for entry in index if entry.get("name") == name), "")

    def reload(self, repository: Path, name: str, restarts: int) -> None:
        """Loads a model again, fully.

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
        self._post(f"/v2/repository/models/{name}/load", {"parameters": {"config": json.dumps(config)}})

    def _post(self, path: str, body: Any) -> Any:
        connection = http.client.HTTPConnection(self.url, timeout=self.timeout_s)
        try:
            connection.request("POST", path, json.dumps(body), {KEY_HEADER: self.access.operator_key})
            response = connection.getresponse()
            text = response.read().decode()
        except (OSError, http.client.HTTPException) as error:
            raise ModelControlError(f"POST {path}: {error}", isinstance(error, TimeoutError)) from None
        finally:
            connection.close()
        if response.status != 200:
            raise ModelControlError(f"POST {path}: {response.status} {text.strip()}")
        return json.loads(text) if text else {}
