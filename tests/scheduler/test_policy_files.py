"""Policies of a user's own, in a file that --policy names: what is taken, and what each mistake is
told."""

from pathlib import Path

import pytest

from nanoserve.commands.main import main
from nanoserve.engine.engine import Engine
from nanoserve.errors import PolicyFailed, UsageError
from nanoserve.request import FinishReason, Request, SamplingParams
from nanoserve.scheduler import make_policy
from nanoserve.scheduler.policies import parse_policies
from nanoserve.scheduler.policies.placement import PreemptingBySwap
from nanoserve.scheduler.scheduler import Scheduler
from tests.fakes.integrity import check_integrity
from tests.fakes.memory_checking_executor import MemoryCheckingExecutor

HEAD = (
    "from dataclasses import dataclass\nfrom nanoserve.scheduler import Decision, Load, Policy, "
    "parameter\n"
)
HEAD += "from nanoserve.scheduler.optional import HostDecision\n"
MINE = f"""{HEAD}
@dataclass(frozen=True)
class Mine(Policy):
    token_budget: int
    share: float = parameter(0.5, at_least=0, below=1)

    def decide(self, load: Load) -> Decision:
        return Decision(int(self.token_budget * self.share), load.ready_decodes)
"""
OVERLAP = "Decision(1, 1, host=HostDecision(strategy='overlap'))"
PLAIN = f"{HEAD}class Mine(Policy):\n    def decide(self, load):\n        return "


@pytest.fixture
def written(tmp_path: Path):
    """Writes a file and returns its path; each has another name, as a file is executed once in a
    process."""

    def write(source: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(source)
        return str(path)

    return write


def test_a_class_has_the_budget_and_the_parameters_that_it_names(written) -> None:
    path = written(MINE)
    policies = parse_policies(f"{path}:Mine, {path}:Mine:share=0.25:order=priority:aging=7", 64)
    mine, other = policies.values()
    assert (mine.token_budget, mine.share, mine.ranks) == (64, 0.5, False)  # type: ignore[attr-defined]
    assert (other.share, other.order, other.aging, other.ranks) == (0.25, "priority", 7, True)  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="share must be at least 0 and below 1, not 2"):
        make_policy(f"{path}:Mine:share=2", 64)
    with pytest.raises(UsageError, match="no parameter 'speed'; it has share, order, aging"):
        make_policy(f"{path}:Mine:speed=2", 64)


def test_a_plain_class_will_do(written) -> None:
    policy = make_policy(
        written(f"{PLAIN}Decision(8, load.ready_decodes)\n") + ":Mine", 64, swaps=True
    )
    assert isinstance(policy, PreemptingBySwap)
    assert not policy.ranking.ranks


