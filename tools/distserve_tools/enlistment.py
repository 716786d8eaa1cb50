"""A node without an orchestrator tells the one on another node that its instances are there, and takes its
leave before it stops, so that no request is on them then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distserve.core.parsing import to_mapping
from distserve.serving.access import Access
from distserve.serving.orchestrator_config import InstanceSpec
from distserve_tools.client import Client, RequestError

_CALL_S = 5.0
_AGAIN_S = 2.0
_LOOK_S = 0.25


class Enlistment:
    """`instances` of this node at the orchestrator of `address` (host:port of its gRPC endpoint).

    Its server has the same secret as this node's.

    Nothing here fails: the orchestrator may come later than this node, or be gone before it.
    """

    def __init__(
        self, address: str, instances: Sequence[InstanceSpec], access: Access, say: Callable[[str], None]
    ) -> None:
        self._address = address
        self._instances = tuple(instances)
        self._say = say
        self._client = Client(address, access=access)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._attach_all, name="enlistment", daemon=True)

    def start(self) -> None:
        """Has the instances taken (back) as soon as the orchestrator answers."""
        self._thread.start()

    def leave(self, drain_s: float) -> bool:
        """No new request comes to the instances; waits up to `drain_s` for those that they have.

        Returns whether they are free of requests, as far as the orchestrator says.
        """
        self._stop.set()
        self._thread.join(_CALL_S + 1.0)
        try:
            return self._drain(time.monotonic() + drain_s)
        except RequestError as error:
            self._say(f"orchestrator at {self._address}: {error}; leaving without it")
            return False
        finally:
            self._client.__exit__(None, None, None)

    def _attach_all(self) -> None:
        left = list(self._instances)
        told = False
        while left and not self._stop.is_set():
            try:
                self._client.control("attach", _CALL_S, instance=_spec(left[0]), wait_s=0.0)
                left.pop(0)
            except RequestError as error:
                if not told:
                    self._say(f"orchestrator at {self._address}: {error}; asking again until it answers")
                told = True
                self._stop.wait(_AGAIN_S)
        if not left:
            names = ", ".join(spec.name for spec in self._instances)
            self._say(f"{names}: attached to the orchestrator at {self._address}")

    def _drain(self, deadline: float) -> bool:
        names = {spec.name for spec in self._instances}
        for name in names:
            self._client.control("drain", _CALL_S, instance=name)
        while True:
            status = self._client.control("status", _CALL_S)
            busy = [e["instance"] for e in status["instances"] if _busy(e, names)]
            if not busy:
                return True
            if time.monotonic() > deadline:
                self._say(f"{', '.join(busy)}: still has requests; they go on elsewhere")
                return False
            time.sleep(_LOOK_S)


def _busy(entry: Mapping[str, Any], names: set[str]) -> bool:
    return entry["instance"] in names and not entry.get("drained")


def _spec(spec: InstanceSpec) -> dict[str, Any]:
    return to_mapping(spec)
