"""The servers of a placement's nodes, as one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from types import TracebackType

from distserve.core.parsing import ConfigError
from distserve.serving.access import Access
from distserve.serving.orchestrator_config import InstanceSpec, OrchestratorConfig
from distserve_planner.placement_file import NodePlan
from distserve_tools.apply.instances import Placed
from distserve_tools.apply.server import ServerError, TritonControl


class Nodes:
    """A `Server`: the first node has the orchestrator, each the models of its instances. A context manager.

    `grpc_url` is that of the first node; the others are called at the address that the placement gives.
    """

    def __init__(self, nodes: Sequence[NodePlan], grpc_url: str, access: Access | None) -> None:
        self._nodes = tuple(nodes)
        self._first = TritonControl(grpc_url, access)
        self._controls = {nodes[0].name: self._first}
        for node in nodes[1:]:
            if node.grpc_port is None:
                raise ConfigError(f"nodes: {node.name} has no grpc_port, so it cannot be reached")
            self._controls[node.name] = TritonControl(f"{node.host}:{node.grpc_port}", access)

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for control in self._controls.values():
                stack.push(control.__exit__)

    def engines(self) -> dict[str, Placed]:
        found: dict[str, Placed] = {}
        for node in self._nodes:
            try:
                engines = self._controls[node.name].engines()
            except ServerError as error:
                raise ServerError(f"node {node.name}: {error}") from None
            for name, config in engines.items():
                if name in found:
                    both = f"{found[name].node.name} and {node.name}"
                    raise ConfigError(f"instances: {name!r} is on {both}; each needs a name of its own")
                found[name] = Placed(config, node)
        return found

    def orchestrator(self) -> OrchestratorConfig:
        return self._first.orchestrator()

    def attached(self) -> dict[str, bool]:
        return self._first.attached()

    def load(self, engine: Placed, timeout_s: float) -> None:
        self._controls[engine.node.name].load(engine.config.instance, timeout_s)

    def unload(self, engine: Placed, timeout_s: float) -> None:
        self._controls[engine.node.name].unload(engine.config.instance, timeout_s)

    def attach(self, engine: Placed, timeout_s: float) -> None:
        node, config = engine.node, engine.config
        address = None if node == self._nodes[0] else f"{node.host}:{node.grpc_port}"
        self._first.attach(InstanceSpec(config.instance, config.role, address), timeout_s)

    def drain(self, name: str, timeout_s: float) -> None:
        self._first.drain(name, timeout_s)

    def detach(self, name: str) -> None:
        self._first.detach(name)
