"""What goes wrong, in OpenAI's shape. Pure values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swarm.errors import AuditFailed, DeadlineExceeded, ExpertUnavailable, Overloaded, UserError

Json = dict[str, Any]

EXPERT_RETRY_S = 5.0  # guessed: a lost peer's replacement is found, or the peer is back

AUDIT_RETRY_S = 1.0  # the peer is out already

# Where other servers' clients look -> what they find here.
_INSTEAD: Mapping[str, str] = {
    "/v1/responses": "/v1/chat/completions",  # OpenAI's newer API
    "/v1/messages": "/v1/chat/completions",  # Anthropic's
    "/api/chat": "/v1/chat/completions",  # Ollama's
    "/api/generate": "/v1/completions",
    "/api/tags": "/v1/models",
    "/completion": "/v1/completions",  # llama-server's
    "/chat/completions": "/v1/chat/completions",  # a base URL without its /v1
    "/completions": "/v1/completions",
    "/models": "/v1/models",
}


class RequestRefused(UserError):
    """A request that OpenAI's protocol, or this gateway, does not allow.

    Attributes:
        param: the parameter at fault, if one is.
        code: OpenAI's word for it, if there is one.
        status: the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorAnswer:
    """An error as a client sees it.

    Attributes:
        fields: more of the error object, beside OpenAI's four.
        retry_after_s: when to try again, if that may help.
    """

    status: int
    message: str
    kind: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    fields: Mapping[str, object] | None = None
    retry_after_s: float | None = None

    def body(self) -> Json:
        """Return the JSON object; also what a stream sends in place of its next chunk."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": {**error, **(self.fields or {})}}

    def headers(self) -> dict[str, str]:
        """Return the HTTP headers that belong to it."""
        return {} if self.retry_after_s is None else {"Retry-After": str(max(1, math.ceil(self.retry_after_s)))}


def not_found(method: str, path: str) -> ErrorAnswer:
    """Return the answer where nothing is served; who looks in another server's place is told where to look."""
    instead = _INSTEAD.get(path.rstrip("/"))
    message = f"nothing is served at {method} {path[:200]}"
    if instead is None:
        return ErrorAnswer(status=404, message=message)
    return ErrorAnswer(status=404, message=f"{message}: use {instead}", code="unsupported_endpoint")


def error_answer(error: Exception) -> ErrorAnswer:
    """Return what to tell a client. An exception that is not expected here tells nothing: status 500."""
    match error:
        case RequestRefused():
            return ErrorAnswer(status=error.status, message=str(error), param=error.param, code=error.code)
        case UserError():
            return ErrorAnswer(status=400, message=str(error))
        case ExpertUnavailable():
            return ErrorAnswer(
                status=503,
                message=str(error),
                kind="server_error",
                code="expert_unavailable",
                fields={"layer": error.layer, "experts": list(error.experts)},
                retry_after_s=EXPERT_RETRY_S,
            )
        case AuditFailed():
            return ErrorAnswer(
                status=503,
                message=str(error),
                kind="server_error",
                code="audit_failed",
                fields={"last_audited_token": error.n_audited},
                retry_after_s=AUDIT_RETRY_S,
            )
        case DeadlineExceeded():
            return ErrorAnswer(status=504, message=str(error), kind="server_error", code="timeout")
        case Overloaded():
            return ErrorAnswer(
                status=429,
                message=str(error),
                kind="rate_limit_error",
                code="overloaded",
                retry_after_s=error.retry_after_s,
            )
        case _:
            return ErrorAnswer(status=500, message="internal error", kind="server_error", code="internal_error")
