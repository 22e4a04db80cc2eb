"""Compare a block-diffusion storyteller with the bundled one: what they write, and how fast.

    python scripts/compare_diffusion.py
    python scripts/compare_diffusion.py --speed

The first prints what answers to the 40 requests of the model card are like: perplexities, repeated
4-grams and distinct words, at equal length, and how many answers have both nouns. The judges of
perplexity are the bundled storyteller and its small sibling. The second measures tokens a step and
tokens a second of batches, one model after the other in turn, and writes
nanoserve/lab/papers/diffusion.csv. `scripts/train_diffusion.py` makes such a model; without --model
it is the one that ships with the package.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the project need not be installed

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

from nanoserve import LLM, SamplingParams
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder
from nanoserve.models.hub import DIFFUSION, DRAFT
from nanoserve.models.loading import load_model
from nanoserve.utils.files import replace_file
from scripts.storyteller_tales import HELD_OUT_PAIRS, plural, with_article

ASSETS = REPOSITORY / "nanoserve/assets"
STORYTELLER, SIBLING, SHIPPED = ASSETS / "storyteller", ASSETS / DRAFT, ASSETS / DIFFUSION
DATA = REPOSITORY / "nanoserve/lab/papers/diffusion.csv"
MOST_TOKENS = 350
BATCHES = (1, 4, 16)
SPEED_TOKENS = 64
REPEATS = 3


class Told(NamedTuple):
    """A request and its answer, as tokens; the answer as text too."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    text: str


def tell(llm: LLM, temperature: float, top_p: float) -> list[Told]:
    """Ask for the 40 stories, with the seeds 0, 1, ..."""
    chats = [
        [{"role": "user", "content": f"a story about {with_article(one)} and {with_article(two)}"}]
        for one, two in HELD_OUT_PAIRS
    ]
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, seed=seed, max_tokens=MOST_TOKENS)
        for seed in range(len(chats))
    ]
    return [
        Told(output.prompt_token_ids, output.outputs[0].token_ids, output.outputs[0].text)
        for output in llm.chat(chats, params)
    ]


class Writing(NamedTuple):
    """Measures of answers that are cut to given lengths; the last is of whole ones."""

    tokens: int
    perplexities: tuple[float, ...]
    """Perplexity under each judge."""
    repeated: float
    """Share of the sequences of four words that were in the answer before."""
    distinct: int
    """Different words of all answers together."""
    with_nouns: int
    """Answers that have both nouns."""


def measure(
    told: Sequence[Told], lengths: Sequence[int], judges: Sequence[Decoder], llm: LLM
) -> Writing:
    """Measure the answers to the 40 requests."""
    cut = [
        one._replace(answer=one.answer[:length]) for one, length in zip(told, lengths, strict=True)
    ]
    texts = [words_of(llm.tokenizer.decode(one.answer)) for one in cut]
    repeated, four_grams = 0, 0
    for words in texts:
        found = list(zip(words, words[1:], words[2:], words[3:], strict=False))
        repeated += len(found) - len(set(found))
        four_grams += len(found)
    has_both = [
        has_word(one.text, first) and has_word(one.text, second)
        for one, (first, second) in zip(told, HELD_OUT_PAIRS, strict=True)
    ]
    return Writing(
        tokens=sum(lengths),
        perplexities=tuple(perplexity(judge, cut) for judge in judges),
        repeated=repeated / max(four_grams, 1),
        distinct=len({word for words in texts for word in words}),
        with_nouns=sum(has_both),
    )


