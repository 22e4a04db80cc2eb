"""Every figure of every paper, with one small simulation in the place of all of its jobs."""

from collections.abc import Collection, Iterable, Mapping
from functools import cache
from typing import Any

import pytest
from msgspec.structs import replace

from nanoserve.lab.charts import draw_figure
from nanoserve.lab.papers.cases import Case, Outcome, System
from nanoserve.lab.papers.claims import stated_claims
from nanoserve.lab.papers.drafted_stories import Drafted, DraftedStories
from nanoserve.lab.papers.framework import PAPERS, Finding, Scale, SimulationJob, load_paper
from nanoserve.lab.papers.gllm.code_size import ROOT, code_lines, lines_of_code, rooms
from nanoserve.lab.papers.gllm.serving import lone_request_limits
from nanoserve.lab.papers.lecture import BLOCK, memory_use
from nanoserve.lab.papers.quantized_stories import (
    METHODS,
    DrawnStories,
    QuantizedPerplexities,
    QuantizedReading,
)
from nanoserve.lab.papers.seesaw.search import RESHARDING_KIND, STATIC_KIND, BestBudget, Shortlist
from nanoserve.lab.papers.seesaw.settings import RESHARDING, closed_batch, fitting_layouts
from nanoserve.layout import ParallelLayout
from nanoserve.record.metrics import Slo
from nanoserve.request import RequestShape

FIGURES = [
    (name, figure.number) for name in ("gllm", "lecture") for figure in load_paper(name).figures
]
SIZES = ("reduced", "full")


@cache
def _outcome() -> Outcome:
    case = Case(
        system=System(label="any", policy="throttling"),
        model="qwen3-0.6b",
        machine="l4",
        layouts=(ParallelLayout(pipeline_parallel=4),),
        lengths="30+20",
        requests=60,
        rate=100.0,
        steady=(0.0, 1.0),
        logged_steps=1000,
        slo=Slo(ttft=1000.0),
    )
    return case.run()


class _Run:
    """Notes the jobs and runs none of them: each takes longer the more requests come a second."""

    def __init__(self) -> None:
        self.outcomes: dict[Any, Outcome] = {}

    def __call__(self, jobs: Iterable[SimulationJob]) -> Mapping[Any, Any]:
        for job in jobs:
            if isinstance(job, DrawnStories | QuantizedReading | DraftedStories):
                self.outcomes[job] = _read(job)
                continue
            assert isinstance(job, Case)
            self.outcomes[job] = _slower(_outcome(), 1 + (job.rate or 0.0))
        return self.outcomes


def _read(job: DrawnStories | QuantizedReading | DraftedStories) -> Any:
    """Result of a job of the storyteller, without reading."""
    if isinstance(job, DrawnStories):
        return [((), ()) for _ in job.seeds]
    if isinstance(job, DraftedStories):
        return [Drafted(2.0, 100, [60, 30, 10, 0]) for _ in job.seeds]
    bits = dict.fromkeys(("4 bits", "3 bits"), METHODS)
    bits["W8A8"] = ("per tensor", "per row", "LLM.int8()")
    methods = [f"{method}, {form}" for form, several in bits.items() for method in several]
    return QuantizedPerplexities(dict.fromkeys(["float32", *methods], 5.0), 0.01)


def _slower(outcome: Outcome, factor: float) -> Outcome:
    result = outcome.result
    assert result.ttft_ms is not None and result.e2el_ms is not None
    times = {
        name: replace(times, mean=times.mean * factor)
        for name, times in (("ttft_ms", result.ttft_ms), ("e2el_ms", result.e2el_ms))
    }
    return replace(outcome, result=replace(result, **times))


@cache
def _made(name: str, number: str, size: str) -> tuple[Finding, Collection[Case]]:
    """A figure of two seeds, and its jobs."""
    (figure,) = load_paper(name).chosen(number)
    run = _Run()
    return figure.make(Scale(seeds=(0, 1), full=size == "full"), run), run.outcomes.keys()


@pytest.mark.parametrize(("name", "number"), FIGURES)
@pytest.mark.parametrize("size", SIZES)
def test_every_figure_ends_in_claims_and_a_picture(name: str, number: str, size: str) -> None:
    found, cases = _made(name, number, size)
    (figure,) = load_paper(name).chosen(number)
    assert found.claims
    assert all(claim.assumption and claim.paper and claim.says for claim in found.claims)
    assert found.chart is not None
    assert all(panel.curves for panel in found.chart.panels)
    assert all(
        len(curve.xs) == len(curve.ys) for panel in found.chart.panels for curve in panel.curves
    )
    for row in found.rows:
        assert all(column.path in row for column in figure.columns)
    simulated = [case for case in cases if isinstance(case, Case)]
    assert {case.seed for case in simulated} <= {0, 1}
    for case in simulated:
        case.costs().memory.kv_blocks(16)  # the model fits


@cache
def _resharded() -> Outcome:
    layouts = tuple(map(ParallelLayout.parse, ("P4", "T4")))
    batch = closed_batch("llama-3-15b", "seesaw-a10", 4, "1000+60", requests=24)
    return replace(batch, layouts=layouts, system=RESHARDING).run()


class _AnyRun(_Run):
    """Answers the jobs of all papers; a search finds the first configuration of its setting."""

    def __call__(self, jobs: Iterable[SimulationJob]) -> Mapping[Any, Any]:
        for job in jobs:
            if isinstance(job, DrawnStories | QuantizedReading | DraftedStories):
                self.outcomes[job] = _read(job)
            elif isinstance(job, Case) and job.machine.startswith("seesaw"):
                self.outcomes[job] = _resharded()
            elif isinstance(job, Case):
                outcome = _slower(_outcome(), 1 + (job.rate or 0.0))
                self.outcomes[job] = replace(outcome, result=replace(outcome.result, preemptions=1))
            elif isinstance(job, Shortlist):
                pair = replace(
                    job.setting, layouts=tuple(fitting_layouts(job.setting)[:2]), system=RESHARDING
                )
                self.outcomes[job] = {STATIC_KIND: (job.setting,), RESHARDING_KIND: (pair,)}
            else:
                self.outcomes[job] = job.case if isinstance(job, BestBudget) else job.run()
        return self.outcomes


