"""Text as it may be shown: by example, and for any text, cut and stop texts."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarm.backbone.text_stream import TextStream

# Few letters, so that stop texts occur and overlap; characters of one, two and four bytes.
LETTERS = "a\u00e9\U0001f389"
TEXT = st.text(LETTERS, max_size=30)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3)


@st.composite
def cut_bytes(draw: st.DrawFn, text: st.SearchStrategy[str] = TEXT) -> tuple[str, list[bytes]]:
    """Return a text and its UTF-8 bytes cut anywhere, as tokens would be."""
    whole = draw(text)
    data = whole.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    edges = [0, *cuts, len(data)]
    return whole, [data[low:high] for low, high in itertools.pairwise(edges)]


def run(stream: TextStream, pieces: list[bytes]) -> list[str]:
    """Return what was shown after each piece; nothing is fed after a stop, as the generator does."""
    shown = []
    for piece in pieces:
        shown.append(stream.feed(piece))
        if stream.is_stopped:
            break
    shown.append(stream.finish())
    return shown


@given(cut_bytes(st.text(max_size=30).filter(lambda text: text.isprintable())))
def test_without_a_stop_the_pieces_add_up_to_the_text(case: tuple[str, list[bytes]]) -> None:
    text, pieces = case
    stream = TextStream()
    shown = run(stream, pieces)
    assert "".join(shown) == text
    assert shown[-1] == "", "without stop texts nothing whole is held back"
    assert not stream.is_stopped


@given(cut_bytes())
def test_a_character_is_never_shown_in_part(case: tuple[str, list[bytes]]) -> None:
    _, pieces = case
    assert all("\ufffd" not in piece for piece in run(TextStream(), pieces))


@given(cut_bytes(), STOPS)
def test_a_stop_ends_the_text_before_it_and_is_never_shown(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    text, pieces = case
    stream = TextStream(stops)
    shown = "".join(run(stream, pieces))
    assert not any(stop in shown for stop in stops)
    assert text.startswith(shown)
    if any(stop in text for stop in stops):
        assert stream.is_stopped
        assert any(text[len(shown) :].startswith(stop) for stop in stops)
    else:
        assert not stream.is_stopped
        assert shown == text


@given(cut_bytes(), STOPS)
def test_what_is_shown_can_never_become_part_of_a_stop(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    _, pieces = case
    stream = TextStream(stops)
    so_far, fed = "", b""
    for piece in pieces:
        so_far += stream.feed(piece)
        fed += piece
        if stream.is_stopped:
            break
        whole = fed.decode(errors="ignore")
        assert not any(stop.startswith(whole[start:]) for stop in stops for start in range(len(so_far)))


@given(cut_bytes(), STOPS)
def test_only_what_may_begin_a_stop_is_held_back(case: tuple[str, list[bytes]], stops: list[str]) -> None:
    _, pieces = case
    stream = TextStream(stops)
    so_far, fed = "", b""
    for piece in pieces:
        so_far += stream.feed(piece)
        fed += piece
        if stream.is_stopped:
            break
        whole = fed.decode(errors="ignore")
        held = whole[len(so_far) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_a_stop_is_found_across_pieces() -> None:
    stream = TextStream(["END"])
    assert [stream.feed(piece) for piece in (b"one E", b"N", b"Dtwo")] == ["one ", "", ""]
    assert stream.is_stopped
    assert stream.finish() == ""


def test_a_stop_that_begins_like_itself_is_found() -> None:
    stream = TextStream(["aab"])
    assert [stream.feed(piece) for piece in (b"xaa", b"a", b"b")] == ["x", "a", ""]
    assert stream.is_stopped


def test_the_first_of_several_stops_counts() -> None:
    stream = TextStream(["cd", "b"])
    assert stream.feed(b"abcd") == "a"
    assert stream.is_stopped


def test_what_only_looked_like_a_stop_is_shown_once_that_is_clear() -> None:
    stream = TextStream(["END"])
    assert [stream.feed(piece) for piece in (b"E", b"N", b"E", b"!")] == ["", "", "EN", "E!"]
    assert not stream.is_stopped


def test_what_is_held_back_is_shown_at_the_end() -> None:
    stream = TextStream(["END"])
    assert stream.feed(b"the EN") == "the "
    assert stream.finish() == "EN"


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    stream = TextStream()
    assert stream.feed(b"a\xffb") == "a\ufffdb"
    assert stream.feed(b"\xe6\x97") == ""
    assert stream.finish() == "\ufffd"


def test_an_empty_stop_is_no_stop() -> None:
    stream = TextStream(["", "x"])
    assert stream.feed(b"abc") == "abc"
    assert not stream.is_stopped
