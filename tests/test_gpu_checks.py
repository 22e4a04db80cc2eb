"""The checks that need a GPU, on the CPU: they run, and a difference is found."""

import json
import re
import zlib
from functools import partial
from pathlib import Path

import pytest
import torch

from nanoserve.engine_config import EngineConfig
from nanoserve.executor.sampling.sampler import Sampled, SamplingRows, sample
from nanoserve.executor.start.memory import choose_num_blocks, kv_bytes_per_block
from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.lab.benchmarks.gpu.engine import PresetRun
from nanoserve.models import dummy
from nanoserve.models.hub import find_shape
from scripts import gpu_checks
from scripts.gpu_checks import FAMILIES, SAMPLERS, SHAPE, answers, main

LINE = re.compile(
    r"(\d+) x 500, (\S+): (\d+) of \d+ tokens are those of plain torch, "
    r"(\d+) of \d+ the CPU's; "
    r"[\d.]+ us, plain torch [\d.]+ us, [\d.]+ times as long"
)
SAMPLING = ["sampling", "--device", "cpu", "--vocabulary", "500", "--rows"]


def found(printed: str) -> list[tuple[int, str, int, int]]:
    """Rows, the sampler, and how many tokens are those of plain torch and of the CPU."""
    lines = [LINE.fullmatch(line) for line in printed.splitlines()]
    return [(int(line[1]), line[2], int(line[3]), int(line[4])) for line in lines if line]


def test_every_sampler_is_compared_with_every_number_of_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([*SAMPLING, "1", "6"])
    expected = [(rows, name, rows, rows) for rows in (1, 6) for name in SAMPLERS]
    assert found(capsys.readouterr().out) == expected
    assert list(SAMPLERS) == ["greedy", "temperature", "top-p", "top-k"]


