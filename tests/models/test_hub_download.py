"""Downloads from a hub on loopback, through huggingface_hub."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import nanoserve
from nanoserve.errors import ModelError
from nanoserve.models import hub_download
from nanoserve.models.hub import ResolvedModel, known_models, named_models, resolve_model
from tests.fakes.loopback_hub import LoopbackHub, Repository, loopback_hub

WEIGHTS = bytes(range(256)) * 40
"""A large file: the hub knows its SHA-256."""
CONFIG = (Path(nanoserve.__file__).parent / "assets" / "storyteller" / "config.json").read_bytes()
SAFETENSORS = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"text",
    "model.safetensors": WEIGHTS,
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as served:
        served.use(monkeypatch, tmp_path)
        yield served


@pytest.fixture
def ggufs(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The .gguf files that were found; they are not read."""
    found: list[Path] = []

    def take(name: str, path: Path) -> ResolvedModel:
        found.append(path)
        return ResolvedModel(name, path.parent, path.parent)

    monkeypatch.setattr("nanoserve.models.hub._of_gguf", take)
    return found


def names_in(directory: Path | None) -> list[str]:
    assert directory is not None
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def test_safetensors_are_downloaded_without_code_or_pickles(hub: LoopbackHub) -> None:
    unwanted = ["pytorch_model.bin", "modeling.py", "consolidated.safetensors", "README.md"]
    unwanted += ["original/consolidated.00.pth", "onnx/model.safetensors"]
    hub.repositories["owner/model"] = Repository(SAFETENSORS | dict.fromkeys(unwanted, WEIGHTS))
    found = resolve_model("owner/model")
    assert (found.name, found.directory) == ("owner/model", found.tokenizer_directory)
    assert names_in(found.directory) == sorted(SAFETENSORS)
    assert found.directory is not None
    for name, content in SAFETENSORS.items():
        assert (found.directory / name).read_bytes() == content


def test_what_is_in_the_cache_needs_no_hub(hub: LoopbackHub) -> None:
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    found = resolve_model("owner/model")
    hub.requests.clear()
    assert resolve_model("owner/model") == resolve_model("owner/model", offline=True) == found
    assert hub.requests == []
    assert ("owner/model", "hub cache") in [(name, place) for name, _, place in known_models()]
    hub.repositories["owner/model"] = Repository(SAFETENSORS | {"config.json": CONFIG + b" "})
    fresh = resolve_model("owner/model", refresh=True)
    assert fresh.directory is not None and fresh.directory != found.directory
    assert (fresh.directory / "config.json").read_bytes() == CONFIG + b" "
    assert hub.ranges == [0]  # the weights are the same, and were downloaded once


def test_a_part_of_a_model_in_the_cache_is_no_model(hub: LoopbackHub) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    whole = {
        "config.json": CONFIG,
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": WEIGHTS,
        "model-2.safetensors": WEIGHTS[1:],
    }
    hub.repositories["owner/model"] = Repository(whole)
    directory = resolve_model("owner/model").directory
    assert directory is not None
    for name in ("model-2.safetensors", "tokenizer.json", "config.json"):
        (directory / name).unlink()
        with pytest.raises(ModelError, match="owner/model is not in the local cache"):
            resolve_model("owner/model", offline=True)
        assert names_in(resolve_model("owner/model").directory) == sorted(whole)


def test_a_model_that_cannot_be_run_is_refused_before_its_weights(hub: LoopbackHub) -> None:
    unknown = CONFIG.replace(b'"model_type": "llama"', b'"model_type": "unknown"')
    assert unknown != CONFIG
    hub.repositories["owner/model"] = Repository(SAFETENSORS | {"config.json": unknown})
    with pytest.raises(ModelError, match="unknown"):
        resolve_model("owner/model")
    assert hub.ranges == []


def test_the_license_and_the_size_are_told_before_a_download(hub: LoopbackHub) -> None:
    told: list[str] = []
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    resolve_model("owner/model", announce=told.append)
    resolve_model("owner/model", announce=told.append)
    page = "https://huggingface.co/owner/model"
    assert told == [f"downloading owner/model: 10.6 KiB, license apache-2.0 ({page})"]
    card = {"license": "other", "license_name": "lfm1.0", "license_link": "LICENSE"}
    hub.repositories["owner/other"] = Repository(SAFETENSORS, card=card)
    hub.repositories["owner/none"] = Repository(SAFETENSORS, card={})
    resolve_model("owner/other", announce=told.append)
    resolve_model("owner/none", announce=told.append)
    assert "license lfm1.0, LICENSE (" in told[1] and "license not stated (" in told[2]


