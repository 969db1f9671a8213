"""Network namespaces of this machine, made and removed with `ip`, as root. Touches only names that start with PREFIX.

A name tells which process made it, so that what a killed process left behind is found and removed by the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from swarm.errors import SwarmError, UserError

PREFIX = "swarm-emu-"
MTU = 1500  # of the emulated network: Ethernet's
DEVICE = "wan0"
TX_QUEUE_PACKETS = 10_000  # a burst must wait in the emulated queue and not be lost in the device's (default 500)

_FOLDER = Path("/run/netns")  # where `ip netns` keeps them (/var/run is a link to /run)
_CLONE_NEWNET = 0x40000000  # linux/sched.h
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
_NAME = re.compile(re.escape(PREFIX) + r"(\d+)-(\d+)-\d+")


class NamespaceError(SwarmError):
    """`ip` or the kernel refused something."""


def missing() -> str | None:
    """Return why namespaces cannot be used here; None: they can."""
    if sys.platform != "linux":
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "the command `ip` is not installed (package iproute2)"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return None


def require() -> None:
    """Raise UserError if namespaces cannot be used here."""
    reason = missing()
    if reason is not None:
        raise UserError(f"cannot emulate hosts: {reason}")


def name(index: int) -> str:
    """Return the name of this process's namespace number `index`."""
    return f"{PREFIX}{os.getpid()}-{_start_ticks(os.getpid())}-{index}"


def create(namespace: str) -> None:
    """Make a namespace with its loopback up."""
    assert namespace.startswith(PREFIX)
    ip("netns", "add", namespace)
    ip("-n", namespace, "link", "set", "lo", "up")


def configure(namespace: str, *addresses: str) -> None:
    """Give the namespace's device (`open_tun`) its addresses, IPv4 or IPv6, and send everything through it."""
    ip("-n", namespace, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", str(TX_QUEUE_PACKETS), "up")
    for address in addresses:
        is_six = ":" in address
        options = ("nodad",) if is_six else ()  # it would not be used while duplicates are looked for
        ip("-n", namespace, "address", "add", f"{address}/{128 if is_six else 32}", "dev", DEVICE, *options)
        ip("-n", namespace, "-6" if is_six else "-4", "route", "add", "default", "dev", DEVICE)


def remove(namespace: str) -> None:
    """End the processes inside, and remove the namespace; nothing happens if there is none."""
    assert namespace.startswith(PREFIX)
    if not (_FOLDER / namespace).exists():
        return
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    for pid in inside.split():
        if int(pid) != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def remove_all(names: Sequence[str]) -> None:
    """Remove several, a few at a time."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        list(pool.map(remove, names))


def remove_stale() -> list[str]:
    """Remove the namespaces whose makers do not run any more; return their names."""
    stale = [each for each in existing() if not _is_maker_running(each)]
    remove_all(stale)
    return stale


def existing() -> list[str]:
    """Return the namespaces that we or processes like us made."""
    return sorted(each.name for each in _FOLDER.glob(PREFIX + "*")) if _FOLDER.is_dir() else []


def open_tun(namespace: str) -> int:
    """Return a non-blocking file of a new TUN device inside the namespace; the device ends with the file.

    Only for a process of one thread: it visits the namespace meanwhile.
    """
    assert namespace.startswith(PREFIX)
    libc = ctypes.CDLL(None, use_errno=True)
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(_FOLDER / namespace, os.O_RDONLY)
    try:
        _enter(libc, there)
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
        finally:
            _enter(libc, here)
    finally:
        os.close(here)
        os.close(there)
    return tun


def _enter(libc: ctypes.CDLL, namespace_file: int) -> None:
    if libc.setns(namespace_file, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def ip(*arguments: str) -> None:
    """Run `ip`; raises NamespaceError."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NamespaceError(f"ip {' '.join(arguments)} failed: {done.stderr.strip()}")


def _is_maker_running(namespace: str) -> bool:
    found = _NAME.fullmatch(namespace)
    return found is not None and _start_ticks(int(found[1])) == int(found[2])


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot: a pid alone may have been given to another process since."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])  # proc(5): field 22, `starttime`
