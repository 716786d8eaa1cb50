"""What a change asks of a running server: Triton's model control, and the orchestrator's operations."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from distserve.core.config import EngineConfig
from distserve.core.parsing import ConfigError, to_mapping
from distserve.serving.access import Access
from distserve.serving.orchestrator_config import MODEL_PARAMETER, InstanceSpec, OrchestratorConfig
from distserve_planner.placement_check import ORCHESTRATOR
from distserve_tools.apply.instances import Placed
from distserve_tools.client import Client, RequestError
from distserve_tools.model_control import GRPC_KEY_HEADER

_ENGINE = "engine"  # parameter of an instance's model
_PAUSE_S = 0.1
_CALL_S = 10.0
_ATTACH_S = 30.0


class ServerError(RuntimeError):
    """The server refused an operation, or did not carry it out in time."""


class Server(Protocol):
    """Every call ends within its time-out and raises `ServerError` if it did not do what it says."""

    def engines(self) -> dict[str, Placed]:
        """The instances whose models are loaded."""

    def orchestrator(self) -> OrchestratorConfig:
        """As the orchestrator was loaded; its instances may have changed since."""

    def attached(self) -> dict[str, bool]:
        """The instances that the orchestrator knows, and whether each takes requests."""

    def load(self, engine: Placed, timeout_s: float) -> None: ...

    def unload(self, engine: Placed, timeout_s: float) -> None:
        """Returns once the model is gone."""

    def attach(self, engine: Placed, timeout_s: float) -> None:
        """Returns once it takes requests; also takes a draining instance back."""

    def drain(self, name: str, timeout_s: float) -> None:
        """No new requests; returns once those that are there have ended."""

    def detach(self, name: str) -> None:
        """The orchestrator forgets a drained instance, or one that is down."""


class TritonControl:
    """One tritonserver behind its gRPC endpoint (`host:port`); a context manager.

    `access`: what the server's launcher has; None for one that was started without a launcher.
    """

    def __init__(self, grpc_url: str, access: Access | None) -> None:
        self._triton = triton.InferenceServerClient(grpc_url)
        self._client = Client(grpc_url, access=access)
        self._headers = {GRPC_KEY_HEADER: access.operator_key} if access is not None else None

    def __enter__(self) -> TritonControl:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()
        self._triton.close()

    def engines(self) -> dict[str, EngineConfig]:
        found = {}
        for name, state in self._states().items():
            if state == "READY" and _ENGINE in (parameters := self._parameters(name)):
                found[name] = EngineConfig.load(json.loads(parameters[_ENGINE]), f"{name}: {_ENGINE}")
        return found

    def orchestrator(self) -> OrchestratorConfig:
        parameters = self._parameters(ORCHESTRATOR)
        if MODEL_PARAMETER not in parameters:
            raise ConfigError(f"{ORCHESTRATOR}: parameter '{MODEL_PARAMETER}' is missing")
        return OrchestratorConfig.load(parameters[MODEL_PARAMETER], ORCHESTRATOR)

    def attached(self) -> dict[str, bool]:
        entries = self._control("status")["instances"]
        return {str(entry["instance"]): bool(entry["usable"]) for entry in entries}

    def load(self, name: str, timeout_s: float) -> None:
        try:
            self._triton.load_model(name, headers=self._headers, client_timeout=timeout_s)
        except InferenceServerException as error:
            raise ServerError(f"{name}: cannot be loaded: {_reason(error)}") from None

    def unload(self, name: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        try:
            self._triton.unload_model(name, headers=self._headers, client_timeout=timeout_s)
        except InferenceServerException as error:
            raise ServerError(f"{name}: cannot be unloaded: {_reason(error)}") from None
        while self._states().get(name) in ("READY", "UNLOADING", "LOADING"):
            if time.monotonic() > deadline:
                raise ServerError(f"{name}: not unloaded after {timeout_s:g} s")
            time.sleep(_PAUSE_S)

    def attach(self, spec: InstanceSpec, timeout_s: float) -> None:
        deadline, name = time.monotonic() + timeout_s, spec.name
        reply = self._control("attach", instance=to_mapping(spec), wait_s=min(timeout_s, _ATTACH_S))
        while not self.attached().get(name, False):
            if time.monotonic() > deadline:
                why = self._entry(name).get("reason") or reply.get("reason") or "no reason given"
                raise ServerError(f"{name}: takes no requests after {timeout_s:g} s: {why}")
            time.sleep(_PAUSE_S)

    def drain(self, name: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not self._control("drain", instance=name)["drained"]:
            if time.monotonic() > deadline:
                entry = self._entry(name)
                raise ServerError(
                    f"{name}: {entry.get('requests')} requests and {entry.get('leases_held')} leases "
                    f"are left after {timeout_s:g} s (--drain-timeout)"
                )
            time.sleep(_PAUSE_S)

    def detach(self, name: str) -> None:
        self._control("drain", instance=name, remove=True)

    def _entry(self, name: str) -> dict[str, Any]:
        entries = self._control("status")["instances"]
        return next((dict(entry) for entry in entries if entry["instance"] == name), {})

    def _control(self, op: str, **arguments: Any) -> dict[str, Any]:
        wait_s = float(arguments.get("wait_s", 0.0))
        try:
            return self._client.control(op, timeout_s=_CALL_S + wait_s, **arguments)
        except RequestError as error:
            raise ServerError(f"{ORCHESTRATOR}: {op}: {error}") from None

    def _states(self) -> dict[str, str]:
        try:
            index = self._triton.get_model_repository_index(self._headers, client_timeout=_CALL_S)
        except InferenceServerException as error:
            raise ServerError(f"the server does not say which models it has: {_reason(error)}") from None
        return {model.name: model.state for model in index.models}

    def _parameters(self, name: str) -> Mapping[str, str]:
        try:
            config = self._triton.get_model_config(name, client_timeout=_CALL_S).config
        except InferenceServerException as error:
            raise ServerError(f"{name}: {_reason(error)}") from None
        return {key: value.string_value for key, value in config.parameters.items()}


def _reason(error: InferenceServerException) -> str:
    return str(error.message() or error)