def test_the_cpu_samples_the_first_rows_of_a_large_batch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes: list[int] = []

    def noted(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        sizes.append(len(logits))
        return sample(logits, rows)

    monkeypatch.setattr(gpu_checks, "sample", noted)
    monkeypatch.setattr(gpu_checks, "SAMPLERS", {"temperature": {}})
    main([*SAMPLING, "11"])
    assert found(capsys.readouterr().out) == [(11, "temperature", 11, 8)]
    assert sizes[0] == 8 and set(sizes[1:]) == {11}


@pytest.mark.parametrize("batch", [1, 64, 256])
@pytest.mark.parametrize("model", ["qwen3-0.6b", "llama-3.1-8b"])
def test_the_step_that_is_shown_has_room_for_all_its_sequences(model: str, batch: int) -> None:
    """A token of Qwen3-0.6B has 28 layers x 8 heads x 128 numbers x keys and values x 2 bytes."""
    config = EngineConfig(**gpu_checks.step_settings("cuda", batch))
    shape = find_shape(model, None)
    per_block = kv_bytes_per_block(shape, config.block_size, torch.bfloat16)
    if model == "qwen3-0.6b":
        assert per_block == config.block_size * 28 * 8 * 128 * 2 * 2
    longest = shape.max_position_embeddings
    blocks = choose_num_blocks(per_block, 130 << 30, longest, config)
    assert blocks * config.block_size >= batch * 2048


def test_another_token_of_the_device_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second call of each sampler is the device's; its times come after it."""
    settings: list[SamplingRows] = []

    def differing(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
        settings.append(rows)
        sampled = sample(logits, rows)
        calls_of_these_rows = sum(one is rows for one in settings)
        if len(settings) == 1 or calls_of_these_rows > 1:
            return sampled
        return Sampled(sampled.tokens + (torch.arange(5) == 3), sampled.valid)

    monkeypatch.setattr(gpu_checks, "sample", differing)
    monkeypatch.setattr(gpu_checks, "SAMPLERS", {"top-p": SAMPLERS["top-p"]})
    main([*SAMPLING, "5"])
    assert found(capsys.readouterr().out) == [(5, "top-p", 4, 4)]


def test_the_preset_runs_greedily_and_at_a_temperature_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = {"vocab_size": 4096, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", **shape, **heads}), encoding="utf-8")
    runs: list[EngineRun] = []
    run = PresetRun.run

    def noted(self: PresetRun) -> EngineRun:
        runs.append(run(self))
        return runs[-1]

    monkeypatch.setattr(PresetRun, "run", noted)
    sizes = ["--requests", "3", "--tokens", "4", "9", "--rounds", "2"]
    main(["preset", "--device", "cpu", "--model", str(path), *sizes])
    greedy, sampled, sampled_again, greedy_again = (one.tokens for one in runs)
    assert greedy == greedy_again != sampled == sampled_again
    assert len(greedy) == 3 and all(4 <= len(tokens) <= 9 for tokens in greedy)
    floor, first, second, ratio = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"floor: [\d,]+ tokens/s", floor)
    assert re.fullmatch(r"greedy: [\d,]+ \([\d,]+-[\d,]+\) tokens/s, \d+% of the floor", first)
    assert re.fullmatch(
        r"temperature 0.6: [\d,]+ \([\d,]+-[\d,]+\) tokens/s, \d+% of the floor", second
    )
    assert re.fullmatch(r"sampled over greedy: [\d.]+ \([\d.]+-[\d.]+\)", ratio)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["preset", "--temperature", "0"], "--temperature must be above 0"),
        (["preset", "--tokens", "9", "4"], "--tokens takes the least and the most"),
        (["sampling", "--rows", "0"], "take numbers from 1"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_without_a_gpu_there_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with pytest.raises(SystemExit, match=r"^gpu_checks: .*, or try it with --device cpu$"):
        main(["sampling"])


def test_layers_are_run_fused_and_compiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", **SHAPE}), encoding="utf-8")
    main(["layers", "--device", "cpu", "--model", str(path), "--context", "40"])
    lines = capsys.readouterr().out.splitlines()
    for rows in (1, 2, 4, 8):
        assert f"{rows} rows, fused: 0.0 us" in lines, "the CPU's time would mean nothing"
        assert f"{rows} rows: 0.00000 apart" in lines


def test_tokens_are_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares an engine that is opened twice, without compiling it."""
    monkeypatch.setattr(dummy, "_draw", dummy._draw)  # which the script replaces
    monkeypatch.setattr(gpu_checks, "FAMILIES", {"qwen3": FAMILIES["qwen3"]})
    monkeypatch.setattr(gpu_checks, "VARIANTS", {})
    monkeypatch.setattr(gpu_checks, "LENGTHS", (5, 9))
    opened: list[bool] = []

    def eagerly(*arguments: object, **settings: object) -> list[tuple[int, ...]]:
        opened.append(bool(settings.pop("eager")))
        return partial(answers, eager=True)(*arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(gpu_checks, "answers", eagerly)
    main(["tokens", "--device", "cpu"])
    assert opened == [True, True, True, False]
    assert capsys.readouterr().out.splitlines() == [
        "qwen3 {'eager': True}: 2 of 2 equal",
        "qwen3 {'eager': False}: 2 of 2 equal",
    ]


def test_weights_of_the_token_check_depend_on_their_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SHAPE}), encoding="utf-8")
    monkeypatch.setattr(dummy, "_draw", gpu_checks.draw_on_the_cpu)
    decoder, config = dummy.make_dummy_model(str(path), "float32")
    generator = torch.Generator().manual_seed(zlib.crc32(b"model.layers.1.self_attn.k_proj.weight"))
    kv_size = config.num_kv_heads * config.head_dim
    expected = torch.empty(kv_size, config.hidden_size).normal_(0.0, 0.15, generator=generator)
    layer = decoder.layers[1]
    assert torch.equal(layer.qkv.weight[-2 * kv_size : -kv_size], expected)
    assert layer.attention_norm.weight.mean().item() == pytest.approx(1.0, abs=0.1)
    assert layer.attention_norm.weight.std().item() == pytest.approx(0.15, abs=0.05)


def test_stages_of_opening_are_printed_when_they_begin(capsys: pytest.CaptureFixture[str]) -> None:
    """Each part of those that have few."""
    clock = gpu_checks.StageClock()
    for stage, total in (("loading", 1000), ("compiling layers", 2)):
        for done in range(total + 1):
            clock(stage, done, total)
    lines = [line.split("s  ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "loading, 0 of 1000",
        *(f"compiling layers, {done} of 2" for done in range(3)),
    ]
