"""What joining takes, against a count by hand and a simulated router."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from swarm.identity import Identity
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest, build_manifest
from swarm.plan.prospect import Prospect, make_prospect, tokens_per_s, traffic_per_token
from swarm.plan.traffic import wire_bytes
from swarm.registry.records import RoutingHistogram
from tests.sample_records import sample_offer
from tests.synthetic_moe import write_synthetic_moe

E, K, D, L = 8, 2, 64, 3
BACKBONE = Identity.from_seed(bytes(32)).node_id


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_synthetic_moe(path, n_layers=L, n_expert=E, n_expert_used=K, n_embd=D, n_ff_exp=32, n_ff_shared=32)
    with GgufFile(path) as file:
        return build_manifest(file)


def histogram(manifest: Manifest, *, n_tokens: int, window_s: int) -> RoutingHistogram:
    return RoutingHistogram(
        node=BACKBONE,
        seq=1,
        ttl_s=60,
        model=manifest.model_id,
        n_tokens=n_tokens,
        window_s=window_s,
        loads=((0, "f" * E),),
    )


def prospect(manifest: Manifest, **fields: Any) -> Prospect:
    experts = ExpertSet.of(range(L), [1, 2, 3])
    values: dict[str, Any] = {
        "node": "n",
        "manifest": manifest,
        "name": "small",
        "offer": None,
        "experts": experts,
        "missing": [(0, 1), (2, 3)],
        "overhead_bytes": 1_000_000,
        "free_memory_bytes": 5_000_000,
        "free_disk_bytes": None,
        "histograms": [],
        "max_upload_bytes_s": None,
        "max_download_bytes_s": None,
    }
    return make_prospect(**values | fields)


def test_sizes_are_counted_block_by_block(manifest: Manifest) -> None:
    block = manifest.spec.block_size_bytes(0)
    plan = prospect(manifest)
    assert (plan.n_blocks, plan.slice_bytes) == (3 * L, 3 * L * block)
    assert (plan.n_fetch, plan.fetch_bytes) == (2, 2 * block)
    assert plan.memory_bytes == plan.slice_bytes + 1_000_000
    assert (plan.model, plan.publisher) == (f"small@{manifest.model_id.short}", "")
    offer = sample_offer(BACKBONE, model=manifest.model_id, addresses=("192.0.2.1:7000",))
    assert prospect(manifest, offer=offer).publisher == str(BACKBONE)


def test_traffic_is_what_an_even_router_sends_here(manifest: Manifest) -> None:
    """Against a router that draws: how many rows of a layer meet experts 1 to 3, with how many pairs."""
    rng = np.random.default_rng(7)
    drawn = np.array([rng.choice(E, K, replace=False) for _ in range(20_000)])
    n_pairs = np.isin(drawn, [1, 2, 3]).sum(axis=1)
    comes = n_pairs > 0
    up, down = traffic_per_token(manifest.spec, ExpertSet.of(range(L), [1, 2, 3]))
    assert up == pytest.approx(L * comes.mean() * wire_bytes(25 + 4 * D), rel=0.02)
    sent = [wire_bytes(29 + 4 * D + 1 + 6 * int(n)) for n in n_pairs[comes]]
    assert down == pytest.approx(L * comes.mean() * float(np.mean(sent)), rel=0.02)


def test_all_experts_of_one_layer_meet_each_row(manifest: Manifest) -> None:
    up, _ = traffic_per_token(manifest.spec, ExpertSet.of([1], range(E)))
    assert up == wire_bytes(25 + 4 * D)


def test_a_day_is_the_present_demand_and_never_above_the_cap(manifest: Manifest) -> None:
    demand = [histogram(manifest, n_tokens=600, window_s=60), histogram(manifest, n_tokens=60, window_s=60)]
    assert tokens_per_s(demand) == 11.0
    plan = prospect(manifest, histograms=demand)
    assert plan.up_bytes_per_day == pytest.approx(plan.up_bytes_per_token * 11 * 86_400)
    capped = prospect(manifest, histograms=demand, max_upload_bytes_s=100.0)
    assert capped.up_bytes_per_day == 100 * 86_400
    assert capped.down_bytes_per_day == plan.down_bytes_per_day


def test_without_a_word_from_backbones_no_demand_is_made_up(manifest: Manifest) -> None:
    plan = prospect(manifest)
    assert (plan.tokens_per_s, plan.up_bytes_per_day, plan.down_bytes_per_day) == (None, None, None)
    assert plan.as_json()["up_bytes_per_day"] is None


def test_json_has_whole_bytes(manifest: Manifest) -> None:
    found = prospect(manifest, histograms=[histogram(manifest, n_tokens=1, window_s=3)]).as_json()
    assert all(isinstance(found[f"{way}_bytes_per_{each}"], int) for way in ("up", "down") for each in ("token", "day"))
