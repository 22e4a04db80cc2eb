"""Records of requests, the metrics that follow from them, and warnings about anything that weakens
the metrics."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from nanoserve.lab.benchmarks.rounds import MeasuredRound
from nanoserve.lab.highest_rate import TimedAnswer, latency_growth
from nanoserve.record.metrics import (
    MILLISECONDS,
    SLO_NAMES,
    Slo,
    in_milliseconds,
    mean_of_known,
    request_distributions,
)
from nanoserve.server.client.events import ServerUsage


class RequestRecord(msgspec.Struct, kw_only=True):
    """Record of one request, filled in as its answer comes; times are seconds since the beginning
    of the run."""

    # when it was to be sent; latencies count from here, however late the client was
    scheduled: float
    started: float  # when it was sent
    ended: float = 0.0  # when its last token came, or when it failed
    text_times: list[float] = []  # when the pieces of its answer came; pieces without text are none
    input_tokens: int = 0  # this count and the next two are as the server reported them
    output_tokens: int = 0
    cached_tokens: int = 0
    counted: bool = True
    """Whether the server did count; if not, output_tokens are pieces and input_tokens what was
    sent."""
    wanted_tokens: int = 0  # how many output tokens were asked for
    failure: str | None = None
    """Reason of a failure, named so that equal failures can be counted; None for a complete
    answer."""

    def count(self, usage: ServerUsage) -> None:
        """Take the server's counts of tokens, as far as it has any."""
        self.counted = usage.completion_tokens is not None
        self.output_tokens = len(self.text_times)
        if usage.completion_tokens is not None:
            self.output_tokens = usage.completion_tokens
        if usage.prompt_tokens is not None:
            self.input_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens or 0

    @property
    def ttft(self) -> float:
        """Time to first token; an answer that shows no text has it when it ends."""
        if not self.text_times:
            return self.e2el
        return self.text_times[0] - self.scheduled

    @property
    def e2el(self) -> float:
        return self.ended - self.scheduled

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None with fewer than two tokens."""
        if self.output_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.output_tokens - 1)

    @property
    def itls(self) -> tuple[float, ...]:
        """Gaps between pieces of text; pieces that came together, in one read, are one."""
        return tuple(
            after - before for before, after in pairwise(self.text_times) if after > before
        )


class LoadRun(msgspec.Struct):
    """The requests of one run of a load, filled in as they end."""

    records: list[RequestRecord] = []
    # time from the start of the schedule until the last request, or the run, ended
    seconds: float = 0.0
    # requests that were on their way, or had not yet come, when the run was ended
    unfinished: int = 0

    @property
    def complete(self) -> list[RequestRecord]:
        return [record for record in self.records if record.failure is None]

    def good(self, slo: Slo) -> int:
        """Complete answers within all of the limits."""
        return sum(slo.allows(record.ttft, record.tpot, record.e2el) for record in self.complete)

    @property
    def answers(self) -> list[TimedAnswer]:
        """The complete answers, for a look at whether a queue grows."""
        return [
            TimedAnswer(one.scheduled, one.ttft, one.tpot, one.output_tokens)
            for one in self.complete
        ]

    @property
    def growth(self) -> float | None:
        return latency_growth(self.answers)

    @property
    def rates(self) -> dict[str, float]:
        """Requests and tokens of complete answers, per second."""
        outputs = sum(record.output_tokens for record in self.complete)
        inputs = sum(record.input_tokens for record in self.complete)
        return {
            "requests_per_s": len(self.complete) / self.seconds,
            "output_tokens_per_s": outputs / self.seconds,
            "total_tokens_per_s": (inputs + outputs) / self.seconds,
        }


class DoneRun(MeasuredRound, frozen=True, kw_only=True):
    """A run that has ended, beside whatever else ran on the machine."""

    run: LoadRun


def figures(runs: Sequence[LoadRun], slo: Slo | None) -> dict[str, Any]:
    """A report's row: latencies over the requests of all runs, rates as means over the runs. Failed
    requests have no latencies; they are counted by their names. Nothing is left out of the
    attainment. The samples, for ``bench diff``, are the metrics of each whole run in which an
    answer came."""
    records = [record for run in runs for record in run.records]
    complete = [record for run in runs for record in run.complete]
    failures = Counter(record.failure for record in records if record.failure is not None)
    rates = [run.rates for run in runs]
    whole = [run for run in runs if run.complete and not run.unfinished]
    samples = {
        f"{name}_ms": [
            MILLISECONDS * mean_of_known(getattr(one, name) for one in run.complete)
            for run in whole
        ]
        for name in SLO_NAMES
    }
    samples["output_tokens_per_s"] = [run.rates["output_tokens_per_s"] for run in whole]
    goodput = None
    if slo is not None:
        samples["goodput_requests_per_s"] = [run.good(slo) / run.seconds for run in whole]
        attainment = None
        if records:
            attainment = sum(run.good(slo) for run in runs) / len(records)
        goodput = {
            "slo_ms": slo,
            "requests_per_s": mean_of_known(run.good(slo) / run.seconds for run in runs),
            "attainment": attainment,
        }
    return {
        "requests": len(records),
        "completed": len(complete),
        "failed": sum(failures.values()),
        "failures": dict(failures.most_common()),
        "unfinished": sum(run.unfinished for run in runs),
        "seconds": mean_of_known(run.seconds for run in runs),
        **{name: mean_of_known(rate[name] for rate in rates) for name in rates[0]},
        "peak_concurrency": max(peak_concurrency(run.records) for run in runs),
        "input_tokens": sum(record.input_tokens for record in complete),
        "output_tokens": sum(record.output_tokens for record in complete),
        "cached_tokens": sum(record.cached_tokens for record in complete),
        "uncounted": sum(not record.counted for record in complete),
        "of_other_length": sum(record.output_tokens != record.wanted_tokens for record in complete),
        "without_text": sum(not record.text_times for record in complete),
        **request_distributions(complete),
        "latency_growth": mean_of_known(run.growth for run in runs),
        "send_delay_ms": in_milliseconds(record.started - record.scheduled for record in complete),
        "goodput": goodput,
        "samples": samples,
    }


def peak_concurrency(records: Sequence[RequestRecord]) -> int:
    """The most requests that were on their way at one time; one that ends as another starts makes
    room for it."""
    changes = sorted(
        [(record.started, 1) for record in records] + [(record.ended, -1) for record in records]
    )
    running = peak = 0
    for _, change in changes:
        running += change
        peak = max(peak, running)
    return peak


_FEWEST_LOADS = 3  # of which one may be a knee


def knee(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the load at which output per second over mean latency is greatest (Kleinrock's
    power): beyond it, latency grows faster than output. None among fewer than three loads with
    answers."""
    answered = [row for row in rows if row["completed"]]
    if len(answered) < _FEWEST_LOADS:
        return None
    return max(answered, key=lambda row: row["output_tokens_per_s"] / row["e2el_ms"]["mean"])


_LATE_MS = 50.0
_REMARKS = {
    "unfinished": "interrupted, {} requests had no answer yet",
    "uncounted": "the server counted no tokens of {} answers: their pieces stand for tokens",
    "of_other_length": "{} answers are not of the length that was asked for",
    "without_text": "{} answers showed no text before they ended: that is their first token's time",
}


def warnings(row: Mapping[str, Any]) -> list[str]:
    """One line each, of a row of ``bench serve``."""
    lines = [f"{count} requests failed: {failure}" for failure, count in row["failures"].items()]
    lines += [remark.format(row[name]) for name, remark in _REMARKS.items() if row[name]]
    if row["cached_tokens"]:
        share = row["cached_tokens"] / row["input_tokens"]
        lines.append(f"{share:.1%} of the prompt tokens came from the server's prefix cache")
    delay = row["send_delay_ms"]
    if delay is not None and delay["p99"] > _LATE_MS:
        lines.append(
            f"the client was late itself: by {delay['p99']:,.0f} ms in the 99th percentile"
        )
    return lines
