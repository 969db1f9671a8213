"""`swarm join`: a volunteer's peer."""

from __future__ import annotations

import asyncio
import sys
import threading
from pathlib import Path
from typing import Annotated

import typer

from swarm.cli.join_plan import Consent, write_first_config
from swarm.cli.join_status import Rates, shown
from swarm.cli.live import LiveLines, Shown
from swarm.cli.options import (
    AdvertiseOption,
    DeviceOption,
    ExactKernelsOption,
    HostOption,
    JsonOption,
    LocationOption,
    NameOption,
    PortOption,
    RegistryOption,
    ThreadsOption,
    UntilEofOption,
    settle_advertise,
    settle_device,
    settle_place,
)
from swarm.cli.question import confirm, is_person_there
from swarm.cli.registries import settle_registries
from swarm.cli.runtime import ProgressBars, err, give_memory_back, out, print_json, run_daemon, tame_openmp
from swarm.cli.service import install_unit, join_unit
from swarm.cli.slice_file import read_slice_file
from swarm.errors import UserError
from swarm.files import Folders
from swarm.identity import Identity
from swarm.ids import ExpertSet, NodeId, parse_index_set
from swarm.net.addresses import is_loopback
from swarm.registry.client import DEFAULT_REGISTRY
from swarm.registry.publishers import Publishers, own_publishers
from swarm.registry.record_fields import public_name
from swarm.sources.locations import is_web_name
from swarm.units import parse_size_bytes


