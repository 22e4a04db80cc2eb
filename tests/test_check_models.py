"""The named models: their sizes against those of the published files, and what the script says of
rows that the hub does not have."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nanoserve.config.published_shapes import published_shapes
from nanoserve.models.hub import best_named_model, find_named_model, named_models
from nanoserve.models.hub_files import parse_reference, quantization_of
from scripts import check_models
from tests.fakes.loopback_hub import LoopbackHub, Repository, loopback_hub

PUBLISHED = {
    # the size that the hub states for each file, in the header x-linked-size or on its page
    "qwen3:4b": (2_497_280_256, 0.003),
    "qwen3:8b": (5_027_783_488, 0.003),
    "qwen3:0.6b": (639_446_688, 0.01),
    "smollm2:1.7b": (1_055_609_824, 0.003),
    "smollm2:135m": (145e6, 0.02),
    "smollm3:3b": (4.97e9 + 1.18e9, 0.003),
    "glm4:9b": (6.17e9, 0.005),
    "lfm2:350m": (379e6, 0.01),
    "gpt-oss:20b": (4.79e9 + 4.80e9 + 4.17e9, 0.003),
    "qwen3:14b": (8.4 * 2**30, 0.006),
    "qwen3.5:0.8b": (774.2 * 2**20, 0.02),
}
"""Bytes, and how much of them is the vocabulary and other metadata, or rounded away."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_those_of_the_published_files(name: str) -> None:
    published, share = PUBLISHED[name]
    assert named_models()[name].file_bytes == pytest.approx(published, rel=share)


def test_memory_holds_weights_and_keys_and_values() -> None:
    """Qwen3-0.6B: 28 layers of 8 heads of 128 numbers of 16 bits, for keys and for values."""
    row = named_models()["qwen3:0.6b"]
    kv_bytes = 4096 * 28 * 2 * 8 * 128 * 2
    assert row.memory_bytes == row.file_bytes + kv_bytes + 512 * 2**20


@pytest.mark.parametrize("name", named_models())
def test_every_row_is_complete_and_its_sizes_follow_from_its_configuration(name: str) -> None:
    row = named_models()[name]
    family, _, size = name.partition(":")
    assert family and size and name == name.lower()
    assert parse_reference(row.repository) is not None and row.shape in published_shapes()
    assert row.page.startswith(("https://huggingface.co/", "https://github.com/"))
    assert row.license
    assert find_named_model(name) is row
    assert find_named_model(family) in named_models().values()
    if row.file is not None:
        assert row.file.endswith(".gguf") and quantization_of(row.file) in ("Q4_K_M", "Q8_0")
    assert list(check_models.size_problems(row)) == []
    assert len(list(check_models.size_problems(replace(row, memory_bytes=1)))) == 1


@pytest.mark.parametrize(
    ("memory", "best"),
    [(0.5, None), (1.0, "smollm2:135m"), (7.0, "qwen3:4b"), (16, "glm4:9b"), (1000, "qwen3:32b")],
)
def test_the_best_model_takes_at_most_half_of_the_memory(memory: float, best: str | None) -> None:
    """By the sizes above: 6.17e9 bytes of GLM-4-9B fit half of 16 GiB, and 8.4 GiB do not."""
    found = best_named_model(int(memory * 2**30))
    assert (found.name if found else None) == best


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackHub]:
    with loopback_hub() as served:
        served.use(monkeypatch, tmp_path)
        yield served


def test_rows_are_compared_with_the_hub(hub: LoopbackHub) -> None:
    row = replace(named_models()["qwen3:0.6b"], file_bytes=2000)
    assert row.file is not None
    hub.repositories[row.repository] = Repository({row.file: b"x" * 2010})
    assert list(check_models.hub_problems(row)) == []
    for wrong, problem in (
        (replace(row, file_bytes=1000), "has 2010 bytes, not 1000"),
        (replace(row, license="mit"), "the license of Qwen/Qwen3-0.6B-GGUF is apache-2.0, not mit"),
        (replace(row, file="none.gguf"), f"has no none.gguf; see {row.page}"),
        (replace(row, file=None), f"has no weights; see {row.page}"),
        (replace(row, repository="a/b"), f"the hub has no a/b; it is named at {row.page}"),
    ):
        (told,) = check_models.hub_problems(wrong)
        assert problem in told


def test_without_a_network_the_sizes_are_still_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(check_models, "named_models", lambda: {"a": named_models()["qwen3:4b"]})
    assert check_models.main() == 0
    assert "the hub is not asked" in capsys.readouterr().err