@pytest.mark.parametrize("name", PAPERS)
def test_every_row_of_the_claims_is_used_by_a_figure(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sizes look up every row of the paper, and no other one: none is told only to who runs
    ``--full``."""
    rows, used = stated_claims(), set[tuple[str, str]]()

    class NotingRows(dict[tuple[str, str], Mapping[str, str]]):
        def __getitem__(self, key: tuple[str, str]) -> Mapping[str, str]:
            used.add(key)
            return rows[key]

    monkeypatch.setattr("nanoserve.lab.papers.claims.stated_claims", NotingRows)
    for full in (False, True):
        used.clear()
        for figure in load_paper(name).figures:
            figure.make(Scale(seeds=(0,), full=full), _AnyRun())
        assert used == {key for key in rows if key[0] == name}


@pytest.mark.parametrize("number", [number for name, number in FIGURES if name == "lecture"])
def test_all_entries_of_a_legend_look_different(number: str) -> None:
    pytest.importorskip("matplotlib")
    found, _ = _made("lecture", number, "reduced")
    assert found.chart is not None
    figure = draw_figure(found.chart)
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()))]
    assert legends
    for legend in legends:
        looks = [_look(handle) for handle in legend.legend_handles]
        assert len({*looks}) == len(looks), [text.get_text() for text in legend.get_texts()]


def _look(handle: Any) -> tuple[object, ...]:
    """Colour, dashes and mark of a line, or the colour of a bar."""
    if hasattr(handle, "get_marker"):
        return handle.get_color(), handle.get_linestyle(), handle.get_marker()
    return (handle.get_facecolor(),)


def test_batches_that_do_not_fit_stand_beyond_a_line() -> None:
    found, _ = _made("lecture", "batch", "reduced")
    assert found.chart is not None
    fitting = [row["batch"] for row in found.rows if row["fits"] == "yes"]
    others = [row["batch"] for row in found.rows if row["fits"] == "no"]
    for panel in found.chart.panels:
        (line,) = panel.vertical_marks
        assert max(fitting) <= line < min(others)
        assert [note.text for note in panel.notes] == [f"{line:g} fit"]


def test_a_full_run_holds_more_than_a_reduced_one() -> None:
    amounts = []
    for size in SIZES:
        cases = {
            case
            for name, number in FIGURES
            if name == "gllm"
            for case in _made(name, number, size)[1]
        }
        amounts.append(sum(case.requests for case in cases))
    assert 2 * amounts[0] < amounts[1]


def test_limits_follow_from_what_a_lone_request_takes() -> None:
    case = Case(
        system=System(label="any", policy="sarathi"),
        model="llama-3.1-100b",
        machine="gllm-a800",
        layouts=(ParallelLayout(pipeline_parallel=4),),
        lengths="azure-conv",
        requests=1,
    )
    limits = lone_request_limits(case)
    assert limits.ttft is not None and limits.tpot is not None
    # 100 billion 16-bit weights at 80 % of 1,935 GB/s, one stage after the other, five times
    assert limits.tpot == pytest.approx(5 * 1e3 * 200e9 / (0.8 * 1935e9), rel=0.1)
    # 1,155 prompt tokens of 2 operations a weight at 70 % of 312 TFLOPS
    assert limits.ttft == pytest.approx(5 * 1e3 * 1155 * 200e9 / (0.7 * 312e12), rel=0.1)


def test_what_reservations_hold_by_hand() -> None:
    """Two steps of one request: 17 and 18 tokens in two blocks of 16; the longest request has 48
    slots."""
    alone = memory_use([RequestShape(16, 2)])
    assert alone["held"] == 17.5
    assert alone["contiguous"] == pytest.approx(17.5 / 18)
    assert alone["paged"] == pytest.approx(17.5 / (2 * BLOCK))
    both = memory_use([RequestShape(16, 2), RequestShape(47, 1)])
    assert both["longest"] == 48
    assert both["contiguous"] == pytest.approx((17 + 18 + 48) / (3 * 48))
    assert both["prompt_known"] == pytest.approx((17 + 18 + 48) / (2 * 18 + 49))
    assert both["gain"] == pytest.approx(3 * 48 / (32 + 32 + 48))


def test_table_1_puts_every_room_beside_the_papers_systems() -> None:
    found = lines_of_code(Scale(), _Run())
    lines = {row["code_of"]: row["lines"] for row in found.rows}
    by_room = rooms()
    assert {name: lines[name] for name in by_room} == {
        name: size.lines for name, size in by_room.items()
    }
    assert lines["all of nanoserve"] == sum(size.lines for size in by_room.values())
    (benchmarks,) = (room for room in by_room if (ROOT / room / "benchmarks").is_dir())
    assert (
        lines["the engine without its laboratory"] == lines["all of nanoserve"] - lines[benchmarks]
    )
    assert [lines[f"{name} (paper)"] for name in ("gLLM", "SGLang", "vLLM")] == [
        3_874,
        65_097,
        226_874,
    ]


def test_a_line_of_code_is_no_comment_docstring_or_blank() -> None:
    source = '"""A module."""\n\n# why\nvalue = """two\nlines"""  # both count\n\n\ndef f():\n    """Do it."""\n'
    assert code_lines(source) == 3
