"""Errors as clients see them."""

from __future__ import annotations

from swarm.errors import AuditFailed, DeadlineExceeded, EngineError, ExpertUnavailable, Overloaded, UserError
from swarm.gateway.errors import error_answer


def test_errors_map_to_statuses_and_codes() -> None:
    lost = error_answer(ExpertUnavailable(3, (5, 9), "peer lost"))
    assert lost.status == 503
    assert lost.headers() == {"Retry-After": "5"}
    assert lost.body() == {
        "error": {
            "message": "no answer for layer 3, experts 5, 9: peer lost",
            "type": "server_error",
            "param": None,
            "code": "expert_unavailable",
            "layer": 3,
            "experts": [5, 9],
        }
    }
    busy = error_answer(Overloaded("8 requests wait", retry_after_s=2.2))
    assert (busy.status, busy.code, busy.headers()) == (429, "overloaded", {"Retry-After": "3"})
    late = error_answer(DeadlineExceeded("the request took longer than 2 s"))
    assert (late.status, late.code, late.message) == (504, "timeout", "the request took longer than 2 s")
    assert error_answer(UserError("the prompt is empty")).body()["error"]["message"] == "the prompt is empty"
    for error in (EngineError("secret"), RuntimeError("secret")):
        told = error_answer(error)
        assert (told.status, told.code, told.message) == (500, "internal_error", "internal error")


def test_a_failed_audit_names_the_last_token_that_holds() -> None:
    told = error_answer(AuditFailed(17))
    assert told.status == 503
    assert told.headers() == {"Retry-After": "1"}
    error = told.body()["error"]
    assert error["code"] == "audit_failed"
    assert error["last_audited_token"] == 17
    assert "number 17" in error["message"]
    assert "no token" in error_answer(AuditFailed(0)).body()["error"]["message"]
