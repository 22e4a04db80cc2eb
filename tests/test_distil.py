"""The script that heals pruned models: its loss, going on after a stop, and what it writes."""

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from nanoserve.config.model_config import ModelConfig
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model, read_tensors
from nanoserve.text.tokenizer import load_tokenizer
from tests.oracle.checkpoints import make_checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import distil
from distil import STATE_NAME, Plan, Trainer, cut_rows, divergence, read_tokens

ASSETS = Path(__file__).resolve().parent.parent / "nanoserve/assets"
TEACHER, STUDENT = ASSETS / "storyteller", ASSETS / "storyteller-draft"
CONFIG = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    }
)
ROWS = torch.arange(7 * 8).view(7, 8) % 50


def small(seed: int) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(CONFIG)


def test_the_loss_is_the_divergence_of_transformers_distributions(tmp_path: Path) -> None:
    """The sum of p * ln(p / q) over the vocabulary, p of the teacher and q of the student, mean
    over all tokens."""
    oracles: list[Any] = []
    decoders = []
    for family in ("llama", "qwen3"):
        oracles.append(make_checkpoint(family, tmp_path / family).eval())
        decoders.append(load_model(tmp_path / family, "float32")[0])
    rows = torch.randint(3, 150, (3, 20), generator=torch.Generator().manual_seed(0))
    teacher, student = decoders
    with torch.inference_mode():
        p, q = (oracle(rows).logits.double().softmax(-1) for oracle in oracles)
        wanted = (p * (p / q).log()).sum(-1).mean()
        found = divergence(student, teacher)(rows)
        itself = divergence(teacher, teacher)(rows)
    assert float(found) == pytest.approx(float(wanted), rel=1e-3)
    assert float(itself) == pytest.approx(0.0, abs=1e-6)


def test_a_student_comes_nearer_to_its_teacher() -> None:
    teacher, student = small(0), small(1)
    loss = divergence(student, teacher)
    before = loss(ROWS).item()
    trainer = Trainer(student, ROWS, Plan(4, 1e-2, 0, tokens=40 * 4 * 8))
    steps = list(trainer.run(loss))
    assert len(steps) == 40
    assert [steps[0].tokens, steps[-1].tokens, steps[-1].share] == [32, 1280, 1.0]
    assert loss(ROWS).item() < 0.5 * before


def test_every_epoch_has_all_rows_in_an_order_of_the_seed() -> None:
    def rows_of(seed: int) -> list[list[int]]:
        trainer = Trainer(small(0), ROWS, Plan(2, 1e-3, seed, tokens=10**6))
        drawn = []
        for trainer.steps in range(7):
            drawn += trainer.batch()[:, 0].tolist()
        return [drawn[:7], drawn[7:]]

    first, second = rows_of(3)
    everything = ROWS[:, 0].tolist()
    assert sorted(first) == sorted(second) == everything
    assert first != second
    assert rows_of(3) == [first, second]
    assert rows_of(4) != [first, second]


def weights(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}


def test_a_stopped_run_ends_with_the_weights_of_one_that_was_not(tmp_path: Path) -> None:
    plan, teacher, state = Plan(2, 1e-2, 5, tokens=6 * 2 * 8), small(0), tmp_path / STATE_NAME
    whole = Trainer(small(1), ROWS, plan)
    assert len(list(whole.run(divergence(whole.decoder, teacher)))) == 6
    begun = Trainer(small(1), ROWS, plan)
    for step in begun.run(divergence(begun.decoder, teacher)):
        if step.number == 3:
            break
    begun.save(state, "settings")
    resumed = Trainer(small(2), ROWS, plan)
    resumed.load(state, "settings")
    assert len(list(resumed.run(divergence(resumed.decoder, teacher)))) == 3
    wanted = weights(whole.decoder)
    for name, parameter in weights(resumed.decoder).items():
        assert torch.equal(parameter, wanted[name]), name
    with pytest.raises(SystemExit, match="is of a run with other settings"):
        resumed.load(state, "others")


