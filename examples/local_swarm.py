"""A whole swarm in one script: a relay, three peers and a backbone on this machine write a text together.

    python examples/local_swarm.py "To create a new thread"

The relay and the peers are processes of their own; the backbone runs here. Peers fetch their experts from it.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.requests import GenerationRequest, SamplingParams
from swarm.emulation.processes import LocalSwarm
from swarm.files import Folders
from swarm.identity import Identity
from swarm.registry.client import parse_registry

MODEL = Path(__file__).parent / "tiny_moe" / "model-Q8_0.gguf"


async def main(prompt: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        async with LocalSwarm(home / "children") as swarm:
            config = BackboneConfig(
                registry=parse_registry(swarm.registry),
                folders=Folders(home / "config", home / "state", home / "cache"),
                model_file=MODEL,
                host="127.0.0.1",
            )
            async with open_backbone(config, Identity.generate()) as running:
                await swarm.add_peers(3, running.manifest.spec.n_expert)
                await running.holders.wait_complete(timeout_s=30)
                request = GenerationRequest(prompt=prompt, max_tokens=60, sampling=SamplingParams(temperature=0))
                print(prompt, end="", flush=True)
                async for delta in running.backbone.generate(request):
                    print(delta.text, end="", flush=True)
                print()
                for node, pairs in running.dispatcher.stats.assignments.items():
                    print(f"peer {node.short} computed {pairs} (token, expert) pairs", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "The :mod:`json` module provides"))
