"""The script that trains the models of figure kv-quality: its checkpoints answer in the engine, it
goes on where it was, and writes the data."""

import csv
import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanoserve import LLM, SamplingParams
from nanoserve.lab.papers.attention_kinds import KINDS, checkpoint_config
from scripts import train_kv_quality
from scripts.saving import save_checkpoint
from scripts.train_kv_quality import (
    DATA,
    ROW,
    ROWS,
    Trained,
    TrainingRun,
    make_batches,
    new_decoder,
    to_csv,
    train,
)
from scripts.train_storyteller import STORYTELLER, load_tokenizer


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_model_answers_in_the_engine(kind: str, tmp_path: Path) -> None:
    decoder, config = new_decoder(kind, seed=0)
    draw = torch.Generator().manual_seed(0)
    # ten tokens that repeat: a few steps are enough to foresee them
    tokens = torch.randint(5, 4096, (10,), generator=draw).repeat(4)
    batch = torch.stack([tokens, torch.ones_like(tokens)], -1)[None]
    losses = [loss for _, loss in train(decoder, [batch] * 6)]
    assert losses[-1] < losses[0] - 1
    save_checkpoint(decoder, config, checkpoint_config(kind), tmp_path)
    load_tokenizer(STORYTELLER).save(str(tmp_path / "tokenizer.json"))

    prompt = tokens[:12].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(str(tmp_path), dtype="float32", eager=True) as llm:
        (output,) = llm.generate([prompt], params)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert list(output.outputs[0].token_ids) == expected[0, 12:].tolist()


def test_all_stories_are_read_once_in_the_order_of_the_seed() -> None:
    tokenizer = load_tokenizer(STORYTELLER)
    draw = random.Random(0)
    words = ("dog", "cat", "tree", "sun", "ball")
    stories = [" ".join(draw.choices(words, k=300)) for _ in range(60)]
    first, again, other = (make_batches(stories, tokenizer, seed) for seed in (0, 0, 1))
    assert all(batch.shape == (ROWS, ROW + 1, 2) for batch in first)
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert not torch.equal(torch.stack(first), torch.stack(other))
    length = sum(len(tokenizer.encode(story).ids) for story in stories)
    assert len(first) == len(other) == length // (ROWS * (ROW + 1))


def test_a_run_that_is_there_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun = list[str]()

    def trained(run: TrainingRun, target: Path) -> Trained:
        begun.append(target.name)
        target.mkdir()
        return Trained(parameters=100, tokens=4096, seconds=9.6, nats_per_byte=0.71239)

    monkeypatch.setattr(train_kv_quality.TrainingRun, "_train", trained)
    first = TrainingRun("GQA", 0, tmp_path, tmp_path)
    results = [first.run(), first.run(), TrainingRun("MLA", 2, tmp_path, tmp_path).run()]
    assert begun == ["gqa-0", "mla-2"]
    assert results[0] == results[1]
    json.loads((tmp_path / "gqa-0/result.json").read_text())
    rows = [*csv.DictReader(to_csv(results[1:]).splitlines())]
    assert [(row["kind"], row["bytes_of_token"], row["nats_per_byte"]) for row in rows] == [
        ("GQA", "1024", "0.7124"),
        ("MLA", "640", "0.7124"),
    ]


def test_the_shipped_file_is_of_these_columns() -> None:
    with DATA.open(encoding="utf-8", newline="") as table:
        assert csv.DictReader(table).fieldnames == [*train_kv_quality.COLUMNS]
