"""One run of `swarm verify`: which comparisons a request needs, and what they say together.

exact alone      a real swarm in processes of its own against stock, bit for bit (`verify`)
other forms      that too, for the first of them; then, in this process, every form on a text (`form_table`), and a short
                 pass of every form over the real swarm, which must give the table's bits (`shortcut`)
a device         the forms on a text, computed there, against stock on the CPU (`form_table`); nothing is stored
too large        the forms layer by layer (`layer_samples`); no real swarm and no stock
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import hashlib
import tempfile
from pathlib import Path
from typing import Protocol

import numpy as np

from swarm import __version__
from swarm.backbone.assembly import BackboneConfig, open_backbone
from swarm.backbone.engine import EngineConfig
from swarm.backbone.prepared import prepare_model
from swarm.backbone.stock import StockModel
from swarm.emulation.processes import LocalSwarm
from swarm.errors import UserError
from swarm.files import Folders
from swarm.gate.audit_errors import measure_audit_errors
from swarm.gate.form_table import GateModel, measure_forms
from swarm.gate.layer_samples import DEFAULT_TOKENS, is_too_large, judge_layers, measure_layers
from swarm.gate.outcome import EXACT, Outcome, VerifyConfig
from swarm.gate.shortcut import check_shortcut
from swarm.gate.statistics import FormStatistics
from swarm.gate.stored import GateResult, engine_name
from swarm.gate.verdict import MIN_TEXT_TOKENS, FormReport, judge
from swarm.gate.verify import PROMPT_LENGTHS, compare
from swarm.identity import Identity
from swarm.interruptible import run_interruptibly
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest
from swarm.model.source import GgufSource
from swarm.model.spec import read_spec
from swarm.native.devices import CPU
from swarm.registry.client import parse_registry

PROMPT_SEED = 1
COVER_TIMEOUT_S = 30.0


class Progress(Protocol):
    """Told how far a part of the work has come."""

    def __call__(self, what: str, n_done: int, n_total: int, *, is_bytes: bool = False) -> None:
        """Show it; may be called from any thread."""
        ...


async def verify_model(config: VerifyConfig, progress: Progress) -> Outcome:
    """Return what the comparisons say; call `use_exact_kernels` before.

    Raises:
        UserError: the model or the text cannot be used.
        SwarmError: a process, the swarm or llama.cpp failed.
    """
    with GgufFile(config.path) as file:
        spec = read_spec(file)
        source = GgufSource(file)
        text = _read_text(config)
        if config.n_peers > spec.n_expert:
            raise UserError(f"more peers than experts: got {config.n_peers}, expected at most {spec.n_expert}")
        prepared = await run_interruptibly(
            lambda check: prepare_model(
                config.path,
                config.folders,
                lambda done, total: progress("hashing the model", done, total, is_bytes=True),
                check,
            )
        )
        prepared.close()  # its share gives nothing away here
        model = GateModel(
            path=config.path,
            backbone_path=prepared.backbone_path,
            spec=spec,
            source=source,
            device=config.device or CPU,
        )
        outcome = Outcome(config)
        if config.device is not None:
            await asyncio.to_thread(_by_logits, outcome, model, text, progress)
        elif config.layers is not None or (config.needs_table and is_too_large(config.path)):
            await asyncio.to_thread(_by_layers, outcome, model, text, progress)
        else:
            statistics = await _over_processes(outcome, model, progress)
            if config.needs_table:
                await asyncio.to_thread(_by_logits, outcome, model, text, progress)
            else:
                form = judge(config.wires[0], statistics, config.thresholds, spec, needs_perplexity=False)
                outcome.forms = (form,)
    if config.needs_table and config.device is None:  # what one device rounds, others do not
        outcome.gate = _gate_result(outcome, prepared.manifest, prepared.name, text)
    return outcome


def _read_text(config: VerifyConfig) -> str:
    if not config.needs_table and config.layers is None:
        return ""
    if config.text is None:
        raise UserError(
            f"no text to measure on: give a file of at least {MIN_TEXT_TOKENS} held-out tokens with --text, "
            "or put it beside the model as heldout.txt"
        )
    try:
        return config.text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {config.text}: {error}") from error


async def _over_processes(outcome: Outcome, model: GateModel, progress: Progress) -> FormStatistics:
    """Compare a real swarm in the first form with stock, and in every form with simulated peers."""
    config, spec = outcome.config, model.spec
    engine = EngineConfig(
        n_ctx=max(PROMPT_LENGTHS) + config.n_tokens, n_batch=512, n_ubatch=512, n_threads=1, exact_kernels=True
    )
    statistics = FormStatistics()
    with tempfile.TemporaryDirectory(prefix="swarm-verify-") as folder:
        home = Path(folder)
        async with LocalSwarm(home) as swarm:
            backbone_config = BackboneConfig(
                registry=parse_registry(swarm.registry),
                folders=Folders(home / "config", home / "state", config.folders.cache),
                model_file=config.path,
                wire=config.wires[0],
                host="127.0.0.1",
                engine=engine,
            )
            async with open_backbone(backbone_config, Identity.generate()) as running:
                # The fault goes into the first MoE layer, where every later value feels it; any expert is used often.
                fault = ("--plant-fault", f"{spec.moe_layers[0]}:0") if config.control else ()
                await swarm.add_peers(config.n_peers, spec.n_expert, "--exact-kernels", faulty=fault)
                await running.holders.wait_complete(COVER_TIMEOUT_S)
                with StockModel(config.path, engine) as stock:
                    tokens = _prompt(stock.n_vocab)
                    outcome.prompts = await compare(
                        running,
                        stock,
                        n_tokens=config.n_tokens,
                        prompt_tokens=tokens,
                        progress=lambda done, total: progress("comparing", done, total),
                        statistics=statistics,
                    )
                if config.needs_table:
                    outcome.n_shortcut_differences = await check_shortcut(running, model, config.wires, tokens)
    return statistics


def _by_logits(outcome: Outcome, model: GateModel, text: str, progress: Progress) -> None:
    config = outcome.config
    outcome.n_text_tokens = MIN_TEXT_TOKENS if config.n_text_tokens is None else config.n_text_tokens
    measured = measure_forms(
        model,
        config.wires,
        text,
        n_tokens=outcome.n_text_tokens,
        n_peers=config.n_peers,
        progress=lambda done, total: progress("measuring", done, total),
    )
    forms = tuple(judge(wire, each, config.thresholds, model.spec) for wire, each in measured.items())
    outcome.forms = _with_audit_errors(forms, outcome, model, text, progress)


def _with_audit_errors(
    forms: tuple[FormReport, ...], outcome: Outcome, model: GateModel, text: str, progress: Progress
) -> tuple[FormReport, ...]:
    """Return the reports with what an audit of each form must bear."""
    errors = measure_audit_errors(
        model,
        [form.wire for form in forms],
        text,
        layers=outcome.config.layers or (),
        n_tokens=outcome.n_text_tokens,
        progress=lambda done, total: progress("measuring audits", done, total),
    )
    return tuple(dataclasses.replace(form, audit_error=errors[form.wire]) for form in forms)


def _by_layers(outcome: Outcome, model: GateModel, text: str, progress: Progress) -> None:
    config = outcome.config
    outcome.method = "layers"
    outcome.n_text_tokens = DEFAULT_TOKENS if config.n_text_tokens is None else config.n_text_tokens
    measured = measure_layers(
        model,
        [wire for wire in config.wires if wire != EXACT],  # f32 is the measure here: nothing to be identical with
        text,
        layers=config.layers or (),
        n_tokens=outcome.n_text_tokens,
        n_peers=config.n_peers,
        progress=lambda done, total: progress("measuring layers", done, total),
    )
    forms = tuple(judge_layers(wire, each, config.thresholds, model.spec) for wire, each in measured.items())
    outcome.forms = _with_audit_errors(forms, outcome, model, text, progress)


def _prompt(n_vocab: int) -> list[int]:
    """Return the prompts' tokens: random ones, so that the experts' use is broad and any vocabulary will do."""
    rng = np.random.default_rng(PROMPT_SEED)
    return [int(token) for token in rng.integers(1, n_vocab, max(PROMPT_LENGTHS))]


def _gate_result(outcome: Outcome, manifest: Manifest, name: str, text: str) -> GateResult:
    return GateResult(
        model=manifest.model_id,
        model_name=name,
        engine=engine_name(),
        version=__version__,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        method=outcome.method,
        text_sha256=hashlib.sha256(text.encode()).hexdigest(),
        n_text_tokens=outcome.n_text_tokens,
        n_peers=outcome.config.n_peers,
        thresholds=outcome.config.thresholds,
        forms=outcome.forms,
    )
