"""Layers of one matrix: torch's, without its initialization, and with the operator made for them where there is one.

A Decoder draws its own first weights, if any. torch would draw others before.
"""

from torch import Tensor, nn

from triton_ops import project


class Linear(nn.Linear):
    """torch's layer, computed by `project`; its first weights are not set."""

    def reset_parameters(self) -> None:
        """Whoever makes the layer fills it."""

    def forward(self, input: Tensor) -> Tensor:
        return project(input, self.weight, self.bias)


class VocabularyEmbedding(nn.Embedding):
    """torch's layer, over a vocabulary or the part of it that begins at `first_row`; its first weights are not set."""

    def __init__(self, num_embeddings: int, embedding_dim: int, *, first_row: int = 0) -> None:
        super().__init__(num_embeddings, embedding_dim)
        self.first_row = first_row

    def reset_parameters(self) -> None:
        """Whoever makes the layer fills it."""

    def known(self, token_ids: Tensor) -> Tensor:
        """token_ids [T], of the whole vocabulary -> [T, embedding_dim]; zeros for tokens that other parts know."""
        rows = token_ids - self.first_row
        unknown = (rows < 0) | (rows >= self.num_embeddings)
        found: Tensor = self(rows.masked_fill(unknown, 0))
        return found.masked_fill(unknown[:, None], 0.0)
