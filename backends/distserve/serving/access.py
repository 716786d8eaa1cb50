"""Who may operate a server: keys that its launcher gives to its models and tools, derived from one secret.

Clients need none of them: the orchestrator takes requests, and its `status`, from everybody. The key for
operators opens its other operations and Triton's model control; every message to an instance carries a tag,
so that only orchestrators of the same secret are heard. A server that was started by hand, without a
secret, has no keys and asks for none.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from distserve.serving.launch_environment import ACCESS_SECRET
from distserve.serving.schema import ServingError

TAG_BYTES = 16
_HASH = "sha256"


@dataclass(frozen=True)
class Access:
    """The keys of one secret; `shared` and `made` make it."""

    secret: bytes

    @classmethod
    def shared(cls, secret: bytes) -> Access:
        """From what several hosts share for other purposes, too."""
        return cls(hmac.digest(secret, b"distserve access", _HASH))

    @classmethod
    def made(cls) -> Access:
        """Of one server, for as long as it runs."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def given(cls, environment: Mapping[str, str]) -> Access | None:
        """What the launcher has given to this process; None: nothing."""
        text = environment.get(ACCESS_SECRET)
        return cls(bytes.fromhex(text)) if text else None

    @property
    def environment(self) -> dict[str, str]:
        """For `given`."""
        return {ACCESS_SECRET: self.secret.hex()}

    @cached_property
    def operator_key(self) -> str:
        """For the orchestrator's operations and Triton's model control. It travels as it is, and stands in
        Triton's command line: it opens nothing else."""
        return hmac.digest(self.secret, b"operator", _HASH).hex()

    @cached_property
    def _message_key(self) -> bytes:
        return hmac.digest(self.secret, b"message", _HASH)

    def is_operator(self, key: object) -> bool:
        return isinstance(key, str) and hmac.compare_digest(key.encode(), self.operator_key.encode())

    def sign(self, message: bytes) -> bytes:
        """The message behind its tag."""
        return self._tag(message) + message

    def verified(self, signed: bytes) -> bytes:
        """The message without its tag. Raises `ServingError` (FAILED_PRECONDITION) if that is not right."""
        tag, message = signed[:TAG_BYTES], signed[TAG_BYTES:]
        if not hmac.compare_digest(tag, self._tag(message)):
            raise ServingError(
                "FAILED_PRECONDITION",
                "unauthenticated: instances take messages only from orchestrators with their server's secret",
            )
        return message

    def _tag(self, message: bytes) -> bytes:
        # by its own key, not by HMAC: there is a tag in every call, and OpenSSL's takes four times as long
        return hashlib.blake2b(message, digest_size=TAG_BYTES, key=self._message_key).digest()
