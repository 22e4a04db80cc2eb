"""The pre-tokenizers of GGUF files that divide text as another one does, and those that divide it
several times."""

from collections.abc import Mapping

# Words of a case: letters without a case belong to both.
_SOME_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SOME_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEGINNING = r"[^\r\n\p{L}\p{N}]?"
_LOWER_WORD = f"{_BEGINNING}{_SOME_UPPER}*{_SOME_LOWER}+"
_UPPER_WORD = f"{_BEGINNING}{_SOME_UPPER}+{_SOME_LOWER}*"
_BEHIND_WORDS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_LOWER_WORD}|{_UPPER_WORD}|\p{{N}}|{_BEHIND_WORDS}"
_AYA = rf"{_LOWER_WORD}{_SHORTENED}|{_UPPER_WORD}{_SHORTENED}|\p{{N}}{{1,3}}|{_BEHIND_WORDS}"

_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ"
    "-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK"
    "-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-"
    "𐳲𑢠-𑣟𞤀-𞥃"
)
"""The letters with a case that DeepSeek's first tokenizer knows."""
_EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    r"\s?[!-/:-~！-／：-～‘-‟" + "\u3000-。]+",
    r"\s+$",
    _EAST_ASIAN,
    r"\p{N}",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r'[!"#$%&'
    r"'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)

MORE_WORDS: Mapping[str, tuple[str, ...]] = {
    "tekken": (_TEKKEN,),
    "gpt-4o": (_AYA,),
    "tiny_aya": (r"\d{1,3}(?=(?:\d{3})*\b)", _AYA),
    "deepseek-llm": _DEEPSEEK_LLM,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK3,
    "joyai-llm": _DEEPSEEK3,  # also DeepSeek-V3's, where it adds no BOS
}
"""Regular expressions by `tokenizer.ggml.pre`; each divides what those before it have left. They
are those of the models' own tokenizer.json."""

LIKE_LLAMA3 = (
    "llama-bpe",
    "llama3",
    "llama-v3",
    "falcon3",
    "falcon-h1",
    "pixtral",
    "midm-2.0",
    "lfm2",
    "jina-v5-nano",
)
"""Names that llama.cpp has for the pre-tokenizer of Llama 3."""
SAME_WORDS: Mapping[str, str] = dict.fromkeys(LIKE_LLAMA3, "llama-bpe") | {
    "smaug-bpe": "llama-bpe",
    "command-r": "gpt-2",
    "deepseek-r1-qwen": "qwen2",
}
"""The pre-tokenizer with the same expression, for some names."""
WHOLE_WORDS = (*LIKE_LLAMA3, "smaug-bpe", "tekken", "glm4", "gpt-4o")
"""Pre-tokenizers that leave a word which is a token whole."""
WITH_BOS = (*LIKE_LLAMA3, "tekken")
"""Pre-tokenizers with which a text begins with BOS unless the file says otherwise."""
