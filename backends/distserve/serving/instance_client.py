"""What the orchestrator needs in order to reach an instance."""

from __future__ import annotations

from typing import Protocol

from distserve.serving.orchestrator_config import InstanceSpec


class InstanceClient(Protocol):
    """A way to one instance: BLS in this server, gRPC to another one, or memory in tests."""

    @property
    def hung_calls(self) -> int:
        """Calls that were given up and have not returned: they hold a thread each."""

    async def call(self, message: bytes, deadline_s: float) -> bytes:
        """One call of the instance protocol, encoded both ways; calls may overlap.

        Raises:
            ServingError: UNAVAILABLE when the instance can't be reached or has failed meanwhile,
                DEADLINE_EXCEEDED when there is no reply in time.
        """

    async def close(self) -> None:
        """Lets go of connections and threads; calls in progress fail."""


class Connector(Protocol):
    """Makes the client of an instance."""

    def __call__(self, spec: InstanceSpec) -> InstanceClient: ...
