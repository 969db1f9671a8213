"""How many peers a token meets, measured: the routers' choices on a text, then slices of several kinds judged on its second half.

The whole model runs here, without a swarm; a callback reads what the routers chose. Slices are clustered on the first half of the
text alone, so that the second half judges them fairly.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swarm.dispatch.fanout import (
    clustered_shares,
    co_activation,
    contiguous_shares,
    destinations_per_token,
    load_imbalance,
    owners_of,
    uniform_destinations,
)
from swarm.errors import EngineError, UserError
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.spec import read_spec
from swarm.native.ggml import read_tensor, tensor_name
from swarm.native.llama import LlamaContext, LlamaModel

N_WINDOW = 512  # tokens of context: the text is read in windows, each begun anew
MIN_WINDOWS = 2  # one to learn from and one to judge by
MAX_CHARACTERS_PER_TOKEN = 32  # a guess, far above what text takes
_CHOICE = re.compile(r"ffn_moe_topk-(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutOptions:
    """What to measure.

    Attributes:
        n_peers: numbers of peers that share the experts.
        n_tokens: most tokens of the text that are read.
    """

    model: Path
    text: Path
    n_peers: tuple[int, ...]
    n_tokens: int
    n_threads: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fanout:
    """What was measured, and the clustered shares for each number of peers."""

    figures: dict[str, Any]
    shares: dict[int, list[ExpertSet]]


def measure_fanout(options: FanoutOptions, progress: Callable[[int, int], None]) -> Fanout:
    """Return the figures of `swarm bench fanout`.

    Raises:
        UserError: not a model with experts, too short a text, or more peers than experts.
        EngineError: llama.cpp cannot run the model.
    """
    with GgufFile(options.model) as file:
        spec = read_spec(file)
    for n_peers in options.n_peers:
        if not 1 <= n_peers <= spec.n_expert:
            raise UserError(f"number of peers out of range: got {n_peers}, expected 1 to {spec.n_expert}")
    choices = record_choices(options, spec.moe_layers, progress)  # [L, T, K]
    half = choices.shape[1] // N_WINDOW // 2 * N_WINDOW
    learned, judged = choices[:, :half], choices[:, half:]
    co_counts = np.stack([co_activation(topk_ids, spec.n_expert) for topk_ids in learned])
    shares: dict[int, list[ExpertSet]] = {}
    rows = []
    search_s = 0.0
    for n_peers in options.n_peers:
        started = time.perf_counter()
        shares[n_peers] = clustered_shares(co_counts, n_peers, spec.moe_layers)
        search_s = max(search_s, time.perf_counter() - started)
        plain = contiguous_shares(spec.n_expert, n_peers, spec.moe_layers)
        contiguous, contiguous_load = _judge(plain, judged, spec.moe_layers, spec.n_expert)
        clustered, clustered_load = _judge(shares[n_peers], judged, spec.moe_layers, spec.n_expert)
        rows.append(
            {
                "n_peers": n_peers,
                "contiguous": contiguous,
                "clustered": clustered,
                "uniform": uniform_destinations(spec.n_expert, spec.n_expert_used, n_peers),
                "contiguous_imbalance": contiguous_load,
                "clustered_imbalance": clustered_load,
            }
        )
    figures = {
        "model": options.model.name,
        "text": options.text.name,
        "layers": len(spec.moe_layers),
        "n_expert": spec.n_expert,
        "n_expert_used": spec.n_expert_used,
        "n_tokens_learned": learned.shape[1],
        "n_tokens_judged": judged.shape[1],
        "search_s": search_s,
        "destinations_per_token": rows,
    }
    return Fanout(figures=figures, shares=shares)


def record_choices(
    options: FanoutOptions, layers: Sequence[int], progress: Callable[[int, int], None]
) -> npt.NDArray[np.int32]:
    """Return what the routers chose for whole windows of the text, [L, T, K]."""
    chosen: dict[int, list[npt.NDArray[np.int32]]] = {layer: [] for layer in layers}

    def callback(tensor: int, ask: bool) -> bool:
        match = _CHOICE.fullmatch(tensor_name(tensor))
        if match is None or int(match[1]) not in chosen:
            return not ask
        if not ask:
            ids = read_tensor(tensor)
            chosen[int(match[1])].append(ids.reshape(ids.shape[-2:]))  # [T, K]
        return True

    with LlamaModel(options.model) as model:
        text = options.text.read_text(encoding="utf-8", errors="replace")[: options.n_tokens * MAX_CHARACTERS_PER_TOKEN]
        tokens = model.tokenize(text, add_special=False, parse_special=False)[: options.n_tokens]
        n_windows = len(tokens) // N_WINDOW
        if n_windows < MIN_WINDOWS:
            raise UserError(
                f"{options.text} is too short: got {len(tokens)} tokens, expected at least {MIN_WINDOWS * N_WINDOW}"
            )
        with LlamaContext(
            model,
            n_ctx=N_WINDOW,
            n_batch=N_WINDOW,
            n_ubatch=N_WINDOW,
            n_threads=options.n_threads,
            eval_callback=callback,
        ) as context:
            for window in range(n_windows):
                progress(window, n_windows)
                context.clear()
                # All logits: the last layer computes only the rows whose logits are asked for.
                context.decode(tokens[window * N_WINDOW :][:N_WINDOW], first_position=0, logits="all")
                error = context.take_callback_error()
                if error is not None:
                    raise EngineError(f"cannot read the routers' choices: {error!r}") from error
            progress(n_windows, n_windows)
    missing = [layer for layer, parts in chosen.items() if sum(map(len, parts)) != n_windows * N_WINDOW]
    if missing:
        raise EngineError(f"the graph does not show the routers' choices of layers {missing}")
    return np.stack([np.concatenate(chosen[layer]) for layer in layers])


def _judge(
    shares: Sequence[ExpertSet], choices: npt.NDArray[np.int32], layers: Sequence[int], n_expert: int
) -> tuple[float, float]:
    """Return destinations per token and max over mean of the peers' loads, means over the layers."""
    owners = [owners_of(shares, layer, n_expert) for layer in layers]
    met = [destinations_per_token(ids, owner_of) for ids, owner_of in zip(choices, owners, strict=True)]
    loads = [load_imbalance(ids, owner_of, len(shares)) for ids, owner_of in zip(choices, owners, strict=True)]
    return float(np.mean(met)), float(np.mean(loads))
