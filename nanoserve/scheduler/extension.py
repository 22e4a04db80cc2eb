"""Extension: how a mechanism that most requests do without attaches to the scheduler.

The scheduler, its table and its plan builder know requests, blocks, the prefix cache, chunks and
preemption. A mechanism (another parallel layout, host memory, attention on the CPU, draft tokens,
recurrent states, canvases) is an object of a folder of its own. It overrides the moments at which
it has something to do. The scheduler binds these methods once, at construction, so that a mechanism
which is not there costs an empty loop in each plan, and nothing in each row.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanoserve.request import PlannedRow, Request, Sequence
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.plan import Answer, StepPlan, StepResult

if TYPE_CHECKING:  # a plain scheduler runs without these folders
    from nanoserve.scheduler.canvas.canvases import Canvases
    from nanoserve.scheduler.cpu_attention.host_decoding import HostDecoding
    from nanoserve.scheduler.host_tier.host_tier import HostTier
    from nanoserve.scheduler.layout_change.layouts import Layouts
    from nanoserve.scheduler.plan_builder import PlanBuilder
    from nanoserve.scheduler.recurrent_state.recurrent_state import RecurrentState
    from nanoserve.scheduler.scheduler import Scheduler
    from nanoserve.scheduler.speculation.drafts import Drafts


class Extension:
    """A mechanism beside the plain path. It does nothing at the moments that it does not
    override."""

    def attach(self, scheduler: "Scheduler") -> None:
        """Learn to know the scheduler, which is complete by now."""

    # ---- a plan is made: the moments in their order ----------------------------------------------

    def holds_back(self) -> bool:
        """Return whether no plan may be made now."""
        return False

    def survey(self, load: Load) -> None:
        """Add to the snapshot that the policy sees."""

    def take_over(self, builder: "PlanBuilder") -> bool:
        """Return whether the plan holds no rows, but what the mechanism has put into it."""
        return False

    def before_rows(
        self, builder: "PlanBuilder", decodes: list[Sequence], prefills: list[Sequence]
    ) -> list[Sequence]:
        """Act before the first row; returns the decodes that may enter the plan."""
        return decodes

    def has_room_soon(self, sequence: Sequence, count: int) -> bool:
        """Return whether blocks that are about to be free hold this many more positions, so that
        nobody gives way."""
        return False

    def rescue(self, builder: "PlanBuilder", victim: Sequence) -> bool:
        """Return whether the mechanism frees the victim's blocks by itself, so that it need not be
        recomputed."""
        return False

    def after_decodes(self, builder: "PlanBuilder") -> None:
        """Act between the decodes and the prompts."""

    def may_admit(self, builder: "PlanBuilder", prompt: Sequence) -> bool:
        """Return whether a waiting prompt may begin."""
        return True

    def after_prompt_row(self, builder: "PlanBuilder", prompt: Sequence) -> None:
        """Act on a prompt of which a chunk was planned."""

    def after_rows(self, builder: "PlanBuilder") -> None:
        """Act when all rows are there."""

    def goes_on(self) -> bool:
        """Return whether a plan without rows lets something go on."""
        return False

    def run_first(self, builder: "PlanBuilder", first: Sequence | None) -> bool:
        """Nothing is in flight, and the decision moved nothing. Return whether a sequence of the
        mechanism's was put into the plan, as it goes before the ``first`` of the others."""
        return False

    def complete(self, plan: StepPlan) -> StepPlan:
        """Return the plan with what the mechanism adds to it."""
        return plan

    def planned(self, plan: StepPlan) -> None:
        """Follow a plan that is about to be submitted."""

    # ---- a result is taken in --------------------------------------------------------------------

    def answered(self, sequence: Sequence, row: PlannedRow, answer: Answer) -> None:
        """Act on a sampled row whose sequence has its tokens."""

    def answered_elsewhere(self, sequence: Sequence) -> None:
        """Act on a sequence that is not on the device, and of which a row was answered."""

    def take_in(self, result: StepResult, gained: int) -> None:
        """Take in a result whose answers brought this many updates."""

    def plan_ended(self, plan: StepPlan, result: StepResult) -> None:
        """Act on the end of a plan."""

    # ---- sequences come and go -------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raise UsageError for a request with which the mechanism does not go together."""

    def added(self, sequence: Sequence) -> None:
        """Act on a new sequence."""

    def released(self, sequence: Sequence) -> None:
        """Give up what a sequence holds: it waits again, or has ended."""

    def abandon(self, *, all_is_lost: bool) -> None:
        """Nothing in flight will be answered. If ``all_is_lost``, no KV is left anywhere either."""


