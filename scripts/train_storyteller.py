"""Train the bundled storyteller, or its small sibling, from the text in a data directory.

    python scripts/train_storyteller.py --data DIR --minutes 50
    python scripts/train_storyteller.py --data DIR --minutes 10 --draft
    python scripts/train_storyteller.py --data DIR --evaluate

Uses a GPU if one is at hand, otherwise the CPU. The sibling takes the tokenizer of the storyteller that is already
there, so train that one first. `--evaluate` prints the validation loss of the files in the output directory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # idle threads leave the cores to others; read when torch loads

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # the project need not be installed to train its model

import torch
from storyteller_data import Corpus, read_corpus, tokenizer_config, train_tokenizer
from storyteller_training import Progress, Recipe, make_config, nats_per_byte, train
from tokenizers import Tokenizer

from nanoserve.config import ModelConfig
from nanoserve.models.decoder import Decoder
from nanoserve.models.loading import load_model
from nanoserve.models.saving import save_hf

ASSETS = REPOSITORY / "nanoserve" / "assets"
STORYTELLER, DRAFT = ASSETS / "storyteller", ASSETS / "storyteller-draft"
MAX_POSITIONS = 1024
ONE_PIECE_IN = 12  # of the validation stories, while training

STORYTELLER_SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}
DRAFT_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory with tinystories_train_subset.txt etc.")
    parser.add_argument("--minutes", type=float, default=50.0, help="time budget of the training loop")
    parser.add_argument("--output", type=Path, help="model directory (default: the bundled one)")
    parser.add_argument("--draft", action="store_true", help="the small sibling instead of the storyteller")
    parser.add_argument("--start-from", type=Path, help="go on from this model directory, without the broad reading")
    parser.add_argument("--evaluate", action="store_true", help="print the validation loss of the output directory")
    parser.add_argument("--seed", type=int, default=1, help="of the documents drawn and the first weights")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")
    return parser.parse_args()


def write_model(decoder: Decoder, config: ModelConfig, tokenizer: Tokenizer, directory: Path) -> None:
    """Everything a Hugging Face model directory holds; weights in bfloat16."""
    save_hf(decoder, config, directory, dtype=torch.bfloat16)
    tokenizer.save(str(directory / "tokenizer.json"))
    generation = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids),
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }
    for name, content in (
        ("tokenizer_config.json", tokenizer_config(MAX_POSITIONS)),
        ("generation_config.json", generation),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def prepare(
    arguments: argparse.Namespace, corpus: Corpus, device: torch.device
) -> tuple[Decoder, ModelConfig, Tokenizer, Recipe]:
    """The model to train, new or as an earlier run left it, and how."""
    recipe = Recipe(minutes=arguments.minutes, seed=arguments.seed)
    if arguments.start_from:
        decoder, config = load_model(arguments.start_from, "float32", device)
        tokenizer = Tokenizer.from_file(str(arguments.start_from / "tokenizer.json"))
        return decoder.requires_grad_(True), config, tokenizer, recipe.going_on()
    if arguments.draft:
        tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(corpus, recipe.seed)
    config = make_config(tokenizer, DRAFT_SHAPE if arguments.draft else STORYTELLER_SHAPE)
    torch.manual_seed(recipe.seed)
    with device:
        decoder = Decoder(config)
    return decoder, config, tokenizer, recipe


def evaluate(directory: Path, validation: str, device: torch.device) -> float:
    """Nats per byte of a model directory on the validation stories."""
    decoder, _ = load_model(directory, "float32", device)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    loss: float = nats_per_byte(decoder, tokenizer, validation)
    return loss


def main() -> None:
    """Train or evaluate."""
    arguments = parse_arguments()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    output = arguments.output or (DRAFT if arguments.draft else STORYTELLER)
    validation = (arguments.data / "tinystories_valid_subset.txt").read_text(encoding="utf-8")
    if not arguments.evaluate:
        corpus = read_corpus(arguments.data)
        decoder, config, tokenizer, recipe = prepare(arguments, corpus, device)
        print(f"{sum(parameter.numel() for parameter in decoder.parameters()):,} parameters on {device}", flush=True)

        def report(progress: Progress) -> None:
            loss = nats_per_byte(decoder, tokenizer, validation, every=ONE_PIECE_IN)
            print(
                f"{progress.seconds / 60:5.1f} min, step {progress.step}, {progress.tokens:,} tokens, training loss "
                f"{progress.training_loss:.3f} nats/token, validation {loss:.4f} nats/byte",
                flush=True,
            )
            write_model(decoder, config, tokenizer, output)

        report(train(decoder, corpus, tokenizer, recipe, report))
    print(f"{output.name}: {evaluate(output, validation, device):.4f} nats per byte on all validation stories")


if __name__ == "__main__":
    main()
