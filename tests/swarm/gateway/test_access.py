"""Keys, origins, and sizes that a gateway takes."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.errors import UserError
from swarm.gateway.access import Access, check_keys
from tests.swarm.gateway.test_app import ScriptedGenerator, serving

KEY, OTHER_KEY = "sk-0123456789abcdef", "sk-fedcba9876543210"
COMPLETION = {"prompt": "x"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": f"Bearer {KEY}"}, 200),
        ({"Authorization": f"bearer  {OTHER_KEY} "}, 200),
        ({}, 401),
        ({"Authorization": KEY}, 401),
        ({"Authorization": f"Basic {KEY}"}, 401),
        ({"Authorization": f"Bearer {KEY}x"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": "Bearer \u00e9"}, 401),
    ],
)
async def test_the_api_needs_one_of_the_keys(headers: dict[str, str], status: int) -> None:
    generator = ScriptedGenerator("ok")
    async with (
        serving(generator, access=Access(api_keys=(KEY, OTHER_KEY))) as client,
        client.post("/v1/completions", json=COMPLETION, headers=headers) as response,
    ):
        assert response.status == status
        if status == 401:
            assert (await response.json())["error"]["code"] == "invalid_api_key"
    assert len(generator.requests) == (status == 200)


async def test_health_needs_no_key() -> None:
    async with serving(ScriptedGenerator(), access=Access(api_keys=(KEY,))) as client:
        for path, status in (("/health", 200), ("/ready", 200), ("/v1/models", 401)):
            async with client.get(path) as response:
                assert response.status == status, path


PREFLIGHT = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}


@pytest.mark.parametrize(
    ("origins", "origin", "is_allowed"),
    [
        (("https://chat.example",), "https://chat.example", True),
        (("*",), "http://any.example", True),
        (("https://chat.example",), "https://evil.example", False),
        ((), "https://chat.example", False),
    ],
)
async def test_pages_of_allowed_origins_may_use_the_api(
    origins: tuple[str, ...], origin: str, is_allowed: bool
) -> None:
    access = Access(cors_origins=origins, api_keys=(KEY,))
    async with serving(ScriptedGenerator("ok"), access=access) as client:
        async with client.options("/v1/completions", headers={"Origin": origin, **PREFLIGHT}) as response:
            assert (response.status == 204) is is_allowed
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
        for body in (COMPLETION, {**COMPLETION, "stream": True}):  # a stream's headers leave before its handler returns
            headers = {"Origin": origin, "Authorization": f"Bearer {KEY}"}
            async with client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)
        async with client.post("/v1/completions", json=COMPLETION, headers={"Origin": origin}) as response:
            assert response.status == 401
            assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)


async def test_the_largest_body_is_the_operators_choice() -> None:
    async with serving(ScriptedGenerator("ok"), access=Access(max_body_bytes=100)) as client:
        body: dict[str, Any] = {"prompt": "x" * 100}
        async with client.post("/v1/completions", json=body) as response:
            assert response.status == 413
            assert "at most 100 bytes" in (await response.json())["error"]["message"]


@pytest.mark.parametrize("key", ["", "short", "has a space in its middle", "ümlautümlautümlaut"])
def test_keys_that_could_be_guessed_are_refused(key: str) -> None:
    with pytest.raises(UserError, match="API key"):
        check_keys([key])
