"""`swarm split` writes whole files and says what it wrote; a mistake is one UserError and no file."""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import gguf
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from swarm.backbone.prepared import prepare_model
from swarm.cli.slice_file import read_slice_file, write_slice_file
from swarm.cli.split import _shown, cut, slice_name, split
from swarm.errors import UserError
from swarm.files import Folders
from swarm.ids import ExpertSet
from swarm.model.gguf_file import GgufFile
from swarm.model.manifest import Manifest
from swarm.model.source import GgufSource
from swarm.model.spec import read_spec
from tests.synthetic_moe import write_synthetic_moe

app = typer.Typer()
app.command()(split)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("split") / "m.gguf"
    return write_synthetic_moe(path, n_embd=64, n_layers=3, n_expert=8, n_expert_used=2, n_ff_exp=32)


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_HOME", str(tmp_path / "home"))


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def held(path: Path) -> ExpertSet:
    with GgufFile(path) as file:
        return GgufSource(file).experts


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_by_default_one_slice_holds_every_expert(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    result = run(model, "--out", out)
    assert result.exit_code == 0
    assert names(out) == ["backbone.gguf", "experts-0-7.gguf", "manifest.json"]
    assert len(held(out / "experts-0-7.gguf")) == 3 * 8
    manifest = Manifest.from_bytes((out / "manifest.json").read_bytes())
    assert manifest.model_id.raw == hashlib.sha256((out / "manifest.json").read_bytes()).digest()
    assert manifest.model_id.short in result.stdout
    for name in names(out):
        assert name in result.stdout
    assert "experts 0-7 of layers 0-2" in result.stdout
    assert "writing backbone.gguf: " in result.stderr
    assert "writing" not in result.stdout


def test_json_names_every_file_with_its_size_and_experts(model: Path, tmp_path: Path) -> None:
    result = run(model, "--out", tmp_path / "o", "--experts", "1-2,5", "--layers", "0,2", "--json")
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    files = {Path(file["path"]).name: file for file in answer["files"]}
    assert names(tmp_path / "o") == sorted(files) == ["backbone.gguf", "experts-1-2_5-layers-0_2.gguf", "manifest.json"]
    for file in files.values():
        assert Path(file["path"]).stat().st_size == file["size_bytes"]
    part = files["experts-1-2_5-layers-0_2.gguf"]
    assert (part["kind"], part["experts"]) == ("slice", [{"layers": "0,2", "experts": "1-2,5"}])
    assert held(Path(part["path"])) == ExpertSet.of([0, 2], [1, 2, 5])
    assert gguf.GGUFReader(part["path"]).fields["swarm.model_id"].contents() == answer["model_id"]


def test_parts_cover_the_experts_once(model: Path, tmp_path: Path) -> None:
    assert run(model, "--out", tmp_path, "--parts", "3").exit_code == 0
    parts = [set(held(tmp_path / name)) for name in names(tmp_path) if name.startswith("experts-")]
    assert len(parts) == 3
    assert set().union(*parts) == set(ExpertSet.of(range(3), range(8)))
    assert sum(map(len, parts)) == 24
    assert sorted(len(part) // 3 for part in parts) == [2, 3, 3]


def test_no_parts_writes_no_slice(model: Path, tmp_path: Path) -> None:
    assert run(model, "--out", tmp_path / "o", "--parts", "0").exit_code == 0
    assert names(tmp_path / "o") == ["backbone.gguf", "manifest.json"]


def test_files_of_an_earlier_split_need_force(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    assert run(model, "--out", out).exit_code == 0
    before = (out / "backbone.gguf").read_bytes()
    (out / "backbone.gguf").write_text("old")
    refused = run(model, "--out", out)
    assert isinstance(refused.exception, UserError)
    assert "--force" in str(refused.exception)
    assert (out / "backbone.gguf").read_text() == "old"
    assert run(model, "--out", out, "--force").exit_code == 0
    assert (out / "backbone.gguf").read_bytes() == before


def test_a_split_that_was_cut_goes_on_and_keeps_what_is_whole(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "o"
    assert run(model, "--out", out, "--parts", "3").exit_code == 0
    before = {name: ((out / name).read_bytes(), (out / name).stat().st_mtime_ns) for name in names(out)}
    (out / "experts-2-4.gguf").unlink()
    (out / "manifest.json").unlink()
    again = run(model, "--out", out, "--parts", "3")
    assert again.exit_code == 0
    assert "keeping backbone.gguf" in again.stderr
    assert "writing experts-2-4.gguf" in again.stderr
    for name, (data, changed_at) in before.items():
        assert (out / name).read_bytes() == data
        kept = name not in ("experts-2-4.gguf", "manifest.json")
        assert ((out / name).stat().st_mtime_ns == changed_at) == kept
    (out / "backbone.gguf").write_bytes(before["backbone.gguf"][0][:-1])
    refused = run(model, "--out", out, "--parts", "3")
    assert "--force" in str(refused.exception), "a file of another size is somebody else's"


def test_the_model_itself_is_never_overwritten(model: Path, tmp_path: Path) -> None:
    own = tmp_path / "backbone.gguf"
    own.write_bytes(model.read_bytes())
    refused = run(own, "--out", tmp_path, "--force")
    assert isinstance(refused.exception, UserError)
    assert "the model itself" in str(refused.exception)
    assert own.read_bytes() == model.read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--experts", "7-8"], "no such experts: got 7-8, the model's are 0-7"),
        (["--experts", "x"], "cannot read experts"),
        (["--layers", "3"], "layer 3 has no experts"),
        (["--layers", "2-"], "cannot read layers"),
        (["--parts", "9"], "too many parts: got 9"),
        (["--experts", "1", "--parts", "2"], "too many parts: got 2"),
    ],
)
def test_a_wrong_set_is_one_line_and_no_file(flags: list[str], message: str, model: Path, tmp_path: Path) -> None:
    result = run(model, "--out", tmp_path / "o", *flags)
    assert isinstance(result.exception, UserError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)
    assert not (tmp_path / "o").exists()


def test_a_file_that_is_no_model_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"hello")
    for name in ("m.gguf", "absent.gguf"):
        assert isinstance(run(tmp_path / name, "--out", tmp_path / "o").exception, UserError)


def test_a_folder_that_cannot_take_the_files_is_a_users_mistake(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    refused = run(model, "--out", tmp_path / "file")
    assert isinstance(refused.exception, UserError)
    assert "cannot write to" in str(refused.exception)
    monkeypatch.setattr("swarm.cli.split.shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    refused = run(model, "--out", tmp_path / "o")
    assert isinstance(refused.exception, UserError)
    assert "got 1.0 kB free" in str(refused.exception)
    assert names(tmp_path / "o") == []


def test_cut_is_contiguous_and_even() -> None:
    parts = cut(ExpertSet.of([0, 1], [0, 1, 2, 3, 8, 9, 10]), 3)
    assert [sorted(part.by_layer[0]) for part in parts] == [[0, 1], [2, 3], [8, 9, 10]]
    assert all(part.by_layer[0] == part.by_layer[1] for part in parts)


def test_a_long_name_is_shortened_and_stays_distinct(model: Path) -> None:
    with GgufFile(model) as file:
        spec = read_spec(file)
    odd, even = ExpertSet.of([0], range(1, 400, 2)), ExpertSet.of([0], range(1, 402, 2))
    assert slice_name(spec, odd) != slice_name(spec, even)
    assert len(slice_name(spec, odd)) < 100


def test_a_terminal_gets_a_bar() -> None:
    console = Console(force_terminal=True, width=80, record=True, file=io.StringIO())
    with _shown(console, "writing x") as progress:
        progress(5, 10)
        progress(10, 10)
    assert "writing x" in console.export_text()


def test_clustered_slices_hold_every_expert_once_and_come_with_their_sets(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {n} of a text\n" for n in range(100)))
    out = tmp_path / "o"
    result = run(model, "--out", out, "--parts", 2, "--cluster", text)
    assert result.exit_code == 0, result.output
    parts = [f"cluster-{n}" for n in (0, 1)]
    assert names(out) == sorted(
        ["backbone.gguf", "manifest.json", *(f"{p}.{e}" for p in parts for e in ("gguf", "json"))]
    )
    held_by = [held(out / f"{part}.gguf") for part in parts]
    assert held_by == [read_slice_file(out / f"{part}.json") for part in parts]
    for layer in range(3):
        ids = [sorted(part.by_layer[layer]) for part in held_by]
        assert list(map(len, ids)) == [4, 4]
        assert sorted([*ids[0], *ids[1]]) == list(range(8))
    assert "12 experts" in result.stdout
    assert f"swarm join --slice {out / 'cluster-0.json'}" in result.stdout.replace("\n", "")
    again = run(model, "--out", out, "--parts", 2, "--cluster", text)
    assert isinstance(again.exception, UserError)


def test_saved_sets_are_cut_as_they_are_under_their_files_names(model: Path, tmp_path: Path) -> None:
    sets = {"mine": ExpertSet({0: frozenset({1, 5}), 2: frozenset({0})}), "yours": ExpertSet.of([1], [7])}
    for name, experts in sets.items():
        write_slice_file(tmp_path / f"{name}.json", experts)
    out = tmp_path / "o"
    result = run(model, "--out", out, "--slice", tmp_path / "mine.json", "--slice", tmp_path / "yours.json")
    assert result.exit_code == 0, result.output
    assert names(out) == ["backbone.gguf", "manifest.json", "mine.gguf", "yours.gguf"]
    assert {name: held(out / f"{name}.gguf") for name in sets} == sets


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cluster", "text.txt"], "--cluster needs --parts N"),
        (["--cluster", "text.txt", "--parts", "9"], "expected 2 to 8"),
        (["--cluster", "none.txt", "--parts", "2"], "no such text file: none.txt"),
        (["--cluster", "text.txt", "--parts", "2", "--experts", "0-3"], "leave them out"),
        (["--slice", "set.json", "--layers", "0"], "leave them out"),
        (["--slice", "set.json", "--parts", "2"], "leave --parts and --cluster out"),
        (["--slice", "set.json", "--slice", "other/set.json"], "the same name"),
        (["--slice", "far.json"], "experts"),
        (["--slice", "none.json"], "cannot read the slice file"),
    ],
)
def test_what_does_not_go_together_is_one_message_and_no_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("a text\n" * 300)
    Path("other").mkdir()
    for path in ("set.json", "other/set.json"):
        write_slice_file(Path(path), ExpertSet.of([0], [1]))
    write_slice_file(Path("far.json"), ExpertSet.of([0], [8]))
    error = run(model, "--out", "o", *arguments).exception
    assert isinstance(error, UserError)
    assert message in str(error)
    assert not Path("o").exists()


def test_sources_are_written_into_the_backbone_and_served_from_there(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(
        model, "--out", out, "--parts", 0, "--source", "hf://owner/repo/m.gguf", "--source", "https://h.example/m.gguf"
    )
    assert result.exit_code == 0, result.output
    with prepare_model(out / "backbone.gguf", Folders.below(tmp_path / "home")) as prepared:
        assert prepared.sources == ("hf://owner/repo/m.gguf", "https://h.example/m.gguf")
    refused = run(model, "--out", tmp_path / "other", "--source", "http://192.168.0.1/m.gguf")
    assert isinstance(refused.exception, UserError)
    assert not (tmp_path / "other").exists()
