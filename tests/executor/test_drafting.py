"""Heads at work: what they draft in an engine is what they draft from dense passes over what is
known, one sequence at a time, however prompts are cut, shared and preempted; and the answers are
those of plain decoding."""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import nanoserve
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.executor.drafting.drafter import DraftedSequence, Drafter
from nanoserve.executor.drafting.drafting import Drafting
from nanoserve.executor.drafting.features import FeatureCache
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.start.drafters import load_drafter
from nanoserve.executor.start.memory import kv_bytes_per_block
from nanoserve.executor.start.model_loading import load_decoder
from nanoserve.executor.step.staging import Staging
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.draft_heads import Eagle3Head, EagleHead, MedusaHeads
from nanoserve.models.hub import resolve_model
from nanoserve.request import SamplingParams
from scripts.saving import llama_config
from tests.executor.small_model import mechanism_of
from tests.scheduler.test_speculation import PROMPTS, SETTINGS, _facts
from triton_ops.cache import SKIPPED_SLOT

KINDS = ("eagle", "eagle3", "medusa")
SETTING = {"dtype": "float32", "eager": True, "seed": 0}


@pytest.fixture(scope="module")
def plain() -> Iterator[nanoserve.LLM]:
    with nanoserve.LLM(**SETTING) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(plain: nanoserve.LLM) -> dict[str, list[nanoserve.RequestOutput]]:
    """Plain decoding's, by the names of the settings."""
    return {name: plain.generate(PROMPTS, SETTINGS[name]) for name in ("random", "cut")}


