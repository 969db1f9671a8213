"""Names of model files on the web, and the URL behind each: `https://host/file.gguf`, `hf://owner/repo/file.gguf`.

`hf://owner/repo@revision/file.gguf` names another revision than main. HF_ENDPOINT and HF_TOKEN (or a stored login) are
huggingface-hub's. `http://` is for files in one's own network: everybody on the way may read and change it, and blocks are
checked, but not everything is a block.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from yarl import URL

from swarm.errors import UserError
from swarm.ip import plain_ip
from swarm.registry.records import MAX_SOURCE_LENGTH, MAX_SOURCES

MAX_NAME_LENGTH = 2048  # characters; what browsers and servers take at least
_HF = re.compile(r"hf://([\w.-]+/[\w.-]+?)(?:@([\w./-]+?))?/((?:[^/@?#]+/)*[^/@?#]+)")
EXPECTED = "https://host/file.gguf or hf://owner/repo/file.gguf"


def is_web_name(text: str) -> bool:
    """Return whether `text` names a file on the web rather than a path or a model."""
    return text.startswith(("https://", "http://", "hf://"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a file is.

    Attributes:
        name: as people wrote it.
        url: to ask; it may redirect elsewhere.
        token: sent to this URL's own server, and to no other; kept out of every message.
        may_be_private: the operator named the server, so it may be on this machine or in this network.
    """

    name: str
    url: URL
    token: str | None = field(default=None, repr=False)
    may_be_private: bool = False

    @property
    def file_name(self) -> str:
        """The last part of its path."""
        return self.url.name

    def sibling(self, file_name: str) -> Location:
        """Return the location of another file in the same folder: of a shard, or a manifest."""
        name = self.name.split("?")[0].rpartition("/")[0] + "/" + file_name
        return replace(self, name=name, url=self.url.with_name(file_name).with_query(self.url.query))


def locate(name: str, *, is_asked: bool) -> Location:
    """Return where a name leads.

    Args:
        is_asked: the operator gave it; else it comes from somebody's record, and may only lead to the public internet.

    Raises:
        UserError: it is no such name.
    """
    if len(name) > MAX_NAME_LENGTH or not (name.isascii() and name.isprintable()):
        raise UserError(f"bad source: got {name[:80]!r}, expected {EXPECTED}")
    if name.startswith("hf://"):
        return _locate_hf(name, is_asked=is_asked)
    try:
        url = URL(name)
        _ = url.host, url.port  # which are looked at only now
    except ValueError as error:
        raise UserError(f"bad source: got {name[:80]!r}, expected {EXPECTED}") from error
    if url.scheme not in ("https", "http") or not url.host or not url.name:
        raise UserError(f"bad source: got {name[:80]!r}, expected {EXPECTED}")
    if url.user is not None or url.password is not None:
        raise UserError("bad source: it has a user name or a password in it; leave them out")
    if url.scheme == "http" and not (is_asked and is_near(url.host)):
        raise UserError(
            f"bad source: got {name[:80]!r}, expected https://: http:// is for this machine and its network"
        )
    return Location(name=name, url=url.with_fragment(None), may_be_private=is_asked)


def public_sources(names: Iterable[str]) -> tuple[str, ...]:
    """Return names as a model's record may carry them, each once; raises UserError for one that is of no use to others."""
    found = tuple(dict.fromkeys(names))
    for name in found:
        locate(name, is_asked=False)
        if len(name) > MAX_SOURCE_LENGTH:
            raise UserError(f"bad source: got {len(name)} characters, expected at most {MAX_SOURCE_LENGTH}")
    if len(found) > MAX_SOURCES:
        raise UserError(f"too many sources: got {len(found)}, expected at most {MAX_SOURCES}")
    return found


def is_worth_telling(name: str) -> bool:
    """Return whether a name that the operator uses may be told to others unasked: a query may hold a secret."""
    try:
        public_sources([name])
    except UserError:
        return False
    return "?" not in name


def is_near(host: str) -> bool:
    """Return whether a host is, by its name or literal, on this machine or in its network."""
    try:
        return not plain_ip(host).is_global
    except ValueError:
        return host == "localhost" or host.endswith((".localhost", ".local", ".lan", ".internal", ".home.arpa"))


def _locate_hf(name: str, *, is_asked: bool) -> Location:
    match = _HF.fullmatch(name)
    if match is None or ".." in name:
        raise UserError(f"bad source: got {name[:80]!r}, expected hf://owner/repo/file.gguf")
    from huggingface_hub import get_token, hf_hub_url  # 0.1 s and 10 MB, for who needs it

    repo, revision, path = match.groups()
    endpoint = os.environ.get("HF_ENDPOINT")  # huggingface-hub reads it once, when it is imported
    try:
        text = hf_hub_url(repo, path, revision=revision, endpoint=endpoint.rstrip("/") if endpoint else None)
    except ValueError as error:  # HFValidationError
        raise UserError(f"bad source: got {name[:80]!r}, expected hf://owner/repo/file.gguf") from error
    url = URL(text, encoded=True)  # a revision's slashes stay encoded
    if not url.host:
        raise UserError(f"bad HF_ENDPOINT: got {endpoint!r}, expected a URL such as https://huggingface.co")
    # A token for whoever runs HF_ENDPOINT, as huggingface-hub itself does. A stranger's record does not choose the server.
    return Location(name=name, url=url, token=get_token(), may_be_private=endpoint is not None)