def join(
    experts: Annotated[
        str | None,
        typer.Option(
            "--experts",
            metavar="SET|auto",
            help="Experts to hold, 0-based, inclusive: 12-19,40. auto: those that the swarm is shortest of, as many as fit; "
            "later others, should they become much scarcer.",
            show_default="all of a slice file",
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option("--layers", metavar="SET", help="Layers to hold them of.", show_default="all")
    ] = None,
    slice_file: Annotated[
        Path | None,
        typer.Option(
            "--slice",
            metavar="FILE",
            help="Instead of --experts: a JSON file of experts by layer, as `swarm split --cluster` writes them.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="FILE|URL|NAME",
            help="A GGUF file, or a slice of `swarm split`, to take the experts from: a path, https://host/file.gguf or "
            "hf://owner/repo/file.gguf, of which only these experts are fetched. Or which of the registry's models.",
            show_default="the registry's only model",
        ),
    ] = None,
    publisher: Annotated[
        list[str] | None,
        typer.Option(
            "--publisher",
            metavar="NODEID",
            help="Trust the models of this node, as after a yes when asked. Repeatable.",
            show_default="yours, this machine's, and those confirmed before",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Most memory to use, like 8GB; --experts auto takes what fits. A move to other experts takes twice as much for "
            "a while, if it is free.",
            show_default="with auto, half of what is free",
        ),
    ] = None,
    disk: Annotated[
        str | None,
        typer.Option(
            "--disk",
            metavar="SIZE",
            help="Most disk space for fetched experts of the model.",
            show_default="with auto, nine tenths of what is free",
        ),
    ] = None,
    registry: RegistryOption = DEFAULT_REGISTRY,
    threads: ThreadsOption = 1,
    device: DeviceOption = "cpu",
    host: HostOption = "0.0.0.0",
    port: PortOption = 0,
    advertise: AdvertiseOption = None,
    exact_kernels: ExactKernelsOption = False,
    max_upload: Annotated[
        str | None,
        typer.Option("--max-upload", metavar="SIZE", help="Most to send in a second, like 2MB.", show_default="no cap"),
    ] = None,
    max_download: Annotated[
        str | None,
        typer.Option(
            "--max-download", metavar="SIZE", help="Most to receive in a second, like 2MB.", show_default="no cap"
        ),
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(
            "--schedule",
            metavar="SPANS",
            help="When to serve, by local time: 22:00-07:00,12:00-13:00.",
            show_default="always",
        ),
    ] = None,
    pause_when_busy: Annotated[
        bool, typer.Option("--pause-when-busy", help="Rest while other programs use much of the machine.")
    ] = False,
    service: Annotated[
        str | None,
        typer.Option(
            "--service",
            metavar="print|install",
            help="Instead of joining: a systemd unit of your user that joins with these options, now and after each start.",
            show_default=False,
        ),
    ] = None,
    name: NameOption = "",
    location: LocationOption = None,
    yes: Annotated[
        bool,
        typer.Option(
            "--yes",
            "-y",
            help="Join without being asked whether the plan is wanted. Nobody is asked either where there is no terminal; "
            "an unknown publisher is trusted by --publisher alone.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no status while serving; warnings are told all the same.")
    ] = False,
    as_json: JsonOption = False,
    until_eof: UntilEofOption = False,
    plant_fault: Annotated[str | None, typer.Option("--plant-fault", metavar="LAYER:EXPERT", hidden=True)] = None,
    slow_disk: Annotated[str | None, typer.Option("--slow-disk", metavar="SIZE", hidden=True)] = None,
    relays_only: Annotated[bool, typer.Option("--relays-only", hidden=True)] = False,
    tls_links: Annotated[
        bool,
        typer.Option(
            "--tls-links/--no-tls-links",
            help="Accept TLS links (TCP, on the number of the UDP port) from backbones that are connected over QUIC: "
            "less processor time on paths of a few milliseconds.",
        ),
    ] = True,
) -> None:
    """Give part of this machine: hold some experts of a model and compute them for others.

    What a peer computes are hidden states of a public model: they reveal much of the text to whoever runs a peer.
    """
    from peer.auto import AutoExperts
    from peer.config import PeerConfig, PeerReady, Progress
    from peer.daemon import PeerDaemon
    from peer.limits import parse_schedule

    folders = Folders.from_environment()
    if service is not None:
        _make_service(service, folders)
        return
    identity = Identity.claim(folders.config, "join")
    url = model if model and is_web_name(model) else None
    file = Path(model) if model and not url and (model.endswith(".gguf") or Path(model).is_file()) else None
    wanted_experts: frozenset[int] | ExpertSet | AutoExperts | None
    if experts == "auto" and slice_file is None:
        wanted_experts = AutoExperts(
            memory_bytes=None if memory is None else parse_size_bytes(memory, "--memory"),
            disk_bytes=None if disk is None else parse_size_bytes(disk, "--disk"),
        )
    else:
        wanted_experts = _parse_experts(experts, layers, slice_file, is_optional=file is not None or url is not None)
    wanted_layers = parse_index_set(layers, "layers") if layers else None
    advertised = settle_advertise(advertise)
    place = settle_place(location)
    hours = None if schedule is None else parse_schedule(schedule)
    given = own_publishers(folders.config) | {NodeId.parse(each) for each in publisher or ()}
    fault = _parse_fault(plant_fault) if plant_fault else None
    disk_bytes_per_s = parse_size_bytes(slow_disk, "--slow-disk") if slow_disk else None
    ready_said = threading.Event()
    tame_openmp()
    give_memory_back()

    def draw(what: str, n_done: int, n_total: int, *, is_bytes: bool = False) -> None:
        if not ready_said.is_set():  # later, when it moves to scarcer experts, the status stands there
            bars.update(what, n_done, n_total, is_bytes=is_bytes)

    class Bars(Progress):
        def hashing(self, n_done: int, n_total: int) -> None:
            draw("hashing the model", n_done, n_total, is_bytes=True)

        def fetching(self, n_done: int, n_total: int) -> None:
            draw("fetching experts", n_done, n_total, is_bytes=True)

        def loading(self, n_done: int, n_total: int) -> None:
            draw("checking and loading", n_done, n_total)

        def leaving(self) -> None:
            if is_person_there() and not as_json:
                err.print("Leaving: what is under way is finished. Ctrl-C again leaves at once.", highlight=False)

    def on_ready(ready: PeerReady) -> None:
        ready_said.set()
        is_ready.set()
        bars.__exit__()
        if as_json:
            print_json(
                {
                    "event": "ready",
                    "node": ready.node,
                    "model": ready.model,
                    "experts": ready.experts,
                    "address": ready.address,
                    "reach": ready.reach,
                }
            )
        else:
            how = "" if ready.reach == "unknown" else f" ({ready.reach}; swarm doctor says more)"
            out.print(f"Joined as {ready.node[:8]} at {ready.address}{how}", highlight=False)
            out.print(f"with {ready.experts} of {ready.model}. Thank you! Ctrl-C leaves.", highlight=False)
        if consent.is_first_agreed:
            write_first_config(folders, registry=None if registry == DEFAULT_REGISTRY else registry)

    async def main() -> None:
        registries = await settle_registries(registry, folders)
        publishers = Publishers(
            folders.config / "known_publishers",
            given=given,
            confirm=confirm,
            is_registry_here=all(is_loopback(each.address[0]) for each in registries),
        )
        config = PeerConfig(
            registry=registries,
            folders=folders,
            experts=wanted_experts,
            layers=wanted_layers,
            model_file=file,
            model_url=url,
            model=None if file or url else model,
            publishers=publishers,
            host=host,
            port=port,
            advertise=advertised,
            n_threads=threads,
            device=settle_device(device, exact_kernels=exact_kernels),
            exact_kernels=exact_kernels,
            fault=fault,
            disk_bytes_per_s=disk_bytes_per_s,
            memory_bytes=None if memory is None else parse_size_bytes(memory, "--memory"),
            disk_bytes=None if disk is None else parse_size_bytes(disk, "--disk"),
            max_upload_bytes_s=None if max_upload is None else parse_size_bytes(max_upload, "--max-upload"),
            max_download_bytes_s=None if max_download is None else parse_size_bytes(max_download, "--max-download"),
            schedule=hours,
            pauses_when_busy=pause_when_busy,
            name=public_name(name),
            place=place,
            is_relays_only=relays_only,
            is_watched=not quiet,
            tls_links=tls_links,
        )
        daemon, rates = PeerDaemon(config, identity, Bars(), agree=consent), Rates()

        def look() -> Shown:
            report = daemon.report()
            return shown(report, rates.update(report))

        async def show() -> None:
            await is_ready.wait()
            await LiveLines(look, as_json=as_json, is_quiet=quiet).run()

        async with asyncio.TaskGroup() as tasks:
            showing = tasks.create_task(show())
            try:
                await daemon.run(on_ready)
            finally:
                showing.cancel()

    is_ready = asyncio.Event()
    consent = Consent(
        folders,
        is_given=yes,
        as_json=as_json,
        on_ask=lambda: bars.__exit__(),
        is_person_there=lambda: not until_eof and is_person_there(),
    )
    with ProgressBars() as bars:
        run_daemon(main(), until_eof=until_eof, is_ready=ready_said.is_set)


def _make_service(what: str, folders: Folders) -> None:
    begin = sys.argv.index("join") if "join" in sys.argv else 0
    common, arguments = sys.argv[1:begin], sys.argv[begin + 1 :]
    kept: list[str] = []
    is_value = False
    for argument in arguments:
        if not is_value and argument != "--service" and not argument.startswith("--service="):
            kept.append(argument)
        is_value = argument == "--service"
    written = (folders.config, folders.state, folders.cache)
    unit = join_unit(kept, written, common=common)
    if what == "print":
        print(unit)
    elif what == "install":
        path = install_unit(unit, written)
        out.print(f"wrote {path}", highlight=False, markup=False)
        out.print(f"start it:      systemctl --user daemon-reload && systemctl --user enable --now {path.name}")
        out.print("keep it while you are logged out:  loginctl enable-linger")
    else:
        raise UserError(f"bad --service: got {what!r}, expected print or install")


def _parse_experts(
    experts: str | None, layers: str | None, slice_file: Path | None, *, is_optional: bool
) -> frozenset[int] | ExpertSet | None:
    if slice_file is not None:
        if experts is not None or layers is not None:
            raise UserError("--slice names experts and layers already: leave --experts and --layers out")
        return read_slice_file(slice_file)
    if experts is None and is_optional:
        return None
    if experts is None:
        raise UserError(
            "which experts? give --experts SET, for example --experts 0-7 or --experts auto, or --slice FILE"
        )
    return parse_index_set(experts)


def _parse_fault(text: str) -> tuple[int, int]:
    layer, colon, expert = text.partition(":")
    if not (colon and layer.isdigit() and expert.isdigit()):
        raise UserError(f"cannot read the fault: got {text!r}, expected LAYER:EXPERT")
    return int(layer), int(expert)
