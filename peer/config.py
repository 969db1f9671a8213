"""What a volunteer asked for, and what a peer tells while it starts. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peer.auto import AutoExperts
from peer.limits import Schedule
from swarm.files import Folders
from swarm.ids import ExpertSet
from swarm.registry.client import RegistryAddress
from swarm.registry.publishers import Publishers


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerConfig:
    """What a volunteer asked for.

    Attributes:
        experts, layers: what to hold; `layers` None means every MoE layer. An ExpertSet has layers of its own.
            `experts` None: all that a slice file holds; AutoExperts: the scarcest that fit.
        model_file: a whole model or a slice file to take the experts from; None fetches them from a backbone.
        model_url: a model file or slice file on the web to take the experts from, `https://` or `hf://`.
        model: which of the registry's models, by name or id prefix; None: the only one.
        publishers: whose models may be fetched; None: anybody's.
        fault: (layer, expert) in which one byte is changed after the hash check: the control of `swarm verify`.
        device: what computes: `cpu`, `auto`, or as `swarm.native.devices.choose_device` takes it.
        disk_bytes_per_s: compute as slowly as from a disk of this speed: for tests and benchmarks of placement.
        name, place: shown on the map, for all to see.
        max_upload_bytes_s, max_download_bytes_s: of all traffic; None: no cap.
        memory_bytes: most that the process may take, when experts are named; AutoExperts has its own. None: no cap.
        disk_bytes: most that fetched blocks of the model may take; None: no cap.
        schedule: when to serve; None: always.
        pauses_when_busy: rest while others need the machine.
        is_relays_only: be reached through relays alone: for benchmarks of relays.
        is_watched: somebody looks at `PeerDaemon.report`, which then says how scarce the experts are.
        tls_links: accept TLS links beside QUIC connections (`net/tls_links`).
    """

    registry: tuple[RegistryAddress, ...]
    folders: Folders
    experts: frozenset[int] | ExpertSet | AutoExperts | None
    layers: frozenset[int] | None = None
    model_file: Path | None = None
    model_url: str | None = None
    model: str | None = None
    publishers: Publishers | None = None
    host: str = "0.0.0.0"
    port: int = 0
    advertise: str | None = None
    n_threads: int = 1
    device: str = "cpu"
    exact_kernels: bool = False
    fault: tuple[int, int] | None = None
    disk_bytes_per_s: float | None = None
    name: str = ""
    place: tuple[int, int] | None = None
    max_upload_bytes_s: float | None = None
    max_download_bytes_s: float | None = None
    memory_bytes: int | None = None
    disk_bytes: int | None = None
    schedule: Schedule | None = None
    pauses_when_busy: bool = False
    is_relays_only: bool = False
    is_watched: bool = False
    tls_links: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady:
    """What a peer says once it is announced.

    Attributes:
        reach: how others reach it, as far as is known then: a value of `swarm.net.reachability.Reach`.
    """

    node: str
    model: str
    experts: str
    address: str
    reach: str = "unknown"


class Progress:
    """Where a peer's start stands; the command line draws it. Every method may be overridden; none does anything."""

    def hashing(self, n_done: int, n_total: int) -> None:
        """Bytes of a model file hashed."""

    def fetching(self, n_done: int, n_total: int) -> None:
        """Bytes of blocks fetched and checked."""

    def loading(self, n_done: int, n_total: int) -> None:
        """Blocks checked and loaded."""

    def leaving(self) -> None:
        """The peer finishes what it has and leaves."""
