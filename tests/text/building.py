"""Small tokenizers and model directories, made in the test from the text below."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

# Property tests run beside whatever else the machine does, so only their outcome counts, never
# their speed.
PATIENT = settings(
    max_examples=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

SENTENCES = [
    "Once upon a time there was a little fox who lived at the edge of the forest.",
    "The fox said hello to the owl, and the owl said hello to the fox!",
    "  Some lines begin with blanks,\n\nothers are empty.\tTabs exist too.",
    "user assistant system Hello. How are you today? I am fine, thank you.",
    "Numbers: 0 1 2 3 4 5 6 7 8 9 10 2026; signs: < > | [ ] { } ( ) # * _ / \\ \" '",
    "Grüße aus München, déjà vu, naïve café.",
    "你好,世界。今天天气很好。",
    "<im start end think tool call> [INST] text of tags |end|",
] * 4

CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_TOKENS = ["<think>", "</think>", "<tool_call>"]
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def make_byte_level(directory: Path, **settings: Any) -> Path:
    """A byte-level BPE tokenizer as GPT-2, Llama 3 and Qwen have it, with ChatML's control
    tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=CHAT_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.add_tokens(
        [AddedToken(text, special=False, normalized=False) for text in PLAIN_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    defaults = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "chat_template": CHATML}
    write_json(directory / "tokenizer_config.json", {**defaults, **settings})
    return directory


def make_metaspace(directory: Path, *, scheme: str = "first", **settings: Any) -> Path:
    """A tokenizer.json as it is converted from sentencepiece: blanks as U+2581, byte fallback, BOS
    from the post processor, and a control token that swallows the blanks to its right."""
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    control = ["<unk>", "<s>", "</s>"]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=control + byte_pieces, show_progress=False
    )
    trained.train_from_iterator([text for text in SENTENCES if text.isascii()], trainer)
    state = json.loads(trained.to_str())
    # Training makes the byte pieces special, which in real vocabularies they are not.
    state["added_tokens"] = [
        token for token in state["added_tokens"] if token["content"] in control
    ]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(
        [AddedToken("<|end|>", rstrip=True, normalized=False, special=True)]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}<|end|>  \n{% "
        "endfor %}"
    )
    defaults = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": template,
    }
    write_json(directory / "tokenizer_config.json", {**defaults, **settings})
    return directory


def make_sentencepiece(
    directory: Path, *, user_defined: Sequence[str] = (), **settings: Any
) -> Path:
    """A tokenizer.model with byte fallback, and a control token and a plain one added beside it.
    `user_defined` are pieces that sentencepiece takes out of any text."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text for text in SENTENCES if text.isascii()]),
        model_prefix=str(directory / "tokenizer"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        user_defined_symbols=list(user_defined),
    )
    (directory / "tokenizer.vocab").unlink()
    size = sentencepiece.SentencePieceProcessor(
        model_file=str(directory / "tokenizer.model")
    ).piece_size()
    declared = {
        str(size): {"content": "<|end|>", "special": True},
        str(size + 1): {"content": "<tool>", "special": False},
    }
    defaults = {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>"},
        "added_tokens_decoder": declared,
    }
    write_json(directory / "tokenizer_config.json", {**defaults, **settings})
    return directory
