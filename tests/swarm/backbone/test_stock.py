"""Stock llama.cpp behind one small class."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from swarm.backbone.engine import EngineConfig
from swarm.backbone.stock import StockModel
from swarm.errors import EngineError
from swarm.native.llama import LlamaContext, LlamaModel
from tests.swarm.backbone.local_experts import SplitModel

CONFIG = EngineConfig(n_ctx=256, n_batch=32, n_ubatch=32)
TOKENS = np.random.default_rng(2).integers(1, 2000, 20).tolist()


def test_its_logits_are_llama_cpps_of_every_token(tiny: SplitModel) -> None:
    with LlamaModel(tiny.file) as model, LlamaContext(model, n_ctx=256, n_batch=32, n_ubatch=32, n_threads=1) as plain:
        plain.decode(TOKENS, first_position=0, logits="all")
        expected = plain.all_logits()
    with StockModel(tiny.file, CONFIG) as stock:
        assert stock.n_vocab == 2048
        first = stock.logits(TOKENS, 0)
        assert first.shape == (20, 2048)
        np.testing.assert_array_equal(first, expected)
        stock.logits([7], 20)
        stock.clear()
        np.testing.assert_array_equal(stock.logits(TOKENS, 0), expected)


def test_its_speed_is_measured_after_a_prompt_of_any_length(tiny: SplitModel) -> None:
    with StockModel(tiny.file, CONFIG) as stock:
        assert stock.tokens_per_s(TOKENS * 4, 3) > 0  # 80 tokens: three batches


def test_a_file_or_context_that_cannot_be_had_is_an_error(tiny: SplitModel, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="absent"):
        StockModel(tmp_path / "absent.gguf", CONFIG)
    with pytest.raises(EngineError, match="n_batch"):
        StockModel(tiny.file, EngineConfig(n_batch=0))
