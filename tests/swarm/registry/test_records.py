"""Signed records: round trip, golden bytes, damage, and each refusal."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import LocalProtocolError, RemoteProtocolError
from swarm.identity import Identity
from swarm.ids import ExpertSet, ModelId, NodeId
from swarm.registry import record_fields, records
from swarm.registry.records import (
    ExpertAnnouncement,
    ModelOffer,
    Record,
    RecordKind,
    RegistryNodeRecord,
    RoutingHistogram,
    SignedRecord,
    Withdrawal,
    levels_of,
    printable_name,
    sign,
    verify,
)

ME = Identity.from_seed(bytes(range(32)))
OTHER = Identity.from_seed(bytes(range(1, 33)))
MODEL = ModelId(bytes(range(100, 132)))

ANNOUNCEMENT = ExpertAnnouncement(
    node=ME.node_id,
    seq=1_760_000_000_000,
    ttl_s=60,
    model=MODEL,
    model_name="tiny-moe",
    experts=ExpertSet({1: frozenset({12, 13, 14, 40}), 2: frozenset({12, 13, 14, 40}), 5: frozenset({0})}),
    addresses=("192.0.2.7:41000", "[2001:db8::7]:41000"),
    exact_kernels=True,
    wire_versions=(1,),
)
OFFER = ModelOffer(
    node=ME.node_id,
    seq=7,
    ttl_s=300,
    model=MODEL,
    model_name="tiny-moe",
    n_expert=32,
    n_expert_used=4,
    moe_layers="1-5,7",
    n_embd=256,
    size_bytes=12_345_678,
    addresses=("127.0.0.1:7441",),
    offers_blocks=True,
)
WITHDRAWAL = Withdrawal(node=ME.node_id, seq=8, model=MODEL, withdraws=RecordKind.EXPERTS)
REGISTRY_NODE = RegistryNodeRecord(
    node=ME.node_id, seq=9, ttl_s=180, addresses=("192.0.2.7:7440", "[2001:db8::7]:7440")
)
HISTOGRAM = RoutingHistogram(
    node=ME.node_id, seq=10, ttl_s=300, model=MODEL, n_tokens=5_000, window_s=600, loads=((1, "f0d"), (7, "001"))
)
EACH_KIND = [ANNOUNCEMENT, OFFER, WITHDRAWAL, REGISTRY_NODE, HISTOGRAM]

GOLDEN_PAYLOADS = {
    RecordKind.EXPERTS: (
        b'{"addresses":["192.0.2.7:41000","[2001:db8::7]:41000"],"exact_kernels":true,'
        b'"experts":[["1-2","12-14,40"],["5","0"]],"kind":"experts",'
        b'"model":"6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283","model_name":"tiny-moe",'
        b'"node":"aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a","seq":1760000000000,"ttl_s":60,"wire_versions":[1]}'
    ),
    RecordKind.MODEL: (
        b'{"addresses":["127.0.0.1:7441"],"kind":"model",'
        b'"model":"6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283","model_name":"tiny-moe",'
        b'"moe_layers":"1-5,7","n_embd":256,"n_expert":32,"n_expert_used":4,'
        b'"node":"aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a","offers_blocks":true,"seq":7,'
        b'"size_bytes":12345678,"ttl_s":300}'
    ),
    RecordKind.REGISTRY: (
        b'{"addresses":["192.0.2.7:7440","[2001:db8::7]:7440"],"kind":"registry",'
        b'"node":"aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a","seq":9,"ttl_s":180}'
    ),
    RecordKind.HISTOGRAM: (
        b'{"kind":"histogram","loads":[[1,"f0d"],[7,"001"]],'
        b'"model":"6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283","n_tokens":5000,'
        b'"node":"aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a","seq":10,"ttl_s":300,"window_s":600}'
    ),
    RecordKind.WITHDRAWAL: (
        b'{"kind":"withdrawal","model":"6465666768696a6b6c6d6e6f707172737475767778797a7b7c7d7e7f80818283",'
        b'"node":"aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a","seq":8,"withdraws":"experts"}'
    ),
}
GOLDEN_SIGNATURES = {
    RecordKind.REGISTRY: (
        "3cd24af0dab32a6d7e99b62caa4ed72c0afe0060ea4769925fac0903650fb990"
        "09cf7e20f5d9a668d72e01f7242f652b9a097da20c3c0c8f59fedf9936fcb801"
    ),
    RecordKind.HISTOGRAM: (
        "e0d8c9ce76b28ed093ab1ebd88b9959ed5ef2a7759218e6fb1d067e2140cfafe"
        "57df79b7012d75ab09e87c3efb3b8f218288362fc4397f2daf3fb407792b2603"
    ),
    RecordKind.EXPERTS: (
        "e299d9a79110a925bf9550e2b66cf6ca6085df6893131786d977dde4f1463007"
        "38794da8ed1f4c8c0bd88863961d42271e4e81663e47ea62d8b54a57e5e1f905"
    ),
    RecordKind.MODEL: (
        "bea11807b4072e6f35147efa25ef939a54b8a3b640176977d8f483812dfc4932"
        "d8bc58356694d2a9482d933b2b9f29fd847342544a5c6e53347ad13496cbed0d"
    ),
    RecordKind.WITHDRAWAL: (
        "64888988a068bd3ba21536326993cc3b4df85df9ffabc545c54095e1815bce75"
        "8d03342b5f8741acbae36e5370f558b1a222abf18e4490ecdc5d0a293902f20a"
    ),
}


def signed_fields(fields: Any, identity: Identity = ME) -> SignedRecord:
    """Return `fields` as canonical JSON with a good signature: what a hostile but real node can send."""
    return signed_payload(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode(), identity)


def signed_payload(payload: bytes, identity: Identity = ME) -> SignedRecord:
    return SignedRecord(payload=payload, signature=identity.sign(b"swarm record 1\0" + payload))


def fields_of(record: Record) -> dict[str, Any]:
    return dict(json.loads(sign(record, ME).payload))


ids_of_layer = st.frozensets(st.integers(0, 300), max_size=20)
names = st.text(min_size=1, max_size=64).filter(str.isprintable)
addresses = st.lists(
    st.one_of(
        st.builds("{}:{}".format, st.ip_addresses(v=4), st.integers(1, 65_535)),
        st.builds("[{}]:{}".format, st.ip_addresses(v=6), st.integers(1, 65_535)),
    ).filter(lambda text: _is_address(text)),
    min_size=1,
    max_size=8,
    unique=True,
).map(tuple)
announcements = st.builds(
    ExpertAnnouncement,
    node=st.just(ME.node_id),
    seq=st.integers(0, 2**63 - 1),
    ttl_s=st.integers(1, 300),
    model=st.builds(ModelId, st.binary(min_size=32, max_size=32)),
    model_name=names,
    experts=st.dictionaries(st.integers(0, 100), ids_of_layer, max_size=8).map(ExpertSet).filter(len),
    addresses=addresses,
    exact_kernels=st.booleans(),
    wire_versions=st.sets(st.integers(1, 255), min_size=1, max_size=16).map(lambda found: tuple(sorted(found))),
)
offers = st.builds(
    ModelOffer,
    node=st.just(ME.node_id),
    seq=st.integers(0, 2**63 - 1),
    ttl_s=st.integers(1, 300),
    model=st.builds(ModelId, st.binary(min_size=32, max_size=32)),
    model_name=names,
    n_expert=st.integers(255, 2048),  # times 47 layers: within MAX_PAIRS
    n_expert_used=st.integers(1, 255),
    moe_layers=st.sampled_from(["0", "0-46", "3,5-8", "1-2,4,65535"]),
    n_embd=st.integers(1, 1 << 20),
    size_bytes=st.integers(1, 2**63 - 1),
    addresses=addresses,
    offers_blocks=st.booleans(),
    sources=st.sampled_from([(), ("hf://owner/repo/file.gguf",), ("https://example.org/a?b=c", "hf://a/b/c")]),
)
withdrawals = st.builds(
    Withdrawal,
    node=st.just(ME.node_id),
    seq=st.integers(0, 2**63 - 1),
    model=st.builds(ModelId, st.binary(min_size=32, max_size=32)),
    withdraws=st.sampled_from([kind for kind in RecordKind if kind is not RecordKind.WITHDRAWAL]),
)
registry_nodes = st.builds(
    RegistryNodeRecord,
    node=st.just(ME.node_id),
    seq=st.integers(0, 2**63 - 1),
    ttl_s=st.integers(1, 300),
    addresses=addresses,
)
histograms = st.builds(
    RoutingHistogram,
    node=st.just(ME.node_id),
    seq=st.integers(0, 2**63 - 1),
    ttl_s=st.integers(1, 300),
    model=st.builds(ModelId, st.binary(min_size=32, max_size=32)),
    n_tokens=st.integers(0, 2**63 - 1),
    window_s=st.integers(1, 3600),
    loads=st.dictionaries(st.integers(0, 65_535), st.text("0123456789abcdef", min_size=1, max_size=9), min_size=1).map(
        lambda found: tuple(sorted(found.items()))
    ),
)
any_record = st.one_of(announcements, offers, withdrawals, registry_nodes, histograms)


def _is_address(text: str) -> bool:
    try:
        record_fields.check_address(text)
    except LocalProtocolError:
        return False
    return True


@settings(max_examples=100, deadline=None, derandomize=True)
@given(any_record)
def test_a_signed_record_reads_back_as_it_was(record: Record) -> None:
    assert verify(SignedRecord.from_bytes(sign(record, ME).to_bytes())) == record


@pytest.mark.parametrize("record", EACH_KIND, ids=lambda record: record.kind.value)
def test_golden_bytes_never_change(record: Record) -> None:
    signed = sign(record, ME)
    assert signed.payload == GOLDEN_PAYLOADS[record.kind]
    assert signed.signature.hex() == GOLDEN_SIGNATURES[record.kind]
    assert signed.to_bytes() == signed.signature + signed.payload
    assert verify(signed) == record


@pytest.mark.parametrize("record", EACH_KIND, ids=lambda record: record.kind.value)
def test_every_cut_is_refused(record: Record) -> None:
    data = sign(record, ME).to_bytes()
    for size in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            verify(SignedRecord.from_bytes(data[:size]))
    with pytest.raises(RemoteProtocolError):
        verify(SignedRecord.from_bytes(data + b"}"))


@pytest.mark.parametrize("record", EACH_KIND, ids=lambda record: record.kind.value)
def test_every_flipped_byte_is_refused(record: Record) -> None:
    data = sign(record, ME).to_bytes()
    for place in range(len(data)):
        for mask in (0x01, 0x20, 0x80):
            damaged = bytearray(data)
            damaged[place] ^= mask
            with pytest.raises(RemoteProtocolError):
                verify(SignedRecord.from_bytes(bytes(damaged)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(SignedRecord.from_bytes(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(EACH_KIND), st.data())
def test_a_wrong_value_in_any_field_with_a_good_signature_raises_only_remote_protocol_error(
    record: Record, data: st.DataObject
) -> None:
    fields = fields_of(record)
    fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(json_values)
    try:
        verify(signed_fields(fields))
    except RemoteProtocolError:
        pass


@pytest.mark.parametrize("record", EACH_KIND, ids=lambda record: record.kind.value)
def test_a_missing_field_is_refused(record: Record) -> None:
    for name in fields_of(record):
        fields = fields_of(record)
        del fields[name]
        with pytest.raises(RemoteProtocolError):
            verify(signed_fields(fields))


def test_unknown_keys_are_ignored_so_that_a_kind_can_grow() -> None:
    assert verify(signed_fields(fields_of(OFFER) | {"zone": {"rack": 3}, "a": [1, None]})) == OFFER


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "gossip"},
        {"seq": -1},
        {"seq": 2**63},
        {"seq": True},
        {"seq": 1.0},
        {"ttl_s": 0},
        {"ttl_s": 301},
        {"model": str(MODEL).upper()},
        {"model": "00"},
        {"node": str(ME.node_id).upper()},
        {"model_name": ""},
        {"model_name": "x" * 65},
        {"model_name": "a\nb"},
        {"model_name": "a\u202eb"},
        {"model_name": "\ud800"},
        {"addresses": []},
        {"addresses": ["192.0.2.7:1"] * 2},
        {"addresses": [f"192.0.2.7:{port}" for port in range(1, 10)]},
        {"exact_kernels": 1},
        {"wire_versions": []},
        {"wire_versions": [2, 1]},
        {"wire_versions": [1, 1]},
        {"wire_versions": [0]},
        {"wire_versions": [256]},
        {"wire_versions": [True]},
        {"experts": []},
        {"experts": [["1", ""]]},
        {"experts": [["1"]]},
        {"experts": [["1", 2]]},
        {"experts": {"1": "2"}},
        {"experts": [["2", "1"], ["1", "0"]]},
        {"experts": [["1", "5"], ["2", "5"]]},
        {"experts": [["1", "5"], ["1-2", "6"]]},
    ],
    ids=str,
)
def test_a_bad_field_is_refused_although_the_signature_is_good(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(ANNOUNCEMENT) | change))


@pytest.mark.parametrize(
    "change",
    [
        {"n_expert": 0},
        {"n_expert": 65_537},
        {"n_expert": 65_536},  # times 6 layers: more pairs than a record may name
        {"moe_layers": "0-1024"},
        {"n_expert_used": 0},
        {"n_expert_used": 33},
        {"n_embd": 0},
        {"size_bytes": 0},
        {"moe_layers": ""},
        {"moe_layers": "5-3"},
        {"offers_blocks": None},
    ],
    ids=str,
)
def test_a_bad_offer_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(OFFER) | change))


def test_a_withdrawal_of_a_withdrawal_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(WITHDRAWAL) | {"withdraws": "withdrawal"}))


@pytest.mark.parametrize(
    "text",
    ["01", "1-1", "3-1", "1,2", "2,1", "1-3,2", "1-3,4", "65536", "1-65536", "1,", "-1", " 1", "1-2-3", "1\n", "１"],
)
def test_a_range_text_has_one_form(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(ANNOUNCEMENT) | {"experts": [["1", text]]}))
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(OFFER) | {"moe_layers": text}))


@pytest.mark.parametrize(
    "address",
    [
        "localhost:1",
        "192.0.2.7",
        "192.0.2.7:0",
        "192.0.2.7:65536",
        "192.0.2.7:080",
        "192.0.2.7:",
        "[192.0.2.7]:80",
        "2001:db8::7:80",
        "[2001:DB8::7]:80",
        "[2001:db8:0::7]:80",
        "[fe80::1%eth0]:80",
        "0.0.0.0:80",
        "[::]:80",
        "224.0.0.1:80",
        "[ff02::1]:80",
        "192.0.2.07:80",
        "",
    ],
)
def test_an_address_is_a_canonical_literal_that_can_be_dialled(address: str) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(OFFER) | {"addresses": [address]}))


def test_ranges_are_counted_before_they_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Expanded(AssertionError):
        pass

    def expand(_: Any) -> Any:
        raise Expanded

    huge = signed_fields(fields_of(ANNOUNCEMENT) | {"experts": [["0-65535", "0-65535"]]})
    many = signed_fields(fields_of(ANNOUNCEMENT) | {"experts": [[str(2 * n), "0-65535"] for n in range(600)]})
    monkeypatch.setattr(record_fields, "ExpertSet", expand)
    for signed in (huge, many):
        with pytest.raises(RemoteProtocolError, match="number of"):
            verify(signed)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"[]",
        b"null",
        b"[" * 16_000,
        b'{"a":' * 3_000,
        b"1" * 10_000,
        b'{"kind":"withdrawal","kind":"withdrawal"}',
        b'{"kind": "withdrawal"}',
        b'{"kind":NaN}',
        b'{"kind":1e999}',
        b"\xff\xfe",
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_json_that_is_not_a_canonical_object_is_refused(payload: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_payload(payload or b" "))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"seq":7', b'"seq": 7'),
        (b'"seq":7', b'"seq":7,"seq":7'),
        (b'"seq":7', b'"seq":7e0'),
        (b'"tiny-moe"', b'"tin\\u0079-moe"'),
        (b'{"addresses":["127.0.0.1:7441"],"kind":"model",', b'{"kind":"model","addresses":["127.0.0.1:7441"],'),
        (b'"ttl_s":300}', b'"ttl_s":300}\n'),
        (b'"ttl_s":300}', b'"ttl_s":300,"zone":1.5}'),
    ],
    ids=repr,
)
def test_a_second_way_to_write_a_good_record_is_refused(old: bytes, new: bytes) -> None:
    payload = sign(OFFER, ME).payload
    assert payload.count(old) == 1
    with pytest.raises(RemoteProtocolError):
        verify(signed_payload(payload.replace(old, new)))


def test_a_record_signed_by_another_node_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="signature"):
        verify(signed_fields(fields_of(OFFER), OTHER))


def test_a_signature_without_our_domain_is_refused() -> None:
    payload = sign(OFFER, ME).payload
    with pytest.raises(RemoteProtocolError, match="signature"):
        verify(SignedRecord(payload=payload, signature=ME.sign(payload)))


def test_sizes_are_bounded_on_both_sides() -> None:
    with pytest.raises(RemoteProtocolError):
        SignedRecord.from_bytes(bytes(16_385))
    with pytest.raises(RemoteProtocolError):
        SignedRecord.from_bytes(bytes(64))
    assert SignedRecord.from_bytes(memoryview(bytes(16_384))).size_bytes == 16_384
    ragged = ExpertSet({layer: frozenset(range(layer % 2, 256, 2)) - {layer} for layer in range(60)})
    with pytest.raises(LocalProtocolError, match="size"):
        sign(replace(ANNOUNCEMENT, experts=ragged), ME)


def test_our_own_bad_record_is_our_mistake() -> None:
    with pytest.raises(LocalProtocolError):
        replace(ANNOUNCEMENT, ttl_s=301)
    with pytest.raises(LocalProtocolError):
        replace(ANNOUNCEMENT, experts=ExpertSet({}))
    with pytest.raises(LocalProtocolError):
        replace(ANNOUNCEMENT, experts=ExpertSet({0: frozenset({70_000})}))
    with pytest.raises(LocalProtocolError):
        sign(replace(OFFER, node=OTHER.node_id), ME)


def test_a_printable_name_is_always_allowed() -> None:
    for text in ["", "\n", "x" * 200, " tiny\x00moe ", "a" * 63 + " b", "模型"]:
        assert replace(OFFER, model_name=printable_name(text)).model_name
    assert printable_name(" tiny\x00moe ") == "tinymoe"


def test_the_golden_node_is_the_published_key_of_its_seed() -> None:
    assert ME.node_id.raw.hex() == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8"
    assert NodeId.parse("aoqqpp7tzyil4hlq3umoos6atft6jvrqtosq2xy53sdgiesvgg4a") == ME.node_id


# Sources, registry nodes, histograms


def test_a_model_without_sources_is_written_as_before_there_were_any() -> None:
    assert b"sources" not in sign(OFFER, ME).payload
    with_sources = replace(OFFER, sources=("hf://owner/repo/file.gguf",))
    assert verify(sign(with_sources, ME)) == with_sources
    assert verify(signed_fields(fields_of(OFFER) | {"sources": []})) == OFFER


@pytest.mark.parametrize(
    "sources",
    [
        "hf://a/b",
        [1],
        ["file:///etc/passwd"],
        ["http://example.org/x"],
        ["hf://"],
        ["https://a b"],
        ["https://a\n"],
        ["https://" + "x" * 300],
        ["hf://a/b/c"] * 9,
    ],
)
def test_a_bad_source_is_refused(sources: Any) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(OFFER) | {"sources": sources}))


@pytest.mark.parametrize(
    "change",
    [
        {"n_tokens": -1},
        {"window_s": 0},
        {"loads": []},
        {"loads": [[1, "f"], [1, "f"]]},
        {"loads": [[2, "f"], [1, "f"]]},
        {"loads": [[-1, "f"]]},
        {"loads": [[1, ""]]},
        {"loads": [[1, "F"]]},
        {"loads": [[1, "g"]]},
        {"loads": [[1, "f", 2]]},
        {"loads": [["1", "f"]]},
        {"loads": [[True, "f"]]},
        {"loads": {"1": "f"}},
        {"ttl_s": 301},
    ],
)
def test_a_bad_histogram_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RemoteProtocolError):
        verify(signed_fields(fields_of(HISTOGRAM) | change))


def test_levels_tell_shares_within_a_quarter_over_two_orders_of_magnitude() -> None:
    counts = [1000, 700, 330, 100, 33, 11, 0]
    levels = levels_of(counts)
    assert levels[0] == "f"
    assert levels[-1] == "0"
    histogram = replace(HISTOGRAM, loads=((3, levels),))
    for share, count in zip(histogram.shares(3), counts, strict=True):
        assert share == pytest.approx(count / sum(counts), rel=0.25)
    assert sum(histogram.shares(3)) == pytest.approx(1)
    assert histogram.shares(4) == ()
    assert levels_of([0, 0]) == "00"
    assert replace(HISTOGRAM, loads=((3, "00"),)).shares(3) == (0.0, 0.0)
    assert levels_of([1, 10**9]) == "1f", "what was chosen at all is never told as never"


def test_a_histogram_of_a_large_model_fits() -> None:
    loads = tuple((layer, "a7" * 128) for layer in range(3, 61))  # DeepSeek-V3: 58 layers of 256 experts
    assert sign(replace(HISTOGRAM, loads=loads), ME).size_bytes <= records.MAX_SIGNED_BYTES


def test_a_registry_node_belongs_to_no_model() -> None:
    assert REGISTRY_NODE.model == records.NO_MODEL
    assert b"model" not in sign(REGISTRY_NODE, ME).payload
    gone = Withdrawal(node=ME.node_id, seq=11, model=records.NO_MODEL, withdraws=RecordKind.REGISTRY)
    assert verify(sign(gone, ME)) == gone


def test_a_cap_on_what_a_peer_sends_is_told_and_none_is_not() -> None:
    capped = replace(ANNOUNCEMENT, upload_bytes_s=2_000_000)
    assert b'"upload_bytes_s":2000000' in sign(capped, ME).payload
    assert verify(sign(capped, ME)) == capped
    assert b"upload_bytes_s" not in sign(ANNOUNCEMENT, ME).payload
    for forged in (b"0", b"-1", b"true", b"1.5", b'"2"'):
        payload = sign(capped, ME).payload.replace(b"2000000", forged)
        with pytest.raises(RemoteProtocolError):
            verify(SignedRecord(payload=payload, signature=ME.sign(b"swarm record 1\0" + payload)))
    with pytest.raises(LocalProtocolError, match="upload_bytes_s"):
        replace(ANNOUNCEMENT, upload_bytes_s=0)


@pytest.mark.parametrize("name", ["is_loading", "is_choosing"])
def test_a_claim_says_so_and_a_ready_peer_says_nothing_of_it(name: str) -> None:
    claim = replace(ANNOUNCEMENT, **{name: True})
    said = f'"{name}":true'.encode()
    assert said in sign(claim, ME).payload
    assert verify(sign(claim, ME)) == claim
    assert name.encode() not in sign(ANNOUNCEMENT, ME).payload
    payload = sign(claim, ME).payload.replace(said, f'"{name}":1'.encode())
    signed = SignedRecord(payload=payload, signature=ME.sign(b"swarm record 1\0" + payload))
    with pytest.raises(RemoteProtocolError, match=name):
        verify(signed)


def test_the_signature_is_checked_before_what_is_dear_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def dear(groups: object) -> ExpertSet:
        raise AssertionError("the experts were read")

    monkeypatch.setattr(records, "expert_set", dear)
    signed = sign(ANNOUNCEMENT, ME)
    with pytest.raises(RemoteProtocolError, match="signature"):
        verify(SignedRecord(payload=signed.payload, signature=bytes(64)))


def test_what_speaks_of_a_member_is_told_without_reading_it() -> None:
    gone = Withdrawal(node=ME.node_id, seq=11, model=records.NO_MODEL, withdraws=RecordKind.REGISTRY)
    for member in (REGISTRY_NODE, gone):
        assert records.speaks_of_a_member(sign(member, ME).to_bytes())
    disguised = sign(ANNOUNCEMENT, ME).payload[:-1] + b',"x":{"kind":"registry"}}'
    others = [
        sign(ANNOUNCEMENT, ME).to_bytes(),
        sign(replace(gone, model=ANNOUNCEMENT.model, withdraws=RecordKind.EXPERTS), ME).to_bytes(),
        bytes(64) + disguised,
        sign(REGISTRY_NODE, ME).to_bytes()[:-1] + b',"x":"' + b"y" * records.MAX_MEMBER_BYTES + b'"}',
        bytes(64) + b"[" * 900,
        bytes(64) + b"[]",
        b"",
        bytes(64),
    ]
    assert not any(map(records.speaks_of_a_member, others))
    longest = tuple(f"[fd00:1111:2222:3333:4444:5555:6666:777{n}]:65535" for n in range(8))
    assert records.speaks_of_a_member(sign(replace(REGISTRY_NODE, addresses=longest), ME).to_bytes())
