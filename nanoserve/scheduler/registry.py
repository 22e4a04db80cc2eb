"""The policies by name: the choices of ``--policy`` and the table of ``nanoserve policies``."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any

from nanoserve.errors import UsageError
from nanoserve.scheduler.baselines import ChunkedPrefill, DecodeFirst, PrefillFirst
from nanoserve.scheduler.hybrid import ApexAlgorithm1, AsymmetricPipelining, AsynchronousOverlap, HybridByPrediction
from nanoserve.scheduler.load import Policy, check_parameter
from nanoserve.scheduler.preempting_by_swap import PreemptingBySwap
from nanoserve.scheduler.token_throttling import AdaptiveThrottling, TokenThrottling
from nanoserve.scheduler.transition_minimizing import TransitionMinimizing


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy as users see it.

    Attributes:
        kind: its class, a dataclass whose fields are its parameters.
        budget: the parameter that is the token budget of a step, ``--max-num-batched-tokens``.
        paper: where it comes from.
        use_when: what it is good for, in one line.
        attends_on_host: whether it has the CPU attend to KV in host memory.
    """

    kind: Callable[..., Policy]
    budget: str
    paper: str
    use_when: str
    attends_on_host: bool = False

    @property
    def defaults(self) -> dict[str, Any]:
        """Its parameters other than the budget, each with its default."""
        parameters = fields(self.kind)  # type: ignore[arg-type]
        return {one.name: one.default for one in parameters if one.default is not MISSING and one.name != self.budget}

    def make(self, token_budget: int, parameters: Mapping[str, Any]) -> Policy:
        """The policy with that budget and these other parameters."""
        defaults = self.defaults
        if unknown := sorted(set(parameters) - set(defaults)):
            known = f"it has {', '.join(defaults)}" if defaults else "it has none"
            raise UsageError(f"the policy has no parameter {unknown[0]!r}; {known}")
        if "min_prefill" in defaults:  # its default may be more than a small budget allows
            parameters = {"min_prefill": min(defaults["min_prefill"], token_budget), **parameters}
        return self.kind(**{self.budget: token_budget}, **parameters)


POLICIES: dict[str, PolicyEntry] = {
    "prefill-first": PolicyEntry(
        PrefillFirst, "token_budget", "Orca, OSDI 2022", "the first token matters most; running answers may stall"
    ),
    "decode-first": PolicyEntry(
        DecodeFirst, "token_budget", "FasterTransformer", "equal requests in closed batches, to compare with"
    ),
    "sarathi": PolicyEntry(
        ChunkedPrefill, "token_budget", "Sarathi-Serve, OSDI 2024", "one device, or tensor parallel: even steps"
    ),
    "throttling": PolicyEntry(
        TokenThrottling, "max_prefill", "gLLM, sections 3.1, 3.2", "pipeline parallel: equal micro-batches, no bubbles"
    ),
    "adaptive": PolicyEntry(
        AdaptiveThrottling,
        "max_prefill",
        "ours, after gLLM",
        "as throttling, where KV memory is short or first tokens shall come soon",
    ),
    "seesaw": PolicyEntry(
        TransitionMinimizing,
        "token_budget",
        "Seesaw, section 4.2",
        "offline work with two parallel layouts and KV memory on the host",
    ),
    "neo": PolicyEntry(
        AsymmetricPipelining,
        "token_budget",
        "NEO, as in APEX, section 2",
        "KV memory on the host, many prompts: the CPU attends in turn with the device",
        attends_on_host=True,
    ),
    "overlap": PolicyEntry(
        AsynchronousOverlap,
        "token_budget",
        "APEX, section 3.3",
        "KV memory on the host, long answers: the CPU attends beside the steps",
        attends_on_host=True,
    ),
    "apex": PolicyEntry(
        ApexAlgorithm1,
        "token_budget",
        "APEX, algorithm 1",
        "as printed, to compare with: neo or overlap by inequality 5",
        attends_on_host=True,
    ),
    "hybrid": PolicyEntry(
        HybridByPrediction,
        "token_budget",
        "ours, after APEX",
        "KV memory on the host: the device alone, neo or overlap, whichever is predicted best",
        attends_on_host=True,
    ),
}
"""Choices of ``--policy``."""


def make_policy(
    name: str, token_budget: int, parameters: Mapping[str, Any] | None = None, *, swaps: bool = False
) -> Policy:
    """The policy of that name.

    Args:
        token_budget: tokens of one step; for the throttling policies, its most prompt tokens.
        parameters: by name, what shall differ from the policy's defaults.
        swaps: preempted sequences may move to host memory; whoever attends to it there has its own mind about that.

    Raises:
        UsageError: for an unknown name or parameter, or one out of its range.
    """
    if name not in POLICIES:
        raise UsageError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    check_parameter("the token budget of a step", token_budget, 1)
    policy = POLICIES[name].make(token_budget, parameters or {})
    return PreemptingBySwap(policy) if swaps and not POLICIES[name].attends_on_host else policy


def parse_policies(text: str, token_budget: int) -> dict[str, Policy]:
    """Policies by the names that are separated by commas, as "sarathi,throttling,throttling:without_wt".

    Raises:
        UsageError: as `named_policy`, and for a name that is there twice.
    """
    names = [part.strip() for part in text.split(",")]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is named twice: give each parameters of its own, as throttling:iterations=4")
    return {name: named_policy(name, token_budget) for name in names}


def named_policy(text: str, token_budget: int) -> Policy:
    """The policy that a name stands for, perhaps with parameters: "throttling:iterations=4:without_wt".

    Raises:
        UsageError: for an unknown name or parameter, or one out of its range.
    """
    name, *words = text.split(":")
    return make_policy(name, token_budget, _parameters(name, words))


def _parameters(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Each once and of the type of its default; a word alone is a switch."""
    defaults = POLICIES[name].defaults if name in POLICIES else {}
    parameters: dict[str, Any] = {}
    for word in words:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if key in parameters:
            raise UsageError(f"{key} is given twice: {':'.join((name, *words))!r:.60}")
        try:
            parameters[key] = _value(value if equals else "true", defaults.get(key))
        except (KeyError, ValueError):
            wanted = f"{key} is a whole number, " if type(defaults.get(key)) is int else ""
            raise UsageError(f"{wanted}{word!r:.60} is no parameter such as iterations=4 or without_wt") from None
    return parameters


def _value(text: str, default: Any) -> float:
    """Of the default's type; of a parameter that there is not, a float.

    Raises:
        KeyError: for what is neither true nor false.
        ValueError: for what is no finite number, or not a whole one.
    """
    if isinstance(default, bool):
        return {"true": True, "false": False}[text]
    if isinstance(default, int):
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number
