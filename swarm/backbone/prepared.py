"""A model's files as a backbone needs them: the manifest, the backbone file (checked, or written), and what it gives away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from swarm.backbone.share import ModelShare
from swarm.errors import IntegrityError, UserError
from swarm.files import Folders
from swarm.interruptible import Check, checked
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import (
    MANIFEST_NAME,
    MODEL_ID_KEY,
    SOURCES_KEY,
    Manifest,
    manifest_beside,
    manifest_of,
    verify_backbone,
)
from swarm.model.slices import write_backbone
from swarm.model.source import GgufSource
from swarm.model.spec import FILE_KEY
from swarm.registry.records import printable_name

logger = logging.getLogger(__name__)

ProgressCallback = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model's files, ready to run. Close it, or use it as a context manager, once its share answers nobody any more.

    Attributes:
        file: the whole model, from which the share reads; None where there is only a backbone file.
        sources: names on the web of the whole model, which a backbone file carries.
    """

    manifest: Manifest
    name: str
    backbone_path: Path
    share: ModelShare
    size_bytes: int
    file: GgufFile | None
    sources: tuple[str, ...] = ()

    @property
    def offers_blocks(self) -> bool:
        """Whether the share has the experts too."""
        return self.file is not None

    def close(self) -> None:
        """Close the model file."""
        if self.file is not None:
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prepare_model(
    path: Path, folders: Folders, progress: ProgressCallback | None = None, check: Check = lambda: None
) -> PreparedModel:
    """Return the model's manifest and backbone file; a whole file's backbone is written to the cache once.

    `progress` is told of the hashing of a file that was never seen. `check` is called often; what it raises ends the work.

    Raises:
        UserError: not a model that can be served, no manifest beside a backbone file, or the cache cannot be written.
        IntegrityError: the backbone file is not what its manifest says.
    """
    advance = checked(check, progress)
    with GgufFile(path) as file:
        kind, said, title = file.text(FILE_KEY), file.text(MODEL_ID_KEY), file.text("general.name")
        sources = tuple((file.text(SOURCES_KEY) or "").splitlines())
    if kind == "slice":
        raise UserError(f"{path} is an expert slice; serve needs the whole model or its backbone.gguf")
    if kind == "backbone":
        manifest = manifest_beside(path)
        if said != str(manifest.model_id):
            raise UserError(f"{path} does not belong to the {MANIFEST_NAME} beside it: got model {said}")
        verify_backbone(path, manifest, folders.cache, advance)
        return PreparedModel(
            manifest=manifest,
            name=printable_name(title or path.stem),  # every split calls this file backbone.gguf
            backbone_path=path,
            share=ModelShare(manifest, None),
            size_bytes=path.stat().st_size,
            file=None,
            sources=sources,
        )
    manifest = manifest_of(path, folders.cache, advance)
    file = GgufFile(path)
    try:
        return PreparedModel(
            manifest=manifest,
            name=printable_name(path.stem),
            backbone_path=_cached_backbone(file, manifest, folders.cache, check),
            share=ModelShare(manifest, GgufSource(file)),
            size_bytes=file.size_bytes,
            file=file,
        )
    except BaseException:
        file.close()
        raise


def _cached_backbone(file: GgufFile, manifest: Manifest, cache_dir: Path, check: Check) -> Path:
    """Return the whole file's backbone in the cache, written unless a good one is there."""
    advance = checked(check)
    path = cache_dir / "backbones" / f"{manifest.model_id}.gguf"
    try:
        if path.exists():
            try:
                verify_backbone(path, manifest, cache_dir, advance)
                return path
            except (IntegrityError, UserError) as error:
                logger.warning("writing the cached backbone again: %s", error)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_backbone(file, manifest, path, advance)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}; set SWARM_HOME to another folder") from error
    verify_backbone(path, manifest, cache_dir, advance)  # the source may have changed since its manifest was made
    return path