def test_processor_time_ends_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes half a second by this clock: it is asked before and after a step."""
    clock = iter(range(1000))
    monkeypatch.setattr(distil.time, "process_time", lambda: next(clock) / 2)
    trainer = Trainer(small(0), ROWS, Plan(2, 1e-3, 0, seconds=2.0))
    steps = list(trainer.run(lambda rows: trainer.decoder.embedding.weight.square().mean()))
    assert [step.share for step in steps] == [0.25, 0.5, 0.75, 1.0]


def test_rows_are_whole() -> None:
    assert cut_rows(list(range(11)), 4).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_conversations_are_in_the_chat_format_as_transformers_writes_them(tmp_path: Path) -> None:
    conversations = [
        [
            {"role": "user", "content": "a dog"},
            {"role": "assistant", "content": "Once, a dog sat."},
        ],
        [{"role": "user", "content": "a cat and a ball"}],
    ]
    text = tmp_path / "text.jsonl"
    text.write_text(
        "".join(json.dumps({"messages": messages}) + "\n" for messages in conversations)
    )
    oracle: Any = transformers.AutoTokenizer.from_pretrained(STUDENT)
    wanted = [oracle.apply_chat_template(messages)["input_ids"] for messages in conversations]
    with closing(load_tokenizer(STUDENT)) as tokenizer:
        assert read_tokens(text, tokenizer) == [*wanted[0], *wanted[1]]
        text.write_text('\n{"prompt": "a dog"}\n')
        with pytest.raises(SystemExit, match=r"text\.jsonl, line 2: no messages"):
            read_tokens(text, tokenizer)
        text.write_text('{"messages": [1]}\n')
        with pytest.raises(SystemExit, match=r"text\.jsonl, line 1: messages must be a list of"):
            read_tokens(text, tokenizer)


def test_the_script_stops_goes_on_and_writes_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, output = tmp_path / "text.txt", tmp_path / "healed"
    text.write_text("One day, a little dog went to the park with a big red ball. " * 12)
    words = ["--teacher", str(TEACHER), "--student", str(STUDENT), "--text", str(text)]
    words += ["--output", str(output), "--length", "16", "--rows", "2", "--tokens", "128"]
    step = Trainer._step

    def interrupted(trainer: Trainer, *arguments: Any) -> float:
        if trainer.steps == 2:
            raise KeyboardInterrupt
        return step(trainer, *arguments)

    with (
        monkeypatch.context() as patched,
        pytest.raises(SystemExit, match="after step 2; the same"),
    ):
        patched.setattr(Trainer, "_step", interrupted)
        distil.main(words)
    assert [path.name for path in output.iterdir()] == [STATE_NAME]
    with pytest.raises(SystemExit, match="is of a run with other settings"):
        distil.main([*words, "--seed", "1"])
    capsys.readouterr()
    distil.main(words)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "goes on after step 2"
    assert lines[-1] == f"{output}: 1.9 MiB of weights, distilled on 128 tokens"
    names = {path.name for path in output.iterdir()}
    assert names == {path.name for path in STUDENT.iterdir()} - {"MODEL_CARD.md"}
    before, after = read_tensors(STUDENT), read_tensors(output)
    assert before.keys() == after.keys()
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16}
    assert any(not torch.equal(tensor, before[name]) for name, tensor in after.items())
    oracle: Any = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert oracle.config.hidden_size == 128
    with pytest.raises(SystemExit, match="exists and is not empty; choose another --output"):
        distil.main(words)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"--text": "none.txt"}, r"cannot read .*none.txt"),
        ({"--teacher": "dummy:qwen3-0.6b"}, "has no files; give the directory or the hub id"),
        ({"--length": "4000"}, "has 6 tokens, and a row has 4000"),
    ],
)
def test_bad_input_is_one_line(changed: dict[str, str], says: str, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a dog and a cat")
    options = {"--teacher": str(TEACHER), "--student": str(STUDENT), "--text": str(text)}
    options |= {"--output": str(tmp_path / "output")} | changed
    with pytest.raises(SystemExit, match=says):
        distil.main([word for pair in options.items() for word in pair])
    assert not (tmp_path / "output").exists()
