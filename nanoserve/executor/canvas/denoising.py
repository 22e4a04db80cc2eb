"""Denoising: the Mechanism that computes canvases, and settles tokens of them in each step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import Denoising
from nanoserve.executor.canvas.samplers import (
    STEP_STRIDE,
    CanvasSampler,
    Probabilities,
    make_canvas_sampler,
)
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.sampling.sampler import SamplingState, sample
from nanoserve.executor.step.answers import NOT_NUMBERS, LogprobColumns, SampledRows
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder
from nanoserve.request import TokenLogprob
from nanoserve.scheduler.plan import Answer, Row

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep

SettledLogprobs = dict[int, dict[int, TokenLogprob]]
"""The log probabilities of settled tokens by place in the canvas, of sequences that want them."""


class CanvasDenoising(Mechanism):
    """Has all rows attend by spans of a canvas's length, and settles tokens of the canvases."""

    def __init__(self, canvas: CanvasConfig, denoising: Denoising) -> None:
        self._canvas, self._sampler = canvas, make_canvas_sampler(denoising)
        self._spans: dict[int, Tensor] = {}  # of steps that are prepared and have not begun
        self._logprobs: SettledLogprobs = {}

    def attach(self, runner: "ModelRunner") -> None:
        self._runner = runner
        assert self._canvas.mask_token is not None, "free canvases are refused"
        runner.stage_sampled = partial(
            CanvasRows.of_step,
            mask_token=self._canvas.mask_token,
            sampler=self._sampler,
            settled_logprobs=self._logprobs,
        )

    def prepare(self, step: "PreparedStep") -> None:
        """Stage the spans of rows, and have the tokens of canvases count as known."""
        for sequence in step.plan.end:
            self._logprobs.pop(sequence, None)
        for row in step.rows:
            record = self._runner.records.get(row.sequence)
            if row.canvas is not None and record is not None:
                record.num_known = max(record.num_known, row.start + len(row.tokens))
        if step.rows:
            spans = np.zeros((len(step.rows), 2), np.int32)
            spans[:, 0] = self._canvas.length  # from position 0
            self._spans[step.plan.step] = self._runner.staging.add(spans)

    def begin(self, step: "PreparedStep") -> None:
        spans = self._spans.pop(step.plan.step, None)
        if step.inputs is not None:
            for batch in step.inputs.batches:
                batch.spans = spans

    def abandon(self) -> None:
        self._spans.clear()


class Canvas(NamedTuple):
    """The canvas of a row, before its step."""

    sequence: int
    tokens: np.ndarray
    """int64 [length]."""
    fixed: int
    step: int
    masked: np.ndarray
    """Places that are not settled yet, ascending."""


@dataclass(slots=True)
class CanvasRows(SampledRows):
    """The canvases of a step. Tokens are sampled at all positions that are not settled, from the
    logits at that position, and a canvas sampler says which are kept."""

    mask_token: int = -1
    sampler: CanvasSampler = field(default_factory=lambda: make_canvas_sampler(Denoising()))
    settled_logprobs: SettledLogprobs = field(default_factory=dict)
    """Is kept from one step of a canvas to the next."""
    canvases: list[Canvas] = field(default_factory=list)
    measured: Tensor | None = None
    """float32 [N], on the host: what the canvas sampler measures at each position."""

    @classmethod
    def of_step(
        cls,
        rows: Sequence[Row],
        ends: np.ndarray,
        states: Sequence[SamplingState],
        staging: Staging,
        *,
        mask_token: int,
        sampler: CanvasSampler,
        settled_logprobs: SettledLogprobs,
    ) -> "CanvasRows | None":
        """Have what the canvases of a step need moved to the device, as `SampledRows.stage`; None
        if it has none."""
        canvases = list[Canvas]()
        states_there = list[SamplingState]()
        positions, places = list[int](), list[int]()
        for row, state, end in zip(rows, states, ends.tolist(), strict=True):
            if row.canvas is None:
                continue
            tokens = np.array(row.tokens[-row.canvas.length :])
            fixed = row.canvas.fixed
            masked = fixed + np.flatnonzero(tokens[fixed:] == mask_token)
            canvases.append(Canvas(row.sequence, tokens, fixed, row.canvas.step, masked))
            first = row.start + len(row.tokens) - len(tokens)
            counter = row.canvas.step * STEP_STRIDE + first
            positions += (counter + masked).tolist()
            places += (end - len(tokens) + masked).tolist()
            states_there += [state] * len(masked)
        if not canvases:
            return None
        sequences = [canvas.sequence for canvas in canvases for _ in canvas.masked]
        staged = cls.at_positions(sequences, states_there, positions, np.array(places), staging)
        staged.mask_token, staged.sampler, staged.canvases = mask_token, sampler, canvases
        staged.settled_logprobs = settled_logprobs
        return staged

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        """Sample a token at each position that is not settled; a mask is never one."""
        if self.last_tokens is not None:
            hidden = hidden[self.last_tokens]
        logits = decoder.compute_logits(hidden)
        if not len(logits):  # another rank gathers them
            return
        of_masks = logits[:, self.mask_token].clone()
        logits[:, self.mask_token] = -torch.inf
        sampled = sample(logits, self.settings)
        self.tokens, self.valid = results.fetch(sampled.tokens), results.fetch(sampled.valid)
        probabilities = Probabilities(logits, sampled.tokens, self.settings)
        self.measured = results.fetch(self.sampler.measure(probabilities))
        if self.asked_places is not None:
            logits[:, self.mask_token] = of_masks
            places, most = self.asked_places, max(top for _, top in self.asked)
            columns = LogprobColumns.of(logits[places], sampled.tokens[places], most)
            self.logprobs = columns.through(results.fetch)

    def answers(self) -> Iterator[Answer]:
        """Settle tokens of each canvas, and answer with the canvas, or with its new tokens once all
        are settled."""
        if self.tokens is None or self.valid is None or self.measured is None:
            return
        tokens, valid = self.tokens.numpy(), self.valid.numpy()
        measured = self.measured.numpy()
        logprobs = self.known_logprobs()
        first = 0
        for canvas in self.canvases:
            end = first + len(canvas.masked)
            if not valid[first:end].all():
                yield Answer(canvas.sequence, error=NOT_NUMBERS)
            else:
                settled = self.sampler.settle(measured[first:end], canvas.step, len(canvas.tokens))
                canvas.tokens[canvas.masked[settled]] = tokens[first:end][settled]
                if first in logprobs:
                    self._keep_logprobs(canvas, settled, first, logprobs)
                yield self._answer(canvas, is_settled=len(settled) == len(canvas.masked))
            first = end

    def _keep_logprobs(
        self,
        canvas: Canvas,
        settled: np.ndarray,
        first: int,
        logprobs: Mapping[int, tuple[TokenLogprob]],
    ) -> None:
        """Keep the log probabilities of the tokens that a step settles."""
        if canvas.step == 0:
            self.settled_logprobs[canvas.sequence] = {}
        kept = self.settled_logprobs[canvas.sequence]
        for place in settled.tolist():
            (kept[int(canvas.masked[place])],) = logprobs[first + place]

    def _answer(self, canvas: Canvas, *, is_settled: bool) -> Answer:
        if not is_settled:
            return Answer(canvas.sequence, canvas=tuple(canvas.tokens.tolist()))
        kept = self.settled_logprobs.pop(canvas.sequence, {})
        found = tuple(kept[place] for place in sorted(kept))
        return Answer(canvas.sequence, tuple(canvas.tokens[canvas.fixed :].tolist()), found)
