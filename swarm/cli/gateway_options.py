"""Options of the HTTP gateway, and what they make of it."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from swarm.errors import UserError
from swarm.gateway.access import Access, check_keys
from swarm.registry.client import RegistryAddress
from swarm.units import parse_size_bytes

GatewayOption = Annotated[
    str,
    typer.Option("--gateway", envvar="SWARM_GATEWAY", metavar="HOST:PORT", help="Where the HTTP API listens."),
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="A name, besides localhost, by which requests may call a gateway on loopback: behind a proxy. Repeatable.",
    ),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        "--api-key-file",
        envvar="SWARM_API_KEY_FILE",
        metavar="FILE",
        help="API keys, one a line: requests need one of them.",
        show_default="no key is needed",
    ),
]
CorsOriginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--cors-origin",
        metavar="ORIGIN",
        help="Web pages that may use the API, such as https://chat.example, or * for all. Repeatable.",
    ),
]
TlsCertOption = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Certificate chain in PEM: serve https.")
]
TlsKeyOption = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", help="Its private key in PEM.")]
MaxBodyOption = Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Largest request body.")]
DEFAULT_MAX_BODY = "8MiB"  # guessed: over a million tokens of text


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """How a gateway is reached, and what its map tells.

    Attributes:
        tls: None serves plain HTTP.
        registry: where volunteers find the swarm.
        place: of the backbone, in whole degrees.
    """

    address: tuple[str, int]
    access: Access = field(default_factory=Access)
    tls: ssl.SSLContext | None = None
    registry: tuple[RegistryAddress, ...] = ()
    place: tuple[int, int] | None = None

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "http" if self.tls is None else "https"


def settle_gateway(
    address: tuple[str, int],
    *,
    allow_hosts: Sequence[str] | None,
    api_key_file: Path | None,
    cors_origins: Sequence[str] | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    max_body: str,
) -> GatewaySettings:
    """Return what the options say. Raises UserError where they cannot be followed."""
    keys = () if api_key_file is None else _read_keys(api_key_file)
    for origin in cors_origins or ():
        if origin != "*" and not origin.startswith(("http://", "https://")):
            raise UserError(f"bad --cors-origin: got {origin!r}, expected one such as https://chat.example, or *")
    return GatewaySettings(
        address=address,
        access=Access(
            allowed_hosts=tuple(allow_hosts or ()),
            api_keys=keys,
            cors_origins=tuple(origin.rstrip("/") for origin in cors_origins or ()),
            max_body_bytes=parse_size_bytes(max_body, "the largest body"),
        ),
        tls=_tls(tls_cert, tls_key),
    )


def _read_keys(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the API keys in {path}: {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise UserError(f"{path} holds no API key")
    check_keys(keys)
    return keys


def _tls(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if certificate is None:
        if key is not None:
            raise UserError("--tls-key needs --tls-cert")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(f"cannot use the certificate {certificate}: {error}") from error
    return context
