"""The table of architectures, and activations as they are written."""

from __future__ import annotations

import pytest

from swarm.model.expert_kinds import EXPERT_KINDS, Activation, ExpertKind, Shared, Stub, activation_of

NONE = (1.0, 0.0)


@pytest.mark.parametrize("text", ["swiglu", "relu_sqr", "swiglu_clamp 7.0", "swiglu_oai 1.702 7.0", "situ 4.0 0.0"])
def test_an_activation_is_read_as_it_was_written(text: str) -> None:
    assert str(Activation.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "swish",
        "swiglu ",
        "swiglu 1.0",
        "swiglu_clamp",
        "swiglu_clamp 7",
        "swiglu_clamp nan",
        "swiglu_clamp inf",
        "swiglu_clamp -1.0",
        "swiglu_clamp 0.0",
        "swiglu_clamp 7.0 ",
        "situ 0.0 1.0",
        "swiglu_oai 1.702",
        "x" * 1000,
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        Activation.parse(text)


def activation(kind: ExpertKind, limit: float = 0.0, *, is_gated: bool = True, is_split: bool = True) -> str:
    return str(activation_of(kind, is_gated=is_gated, is_split=is_split, limit=limit, situ=NONE))


def test_tensors_and_limits_decide_the_form_of_an_activation() -> None:
    kinds = EXPERT_KINDS
    assert activation(kinds["olmoe"]) == "swiglu"
    assert activation(kinds["granitemoe"], is_gated=False, is_split=False) == "silu"
    assert activation(kinds["grok"]) == "geglu"
    assert activation(kinds["smallthinker"]) == "reglu"
    assert activation(kinds["nemotron_h"], is_gated=False, is_split=False) == "relu_sqr"
    assert activation(kinds["gpt-oss"]) == "swiglu_oai 1.702 7.0"
    assert activation(kinds["step35"], 4.0) == "silu_clamp 4.0"
    assert activation(kinds["deepseek4"], 10.0) == "swiglu_clamp 10.0"
    assert activation(kinds["deepseek4"], 1e-7) == "swiglu", "llama.cpp takes such a limit for none"
    assert activation(kinds["deepseek4"], 10.0, is_split=False) == "swiglu", "llama.cpp clamps parted products only"
    assert activation(kinds["olmoe"], 10.0) == "swiglu", "llama.cpp does not read a limit for this architecture"
    for name, is_gated in (("gpt-oss", False), ("kimi-k3", False), ("nemotron_h", True)):
        with pytest.raises(ValueError, match="is not known"):
            activation(kinds[name], is_gated=is_gated, is_split=is_gated)


def test_a_stub_changes_only_keys_that_size_experts() -> None:
    for name, kind in EXPERT_KINDS.items():
        keys = {key.removeprefix(f"{name}.") for key in kind.stub_keys(name)}
        if kind.stub is Stub.SPARSE:
            assert not keys
            continue
        assert kind.width in keys
        assert ("expert_shared_count" in keys) == (kind.shared is Shared.COUNT)
        assert keys <= {kind.width, "expert_shared_count", "expert_shared_feed_forward_length"}
