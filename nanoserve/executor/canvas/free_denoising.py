"""FreeCanvasDenoising: the Mechanism that computes free canvases, which begin as random tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from nanoserve.config.model_parts import RenoisingConfig
from nanoserve.executor.canvas.renoising import Renoising, random_tokens
from nanoserve.executor.canvas.samplers import STEP_STRIDE, entropies_of
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.step.answers import NOT_NUMBERS, LogprobColumns, rows_per_chunk
from nanoserve.executor.step.forward_pass import row_ends
from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.attention import CanvasInputs
from nanoserve.models.decoder import Decoder
from nanoserve.request import TokenLogprob
from nanoserve.scheduler.plan import Answer, Row


@dataclass(slots=True)
class UnsettledCanvas:
    """A sequence's canvas between its steps."""

    soft_embeddings: Tensor
    """[length, hidden_size], on the device: what the last step expected at each position."""
    likeliest: list[np.ndarray] = field(default_factory=list)
    """The likeliest tokens of the last steps, int64 [length] each, as many as decide whether a
    canvas is stable."""


@dataclass(slots=True)
class _StagedStep:
    """Tensors on the device that a step needs beside its rows."""

    spans: Tensor
    """int32 [R, 2], as `AttentionBatch.spans`."""
    is_canvas: Tensor
    places: Tensor
    """See CanvasInputs."""


class FreeCanvasDenoising(Mechanism):
    """Has each canvas see itself whole, tells the decoder which tokens are canvases and what their
    last steps expected, and puts sampled and random tokens into them."""

    def __init__(self, length: int, renoising: RenoisingConfig) -> None:
        self._length, self._renoising = length, Renoising(renoising)
        self._unsettled: dict[int, UnsettledCanvas] = {}
        self._staged: dict[int, _StagedStep] = {}  # of steps that are prepared and have not begun

    def attach(self, runner: ModelRunner) -> None:
        self._runner = runner
        runner.stage_sampled = self._stage_sampled

    def prepare(self, step: PreparedStep) -> None:
        """Draw the tokens of new canvases, have the tokens of canvases count as known, and stage
        where they are."""
        records = self._runner.records
        for sequence in self._unsettled.keys() - records.keys():
            del self._unsettled[sequence]
        if not step.rows:
            return
        step.rows = [self._with_drawn_tokens(row) for row in step.rows]
        ends = row_ends(step.rows)
        spans = np.ones((len(step.rows), 2), np.int32)
        is_canvas = np.zeros(int(ends[-1]), np.bool_)
        for place, (row, end) in enumerate(zip(step.rows, ends.tolist(), strict=True)):
            spans[place, 1] = 0
            if row.canvas is not None:
                spans[place] = self._length, row.start
                is_canvas[end - self._length : end] = True
                if row.sequence in records:
                    record = records[row.sequence]
                    record.num_known = max(record.num_known, row.start + len(row.tokens))
        if is_canvas.any():
            add = self._runner.staging.add
            self._staged[step.plan.step] = _StagedStep(
                add(spans), add(is_canvas), add(np.flatnonzero(is_canvas))
            )

    def begin(self, step: PreparedStep) -> None:
        staged = self._staged.pop(step.plan.step, None)
        if staged is None or step.inputs is None:
            return
        for batch in step.inputs.batches:
            batch.spans = staged.spans
        soft_embeddings = [self._before(row) for row in step.rows if row.canvas is not None]
        step.inputs.canvas = CanvasInputs(
            staged.is_canvas, staged.places, torch.cat(soft_embeddings)
        )

    def abandon(self) -> None:
        self._staged.clear()

    def _with_drawn_tokens(self, row: Row) -> Row:
        """A row as it is, but a new canvas with its random tokens."""
        if row.canvas is None or row.canvas.step > 0 or row.sequence not in self._runner.records:
            return row
        state = self._runner.records[row.sequence].sampling
        vocab_size = self._runner.config.vocab_size
        tokens = random_tokens(state, row.start, self._length, 0, vocab_size)
        return replace(row, tokens=tuple(tokens.tolist()))

    def _before(self, row: Row) -> Tensor:
        """Return the soft embeddings that a canvas's step finds, [length, hidden_size]."""
        assert row.canvas is not None
        if row.canvas.step > 0:
            return self._unsettled[row.sequence].soft_embeddings
        decoder = self._runner.decoder
        shape = self._length, decoder.config.hidden_size
        return torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)

    def _stage_sampled(
        self,
        rows: Sequence[Row],
        ends: np.ndarray,
        states: Sequence[SamplingState],
        staging: Staging,
    ) -> "FreeCanvasRows | None":
        canvases = [
            FreeCanvas(row.sequence, row.start, row.canvas.step, state, end - self._length)
            for row, state, end in zip(rows, states, ends.tolist(), strict=True)
            if row.canvas is not None
        ]
        if not canvases:
            return None
        return FreeCanvasRows.stage(
            canvases,
            self._length,
            self._runner.config.vocab_size,
            self._renoising,
            self._unsettled,
            staging,
        )


