"""Engines that write canvases, on a fake executor, for tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from msgspec.structs import replace

from nanoserve.engine.engine import Engine
from nanoserve.request import Request
from nanoserve.scheduler.canvas.aligned_canvases import AlignedCanvases
from nanoserve.scheduler.canvas.canvases import Canvases
from nanoserve.scheduler.canvas.free_canvases import FreeCanvases
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.optional import CanvasRow
from nanoserve.scheduler.plan import Answer, Begin, Row, StepPlan
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.dying_executor import DyingExecutor
from tests.fakes.memory_checking_executor import MemoryViolation

MASK = 99
SCRATCH = -2
"""Stands for the cache group of keys and values that are not final."""


def denoise(tokens: Sequence[int], canvas: Sequence[int], begin: Begin) -> tuple[int, ...]:
    """A "model" and its sampler: the canvas after a step, a function of the known tokens before it,
    of the canvas, and with a temperature of the seed and the sample. Each step settles one place,
    or more."""
    parts: list[object] = [tuple(tokens), tuple(canvas)]
    if begin.params.temperature > 0:
        parts += [begin.seed, begin.index]
    after = list(canvas)
    digest = blake2b(repr(parts).encode(), digest_size=32).digest()
    masked = [place for place, token in enumerate(canvas) if token == MASK]
    first = masked[digest[0] % len(masked)]
    for place in masked:
        if place == first or digest[1 + place % 15] % 3 == 0:
            after[place] = digest[16 + place % 16] % 50
    return tuple(after)


def expected_tokens(
    request: Request, index: int, length: int, max_model_len: int
) -> tuple[list[int], str]:
    """One sample with nothing else in the world: its tokens and its finish reason."""
    params = request.params
    begin = Begin(0, request.prompt, len(request.prompt), index, request.seed, params, ())
    tokens, output = list(request.prompt), list[int]()
    while True:
        fixed = len(tokens) % length
        before = tokens[: len(tokens) - fixed]
        canvas = (*tokens[len(before) :], *[MASK] * (length - fixed))
        while MASK in canvas:
            canvas = denoise(before, canvas, begin)
        for token in canvas[fixed:]:
            tokens.append(token)
            output.append(token)
            ends = token in request.end_tokens and not params.ignore_eos
            if ends or token in params.stop_token_ids:
                return output, "stop"
            if len(output) == params.max_tokens or len(tokens) == max_model_len:
                return output, "length"


class CanvasExecutor(DyingExecutor):
    """A MemoryCheckingExecutor of a model that writes canvases. What is in a canvas's slots is no
    final key of anything, and nobody may read it."""

    def __init__(self, *sizes: int, length: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.length = length
        self._canvases: dict[int, tuple[tuple[int, ...], int]] = {}

    def submit(self, plan: StepPlan) -> None:
        for name in (*plan.end, *(begin.sequence for begin in plan.begin)):
            self._canvases.pop(name, None)
        super().submit(plan)

    def die(self) -> None:
        self._canvases.clear()
        super().die()

    def _write(self, row: Row) -> None:
        record, end = self._record(row), row.start + len(row.tokens)
        if row.start % self.length or end % self.length or row.sample != (row.canvas is not None):
            raise MemoryViolation(f"sequence {row.sequence}: its row does not end with a span")
        if row.canvas is None:
            super()._write(row)
            return
        self._check_canvas(row)
        record.last_plan = self.plans[-1].step
        record.block_table += row.new_blocks
        for position, token in enumerate(row.tokens, start=row.start):
            block, slot = self._slot(record, position)
            group = 0 if position < end - self.length else SCRATCH
            self._check_no_other_reader(row, block, slot, (token, position, group))
            self._memory["device"][block][slot] = (token, position, group)
        record.computed = end - self.length

    def _check_canvas(self, row: Row) -> None:
        record, canvas = self._record(row), row.canvas
        assert canvas is not None
        known, fixed = record.tokens, len(record.tokens) % self.length
        masked = (*known[len(known) - fixed :], *[MASK] * (self.length - fixed))
        expected, steps = self._canvases.get(row.sequence, (masked, 0))
        before = tuple(known[row.start : len(known) - fixed])
        if row.tokens != (*before, *expected):
            raise MemoryViolation(f"sequence {row.sequence}: its row is not its tokens and canvas")
        if (canvas.length, canvas.fixed, canvas.step) != (self.length, fixed, steps):
            raise MemoryViolation(f"sequence {row.sequence}: {canvas} is not what its canvas is")

    def _read_and_answer(self, row: Row) -> Answer:
        record, canvas = self._records[row.sequence], row.canvas
        assert canvas is not None
        before = record.tokens[: record.computed]
        for position, token in enumerate(before):
            block, slot = self._slot(record, position)
            if self._memory["device"][block][slot] != (token, position, 0):
                raise MemoryViolation(f"sequence {row.sequence}: position {position} is not final")
        after = denoise(before, row.tokens[-self.length :], record.begin)
        if MASK in after:
            self._canvases[row.sequence] = after, canvas.step + 1
            return Answer(row.sequence, canvas=after)
        self._canvases.pop(row.sequence, None)
        new = after[canvas.fixed :]
        record.tokens += new
        return Answer(row.sequence, new)


def denoise_freely(
    tokens: Sequence[int], canvas: Sequence[int], begin: Begin, step: int
) -> tuple[tuple[int, ...], bool]:
    """A "model" and its sampler that settle no place before the others: the canvas after a step,
    and whether it is final."""
    parts: list[object] = [tuple(tokens), tuple(canvas), step]
    if begin.params.temperature > 0:
        parts += [begin.seed, begin.index]
    digest = blake2b(repr(parts).encode(), digest_size=32).digest()
    after = tuple(digest[place] % 50 for place in range(len(canvas)))
    return after, step == 3 or digest[31] % 3 == 0


def expected_free_tokens(
    request: Request, index: int, length: int, max_model_len: int
) -> tuple[list[int], str]:
    """One sample of a model with free canvases, with nothing else in the world."""
    params = request.params
    begin = Begin(0, request.prompt, len(request.prompt), index, request.seed, params, ())
    tokens, output = list(request.prompt), list[int]()
    while True:
        canvas: tuple[int, ...] = (0,) * length
        step, is_final = 0, False
        while not is_final:
            canvas, is_final = denoise_freely(tokens, canvas, begin, step)
            step += 1
        for token in canvas:
            tokens.append(token)
            output.append(token)
            ends = token in request.end_tokens and not params.ignore_eos
            if ends or token in params.stop_token_ids:
                return output, "stop"
            if len(output) == params.max_tokens or len(tokens) == max_model_len:
                return output, "length"


class FreeCanvasExecutor(DyingExecutor):
    """A MemoryCheckingExecutor of a model whose canvases begin anywhere. Known tokens are never
    sampled from. What is in a canvas's slots is no final key of anything, and nobody may read
    it."""

    def __init__(self, *sizes: int, length: int, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.length = length
        self._canvases: dict[int, tuple[tuple[int, ...], int]] = {}

    def submit(self, plan: StepPlan) -> None:
        for name in (*plan.end, *(begin.sequence for begin in plan.begin)):
            self._canvases.pop(name, None)
        super().submit(plan)

    def die(self) -> None:
        self._canvases.clear()
        super().die()

    def _write(self, row: Row) -> None:
        record = self._record(row)
        if row.canvas is None:
            if row.sample or row.start + len(row.tokens) > len(record.tokens):
                raise MemoryViolation(f"sequence {row.sequence}: its row is not of known tokens")
            reaches_end = row.start + len(row.tokens) == len(record.tokens)
            super()._write(replace(row, sample=reaches_end))
            return
        expected, steps = self._canvases.get(row.sequence, ((0,) * self.length, 0))
        if not row.sample or row.tokens != expected:
            raise MemoryViolation(f"sequence {row.sequence}: its row is not its canvas")
        if row.canvas != CanvasRow(self.length, 0, steps):
            raise MemoryViolation(f"sequence {row.sequence}: {row.canvas} is not its canvas")
        if not row.start == record.computed == len(record.tokens):
            raise MemoryViolation(f"sequence {row.sequence}: its canvas is not behind its tokens")
        record.last_plan = self.plans[-1].step
        record.block_table += row.new_blocks
        for position, token in enumerate(row.tokens, start=row.start):
            for group in range(len(self.windows)):
                block, slot = self._slot(record, position, group)
                content = token, position, SCRATCH - group
                self._check_no_other_reader(row, block, slot, content)
                self._memory["device"][block][slot] = content

    def _read_and_answer(self, row: Row) -> Answer:
        record, canvas = self._records[row.sequence], row.canvas
        assert canvas is not None
        self._check_prefix(row, record)
        for position, token in enumerate(row.tokens, start=row.start):
            for group in range(len(self.windows)):
                block, slot = self._slot(record, position, group)
                if self._memory["device"][block][slot] != (token, position, SCRATCH - group):
                    raise MemoryViolation(f"sequence {row.sequence}: not the canvas's own slots")
        after, is_final = denoise_freely(record.tokens, row.tokens, record.begin, canvas.step)
        if not is_final:
            self._canvases[row.sequence] = after, canvas.step + 1
            return Answer(row.sequence, canvas=after)
        self._canvases.pop(row.sequence, None)
        record.tokens += after
        return Answer(row.sequence, after)


@dataclass
class CanvasBench:
    """An engine that writes canvases of a `length`: at multiples of it, or, if they are free,
    behind the known tokens."""

    policy: Policy
    length: int
    budget: int
    num_blocks: int
    block_size: int
    max_model_len: int
    deaths: frozenset[int] = frozenset()
    depth: int = 1
    prefix_caching: bool = True
    max_num_seqs: int = 256
    is_free: bool = False
    windows: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        sizes = {"length": self.length, "token_budget": self.budget}
        canvases: Canvases = AlignedCanvases(**sizes, mask_token=MASK)
        executor: type[CanvasExecutor | FreeCanvasExecutor] = CanvasExecutor
        if self.is_free:
            canvases, executor = FreeCanvases(**sizes), FreeCanvasExecutor
        self.scheduler = Scheduler(
            self.policy,
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            prefix_caching=self.prefix_caching,
            pipeline_depth=self.depth,
            windows=self.windows,
            extensions=Extensions(canvases=canvases),
        )
        self.canvases = canvases
        self.executor = executor(
            self.num_blocks,
            self.block_size,
            length=self.length,
            windows=self.windows,
            depth=self.depth,
            deaths=self.deaths,
        )
        self.engine = Engine(self.scheduler, self.executor, vocab_size=100)


def plain(request: Request) -> Request:
    """The request without what canvases do not go together with."""
    params = replace(request.params, presence_penalty=0.0, min_tokens=0)
    return Request(
        request.request_id,
        request.prompt,
        params,
        request.seed,
        end_tokens=request.end_tokens,
        cache_salt=request.cache_salt,
    )
