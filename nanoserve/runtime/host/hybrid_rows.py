"""The rows of a plan whose KV is in host memory: what their step needs, and the groups that they become."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanoserve.costs.step_features import Strategy
from nanoserve.models.decoder import Decoder
from nanoserve.runtime.host.host_attention import HostRows
from nanoserve.runtime.host.hybrid_pass import HostGroup
from nanoserve.runtime.step.staging import Staging
from nanoserve.runtime.step.step_inputs import BlockTable, InputBuilder, StagedInputs, row_ends
from nanoserve.scheduler.plan import Row, StepPlan


@dataclass(frozen=True, slots=True)
class Beginning:
    """Host sequences that begin a token."""

    rows: Sequence[Row]
    inputs: StagedInputs

    def group(self, step: int, decoder: Decoder) -> HostGroup:
        """As they come to the first layer of the first stage."""
        hidden, cos, sin = decoder.enter(self.inputs.token_ids.tensor, self.inputs.positions.tensor)
        return HostGroup(step, self.rows, self._cache(list(range(len(self.rows)))), hidden, cos, sin)

    def arrive(self, step: int, decoder: Decoder, sequences: Sequence[int], hidden: Tensor) -> HostGroup:
        """Some of them as they come to the first layer of a later stage, with hidden states [n, hidden_size]."""
        place_of = {row.sequence: place for place, row in enumerate(self.rows)}
        chosen = [place_of[sequence] for sequence in sequences]
        hidden, cos, sin = decoder.enter(hidden, self.inputs.positions.tensor[chosen])
        return HostGroup(step, [self.rows[place] for place in chosen], self._cache(chosen), hidden, cos, sin)

    def _cache(self, places: Sequence[int]) -> HostRows:
        """Of some of them; on the CPU, whatever the device is."""
        inputs = (self.inputs.block_tables, self.inputs.context_lengths, self.inputs.slot_mapping)
        return HostRows(*(torch.from_numpy(one.array[places]) for one in inputs))


@dataclass(frozen=True, slots=True)
class StagedHostRows:
    """What host sequences have to do with a step, by sub-batch."""

    strategy: Strategy
    """Of the step; one in which they take part."""
    beginning: tuple[Beginning | None, Beginning | None]
    """Those that begin a token; None for none."""
    going_on: tuple[Sequence[int], Sequence[int]]
    """Those under way that the step is to end."""

    def begin(self, step: int, decoder: Decoder, sub_batch: int) -> list[HostGroup]:
        """The group of those that begin; none if there are none."""
        beginning = self.beginning[sub_batch]
        return [] if beginning is None else [beginning.group(step, decoder)]


def stage_host_rows(
    plan: StepPlan, table_of: Callable[[int], BlockTable], block_size: int, staging: Staging
) -> StagedHostRows | None:
    """Prepare the host rows of a plan; None if host sequences take no part in it.

    Args:
        table_of: a sequence's blocks in host memory.
    """
    if plan.strategy == "device":
        return None
    halves = [[row for row in plan.rows if row.tier == "host" and row.sub_batch == number] for number in range(2)]

    def beginning(rows: Sequence[Row]) -> Beginning | None:
        rows = [row for row in rows if row.tokens]
        if not rows:
            return None
        # Arrays of their own: the CPU reads them as long as the token is under way.
        builder, tables = InputBuilder(block_size), [table_of(row.sequence) for row in rows]
        return Beginning(rows, builder.stage(rows, row_ends(rows), tables, staging))

    first, second = halves
    return StagedHostRows(
        strategy=plan.strategy,
        beginning=(beginning(first), beginning(second)),
        going_on=(_going_on(first), _going_on(second)),
    )


def _going_on(rows: Sequence[Row]) -> list[int]:
    return [row.sequence for row in rows if not row.tokens]
