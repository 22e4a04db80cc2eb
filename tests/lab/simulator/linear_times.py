"""Step times for tests: so much per step, per decode and per prompt token."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanoserve.scheduler.work import Chunk, StepWork


@dataclass(frozen=True)
class LinearTimes:
    """Every stage takes the same time."""

    num_stages: int = 1
    step: float = 1.0
    decode: float = 0.0
    prompt_token: float = 0.0
    send: float = 0.0
    host: float = 0.0

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        return StepWork.of(decode_contexts, chunks, sampled)

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        prompt = work.tokens - work.decodes
        return self.step + work.decodes * self.decode + prompt * self.prompt_token

    def send_seconds(self, work: StepWork, stage: int) -> float:
        return self.send

    def host_seconds(self, work: StepWork) -> float:
        return self.host
