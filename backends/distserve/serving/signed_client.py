"""An `InstanceClient` whose messages carry the tag that the instance asks for."""

from __future__ import annotations

from distserve.serving.access import Access
from distserve.serving.instance_client import InstanceClient


class SignedClient:
    """`client` with every message signed."""

    def __init__(self, client: InstanceClient, access: Access) -> None:
        self._client, self._access = client, access

    @property
    def hung_calls(self) -> int:
        return self._client.hung_calls

    async def call(self, message: bytes, deadline_s: float) -> bytes:
        return await self._client.call(self._access.sign(message), deadline_s)

    async def close(self) -> None:
        await self._client.close()
