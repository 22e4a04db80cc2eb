"""An explanation shows the block tables that the scheduler and the executor have, whatever
happens."""

import dataclasses
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings

from nanoserve.engine.engine import Engine
from nanoserve.lab.commands.explain_view import print_steps
from nanoserve.lab.explanation import (
    AT_MOST,
    MEANINGS,
    NAMES,
    NOT_SHOWN,
    ExplainedRun,
    Explanation,
    explain_run,
)
from nanoserve.record.events import Event, Planned, States
from nanoserve.record.recorder import recorder_of
from nanoserve.record.run_record import RunRecord
from nanoserve.scheduler.load import Decision, Load
from nanoserve.scheduler.optional import HostDecision, HostLoad, LayoutsLoad, Tier
from tests.scheduler.lives import lives
from tests.scheduler.states import StatefulBench
from tests.scheduler.tier_lives import DECIDED, TIERS, AtRandom, check

Tables = dict[tuple[int, Tier], tuple[int, ...]]


class Watch:
    """Notes after each plan the tables that the scheduler holds, and those that the executor made
    of the plans."""

    def __init__(self) -> None:
        self.record = RunRecord(1, keeps_tables=True)
        self.held: list[Tables] = []
        self.known: list[Tables] = []

    def __call__(self, engine: Engine) -> None:
        self._engine = engine
        recorder_of(engine).add(self.record, self._on_event)

    def _on_event(self, event: Event) -> None:
        if not isinstance(event, Planned):
            return
        sequences = self._engine.scheduler.table.sequences.items()
        on_device: Tables = {
            (key, "device"): tuple(one.block_table) for key, one in sequences if one.block_table
        }
        on_host: Tables = {
            (key, "host"): tuple(one.host_table) for key, one in sequences if one.host_table
        }
        self.held.append(on_device | on_host)
        records = self._engine.executor._records.items()
        self.known.append({(key, one.tier): tuple(one.block_table) for key, one in records})


@settings(max_examples=100, deadline=None)
@given(life=lives(), memory=TIERS, decided=DECIDED)
def test_tables_are_those_of_the_scheduler_and_of_the_executor(
    life: dict, memory: dict, decided: list[Decision]
) -> None:
    watch = Watch()
    check(AtRandom(decided), life, memory, watch=watch)
    run = explain_run(
        "random", watch.record, life["block_size"], 1, lambda tokens: tuple(map(str, tokens))
    )
    encoded = msgspec.json.encode(run)
    assert msgspec.json.encode(msgspec.json.decode(encoded, type=ExplainedRun)) == encoded
    for step, held, known in zip(run.steps, watch.held, watch.known, strict=True):
        tables = {(table.sequence, table.tier): table.blocks for table in step.tables}
        assert tables == held
        for (sequence, tier), blocks in known.items():
            shown = tables[sequence, tier]
            assert shown[: len(blocks)] == blocks
            # the scheduler may have reserved more on the host
            assert tier == "host" or shown == blocks
        owners = Counter(
            block for (_, tier), blocks in tables.items() if tier == "device" for block in blocks
        )
        assert set(step.shared) == {block for block, number in owners.items() if number > 1}
        # A fork that has not written yet also owns the block that it will copy.
        assert step.total_blocks - step.free_blocks >= len(owners)
        assert not {copy.target for copy in step.copies} & set(step.shared)
        for row in step.rows:
            assert (row.sequence, row.tier) in tables


def test_slots_and_snapshots_are_shown_where_blocks_are(capsys: pytest.CaptureFixture[str]) -> None:
    """The prompts of 130 tokens leave a snapshot at 128 in their first step; nobody owns it."""
    bench = StatefulBench(num_slots=9)
    record = RunRecord(1, keeps_tables=True)
    recorder_of(bench.engine).add(record)
    for name, first in (("a", 0), ("b", 500)):
        bench.add(name, tuple(range(first, first + 130)))
    bench.step()
    assert (bench.engine.status.free_state_slots, bench.engine.status.total_state_slots) == (7, 9)
    bench.finish()
    run = explain_run("sarathi", record, 16, 1, lambda tokens: tuple(map(str, tokens)))
    assert run.steps[0].states == States(slots=9, working=2, snapshots=2, free=7)
    assert bench.engine.status.free_state_slots == 9
    encoded = msgspec.json.encode(run)
    assert msgspec.json.decode(encoded, type=ExplainedRun) == run
    print_steps(Explanation("two prompts", (run,)))
    shown = capsys.readouterr().out.splitlines()
    (place, *_) = [place for place, line in enumerate(shown) if line.startswith("free ")]
    counted = "2 of 9 slots are of running sequences, 2 are snapshots, 7 free"
    assert " ".join(shown[place + 1].split()) == f"states {counted}"
    rows = [line.split() for line in shown if line.startswith("state ")]
    assert [row[:2] for row in rows[:2]] == [["state", "0:"], ["state", "1:"]]
    assert [row[5:7] for row in rows[:2]] == [["position", "128"]] * 2


def test_every_field_that_a_step_shows_has_its_meaning() -> None:
    of_decisions = _names(Decision, "host") | _names(HostDecision)
    of_loads = _names(Load, "layouts", "host") | _names(LayoutsLoad) | _names(HostLoad)
    assert {*MEANINGS} == of_decisions | of_loads
    assert {*AT_MOST} <= of_decisions


def _names(shape: type, *members: str) -> set[str]:
    """The names under which a step shows the fields of a class, but for its ``members``, whose
    fields it shows."""
    own = {field.name for field in dataclasses.fields(shape)} - {*NOT_SHOWN, *members}
    return {NAMES.get((shape, name), name) for name in own}