def words_of(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def has_word(text: str, word: str) -> bool:
    """Whether the word or its plural is in the text as a whole word."""
    return re.search(rf"\b({word}|{plural(word)})\b", text.lower()) is not None


@torch.inference_mode()
def perplexity(judge: Decoder, told: Iterable[Told]) -> float:
    """The perplexity of the answers, given their requests."""
    nats, tokens = 0.0, 0
    for one in told:
        ids = torch.tensor(one.prompt + one.answer)
        length = len(ids)
        attention = DenseCausalAttention(judge.config, 1, length)
        hidden: Tensor = judge(ids, torch.arange(length), attention)
        before = hidden[len(one.prompt) - 1 : -1]
        answer = ids[len(one.prompt) :]
        nats += functional.cross_entropy(
            judge.compute_logits(before), answer, reduction="sum"
        ).item()
        tokens += len(answer)
    return math.exp(nats / tokens)


def compare(model: Path, denoising: str, temperature: float, top_p: float) -> None:
    """Print what both models write."""
    judges = [load_model(directory, "float32")[0] for directory in (STORYTELLER, SIBLING)]
    with LLM(STORYTELLER, dtype="float32") as plain:
        told = tell(plain, 0.8, 0.95)
    with LLM(model, dtype="float32", denoising=denoising) as llm:
        diffused = tell(llm, temperature, top_p)
        lengths = [
            min(len(one.answer), len(other.answer))
            for one, other in zip(told, diffused, strict=True)
        ]
        for name, answers in (("storyteller", told), (str(model), diffused)):
            writing = measure(answers, lengths, judges, llm)
            print(
                f"{name}: {writing.tokens} tokens, perplexity "
                f"{' and '.join(f'{one:.2f}' for one in writing.perplexities)}, "
                f"{100 * writing.repeated:.1f} % of 4-grams repeated, "
                f"{writing.distinct} distinct words, both nouns in {writing.with_nouns} of "
                f"{len(answers)}"
            )
    for one in diffused[:3]:
        print(f"\n{one.text}")


# ---- speed ---------------------------------------------------------------------------------------


class Timing(NamedTuple):
    """A batch of sequences that was written, and what it took."""

    model: str
    batch: int
    repeat: int
    tokens: int
    steps: int
    seconds: float
    processor_seconds: float


def time_batches(
    llms: Sequence[tuple[str, LLM]], batches: Sequence[int], repeats: int, tokens: int
) -> list[Timing]:
    """Have the models write batches in turn; the first turn of each batch is not counted."""
    timings = []
    for batch in batches:
        for repeat in range(-1, repeats):
            for name, llm in llms:
                params = msgspec.structs.replace(
                    llm.default_sampling_params(),
                    seed=repeat + 1,
                    n=batch,
                    max_tokens=tokens,
                    ignore_eos=True,
                )
                steps = llm.status.steps
                began, busy = time.monotonic(), time.process_time()
                llm.generate("Once upon a time", params)
                ended, was_busy = time.monotonic(), time.process_time()
                timing = Timing(
                    name,
                    batch,
                    repeat,
                    batch * tokens,
                    llm.status.steps - steps,
                    round(ended - began, 4),
                    round(was_busy - busy, 4),
                )
                if repeat >= 0:
                    timings.append(timing)
    return timings


def to_csv(timings: Iterable[Timing]) -> str:
    """Make a row of each timing."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(Timing._fields)
    table.writerows(timings)
    return text.getvalue()


def compare_speeds(model: Path, denoising: str) -> None:
    """Measure both models, print their fastest turns, and write the data."""
    with LLM(STORYTELLER) as plain, LLM(model, denoising=denoising) as diffusion:
        llms = [("storyteller", plain), ("block diffusion", diffusion)]
        timings = time_batches(llms, BATCHES, REPEATS, SPEED_TOKENS)
    replace_file(DATA, to_csv(timings).encode())
    for batch in BATCHES:
        for name, _ in llms:
            own = [one for one in timings if (one.model, one.batch) == (name, batch)]
            tokens_a_step = sum(one.tokens for one in own) / sum(one.steps for one in own) / batch
            speeds = sorted(one.tokens / one.seconds for one in own)
            print(
                f"{name}, batch {batch}: {tokens_a_step:.2f} tokens a step of a sequence, "
                f"{speeds[len(speeds) // 2]:.0f} tokens/s "
                f"[{speeds[0]:.0f}..{speeds[-1]:.0f}]"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare what is written, or the speeds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SHIPPED, help="directory of the model")
    parser.add_argument("--denoising", default="confidence", help="how tokens are settled")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the model's answers")
    parser.add_argument("--top-p", type=float, default=0.97, help="of the model's answers")
    parser.add_argument("--speed", action="store_true", help="measure the speeds")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.speed:
        compare_speeds(options.model, options.denoising)
    else:
        compare(options.model, options.denoising, options.temperature, options.top_p)


if __name__ == "__main__":
    main()
