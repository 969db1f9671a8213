"""`swarm doctor` on real NATs: what it calls public can be dialled by anybody, and nothing else is called so (scenario 26)."""

from __future__ import annotations

from pathlib import Path

from swarm.emulation.nat import NatKind
from tests.e2e.internet.world import world

EXPECTED = {
    "public": ("public", "none"),
    "full-cone": ("public", "same"),  # its mapping lets anybody in
    "address-restricted": ("hole-punchable", "same"),
    "port-restricted": ("hole-punchable", "same"),
    "symmetric": ("relayed", "varying"),
    "udp-blocked": ("relayed", "blocked"),
}


async def test_each_kind_of_network_is_told_for_what_it_is(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        for i in range(2):  # who dials back, for one relay ten times a second at most: doctors come one after the other
            await made.member("backbone", await made.internet.public(f"helper{i}"), "0.1", home=f"helper{i}")
        found = {}
        for kind in EXPECTED:
            host = await made.internet.public(kind) if kind == "public" else (await made.behind(kind, NatKind(kind)))[0]
            doctor = await made.start(
                host, "-m", "swarm", "doctor", "--registry", made.registry, "--json", home=f"doctor-{kind}"
            )
            said = await doctor.event()
            found[kind] = (said["reach"], said["ip"]["v4"]["mapping"])
        assert found == EXPECTED


async def test_without_others_to_try_nothing_is_called_public(tmp_path: Path) -> None:
    async with world(tmp_path) as made:
        host, _ = await made.behind("inner", NatKind.ADDRESS_RESTRICTED)
        doctor = await made.start(host, "-m", "swarm", "doctor", "--registry", made.registry, "--json", home="doctor")
        said = await doctor.event()
        assert said["reach"] != "public"
        assert said["ip"]["v4"]["dial_back"] == "unknown"