@dataclass(frozen=True, slots=True)
class FreeCanvas:
    """A canvas before its step."""

    sequence: int
    start: int
    """Its first position in the sequence."""
    step: int
    """Steps that it has had."""
    state: SamplingState
    first_token: int
    """The place of its first token among those of the step."""


@dataclass(slots=True)
class Piece:
    """Some positions of a step's canvases, n of them, whose logits are looked at together."""

    places: Tensor
    """int64 [n], of their tokens in the step."""
    temperatures: Tensor
    """float32 [n], by the schedule of the canvas."""
    settings: SamplingRows
    asked: list[tuple[int, int]]
    """Positions, counted from 0 to n - 1, that want log probabilities, each with how many of the
    likeliest tokens to name."""
    asked_places: Tensor | None
    """int64 [number of these], if there are any."""
    logprobs: LogprobColumns | None = None
    """Log probabilities of the likeliest tokens at these, on the host."""

    @classmethod
    def stage(
        cls,
        positions: Sequence[tuple[FreeCanvas, int]],
        renoising: Renoising,
        staging: Staging,
    ) -> "Piece":
        """Stage positions: their canvases, and the place in each."""
        states = [canvas.state for canvas, _ in positions]
        counters = [canvas.step * STEP_STRIDE + canvas.start + place for canvas, place in positions]
        temperatures = [renoising.temperature(canvas.step) for canvas, _ in positions]
        asked = [
            (number, state.params.logprobs)
            for number, state in enumerate(states)
            if state.params.logprobs is not None
        ]
        asked_places = None
        if asked:
            asked_places = staging.add(np.array([number for number, _ in asked]))
        places = np.array([canvas.first_token + place for canvas, place in positions])
        return cls(
            staging.add(places),
            staging.add(np.array(temperatures, np.float32)),
            SamplingRows.stage(states, counters, staging),
            asked,
            asked_places,
        )


class Samples(NamedTuple):
    """Results of a step at N positions of canvases."""

    tokens: Tensor
    """int64 [N], drawn."""
    likeliest: Tensor
    """int64 [N]."""
    entropies: Tensor
    """float32 [N]."""
    valid: Tensor
    """bool [N], whether the logits are numbers."""


