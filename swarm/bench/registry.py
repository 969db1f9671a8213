"""A registry of hundreds of nodes and thousands of peers in one process: virtual clock, one seed, no sockets.

What runs is the real `Replica`, `Ring` and `Reading`; what is played is the network (delays by distance, loss repaired as QUIC
does, cuts), the announcers, churn, and nodes that withhold. Signatures are stood in for by a hash, since ten thousand peers that
renew every 15 s would spend the time on ed25519; the tests forge with real ones.

A look-up is *right* if it has every peer whose first announcement had been taken when it began, and none that had withdrawn,
whose lease had ended, or that never was.
"""

from __future__ import annotations

import math
import statistics
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

from swarm.bench.registry_hosts import Host, RegistryOptions
from swarm.bench.registry_network import RegistrySimulation
from swarm.ids import NodeId
from swarm.registry.announcer import RENEW_S


def simulate_registry(
    options: RegistryOptions, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Return the figures of a run with churn, loss, stale views and withholding nodes, and of a cut that heals."""
    simulation = RegistrySimulation(options)
    rng = simulation.rng
    for index in range(options.n_nodes):
        simulation.add_node(joins=False).withholds = index < options.withholding * options.n_nodes
    simulation.introduce_all()
    simulation.run_until(simulation.now + 1.0)
    for _ in range(options.n_peers):
        simulation.add_peer()
    n_readers = max(20, options.n_nodes // 2)
    readers = [
        simulation.add_client(Host(NodeId(rng.randbytes(32)), simulation._address(5000), simulation._where()))
        for _ in range(n_readers)
    ]
    simulation.run_until(simulation.now + 2 * RENEW_S)  # everybody has announced itself
    for node in simulation.nodes.values():
        node.n_bytes.clear()
    started = simulation.now
    _schedule_churn(simulation, options.churn_per_hour, options.duration_s)
    places = list(simulation.peers_at)
    n_lookups = round(options.lookups_per_s * options.duration_s)
    for _ in range(n_lookups):
        when = started + rng.random() * options.duration_s
        simulation.at(when, simulation.look_up, rng.choice(readers), rng.choice(places))
    n_steps = 20
    for step in range(1, n_steps + 1):
        simulation.run_until(started + options.duration_s * step / n_steps)
        progress(step, n_steps + 1)
    simulation.run_until(simulation.now + 10.0)
    duration_s = simulation.now - started
    figures = _figures(simulation, duration_s) | {"heal": simulate_cut(options)}
    progress(n_steps + 1, n_steps + 1)
    return figures


def simulate_cut(options: RegistryOptions) -> dict[str, Any]:
    """Return how long the two halves of a network that was cut take to come to one view once it is whole again."""
    simulation = RegistrySimulation(options)
    for _ in range(options.n_nodes):
        simulation.add_node(joins=False)
    simulation.introduce_all()
    simulation.run_until(simulation.now + 30.0)
    for index, node in enumerate(simulation.nodes.values()):
        node.side = index % 2
    simulation.run_until(simulation.now + options.cut_s)
    n_views_cut = len(views(simulation))
    healed_at = simulation.now
    for node in simulation.nodes.values():
        node.side = 0
    while len(views(simulation)) > 1 and simulation.now < healed_at + 600:
        simulation.run_until(simulation.now + 1.0)
    n_views = len(views(simulation))
    return {
        "cut_s": options.cut_s,
        "n_views_while_cut": n_views_cut,
        "n_views_after": n_views,
        "one_view_after_s": simulation.now - healed_at if n_views == 1 else None,
    }


def views(simulation: RegistrySimulation) -> set[frozenset[NodeId]]:
    """Return the different rings that the nodes which are up see."""
    return {frozenset(node.replica.membership.ring.members) for node in simulation.nodes.values() if node.is_up}


def _schedule_churn(simulation: RegistrySimulation, per_hour: float, duration_s: float) -> None:
    rng = simulation.rng
    options = simulation.options

    def replace_node() -> None:
        node = rng.choice([node for node in simulation.nodes.values() if node.is_up])
        (simulation.crash if rng.random() < 0.5 else simulation.retire)(node)
        simulation.add_node().withholds = node.withholds

    def replace_peer() -> None:
        peer = rng.choice(list(simulation.peers.values()))
        while not peer.client.host.is_up or peer.published_at > simulation.now:
            peer = rng.choice(list(simulation.peers.values()))
        kind = rng.random()
        (simulation.withdraw if kind < 0.5 else simulation.kill)(peer)
        simulation.add_peer()

    for count, action in ((options.n_nodes, replace_node), (options.n_peers, replace_peer)):
        for _ in range(round(count * per_hour * duration_s / 3600)):
            simulation.at(simulation.now + rng.random() * duration_s, action)


def _figures(simulation: RegistrySimulation, duration_s: float) -> dict[str, Any]:
    options, lookups = simulation.options, simulation.lookups
    ended = [each for each in lookups if each.ended_at < math.inf]
    up = [node for node in simulation.nodes.values() if node.is_up]
    lived = [node for node in up if node.up_since < simulation.now - duration_s]
    honest = [node for node in lived if not node.withholds] or up
    rates = [sum(node.n_bytes.values()) / duration_s for node in honest]
    by_kind: Counter[str] = Counter()
    for node in honest:
        by_kind.update(node.n_bytes)
    sample = sorted(honest, key=lambda node: node.node)[:5]
    times = sorted(each.ended_at - each.began_at for each in ended)
    return {
        "n_nodes": options.n_nodes,
        "n_peers": options.n_peers,
        "n_models": options.n_models,
        "churn_per_hour": options.churn_per_hour,
        "loss": options.loss,
        "withholding": options.withholding,
        "simulated_s": round(duration_s, 1),
        "seed": options.seed,
        "n_lookups": len(lookups),
        "n_unfinished": len(lookups) - len(ended),
        "n_incomplete": sum(1 for each in ended if each.missing),
        "n_with_dead": sum(1 for each in ended if each.wrong),
        "lookup_success": sum(each.is_right for each in lookups) / max(len(lookups), 1),
        "median_round_trips": statistics.median(each.n_rounds for each in ended) if ended else None,
        "median_time_over_rtt": round(
            statistics.median((each.ended_at - each.began_at) / each.rtt_s for each in ended), 3
        )
        if ended
        else None,
        "p99_lookup_s": round(times[int(len(times) * 0.99)], 3) if times else None,
        "records_per_lookup": round(statistics.mean(each.n_found for each in ended), 1) if ended else None,
        "bytes_per_s_per_node": round(statistics.mean(rates)),
        "max_bytes_per_s_per_node": round(max(rates)),
        "bytes_per_s_by_request": {
            kind: round(n / duration_s / len(honest)) for kind, n in sorted(by_kind.items(), key=lambda item: -item[1])
        },
        "records_per_node": round(statistics.mean(len(node.replica.table) for node in honest), 1),
        "memory_bytes_per_node": round(statistics.median(deep_size(node.replica) for node in sample)),
    }


def deep_size(root: object) -> int:
    """Return the bytes of all objects that are reached from `root`, but for code."""
    seen: set[int] = set()
    todo, total = [root], 0
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | types.FunctionType | types.MethodType | types.ModuleType):
            continue
        seen.add(id(each))
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            todo += [*each.keys(), *each.values()]
        elif isinstance(each, list | tuple | set | frozenset) or type(each).__name__ == "deque":
            todo += list(each)  # type: ignore[call-overload]
        else:
            todo += list(getattr(each, "__dict__", {}).values())
            slots = [name for kind in type(each).__mro__ for name in getattr(kind, "__slots__", ())]
            todo += [getattr(each, name) for name in slots if hasattr(each, name)]
    return total
