"""Expected growth of running sequences, worked out by hand, and that the policy is
told."""

import statistics
from typing import ClassVar

import pytest

from nanoserve.engine.engine import Engine
from nanoserve.request import Place, Request, SamplingParams, Sequence
from nanoserve.scheduler.growth import GrowthForecast
from nanoserve.scheduler.load import Decision, Load, Policy
from nanoserve.scheduler.scheduler import Scheduler
from nanoserve.scheduler.sequence_table import RankOrdered
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor


def _sequence(number: int, *, prompt: int, produced: int, longest: int = 1000) -> Sequence:
    request = Request(f"r{number}", (1,) * prompt, SamplingParams(), seed=0)
    return Sequence(number, request, 0, tokens=[1] * (prompt + produced), max_length=longest)


def _known(*lengths: int, running: tuple[int, ...] = ()) -> GrowthForecast:
    """After answers of these lengths, while others have produced so much."""
    known = GrowthForecast()
    for length in lengths:
        known.record(length)
    known.renew(running)
    return known


def test_answers_of_one_length_grow_to_it_together() -> None:
    running = [_sequence(number, prompt=5, produced=4) for number in range(3)]
    assert _known(10).expected_growth(running) == 3 * 6


def test_what_ends_early_makes_room_for_what_ends_late() -> None:
    long_prompt = _sequence(0, prompt=50, produced=8)  # 2 tokens to go, then 60 are free
    young = _sequence(1, prompt=5, produced=0)  # 10 to go
    assert _known(10).expected_growth([long_prompt, young]) == 2 + 2


def test_draft_tokens_are_spread_over_the_known_lengths_that_are_longer() -> None:
    known = _known(2, 20, 40, 30, 10)
    fresh = [known.remaining(_sequence(number, prompt=5, produced=0)) for number in range(1000)]
    assert {
        length: round(fresh.count(length) / 1000, 1) for length in (2, 10, 20, 30, 40)
    } == dict.fromkeys((2, 10, 20, 30, 40), 0.2)
    late = {known.remaining(_sequence(number, prompt=5, produced=25)) for number in range(10)}
    assert late == {5, 15}


def test_longer_than_any_known_answer_is_half_way_but_ends_with_its_limit() -> None:
    assert _known(10).remaining(_sequence(0, prompt=5, produced=12)) == 12
    assert _known(10).remaining(_sequence(0, prompt=5, produced=12, longest=20)) == 3


def test_with_no_answer_known_one_is_taken_to_be_as_long_as_its_prompt() -> None:
    assert _known().remaining(_sequence(0, prompt=5, produced=0)) == 5
    assert _known().remaining(_sequence(0, prompt=5, produced=7)) == 7


def test_those_that_still_run_say_that_the_first_to_end_were_the_short_ones() -> None:
    known = _known(10, 10, 30, running=(20, 20, 50))
    # Of six, two end with 10: a third. Of the two that are seen to come to 30, one does: half of
    # what is left. The other third is beyond: 50 is half way.
    fresh = [known.remaining(_sequence(number, prompt=5, produced=0)) for number in range(900)]
    assert {
        length: round(fresh.count(length) / 900, 2) for length in (10, 30, 100)
    } == dict.fromkeys((10, 30, 100), 0.33)
    late = {known.remaining(_sequence(number, prompt=5, produced=20)) for number in range(10)}
    assert late == {30 - 20, 100 - 20}
    assert known.deviation() == pytest.approx(statistics.pstdev([10, 30, 100]))


def test_lengths_that_differ_ask_for_one_and_a_half_deviations_on_top() -> None:
    # all go on to 40, the only longer one
    running = [_sequence(number, prompt=5, produced=30) for number in range(4)]
    assert _known(20, 40).expected_growth(running) == 4 * 10 + round(1.5 * 10 * 4**0.5)


def test_old_answers_are_forgotten() -> None:
    known = _known(*[500] * 10, *[7] * 1000)
    assert known.remaining(_sequence(0, prompt=5, produced=0)) == 7
    assert known.remaining(_sequence(0, prompt=5, produced=8)) == 8


def test_only_who_begins_on_the_device_is_added_and_with_nobody_left_nothing_is_expected() -> None:
    running, forecaster = RankOrdered(), GrowthForecast()
    here, there = _sequence(0, prompt=5, produced=0), _sequence(1, prompt=7, produced=0)
    here.place, there.place = Place.DEVICE, Place.HOST
    running.add(here)
    forecaster.add([here, there])
    assert forecaster.look(1, running) == (5, 0)
    running.remove(here)
    assert forecaster.look(2, running) == (0, 0)


class _Deaf(Policy):
    """Decides like a plain loop and keeps what it was told, without having asked."""

    def __init__(self) -> None:
        self.growth: list[int] = []
        self.longest: list[int] = []

    def decide(self, load: Load) -> Decision:
        self.growth.append(load.expected_growth)
        self.longest.append(load.longest_remaining)
        return Decision(prefill_tokens=8, decodes=load.ready_decodes)


class _Listener(_Deaf):
    reads_forecast: ClassVar[bool] = True


def test_the_scheduler_learns_from_answers_that_ended_by_themselves_and_tells_the_policy() -> None:
    policy = _Listener()
    _aborted_then_two_answers(policy)
    # Steps 1 to 21 are the first answer: after 15 tokens it is half way, but only 6 are left to its
    # limit.
    assert policy.growth[16:22] == [2] * 6
    # From step 22 on the second: after 10 tokens 11 of 21 are to come, after 26 it is half way,
    # give or take 1.5 * 15.5: it is one of two that came to 21, where the other ended.
    assert [policy.growth[step] for step in (32, 47, 48)] == [3, 3, 13]
    assert [policy.longest[step] for step in (16, 32, 48)] == [6, 11, 26]


def test_nobody_is_looked_at_for_a_policy_that_does_not_read_forecasts() -> None:
    policy = _Deaf()
    _aborted_then_two_answers(policy)
    assert set(policy.growth) == set(policy.longest) == {0}


def _aborted_then_two_answers(policy: _Deaf) -> None:
    scheduler = Scheduler(policy, num_blocks=40, block_size=4, max_model_len=100)
    engine = Engine(scheduler, MemoryCheckingExecutor(40, 4), vocab_size=50)
    engine.add(Request("aborted", (3, 1), SamplingParams(temperature=0), seed=0))
    engine.step()
    engine.stop("aborted")
    for name, limit in (("first", 21), ("second", 60)):
        engine.add(
            Request(name, (1, 2, 3, 4), SamplingParams(temperature=0, max_tokens=limit), seed=0)
        )
        while engine.has_work:
            engine.step()