@dataclass(slots=True)
class FreeCanvasRows:
    """The canvases of a step (StepSamples). The vocabulary is computed in pieces of few positions;
    what is kept of them on the device are soft embeddings."""

    sequences: list[int]
    canvases: list[FreeCanvas]
    length: int
    vocab_size: int
    pieces: list[Piece]
    renoising: Renoising
    unsettled: dict[int, UnsettledCanvas]
    """Is kept from one step of a canvas to the next."""
    samples: Samples | None = None
    """On the host."""
    device_tokens: Tensor | None = None

    @classmethod
    def stage(
        cls,
        canvases: list[FreeCanvas],
        length: int,
        vocab_size: int,
        renoising: Renoising,
        unsettled: dict[int, UnsettledCanvas],
        staging: Staging,
    ) -> "FreeCanvasRows":
        """Have what the canvases of a step need moved to the device."""
        positions = [(canvas, place) for canvas in canvases for place in range(length)]
        size = rows_per_chunk(vocab_size)
        pieces = [
            Piece.stage(positions[start : start + size], renoising, staging)
            for start in range(0, len(positions), size)
        ]
        sequences = [canvas.sequence for canvas, _ in positions]
        return cls(sequences, canvases, length, vocab_size, pieces, renoising, unsettled)

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        """Sample at all positions of the canvases, and keep what each expects."""
        found, soft_embeddings = list[Samples](), list[Tensor]()
        for piece in self.pieces:
            logits = decoder.compute_logits(hidden[piece.places])
            if piece.asked_places is not None:
                most = max(top for _, top in piece.asked)
                chosen = logits[piece.asked_places]
                columns = LogprobColumns.of(chosen, chosen.argmax(1), most)
                piece.logprobs = columns.through(results.fetch)
            logits /= piece.temperatures[:, None]
            sampled = sample(logits, piece.settings)
            samples = Samples(sampled.tokens, logits.argmax(1), entropies_of(logits), sampled.valid)
            found.append(samples)
            soft_embeddings.append(decoder.soft_embeddings(logits))
        columns_of_all = (torch.cat(column) for column in zip(*found, strict=True))
        self.samples = Samples._make(results.fetch(column) for column in columns_of_all)
        by_canvas = torch.split(torch.cat(soft_embeddings), self.length)
        for canvas, expected in zip(self.canvases, by_canvas, strict=True):
            if canvas.step == 0:
                self.unsettled[canvas.sequence] = UnsettledCanvas(expected.clone())
            else:
                self.unsettled[canvas.sequence].soft_embeddings = expected.clone()

    def answers(self) -> Iterator[Answer]:
        """Answer with each canvas as its next step finds it, or with its tokens if it is final."""
        if self.samples is None:
            return
        tokens, likeliest, entropies, valid = (column.numpy() for column in self.samples)
        for number, canvas in enumerate(self.canvases):
            part = slice(number * self.length, (number + 1) * self.length)
            kept = self.unsettled[canvas.sequence]
            is_over = True
            if not valid[part].all():
                yield Answer(canvas.sequence, error=NOT_NUMBERS)
            elif self.renoising.is_final(
                canvas.step, entropies[part], likeliest[part], kept.likeliest
            ):
                final = tuple(likeliest[part].tolist())
                yield Answer(canvas.sequence, final, self._logprobs(part))
            else:
                is_over = False
                self._keep_likeliest(kept, likeliest[part])
                yield Answer(
                    canvas.sequence, canvas=self._next(canvas, tokens[part], entropies[part])
                )
            if is_over:
                del self.unsettled[canvas.sequence]

    def _keep_likeliest(self, kept: UnsettledCanvas, likeliest: np.ndarray) -> None:
        kept.likeliest.append(likeliest.copy())
        while len(kept.likeliest) > self.renoising.config.stability_threshold:
            kept.likeliest.pop(0)

    def _next(
        self, canvas: FreeCanvas, tokens: np.ndarray, entropies: np.ndarray
    ) -> tuple[int, ...]:
        """Return the canvas that the next step finds: accepted tokens, and new random ones."""
        after = random_tokens(
            canvas.state, canvas.start, self.length, canvas.step + 1, self.vocab_size
        )
        accepted = self.renoising.accepted(entropies)
        after[accepted] = tokens[accepted]
        return tuple(after.tolist())

    def _logprobs(self, part: slice) -> tuple[TokenLogprob, ...]:
        """Return the log probabilities of a canvas's likeliest tokens, if they are asked for."""
        found = list[TokenLogprob]()
        first = 0
        for piece in self.pieces:
            if piece.logprobs is not None:
                rows = piece.logprobs.rows([top for _, top in piece.asked])
                for (place, _), logprob in zip(piece.asked, rows, strict=True):
                    if part.start <= first + place < part.stop:
                        found.append(logprob)
            first += len(piece.places)
        return tuple(found)
