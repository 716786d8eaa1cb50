"""The one error of this package: what a failed or refused transfer tells both sides."""

from __future__ import annotations


class TransferError(RuntimeError):
    """A transfer that was refused or failed.

    `code` is one of the serving protocol's codes (FAILED_PRECONDITION, NOT_FOUND, UNAVAILABLE,
    DEADLINE_EXCEEDED, CANCELLED, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, INTERNAL), `reason` a stable word for
    programs (`stale_epoch`, `nonce_reused`, `layout_mismatch`, ...); the message names the field, the value
    and what is allowed.
    """

    def __init__(self, code: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason


def timed_out(what: str) -> TransferError:
    return TransferError("DEADLINE_EXCEEDED", "timeout", f"{what}: not done by the transfer's deadline")


def peer_gone(what: str) -> TransferError:
    return TransferError("UNAVAILABLE", "peer_gone", what)


def bad_message(what: str) -> TransferError:
    return TransferError("INVALID_ARGUMENT", "bad_message", what)