def test_a_named_model_that_is_too_large_for_this_machine_is_told(
    hub: LoopbackHub, ggufs: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    row = named_models()["qwen3:8b"]
    hub.repositories[row.repository] = Repository({str(row.file): WEIGHTS})
    told: list[str] = []
    monkeypatch.setattr("nanoserve.models.hub.available_host_memory", lambda: row.memory_bytes)
    resolve_model("qwen3:8b", refresh=True, announce=told.append)
    (line,) = told
    assert line.startswith("downloading qwen3:8b (unsloth/Qwen3-8B-GGUF): ") and ";" not in line
    hub.repositories[row.repository] = Repository({str(row.file): WEIGHTS[1:]})
    monkeypatch.setattr("nanoserve.models.hub.available_host_memory", lambda: 2 << 30)
    resolve_model("qwen3:8b", refresh=True, announce=told.append)
    assert told[1].endswith("; it takes 5.9 GiB of memory, and 2.0 GiB are free")


def test_progress_counts_bytes(hub: LoopbackHub) -> None:
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    reports: list[tuple[str, int, int]] = []
    resolve_model("owner/model", progress=lambda *report: reports.append(report))
    total = sum(map(len, SAFETENSORS.values()))
    downloading = [(done, whole) for stage, done, whole in reports if stage == "downloading"]
    assert downloading == sorted(downloading) and downloading[-1] == (total, total)
    assert ("checking", len(WEIGHTS), len(WEIGHTS)) in reports


PARTS = [f"Q8_0/big-Q8_0-0000{number}-of-00002.gguf" for number in (1, 2)]
GGUFS = ["tiny-Q4_K_M.gguf", "tiny-q5_0.gguf", "tiny-UD-Q6_K.gguf", "mmproj-Q4_0.gguf", *PARTS]


@pytest.mark.parametrize(
    ("selector", "files"),
    [
        ("", ["tiny-Q4_K_M.gguf"]),
        (":Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        (":q5_0", ["tiny-q5_0.gguf"]),
        (":Q6_K", ["tiny-UD-Q6_K.gguf"]),
        (":tiny-q5_0.gguf", ["tiny-q5_0.gguf"]),
        (":Q8_0", PARTS),
        (f":{PARTS[0]}", PARTS),
        (":big-Q8_0-00001-of-00002.gguf", PARTS),
    ],
)
def test_a_gguf_file_is_found_by_its_quantization_or_its_name(
    selector: str, files: list[str], hub: LoopbackHub, ggufs: list[Path]
) -> None:
    hub.repositories["owner/tiny-GGUF"] = Repository(
        {name: name.encode() for name in (*GGUFS, "README.md", "config.json")}
    )
    found = resolve_model(f"owner/tiny-GGUF{selector}")
    assert found.name == f"owner/tiny-GGUF{selector}"
    snapshot = ggufs[0].parents[files[0].count("/")]
    assert ggufs == [snapshot / files[0]]
    assert names_in(snapshot) == sorted(files)
    asked = len(hub.requests)
    assert resolve_model(found.name) == found and len(hub.requests) == asked
    told = f"owner/tiny-GGUF:{Path(files[0]).name}"
    sizes = {name: size for name, size, place in known_models() if place == "hub cache"}
    assert sizes == {told: sum(map(len, files))}  # each file holds its name
    assert resolve_model(told).directory == found.directory


def test_half_a_split_file_is_downloaded_again(hub: LoopbackHub, ggufs: list[Path]) -> None:
    hub.repositories["owner/tiny-GGUF"] = Repository({name: name.encode() for name in GGUFS})
    resolve_model("owner/tiny-GGUF:Q8_0")
    ggufs[0].with_name("big-Q8_0-00002-of-00002.gguf").unlink()
    resolve_model("owner/tiny-GGUF:Q8_0")
    assert names_in(ggufs[0].parent) == [Path(part).name for part in PARTS]


@pytest.mark.parametrize(
    ("files", "selector", "problem"),
    [
        (GGUFS, ":Q3_K", r"has no 'Q3_K'; .* where NAME is Q4_K_M, Q5_0, Q8_0, UD-Q6_K$"),
        (GGUFS, ":none.gguf", r"has no 'none\.gguf'"),
        (["a-Q8_0.gguf", "b-F16.gguf"], "", r"has no 'Q4_K_M'; .* where NAME is F16, Q8_0$"),
        (["config.json", "pytorch_model.bin"], "", r"no \*\.safetensors and no \*\.gguf weights"),
        (["model.safetensors"], ":Q8_0", r"no \*\.gguf weights"),
    ],
)
def test_what_a_repository_has_not_is_one_clear_line(
    files: list[str], selector: str, problem: str, hub: LoopbackHub
) -> None:
    hub.repositories["owner/tiny-GGUF"] = Repository(dict.fromkeys(files, b"x"))
    with pytest.raises(ModelError, match=problem) as told:
        resolve_model(f"owner/tiny-GGUF{selector}")
    assert "\n" not in str(told.value)
    assert not any("/resolve/" in request for request in hub.requests)


def test_a_single_gguf_file_needs_no_name(hub: LoopbackHub, ggufs: list[Path]) -> None:
    hub.repositories["owner/tiny-GGUF"] = Repository({"only-Q8_0.gguf": WEIGHTS})
    resolve_model("owner/tiny-GGUF")
    assert ggufs[0].read_bytes() == WEIGHTS


def test_a_gated_model_needs_a_token_which_no_other_server_sees(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["owner/gated"] = Repository(SAFETENSORS, gated=True)
    with pytest.raises(ModelError) as told:
        resolve_model("owner/gated")
    assert str(told.value) == (
        "owner/gated is gated: accept its terms at https://huggingface.co/owner/gated, and set "
        "HF_TOKEN to a token of your account from https://huggingface.co/settings/tokens"
    )
    monkeypatch.setenv("HF_TOKEN", "accepted")
    assert names_in(resolve_model("owner/gated").directory) == sorted(SAFETENSORS)
    assert hub.ranges == [0] and hub.tokens_at_store == []


def test_an_unknown_repository_is_one_line_with_its_page(hub: LoopbackHub) -> None:
    with pytest.raises(
        ModelError, match=r"no model 'owner/none' \(https://huggingface\.co/owner/none\)"
    ) as told:
        resolve_model("owner/none")
    assert "HF_TOKEN" in str(told.value) and "\n" not in str(told.value)


def test_a_hub_that_cannot_be_reached_is_one_line(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(
        ModelError,
        match=r"^qwen3:4b \(unsloth/Qwen3-4B-GGUF\) cannot be downloaded: "
        r"http://127\.0\.0\.1:9 cannot be reached \(.*\); check the network",
    ) as told:
        resolve_model("qwen3")
    assert "\n" not in str(told.value)


def test_a_full_disk_is_told_before_anything_is_downloaded(
    hub: LoopbackHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    total = sum(map(len, SAFETENSORS.values()))
    monkeypatch.setattr(hub_download, "free_bytes", lambda place: total - 1)
    with pytest.raises(ModelError, match=r"owner/model needs 10\.6 KiB more, .* free; .*HF_HOME"):
        resolve_model("owner/model")
    assert not any("/resolve/" in request for request in hub.requests)
    # what is there of an interrupted download needs no more room
    blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete").write_bytes(WEIGHTS[:1])
    resolve_model("owner/model")


def test_a_download_goes_on_where_it_was_interrupted(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
    partial.write_bytes(WEIGHTS[:4000])
    directory = resolve_model("owner/model").directory
    assert directory is not None
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert (hub.ranges, hub.sent) == ([4000], len(WEIGHTS) - 4000)
    assert not partial.exists()


@pytest.mark.parametrize("content", [b"x" * 4000, WEIGHTS + b"more"])
def test_a_damaged_download_is_removed(content: bytes, hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    partial = blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete"
    partial.write_bytes(content)
    if len(content) < len(WEIGHTS):
        with pytest.raises(ModelError, match="of owner/model arrived damaged"):
            resolve_model("owner/model")
        assert not partial.exists()
    directory = resolve_model("owner/model").directory
    assert directory is not None
    assert (directory / "model.safetensors").read_bytes() == WEIGHTS
    assert hub.ranges[-1] == 0


@pytest.mark.parametrize("wrong", ["commit", "model.safetensors"])
def test_a_hub_cannot_name_files_outside_of_the_cache(
    wrong: str, hub: LoopbackHub, tmp_path: Path
) -> None:
    stated = {wrong: "../../../outside"}
    hub.repositories["owner/model"] = Repository(SAFETENSORS, stated=stated)
    with pytest.raises(ModelError, match=r"the hub states '\.\./\.\./\.\./outside' as the "):
        resolve_model("owner/model")
    assert not (tmp_path / "hub").exists() and not list(tmp_path.glob("outside*"))


def test_two_processes_do_not_write_one_file(hub: LoopbackHub, tmp_path: Path) -> None:
    hub.repositories["owner/model"] = Repository(SAFETENSORS)
    blobs = tmp_path / "hub" / "models--owner--model" / "blobs"
    blobs.mkdir(parents=True)
    with (blobs / f"{hashlib.sha256(WEIGHTS).hexdigest()}.incomplete").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another process is downloading owner/model"):
            resolve_model("owner/model")
    resolve_model("owner/model")
