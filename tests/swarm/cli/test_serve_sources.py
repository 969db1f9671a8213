"""What `swarm serve` tells others of where its model is."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.cli.runtime import ProgressBars
from swarm.cli.serve import _model_here, _sources_to_tell
from swarm.files import Folders

HF, HTTPS = "hf://owner/repo/m.gguf", "https://h.example/m.gguf"


@pytest.mark.parametrize(
    ("model", "given", "carried", "told"),
    [
        ("/models/m.gguf", (), (), ()),
        ("/models/m.gguf", (HF,), (), (HF,)),
        (HF, (), (), (HF,)),
        (HF, (HTTPS,), (), (HTTPS,)),
        ("backbone.gguf", (), (HF, HTTPS), (HF, HTTPS)),
        ("backbone.gguf", (HF,), (HF, HTTPS), (HF, HTTPS)),
        ("backbone.gguf", (HF,), ("http://192.168.0.1/m.gguf",), (HF,)),
        ("https://h.example/m.gguf?signature=secret", (), (), ()),
        ("http://192.168.0.1/m.gguf", (), (), ()),
    ],
)
def test_sources_are_the_given_ones_or_where_the_model_came_from(
    model: str, given: tuple[str, ...], carried: tuple[str, ...], told: tuple[str, ...]
) -> None:
    assert _sources_to_tell(model, given, carried) == told


async def test_a_path_is_not_fetched(tmp_path: Path) -> None:
    with ProgressBars() as bars:
        assert await _model_here("m.gguf", Folders.below(tmp_path), bars) == Path("m.gguf")
