"""What names of files on the web mean, and which are refused."""

from __future__ import annotations

import pytest

from swarm.errors import UserError
from swarm.registry.records import MAX_SOURCES
from swarm.sources.locations import is_near, is_web_name, is_worth_telling, locate, public_sources


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_ENDPOINT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("https://h.example/a/b.gguf", "https://h.example/a/b.gguf"),
        ("https://h.example:8443/b.gguf?x=1#part", "https://h.example:8443/b.gguf?x=1"),
        ("hf://owner/repo/m.gguf", "https://huggingface.co/owner/repo/resolve/main/m.gguf"),
        ("hf://owner/re.po-1/sub/dir/m.gguf", "https://huggingface.co/owner/re.po-1/resolve/main/sub/dir/m.gguf"),
        ("hf://owner/repo@v1.0/m.gguf", "https://huggingface.co/owner/repo/resolve/v1.0/m.gguf"),
    ],
)
def test_a_name_leads_to_its_url(name: str, url: str) -> None:
    location = locate(name, is_asked=False)
    assert str(location.url) == url
    assert (location.name, location.may_be_private, location.token) == (name, False, None)


@pytest.mark.parametrize(
    "name",
    [
        "ftp://h.example/m.gguf",
        "https://",
        "https:///m.gguf",
        "https://h.example/",
        "https://h.example",
        "https://[::1/m.gguf",
        "https://user:secret@h.example/m.gguf",
        "https://h.example/m\n.gguf",
        "https://h.example/" + "m" * 3000,
        "http://h.example/m.gguf",
        "http://8.8.8.8/m.gguf",
        "hf://owner/m.gguf",
        "hf://owner/repo/",
        "hf://owner/repo/../../m.gguf",
        "hf://owner/repo/m.gguf?x=1",
        "hf:///repo/m.gguf",
        "hf://-owner/repo/m.gguf",
        "hf://own--er/repo/m.gguf",
        "hf://owner/repo.git/m.gguf",
        "https://xn--a/m.gguf",
        "https://h.example:99999/m.gguf",
    ],
)
@pytest.mark.parametrize("is_asked", [True, False])
def test_what_is_no_name_of_a_file_is_refused(name: str, is_asked: bool) -> None:
    with pytest.raises(UserError, match=r"^bad source: ") as raised:
        locate(name, is_asked=is_asked)
    assert "secret" not in str(raised.value)


def test_http_is_for_ones_own_network_and_only_for_who_asks() -> None:
    for name in (
        "http://localhost:8000/m.gguf",
        "http://192.168.1.7/m.gguf",
        "http://[::1]/m.gguf",
        "http://nas.lan/m",
    ):
        assert locate(name, is_asked=True).may_be_private
        with pytest.raises(UserError, match="http:// is for this machine and its network"):
            locate(name, is_asked=False)
    assert not is_near("h.example")


def test_another_endpoint_and_a_token_are_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9/hub/")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "t0ken")
    location = locate("hf://owner/repo/m.gguf", is_asked=False)
    assert str(location.url) == "http://127.0.0.1:9/hub/owner/repo/resolve/main/m.gguf"
    assert (location.token, location.may_be_private) == ("t0ken", True)
    assert locate("https://h.example/m.gguf", is_asked=True).token is None
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    with pytest.raises(UserError, match="bad HF_ENDPOINT"):
        locate("hf://owner/repo/m.gguf", is_asked=False)


def test_a_sibling_is_in_the_same_folder() -> None:
    location = locate("https://h.example/a/m-00001-of-00002.gguf?key=1", is_asked=True)
    other = location.sibling("m-00002-of-00002.gguf")
    assert str(other.url) == "https://h.example/a/m-00002-of-00002.gguf?key=1"
    assert (other.name, other.file_name) == ("https://h.example/a/m-00002-of-00002.gguf", "m-00002-of-00002.gguf")
    assert other.may_be_private
    hf = locate("hf://owner/repo@v1/sub/m.gguf", is_asked=False).sibling("manifest.json")
    assert str(hf.url) == "https://huggingface.co/owner/repo/resolve/v1/sub/manifest.json"


def test_paths_and_models_are_no_names_of_the_web() -> None:
    assert is_web_name("hf://o/r/m.gguf")
    for text in ("m.gguf", "/a/https:/m.gguf", "qwen3@1a2b", "httpsx"):
        assert not is_web_name(text)


def test_sources_for_others_are_each_once_few_and_public() -> None:
    one, two = "hf://o/r/m.gguf", "https://h.example/m.gguf?download=true"
    assert public_sources([one, two, one]) == (one, two)
    for bad in ("http://localhost/m.gguf", "m.gguf", "https://h.example/" + "m" * 300):
        with pytest.raises(UserError):
            public_sources([bad])
    with pytest.raises(UserError, match="too many sources"):
        public_sources([f"https://h.example/{n}.gguf" for n in range(MAX_SOURCES + 1)])


def test_a_name_that_may_hold_a_secret_is_not_told_unasked() -> None:
    assert is_worth_telling("hf://o/r/m.gguf")
    assert not is_worth_telling("https://h.example/m.gguf?signature=1")
    assert not is_worth_telling("http://192.168.1.7/m.gguf")
