"""The lecture's accounting of a model on a machine: per operator, and latency and throughput
against batch size."""

from functools import cached_property
from typing import Literal

import msgspec

from nanoserve.costs.step_costs import StepCosts
from nanoserve.scheduler.windows import most_blocks
from nanoserve.scheduler.work import StepWork

Bound = Literal["compute", "memory", "link", "overhead"]

BLOCK_SIZE = 16
_ATTENTION = (
    "per_layer_input",
    "per_layer_input_up",
    "qkv",
    "query_up",
    "latent_up",
    "output_gate",
    "attention",
    "inputs",
    "rates",
    "convolution",
    "state",
    "output",
)
_EXPERTS = ("router", "experts", "shared_gate_up", "shared_down", "shared_gate")
_ORDER = ("embedding", *_ATTENTION, *_EXPERTS, "gate_up", "down", "head")


class OperatorRow(msgspec.Struct, frozen=True):
    """One operator of a step, summed over layers and stages; on one device of each stage."""

    phase: str
    operator: str
    flops: float
    bytes: float  # of communication, those of the tensors
    intensity: float | None  # operations per byte; None where nothing is computed
    bound: Bound
    seconds: float
    share: float  # of the step's time


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """Decoding with a batch of sequences on the devices of a replica."""

    batch: int
    tpot: float  # seconds from token to token of a sequence
    tokens_per_second: float  # batch / tpot
    # output tokens over the time of their prompts and their own
    tokens_per_second_with_prefill: float
    # keys, values and states of whole sequences over the memory that weights leave; above 1 they do
    # not fit
    kv_share: float

    @property
    def fits(self) -> bool:
        return self.kv_share <= 1


class Analysis:
    """A model on a machine, for requests of one length. Raises DoesNotFit if weights leave no room
    for keys and values. Decoding is looked at in the middle of the answer, but memory must hold
    whole sequences: their states, and keys and values but for what their windows leave behind."""

    def __init__(self, costs: StepCosts, input_tokens: int, output_tokens: int) -> None:
        self.costs = costs
        self.input_tokens, self.output_tokens = input_tokens, output_tokens
        self.context = input_tokens + (output_tokens + 1) // 2
        self.blocks = costs.memory.kv_blocks(BLOCK_SIZE)
        windows = costs.counts.groups.windows
        # that windows have not left behind
        self.kv_tokens = self.blocks // len(windows) * BLOCK_SIZE
        self.blocks_per_sequence = most_blocks(windows, input_tokens + output_tokens, BLOCK_SIZE)

    @property
    def largest_batch(self) -> int:
        """Whole sequences whose keys, values and states fit."""
        return self.costs.memory.sequences(self.blocks_per_sequence, BLOCK_SIZE)

    def default_batches(self) -> list[int]:
        """Powers of two up to the limit, the limit itself, and the power beyond it."""
        batches = {2**exponent for exponent in range(self.largest_batch.bit_length() + 1)}
        batches.add(max(1, self.largest_batch))
        return sorted(batches)

    def prefill_work(self) -> StepWork:
        return self.costs.work([], [(0, self.input_tokens)])

    def decode_work(self, batch: int) -> StepWork:
        """One token of each of `batch` sequences; in a pipeline, of the sequences in one
        micro-batch."""
        rows = -(-batch // self.costs.num_stages)
        return self.costs.work([self.context] * rows)

    def batch_row(self, batch: int) -> BatchRow:
        """Latency and throughput of decoding, with as many micro-batches in flight as there are
        stages."""
        tpot = self._round_seconds(self.decode_work(batch), batch)
        whole_seconds = batch * self.prefill_seconds + self.output_tokens * tpot
        return BatchRow(
            batch=batch,
            tpot=tpot,
            tokens_per_second=batch / tpot,
            tokens_per_second_with_prefill=self.output_tokens * batch / whole_seconds,
            kv_share=self.costs.memory.share(batch, self.blocks_per_sequence, BLOCK_SIZE),
        )

    @cached_property
    def prefill_seconds(self) -> float:
        """Seconds from prompt to prompt, with enough prompts to fill the pipeline."""
        prompts = self.costs.num_stages
        return self._round_seconds(self.prefill_work(), prompts) / prompts

    def operator_rows(self, phase: str, work: StepWork) -> list[OperatorRow]:
        """Every part of a step through all stages, in the order in which a layer runs them."""
        costs, stages = self.costs, range(self.costs.num_stages)
        step, rows = costs.step_seconds(work), list[OperatorRow]()

        def add(
            name: str, bound: Bound, seconds: float, size: float = 0.0, flops: float = 0.0
        ) -> None:
            intensity = flops / size if flops else None
            rows.append(
                OperatorRow(phase, name, flops, size, intensity, bound, seconds, seconds / step)
            )

        operators = [
            operator for stage in stages for operator in costs.counts.operators(work, stage)
        ]
        for name in sorted({operator.name for operator in operators}, key=_ORDER.index):
            seconds = computing = size = flops = 0.0
            for operator in operators:
                if operator.name != name:
                    continue
                seconds += costs.operator_seconds(operator)
                if costs.is_compute_bound(operator):
                    computing += costs.operator_seconds(operator)
                size += operator.bytes
                flops += operator.flops
            bound: Bound = "compute" if computing > seconds / 2 else "memory"
            add(name, bound, seconds, size, flops)
        hidden = costs.counts.activation_bytes(work.tokens)
        reducing = sum(costs.all_reduce_seconds(work, stage) for stage in stages)
        sending = sum(costs.send_seconds(work, stage) for stage in stages)
        gaps = sum(costs.kernel_seconds(work, stage) for stage in stages)
        add("all-reduce", "link", reducing, sum(map(costs.all_reduces, stages)) * hidden)
        add("send", "link", sending, hidden * (len(stages) - 1))
        add("kernel gaps", "overhead", gaps)
        add("host", "overhead", costs.host_seconds(work))
        return [row for row in rows if row.seconds]

    def _round_seconds(self, work: StepWork, sequences: int) -> float:
        """Seconds until every micro-batch had its turn, one for each stage, if there are enough
        sequences. The slowest stage sets the pace of a full pipeline; what one micro-batch needs
        alone is the least."""
        stages = range(self.costs.num_stages)
        pace = max(
            self.costs.stage_seconds(work, stage) + self.costs.send_seconds(work, stage)
            for stage in stages
        )
        return max(min(len(stages), sequences) * pace, self.costs.step_seconds(work))
