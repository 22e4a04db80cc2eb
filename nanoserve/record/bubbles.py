"""What the time of a pipeline's stages went into: computing, sending, waiting for inputs, or nothing. No torch."""

from collections.abc import Sequence

import msgspec

from nanoserve.record.run_record import RunRecord
from nanoserve.record.times import StageTimes


class StageShares(msgspec.Struct, frozen=True, kw_only=True):
    """One stage's time with something in flight, divided; the four shares add up to 1."""

    computing: float
    """Its device's work. 1 less this is the stage's share of bubbles."""
    sending: float
    """From there until the activations, or the answer, were on their way."""
    metadata: float
    """It was free and its work was there, but its inputs were not prepared: what ``metadata_seconds`` says."""
    waiting: float
    """The rest: for activations, or for a plan."""
    metadata_of_step: float
    """Waiting for inputs, as a share of waiting for inputs, computing and sending."""

    @property
    def bubbles(self) -> float:
        return 1 - self.computing


def working_seconds(record: RunRecord) -> float:
    """How long anything was in flight: bubbles are not the time in which there is no request."""
    seconds = end = 0.0
    for step, planned in record.planned.items():
        submitted, known = planned.time, record.known[step]
        seconds += max(0.0, known - max(end, submitted))
        end = max(end, known)
    return seconds


def metadata_seconds(record: RunRecord, stages: Sequence[Sequence[StageTimes]], stage: int) -> list[float]:
    """For each plan, how long the stage could have computed it already, had its inputs been prepared.

    It could from the moment at which it was through with the plan before and, in the first stage, the engine had
    handed the plan over, in a later one, the activations had left the stage before. That is a little too much: the way
    of the activations is in it, where preparing took as long.
    """
    submitted = [record.planned[times.step].time for times in stages[0]]
    given = submitted if stage == 0 else [times.sent for times in stages[stage - 1]]
    free = [given[0], *(times.sent for times in stages[stage][:-1])]
    return [
        max(0.0, times.prepared - max(work, own)) for times, work, own in zip(stages[stage], given, free, strict=True)
    ]


def stage_shares(record: RunRecord, tensor_parallel: int = 1) -> list[StageShares]:
    """Shares of every stage; none where the executor told no times."""
    stages, working = record.stages(tensor_parallel), working_seconds(record)
    shares = []
    for stage, parts in enumerate(stages):
        computing = sum(times.computed - times.started for times in parts)
        sending = sum(times.sent - times.computed for times in parts)
        metadata = sum(metadata_seconds(record, stages, stage))
        shares.append(
            StageShares(
                computing=computing / working,
                sending=sending / working,
                metadata=metadata / working,
                waiting=1 - (computing + sending + metadata) / working,
                metadata_of_step=metadata / (metadata + computing + sending),
            )
        )
    return shares


def engine_seconds(record: RunRecord) -> list[float]:
    """For each plan, how long the engine took to make it: taking in the result before it, and deciding."""
    seconds, done = [], 0.0
    for planned in record.planned.values():
        seconds.append(max(0.0, planned.time - max(planned.clock, done)))  # the clock is in ticks
        done = planned.time
    return seconds