def _bound(extensions: "Extensions", moment: str) -> tuple[Any, ...]:
    """The bound methods of the extensions that override this moment."""
    plain = getattr(Extension, moment)
    return tuple(
        getattr(one, moment) for one in extensions if getattr(type(one), moment) is not plain
    )


class Moments:
    """The moments of all extensions of a scheduler, bound: empty tuples where nothing is
    attached."""

    def __init__(self, extensions: "Extensions") -> None:
        self.holds_back: tuple[Callable[[], bool], ...] = _bound(extensions, "holds_back")
        self.survey: tuple[Callable[[Load], None], ...] = _bound(extensions, "survey")
        self.take_over: tuple[Callable[[PlanBuilder], bool], ...] = _bound(extensions, "take_over")
        self.before_rows: tuple[
            Callable[[PlanBuilder, list[Sequence], list[Sequence]], list[Sequence]], ...
        ] = _bound(extensions, "before_rows")
        self.has_room_soon: tuple[Callable[[Sequence, int], bool], ...] = _bound(
            extensions, "has_room_soon"
        )
        self.rescue: tuple[Callable[[PlanBuilder, Sequence], bool], ...] = _bound(
            extensions, "rescue"
        )
        self.after_decodes: tuple[Callable[[PlanBuilder], None], ...] = _bound(
            extensions, "after_decodes"
        )
        self.may_admit: tuple[Callable[[PlanBuilder, Sequence], bool], ...] = _bound(
            extensions, "may_admit"
        )
        self.after_prompt_row: tuple[Callable[[PlanBuilder, Sequence], None], ...] = _bound(
            extensions, "after_prompt_row"
        )
        self.after_rows: tuple[Callable[[PlanBuilder], None], ...] = _bound(
            extensions, "after_rows"
        )
        self.goes_on: tuple[Callable[[], bool], ...] = _bound(extensions, "goes_on")
        self.run_first: tuple[Callable[[PlanBuilder, Sequence | None], bool], ...] = _bound(
            extensions, "run_first"
        )
        self.complete: tuple[Callable[[StepPlan], StepPlan], ...] = _bound(extensions, "complete")
        self.planned: tuple[Callable[[StepPlan], None], ...] = _bound(extensions, "planned")
        self.answered: tuple[Callable[[Sequence, PlannedRow, Answer], None], ...] = _bound(
            extensions, "answered"
        )
        self.answered_elsewhere: tuple[Callable[[Sequence], None], ...] = _bound(
            extensions, "answered_elsewhere"
        )
        self.take_in: tuple[Callable[[StepResult, int], None], ...] = _bound(extensions, "take_in")
        self.plan_ended: tuple[Callable[[StepPlan, StepResult], None], ...] = _bound(
            extensions, "plan_ended"
        )
        self.check: tuple[Callable[[Request], None], ...] = _bound(extensions, "check")
        self.added: tuple[Callable[[Sequence], None], ...] = _bound(extensions, "added")
        self.released: tuple[Callable[[Sequence], None], ...] = _bound(extensions, "released")
        self.abandon: tuple[Callable[..., None], ...] = _bound(extensions, "abandon")


@dataclass(frozen=True)
class Extensions:
    """The mechanisms that are attached to a scheduler, in the order in which they are asked; None
    is one that is not used. `nanoserve.scheduler.assembly` makes them."""

    layouts: "Layouts | None" = None
    host: "HostTier | None" = None
    cpu_attention: "HostDecoding | None" = None
    drafts: "Drafts | None" = None
    state: "RecurrentState | None" = None
    canvases: "Canvases | None" = None

    def __iter__(self) -> Iterator[Extension]:
        """Iterate over the mechanisms that are attached."""
        mechanisms: tuple[Extension | None, ...] = (
            self.layouts,
            self.host,
            self.cpu_attention,
            self.drafts,
            self.state,
            self.canvases,
        )
        return (mechanism for mechanism in mechanisms if mechanism is not None)


NOTHING_ATTACHED = Extensions()
"""The plain path."""
