"""Errors in the shape that OpenAI clients expect."""

from __future__ import annotations

from typing import Any

_STATUS = {
    "INVALID_ARGUMENT": (400, "invalid_request_error"),
    "NOT_FOUND": (404, "invalid_request_error"),
    "FAILED_PRECONDITION": (400, "invalid_request_error"),
    "RESOURCE_EXHAUSTED": (429, "rate_limit_error"),
    "UNAVAILABLE": (503, "service_unavailable"),
    "DEADLINE_EXCEEDED": (504, "timeout"),
    "CANCELLED": (499, "cancelled"),
}


class ApiError(Exception):
    """One refusal: HTTP status, the message, and the parameter at fault, if there is one."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param

    @classmethod
    def of_code(cls, code: str, message: str) -> ApiError:
        """From an error code of the serving protocol."""
        status, kind = _STATUS.get(code, (500, "server_error"))
        return cls(status, message, kind)

    def body(self) -> dict[str, Any]:
        return {
            "error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.status}
        }
