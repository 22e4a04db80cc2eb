"""CUDA graphs of what comes behind the last layer: logits, and the tokens of rows that are all
taken greedily, or all drawn by temperature alone. All other steps are sampled as they were
before."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from nanoserve.executor.sampling.sampler import Sampled, SamplingState
from nanoserve.executor.step.answers import SampledRows
from nanoserve.executor.step.decode_graphs import GraphRecorder
from nanoserve.executor.step.staging import DeviceToHostCopy, Staging
from nanoserve.models.decoder import Decoder
from nanoserve.scheduler.plan import Row
from triton_ops import draw_tokens, likeliest_tokens

_GRAPH_BYTES = 2**20
"""Memory of a graph beside its tensors: it has a fiftieth of a decode step's kernels."""
_CHANGED_LOGIT_BYTES = 12
"""Memory of a logit while it is scaled and capped: three numbers of 32 bits, beside the product."""


class SamplingGraphs:
    """Graphs for some numbers of rows, each up to a bucket; all read their inputs at one place."""

    def __init__(self, decoder: Decoder, buckets: Sequence[int]) -> None:
        self._decoder, self._buckets = decoder, buckets
        most = buckets[-1]
        shape = (most, decoder.config.hidden_size)
        with torch.inference_mode(), torch.device(decoder.device):
            self._hidden = torch.zeros(shape, dtype=decoder.dtype)
            self._keys = torch.zeros(most, 2, dtype=torch.int32)
            self._temperature = torch.ones(most)
            self._all_rows = torch.arange(most)
            self._no_top_k = torch.zeros(most, dtype=torch.int64)
            self._no_top_p = torch.ones(most, dtype=torch.float64)
            self._no_min_p = torch.zeros(most, dtype=torch.float64)
        # By bucket, and whether tokens are drawn: what replays a graph, and what it writes.
        self._graphs: dict[tuple[int, bool], tuple[Callable[[], None], Sampled]] = {}

    def memory(self) -> int:
        """Bytes that the graphs will take; those of the largest one serve the others too."""
        config, each = self._decoder.config, self._decoder.dtype.itemsize
        if config.logits.scale != 1.0 or config.logits.soft_cap:
            each += _CHANGED_LOGIT_BYTES
        logits = self._buckets[-1] * config.vocab_size
        return each * logits + 2 * _GRAPH_BYTES * len(self._buckets)

    @torch.inference_mode()
    def capture(self, recorder: GraphRecorder) -> None:
        """Record all graphs, the largest first."""
        for rows, draws in product(sorted(self._buckets, reverse=True), (True, False)):
            self._graphs[rows, draws] = recorder.record(partial(self._sample, rows, draws=draws))

    def _sample(self, rows: int, *, draws: bool) -> Sampled:
        """Sample the first rows of the inputs."""
        logits = self._decoder.compute_sampled_logits(self._hidden[:rows])
        maxima, tokens, valid = likeliest_tokens(logits)
        if draws:
            tokens = draw_tokens(
                logits,
                maxima,
                self._all_rows[:rows],
                self._keys[:rows],
                self._temperature[:rows],
                self._no_top_k[:rows],
                self._no_top_p[:rows],
                self._no_min_p[:rows],
                largest_top_k=0,
                uses_top_p=False,
                uses_min_p=False,
            )
        return Sampled(tokens, valid)

    def fit(self, sampled: SampledRows) -> bool:
        """Tell whether there is a graph for the rows of a step."""
        settings, count = sampled.settings, len(sampled.sequences)
        changes_logits = settings.adjustments is not None or settings.grammars is not None
        if changes_logits or sampled.asked or count > self._buckets[-1]:
            return False
        if not settings.draws:
            return True
        draw = settings.draws[0]
        limits = draw.largest_top_k > 0 or draw.uses_top_p or draw.uses_min_p
        return len(draw.rows) == count and not limits

    def stage(
        self,
        rows: Sequence[Row],
        ends: np.ndarray,
        states: Sequence[SamplingState],
        staging: Staging,
    ) -> SampledRows | None:
        """Stage as `SampledRows.stage` does; a graph samples the rows that fit one."""
        sampled = SampledRows.stage(rows, ends, states, staging)
        if sampled is None or not self.fit(sampled):
            return sampled
        staged = {column.name: getattr(sampled, column.name) for column in fields(sampled)}
        return CapturedRows(**staged, graphs=self)

    def __call__(self, hidden: Tensor, sampled: SampledRows) -> Sampled:
        """Sample rows that fit, from the step's hidden states."""
        count, draws = len(sampled.sequences), sampled.settings.draws
        before = self._hidden[:count]
        if sampled.last_tokens is None:
            before.copy_(hidden)
        else:
            torch.index_select(hidden, 0, sampled.last_tokens, out=before)
        if draws:
            self._keys[:count].copy_(draws[0].keys)
            self._temperature[:count].copy_(draws[0].temperature)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        replay, found = self._graphs[bucket, bool(draws)]
        replay()
        # copies: the next step's replay writes there before the host has read this one's
        return Sampled(found.tokens[:count].clone(), found.valid[:count].clone())


@dataclass(slots=True)
class CapturedRows(SampledRows):
    """Sampled rows that fit a graph."""

    graphs: SamplingGraphs = field(kw_only=True)

    def sample(self, decoder: Decoder, hidden: Tensor, results: DeviceToHostCopy) -> None:
        sampled = self.graphs(hidden, self)
        self.device_tokens = sampled.tokens
        self.tokens, self.valid = results.fetch(sampled.tokens), results.fetch(sampled.valid)