@pytest.fixture(scope="module")
def heads(plain: nanoserve.LLM, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random ones for the bundled model."""
    target = plain.engine.executor.runner.decoder
    return {kind: write_head(kind, target, tmp_path_factory.mktemp(kind)) for kind in KINDS}


def write_head(kind: str, target: Decoder, directory: Path) -> Path:
    torch.manual_seed(3)
    config = replace(target.config, num_layers=1, intermediate_size=64, tie_word_embeddings=False)
    fields = llama_config(config, torch.float32)
    head: EagleHead | MedusaHeads = EagleHead(config, target)
    extra: dict[str, Tensor] = {}
    if kind == "eagle3":
        targets = torch.randperm(config.vocab_size)[:300].sort().values
        head = Eagle3Head(config, target, (0, 2, 3), targets)
        extra["d2t"] = targets - torch.arange(300)
        fields |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 300}
        fields["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    if kind == "medusa":
        head = MedusaHeads(config.hidden_size, config.vocab_size, 4, 1)
        fields = {"medusa_num_heads": 4, "medusa_num_layers": 1}
    scale = config.hidden_size**-0.5
    tensors = {
        part.name: torch.randn(part.shape) * scale + (1.0 if len(part.shape) == 1 else 0.0)
        for part in head.parts()
    }
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(tensors | extra, directory / "model.safetensors")
    return directory


@dataclass
class Watched:
    """A drafter whose draft tokens are noted, and in whose place those are given that plain
    decoding answers, some wrong."""

    inner: Drafter
    answers: list[tuple[int, ...]]
    """With their prompts."""
    noted: list[tuple[tuple[int, ...], SamplingState, list[int]]] = field(default_factory=list)

    @property
    def features(self) -> FeatureCache | None:
        return self.inner.features

    def draft(self, sequences: Sequence[DraftedSequence], counts: Sequence[int]) -> list[list[int]]:
        known = [tuple(one.tokens) for one in sequences]
        found = self.inner.draft(sequences, counts)
        assert all(len(draft) <= count for draft, count in zip(found, counts, strict=True))
        states = [one.plain for one in sequences]
        self.noted += zip(known, states, found, strict=True)
        return [self._given(tokens, count) for tokens, count in zip(known, counts, strict=True)]

    def _given(self, known: tuple[int, ...], count: int) -> list[int]:
        whole = next((one for one in self.answers if one[: len(known)] == known), known)
        right = whole[len(known) : len(known) + count]
        return [
            (token + ((len(known) + place) % 5 == 0)) % 4096 for place, token in enumerate(right)
        ]


def features_of(target: Decoder, tokens: Tensor, layers: Sequence[int]) -> Tensor:
    kept: dict[int, Tensor] = {}

    def run(layer: DecoderLayer, *inputs: Tensor) -> Tensor:
        kept[layer.index] = output = layer(*inputs)
        return output

    attention = DenseCausalAttention(target.config, 1, len(tokens))
    hidden = target(tokens, torch.arange(len(tokens)), attention, run)
    return torch.cat([kept[layer] for layer in layers], -1) if layers else hidden


def drawn(logits: Tensor, state: SamplingState, position: int) -> int:
    return int(
        sample(logits, SamplingRows.stage([state], [position], Staging(torch.device("cpu")))).tokens
    )


def dense_draft_tokens(
    target: Decoder,
    head: EagleHead | MedusaHeads,
    known: tuple[int, ...],
    state: SamplingState,
    count: int,
) -> list[int]:
    """Draft as a head does to follow these tokens, by its paper."""
    tokens, draft_tokens = torch.tensor(known), list[int]()
    if isinstance(head, MedusaHeads):
        logits = head(features_of(target, tokens[:-1], ())[-1:], count)
        return [drawn(one, state, len(known) + ahead) for ahead, one in enumerate(logits)]
    features = head.fuse(features_of(target, tokens[:-1], head.feature_layers))
    for _ in range(count):
        pairs = head.pair(torch.tensor([*known[1:], *draft_tokens]), features)
        hidden = head(
            pairs, torch.arange(len(pairs)), DenseCausalAttention(head.config, 1, len(pairs))
        )[-1:]
        draft_tokens.append(
            drawn(head.compute_logits(hidden), state, len(known) + len(draft_tokens))
        )
        features = torch.cat((features, hidden))
    return draft_tokens


def _sequences(outputs: list[nanoserve.RequestOutput]) -> list[tuple[int, ...]]:
    return [
        tuple(output.prompt_token_ids) + tuple(completion.token_ids)
        for output in outputs
        for completion in output.outputs
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_drafts_what_it_does_over_dense_passes(
    kind: str, answers: dict[str, list[nanoserve.RequestOutput]], heads: dict[str, Path]
) -> None:
    memory = 2**20 if kind != "medusa" else 3 * 2**18  # so that sequences are preempted
    small = {"kv_cache_memory": memory, "max_model_len": 96, "max_num_batched_tokens": 24}
    with nanoserve.LLM(speculate=spelled(kind, heads[kind]), **small, **SETTING) as speculating:
        runner, table = speculating.engine.executor.runner, speculating.engine.scheduler.table
        drafts = speculating.engine.scheduler.extensions.drafts
        speculating.engine.scheduler.predictors = ()  # so that all that may be is drafted
        drafting = mechanism_of(speculating.engine.executor, Drafting)
        inner = drafting.drafter
        head = inner._heads if kind == "medusa" else inner._decoder
        for name in ("random", "cut", "random"):  # the last finds cached prefixes
            outputs = answers[name]
            watched = drafting.drafter = Watched(inner, _sequences(outputs))
            assert _facts(speculating.generate(PROMPTS, SETTINGS[name])) == _facts(outputs), name
            with torch.inference_mode():
                for known, state, found in watched.noted[:: max(1, len(watched.noted) // 6)]:
                    assert found == dense_draft_tokens(
                        runner.decoder, head, known, state, len(found)
                    ), (
                        name,
                        len(known),
                    )
        assert 0 < sum(drafts.proposer.counts.accepted) < drafts.proposer.counts.draft_tokens
        assert table.preemptions > 0


LONG_PROMPTS = [prompt + " one two three" for prompt in PROMPTS]
TO_THE_END = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def cut_off() -> list[nanoserve.RequestOutput]:
    """Answers of plain decoding that end at the context."""
    with nanoserve.LLM(max_model_len=32, **SETTING) as short:
        return short.generate(LONG_PROMPTS, TO_THE_END)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_end_at_the_context_and_are_those_without_a_head(
    kind: str, cut_off: list[nanoserve.RequestOutput], heads: dict[str, Path]
) -> None:
    with nanoserve.LLM(
        speculate=spelled(kind, heads[kind]), max_model_len=32, **SETTING
    ) as speculating:
        speculating.engine.scheduler.predictors = ()
        drafting = mechanism_of(speculating.engine.executor, Drafting)
        drafting.drafter = Watched(drafting.drafter, _sequences(cut_off))
        assert _facts(speculating.generate(LONG_PROMPTS, TO_THE_END)) == _facts(cut_off)
    assert {output.outputs[0].finish_reason for output in cut_off} == {"length"}


def test_features_are_read_where_they_were_written_and_padding_writes_none() -> None:
    cache = FeatureCache(
        2,
        layers=(),
        fuse=lambda found: found,
        num_blocks=3,
        block_size=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    with torch.inference_mode():
        cache.write(torch.tensor([3, SKIPPED_SLOT, 2]), torch.tensor([[1.0, 2], [9, 9], [3, 4]]))
        cache.copy(torch.tensor([[1, 0]]))
        assert cache.read(torch.arange(6)).tolist() == [
            [3, 4],
            [1, 2],
            [3, 4],
            [1, 2],
            [0, 0],
            [0, 0],
        ]


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_whose_logits_are_not_numbers_is_asked_once(
    kind: str,
    answers: dict[str, list[nanoserve.RequestOutput]],
    heads: dict[str, Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    with nanoserve.LLM(speculate=spelled(kind, heads[kind]), **SETTING) as speculating:
        drafter = mechanism_of(speculating.engine.executor, Drafting).drafter
        for parameter in (
            drafter._heads if kind == "medusa" else drafter._decoder.layers
        ).parameters():
            parameter.fill_(torch.nan)
        params = SETTINGS["random"]
        assert _facts(speculating.generate(PROMPTS[:1], params)) == _facts(answers["random"][:1])
    (told,) = [record.message for record in caplog.records if "drafted" in record.message]
    assert told == "nanoserve: nothing is drafted any more: the drafter's logits are not numbers"


def refusal(speculate: str, **settings: object) -> str:
    with pytest.raises(NanoserveError) as caught:
        nanoserve.LLM(speculate=speculate, **SETTING | settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_is_no_head_of_this_model_is_refused_in_one_line(
    heads: dict[str, Path], tmp_path: Path
) -> None:
    for kind in ("eagle", "medusa"):
        assert "none of ngram, draft:MODEL, eagle:PATH, medusa:PATH, auto" in refusal(kind)
        nowhere = f"{kind}:{tmp_path / 'nowhere'}"
        assert (
            refusal(nowhere)
            == f"--speculate {nowhere}: no {tmp_path}/nowhere/config.json; name a head's directory"
        )
        assert "no weights found" in refusal(
            f"{kind}:{copied(heads[kind], tmp_path / kind, weights=False)}"
        )
        (tmp_path / kind / "pytorch_model.bin").write_bytes(b"\x80\x04.")
        assert "which are not read; convert them to safetensors" in refusal(
            f"{kind}:{tmp_path / kind}"
        )
    assert "the head has hidden_size 256, the model" in refusal(
        f"eagle:{heads['eagle']}", model="storyteller-draft"
    )
    assert "has shape" in refusal(f"medusa:{heads['medusa']}", model="storyteller-draft")


def test_an_eagle_3_head_in_a_pipeline_is_refused(heads: dict[str, Path]) -> None:
    told = refusal(f"eagle:{heads['eagle3']}", pipeline_parallel=2)
    assert "an EAGLE-3 head reads layers of several stages; leave --pp out" in told


@pytest.mark.parametrize("kind", ["draft", "eagle", "medusa"])
def test_a_drafter_with_other_tokens_of_the_same_number_is_refused(
    kind: str, heads: dict[str, Path], tmp_path: Path
) -> None:
    own = resolve_model("storyteller-draft").directory
    directory = copied(heads.get(kind, own), tmp_path / kind)
    table = json.loads((own / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps(table))
    with nanoserve.LLM(speculate=f"{kind}:{directory}", **SETTING):
        pass
    vocabulary = table["model"]["vocab"]
    first, second = list(vocabulary)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (directory / "tokenizer.json").write_text(json.dumps(table))
    assert "its tokenizer is not that of storyteller" in refusal(f"{kind}:{directory}")


def test_a_drafter_that_does_not_fit_beside_the_cache_is_refused(heads: dict[str, Path]) -> None:
    decoder, config = load_decoder(
        resolve_model(None), EngineConfig(dtype="float32"), torch.device("cpu"), None
    )
    for kind in ("draft", "eagle", "medusa"):
        settings = EngineConfig(
            dtype="float32", eager=True, speculate=f"{kind}:{heads.get(kind, 'storyteller-draft')}"
        )
        start = load_drafter(settings, resolve_model(None), decoder, None)
        with pytest.raises(
            RuntimeFailure, match="lower --kv-cache-memory, or leave --speculate out"
        ) as caught:
            start.build(2**40 // start.block_bytes)
        assert f"the 1024.0 GiB of --speculate {kind}:" in str(caught.value)
    # What it takes counts as the cache's: a cache that holds a request alone may not hold it with a
    # drafter.
    alone = 4 * kv_bytes_per_block(config, 16, torch.float32)
    told = refusal(f"eagle:{heads['eagle']}", kv_cache_memory=alone, max_model_len=64)
    assert "one request may have 64; raise it to" in told


def copied(head: Path, directory: Path, *, weights: bool = True) -> Path:
    return shutil.copytree(
        head, directory, ignore=None if weights else shutil.ignore_patterns("*.safetensors")
    )


def spelled(kind: str, directory: Path) -> str:
    return f"{kind.removesuffix('3')}:{directory}"


def test_auto_takes_what_lies_in_the_models_directory_or_else_ngrams(
    heads: dict[str, Path], tmp_path: Path
) -> None:
    draft = resolve_model("storyteller-draft").directory
    model = shutil.copytree(
        resolve_model(None).directory, tmp_path / "model", ignore=shutil.ignore_patterns("eagle")
    )
    last = "ngram"
    for kind, found in (("draft", draft), ("medusa", heads["medusa"]), ("eagle", heads["eagle3"])):
        with nanoserve.LLM(str(model), speculate="auto", **SETTING) as llm:
            assert llm.built.config.speculate == last
        copied(found, model / kind)
        last = f"{kind}:{model / kind}"
    with nanoserve.LLM(str(model), speculate="auto", **SETTING) as llm:
        assert llm.built.config.speculate == last
