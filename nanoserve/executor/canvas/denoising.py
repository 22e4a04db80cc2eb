"""Denoising: the Mechanism that computes canvases, and settles tokens of them in each step."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanoserve.config.model_parts import CanvasConfig
from nanoserve.engine_config import Denoising
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.step.answers import NOT_NUMBERS, SampledRows
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder
from nanoserve.scheduler.plan import Answer, Row
from triton_ops.sampling import keep_likely

if TYPE_CHECKING:
    from nanoserve.executor.step.model_runner import ModelRunner, PreparedStep

_STEP_STRIDE = 1 << 32
"""Positions that lie between two denoising steps in the counter of random numbers: each step draws
new ones."""


class CanvasDenoising(Mechanism):
    """Has all rows attend by spans of a canvas's length, and settles tokens of the canvases."""

    def __init__(self, canvas: CanvasConfig, denoising: Denoising) -> None:
        self._canvas, self._denoising = canvas, denoising
        self._spans: dict[int, Tensor] = {}  # of steps that are prepared and have not begun

    def attach(self, runner: "ModelRunner") -> None:
        self._runner = runner
        runner.stage_sampled = partial(
            CanvasRows.of_step, mask_token=self._canvas.mask_token, denoising=self._denoising
        )

    def prepare(self, step: "PreparedStep") -> None:
        """Stage the spans of rows, and have the tokens of canvases count as known."""
        for row in step.rows:
            record = self._runner.records.get(row.sequence)
            if row.canvas is not None and record is not None:
                record.num_known = max(record.num_known, row.start + len(row.tokens))
        if step.rows:
            spans = np.full(len(step.rows), self._canvas.length, np.int32)
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
    logits at that position, and the most confident ones are kept."""

    mask_token: int = -1
    denoising: Denoising = field(default_factory=Denoising)
    canvases: list[Canvas] = field(default_factory=list)
    confidences: Tensor | None = None
    """float32 [N], on the host: the probability of each sampled token."""

    @classmethod
    def of_step(
        cls,
        rows: Sequence[Row],
        ends: np.ndarray,
        states: Sequence[SamplingState],
        staging: Staging,
        *,
        mask_token: int,
        denoising: Denoising,
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
            counter = row.canvas.step * _STEP_STRIDE + first
            positions += (counter + masked).tolist()
            places += (end - len(tokens) + masked).tolist()
            states_there += [state] * len(masked)
        if not canvases:
            return None
        sequences = [canvas.sequence for canvas in canvases for _ in canvas.masked]
        staged = cls.at_positions(sequences, states_there, positions, np.array(places), staging)
        staged.mask_token, staged.denoising, staged.canvases = mask_token, denoising, canvases
        return staged

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        """Sample a token at each position that is not settled; a mask is never one."""
        logits = decoder.compute_logits(hidden[self.last_tokens])
        if not len(logits):  # another rank gathers them
            return
        logits[:, self.mask_token] = -torch.inf
        sampled = sample(logits, self.settings)
        self.tokens, self.valid = results.fetch(sampled.tokens), results.fetch(sampled.valid)
        self.confidences = results.fetch(confidences(logits, sampled.tokens, self.settings))

    def answers(self) -> Iterator[Answer]:
        """Settle tokens of each canvas, and answer with the canvas, or with its new tokens once all
        are settled."""
        if self.tokens is None or self.valid is None or self.confidences is None:
            return
        tokens, valid = self.tokens.numpy(), self.valid.numpy()
        sureness = self.confidences.numpy()
        first = 0
        for canvas in self.canvases:
            end = first + len(canvas.masked)
            if not valid[first:end].all():
                yield Answer(canvas.sequence, error=NOT_NUMBERS)
            else:
                share = self.denoising.share(canvas.step, len(canvas.tokens))
                settled = settle(sureness[first:end], share, self.denoising)
                canvas.tokens[canvas.masked[settled]] = tokens[first:end][settled]
                if len(settled) == len(canvas.masked):
                    yield Answer(canvas.sequence, tuple(canvas.tokens[canvas.fixed :].tolist()))
                else:
                    yield Answer(canvas.sequence, canvas=tuple(canvas.tokens.tolist()))
            first = end


def settle(confidence: np.ndarray, share: int, denoising: Denoising) -> np.ndarray:
    """Choose which of the positions with these confidences, float32 [M], a step settles (SDAR's
    generate.py): at least ``share`` of them, as far as there are so many, and of equally confident
    ones the first."""
    if denoising.strategy == "confidence":
        sure = np.flatnonzero(confidence > denoising.threshold)
        if len(sure) >= share:
            return sure
    return np.argsort(-confidence, kind="stable")[:share]


def confidences(logits: Tensor, tokens: Tensor, rows: SamplingRows) -> Tensor:
    """Return the probability of the token that was sampled from each row of logits, float32 [N]:
    among the tokens that temperature, top_k, top_p and min_p leave, or among all of them where the
    likeliest token was taken."""
    chosen = logits.gather(1, tokens[:, None])[:, 0].double()
    found = (chosen - logits.double().logsumexp(1)).exp()
    for draw in rows.draws:
        part = logits[draw.rows]
        scaled = (part - part.amax(1, keepdim=True)) / draw.temperature[:, None]
        kept, _ = keep_likely(
            scaled,
            draw.top_k,
            draw.top_p,
            draw.min_p,
            draw.largest_top_k,
            uses_top_p=draw.uses_top_p,
            uses_min_p=draw.uses_min_p,
        )
        chosen = scaled.gather(1, tokens[draw.rows][:, None])[:, 0].double()
        share = (chosen - kept.double().logsumexp(1)).exp()
        found = found.index_copy(0, draw.rows, share)
    return found.float()
