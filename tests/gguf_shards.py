"""Cuts a GGUF file into shards as `llama-gguf-split` does: metadata in the first, tensors in order, numbers of its types."""

from __future__ import annotations

import struct
from pathlib import Path

from swarm.model.gguf_file import GgufFile, MetadataValue, encode_header

UINT16, INT32 = 2, 5


def write_shards(
    folder: Path, whole: Path, n_shards: int, *, stem: str = "model", total: int | None = None
) -> list[Path]:
    """Write the shards and return their paths; `total` makes them claim another number of tensors."""
    paths = []
    with GgufFile(whole) as source:
        names = list(source.tensors)
        n_each = -(-len(names) // n_shards)
        for number in range(n_shards):
            tensors = [source.tensors[name] for name in names[number * n_each : (number + 1) * n_each]]
            metadata = dict(source.metadata) if number == 0 else {}
            metadata["split.no"] = MetadataValue(UINT16, struct.pack("<H", number))
            metadata["split.count"] = MetadataValue(UINT16, struct.pack("<H", n_shards))
            claimed = len(names) if total is None else total
            metadata["split.tensors.count"] = MetadataValue(INT32, struct.pack("<i", claimed))
            data = encode_header(metadata, tensors, source.alignment)
            for each in tensors:
                raw = b"".join(source.chunks(each.name))
                data += raw + bytes(-len(raw) % source.alignment)
            paths.append(folder / f"{stem}-{number + 1:05}-of-{n_shards:05}.gguf")
            paths[-1].write_bytes(data)
    return paths