@pytest.mark.parametrize(
    ("source", "name", "says"),
    [
        (None, "Mine", "mine.py: No such file or directory"),
        ("class Mine:\n", "Mine", "mine.py: IndentationError: expected an indented block"),
        ("1 / 0\n", "Mine", "mine.py: ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", "Mine", "mine.py: SystemExit: 3"),
        (
            "class Mine: ...\nclass Other: ...\n",
            "Mine",
            "no such subclass of Policy; it has Mine, Other",
        ),
        (MINE, "Yours", "mine.py:Yours: the file has no such subclass of Policy; it has Mine"),
        (MINE, "", "mine.py:NAME: the file has no such subclass of Policy; it has Mine"),
        (f"{PLAIN}1\n    aging = order = []\n", "Mine", "order must be one of first-come"),
        (f"{PLAIN}1\n    aging = '1'\n", "Mine", "and aging at least 1"),
        (
            f"{PLAIN}1\n    def __init_subclass__(cls): 1 / 0\n",
            "Mine",
            "mine.py: ZeroDivisionError: division",
        ),
        (
            f"{HEAD}class Mine(Policy):\n    def __init__(self, x): ...\n",
            "Mine",
            "policy Mine: TypeError",
        ),
    ],
)
def test_a_mistake_is_told_in_one_line_before_anything_runs(
    source: str | None,
    name: str,
    says: str,
    tmp_path: Path,
    written,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = str(tmp_path / "mine.py") if source is None else written(source)
    assert main(["simulate", "--policy", f"{path}:{name}"]) == 2
    told = capsys.readouterr().err.strip()
    assert says in told
    assert "\n" not in told


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"{PLAIN}7\n", "policy Mine.decide: ValueError: it answers 7, which is no Decision"),
        (f"{PLAIN}Decision(-1, 0)\n", "prefill_tokens must be a whole number from 0, not -1"),
        (f"{PLAIN}Decision(0, float('nan'))\n", "decodes must be a whole number from 0, not nan"),
        (f"{PLAIN}Decision(1.5, 1)\n", "prefill_tokens must be a whole number from 0, not 1.5"),
        (f"{PLAIN}{OVERLAP}\n", "only policies of nanoserve have the CPU attend"),
        (
            f"{PLAIN}Decision(1, 1, host=3)\n",
            "policy Mine.decide: ValueError: host must be a HostDecision, not 3",
        ),
        (
            f"{PLAIN}Decision(10**30, 1)\n",
            "prefill_tokens must be a whole number from 0, not 1000000",
        ),
        (
            f"{PLAIN}Decision(1, 1, bound=7)\n",
            "policy Mine.decide: ValueError: bound must be text, not 7",
        ),
        (f"{PLAIN}exit(0)\n", "policy Mine.decide: SystemExit: 0"),
        (
            f"{PLAIN}load.nothing\n",
            "policy Mine.decide: AttributeError: 'Load' object has no attribute",
        ),
        (
            f"{PLAIN}Decision(1, 1)\n    rank = lambda *_: 'x'\n",
            "Mine.rank: ValueError: a rank is a number",
        ),
    ],
)
def test_a_simulation_ends_with_one_line_about_its_policy(
    source: str, says: str, written, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--policy", f"{written(source)}:Mine", "--requests", "2"]) == 1
    told = capsys.readouterr().err.strip()
    assert says in told
    assert "\n" not in told


FAILING = f"""{HEAD}
class Mine(Policy):
    def decide(self, load):
        if load.first_waiting_tokens == 13:
            raise KeyError("thirteen")
        return Decision(4, load.ready_decodes)

    def rank(self, request, fair_start):
        return 1 / (request.priority + 1)
"""


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_that_fails_ends_its_requests_and_the_engine_goes_on(depth: int, written) -> None:
    policy = make_policy(written(FAILING) + ":Mine", 64)
    scheduler = Scheduler(
        policy, num_blocks=8, block_size=4, max_model_len=32, pipeline_depth=depth
    )
    engine = Engine(scheduler, MemoryCheckingExecutor(8, 4, depth=depth), vocab_size=50)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    ended = {}

    def run(steps: int) -> None:
        for _ in range(steps):
            for update in engine.step():
                if update.finished:
                    ended[update.request_id] = update.sequence.finish_reason, update.sequence.error
            check_integrity(scheduler)

    engine.add(Request("good", (1,) * 5, params, seed=0))
    run(2)
    engine.add(Request("bad", (1,) * 13, params, seed=0))
    run(10)
    error = "policy Mine.decide: KeyError: 'thirteen'"
    assert ended == dict.fromkeys(("good", "bad"), (FinishReason.ERROR, error))
    assert not engine.has_work
    assert scheduler.pool.free_blocks == 8
    with pytest.raises(
        PolicyFailed, match=r"policy Mine.rank: ZeroDivisionError: division by zero"
    ):
        engine.add(Request("unranked", (1, 2), params, seed=0, priority=-1))
    engine.add(Request("later", (1,) * 5, params, seed=0))
    run(10)
    assert ended["later"] == (FinishReason.LENGTH, None)
