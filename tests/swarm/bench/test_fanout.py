"""The routers' choices are read right, and the figures are those of the second half of the text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.backbone.engine import EngineConfig
from swarm.bench import fanout
from swarm.bench.fanout import FanoutOptions, measure_fanout, record_choices
from swarm.dispatch.fanout import destinations_per_token, owners_of
from swarm.errors import UserError
from swarm.gate.hooked_model import HookedModel
from tests.swarm.backbone.local_experts import LocalExperts, split
from tests.synthetic_moe import write_synthetic_moe

EMBEDDED = Path(__file__).parents[3] / "examples" / "tiny_moe"
OPTIONS = FanoutOptions(
    model=EMBEDDED / "model-Q8_0.gguf", text=EMBEDDED / "heldout.txt", n_peers=(4, 16), n_tokens=6 * 512
)


def no_progress(n_done: int, n_total: int) -> None: ...


def test_clustered_slices_meet_fewer_peers_on_text_they_were_not_made_from() -> None:
    seen: list[tuple[int, int]] = []
    found = measure_fanout(OPTIONS, lambda *each: seen.append(each))
    assert seen == [(i, 6) for i in range(7)]
    assert (found.figures["n_tokens_learned"], found.figures["n_tokens_judged"]) == (3 * 512, 3 * 512)
    for row, n_peers in zip(found.figures["destinations_per_token"], (4, 16), strict=True):
        assert row["n_peers"] == n_peers
        assert 1 < row["clustered"] < row["contiguous"] < row["uniform"] + 0.1
        assert row["clustered_imbalance"] < 1.5 * row["contiguous_imbalance"]
        shares = found.shares[n_peers]
        assert len(shares) == n_peers
        assert {len(share) for share in shares} == {6 * 32 // n_peers}
        # Judged by the second half, as counting it here does.
        choices = record_choices(OPTIONS, range(6), no_progress)[:, 3 * 512 :]
        met = [destinations_per_token(choices[layer], owners_of(shares, layer, 32)) for layer in range(6)]
        assert row["clustered"] == pytest.approx(np.mean(met))


@pytest.mark.parametrize("architecture", ["qwen2moe", "qwen3moe"])
def test_the_choices_are_those_that_are_dispatched(tmp_path: Path, architecture: str) -> None:
    """What the hook of a running backbone dispatches, of the same windows."""
    path = write_synthetic_moe(tmp_path / "m.gguf", architecture=architecture, n_layers=2, n_expert=8, seed=3)
    text = tmp_path / "text.txt"
    text.write_text("a text of some length, " * 100)
    options = replace(OPTIONS, model=path, text=text, n_peers=(2,), n_tokens=1100)
    choices = record_choices(options, (0, 1), no_progress)
    assert choices.shape == (2, 1024, 4)  # the rest of a window is left out
    model = split(path, tmp_path)
    experts = LocalExperts(model)
    config = EngineConfig(n_ctx=512, n_batch=512, n_ubatch=512)
    with HookedModel(model.backbone, model.spec, config, experts) as hooked:
        tokens = hooked.model.tokenize(text.read_text(), add_special=False, parse_special=False)
        hooked.logits(tokens[:512], 0)
    experts.ffn.close()
    for layer in range(2):
        dispatched = next(call.ids for call in experts.calls if call.layer == layer)
        same = (np.sort(dispatched, axis=1) == np.sort(choices[layer, :512], axis=1)).all(axis=1)
        assert same.mean() > 0.98  # but for near-ties: expert sums differ in their last bits


def test_too_short_a_text_is_said(tmp_path: Path) -> None:
    text = tmp_path / "short.txt"
    text.write_text("too short")
    with pytest.raises(UserError, match=r"short.txt is too short: got \d+ tokens, expected at least 1024"):
        measure_fanout(replace(OPTIONS, text=text), no_progress)


@pytest.mark.parametrize("n_peers", [0, 33])
def test_more_peers_than_experts_are_refused_before_the_text_is_read(
    n_peers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fanout, "record_choices", lambda *_: pytest.fail("the text was read"))
    with pytest.raises(UserError, match=r"number of peers out of range: got \d+, expected 1 to 32"):
        measure_fanout(replace(OPTIONS, n_peers=(4, n_peers)), no_progress)
