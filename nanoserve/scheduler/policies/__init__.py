"""The scheduling policies by name: the choices of ``--policy`` and the table of ``nanoserve
policies``."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

from nanoserve.errors import UsageError, shown
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies.apex import (
    ApexAlgorithm1,
    AsymmetricPipelining,
    AsynchronousOverlap,
)
from nanoserve.scheduler.policies.baselines import ChunkedPrefill, DecodeFirst, PrefillFirst
from nanoserve.scheduler.policies.hybrid import HybridByPrediction
from nanoserve.scheduler.policies.placement import HybridPolicy, PreemptingBySwap
from nanoserve.scheduler.policies.token_throttling import AdaptiveThrottling, TokenThrottling
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing
from nanoserve.scheduler.policy_files import load_policy_class, start_policy


@dataclass(frozen=True, slots=True)
class PolicyEntry:
    """One policy as users see it, and its class, a dataclass whose fields are its parameters."""

    kind: type[Policy]
    paper: str
    use_when: str
    budget: str = "token_budget"
    """The parameter that is the token budget of a step, ``--max-num-batched-tokens``."""

    @property
    def attends_on_host(self) -> bool:
        return issubclass(self.kind, HybridPolicy)

    @property
    def defaults(self) -> dict[str, Any]:
        """Its parameters other than the budget, each with its default."""
        defaults = {}
        for name, parameter in signature(self.kind).parameters.items():
            if name != self.budget and parameter.default is not parameter.empty:
                defaults[name] = parameter.default
        return defaults


POLICIES: dict[str, PolicyEntry] = {
    "prefill-first": PolicyEntry(
        PrefillFirst, "Orca, OSDI 2022", "the first token matters most; running answers may stall"
    ),
    "decode-first": PolicyEntry(
        DecodeFirst, "FasterTransformer", "equal requests in closed batches, to compare with"
    ),
    "sarathi": PolicyEntry(
        ChunkedPrefill, "Sarathi-Serve, OSDI 2024", "one device, or tensor parallel: even steps"
    ),
    "throttling": PolicyEntry(
        TokenThrottling,
        "gLLM, sections 3.1, 3.2",
        "pipeline parallel: equal micro-batches, no bubbles",
        "max_prefill",
    ),
    "adaptive": PolicyEntry(
        AdaptiveThrottling,
        "ours, after gLLM",
        "as throttling, where KV memory is short, first tokens shall come soon, or stages are CPUs",
        "max_prefill",
    ),
    "seesaw": PolicyEntry(
        TransitionMinimizing,
        "Seesaw, section 4.2",
        "offline work with two parallel layouts and KV memory on the host",
    ),
    "neo": PolicyEntry(
        AsymmetricPipelining,
        "NEO, as in APEX, section 2",
        "KV memory on the host, many prompts: the CPU attends in turn with the device",
    ),
    "overlap": PolicyEntry(
        AsynchronousOverlap,
        "APEX, section 3.3",
        "KV memory on the host, long answers: the CPU attends beside the steps",
    ),
    "apex": PolicyEntry(
        ApexAlgorithm1,
        "APEX, algorithm 1",
        "as printed, to compare with: neo or overlap by inequality 5",
    ),
    "hybrid": PolicyEntry(
        HybridByPrediction,
        "ours, after APEX",
        "KV memory on the host: the device alone, neo or overlap, whichever is predicted best",
    ),
}
"""Choices of ``--policy``."""
_PARSERS: dict[type, Callable[[str], Any]] = {
    bool: {"true": True, "false": False}.__getitem__,
    int: int,
    float: float,
}


def find_policy(name: str) -> tuple[PolicyEntry, list[str]]:
    """The policy of a name such as "throttling:iterations=4" or "mine.py:Mine:speed=2", and its
    parameters, word for word. Raises UsageError for an unknown name, and a file without such a
    class."""
    first, *words = name.split(":")
    if first.endswith(".py"):
        class_name = ""
        if words:
            class_name = words.pop(0)
        return PolicyEntry(load_policy_class(first, class_name), "", ""), words
    if first not in POLICIES:
        raise UsageError(
            f"unknown policy {shown(first)}; choose one of {', '.join(POLICIES)}, or FILE.py:CLASS"
        )
    return POLICIES[first], words


def make_policy(
    name: str,
    token_budget: int,
    parameters: Mapping[str, Any] | None = None,
    *,
    swaps: bool = False,
) -> Policy:
    """The policy of that name, as for `find_policy`, with parameters that differ from its defaults.
    With ``swaps`` preempted sequences may move to host memory; a policy that attends there decides
    so itself. Raises UsageError for an unknown name or parameter, or one out of its range, and for
    a file that is none."""
    entry, words = find_policy(name)
    if token_budget < 1:
        raise UsageError(f"the token budget of a step must be at least 1, not {token_budget}")
    defaults = entry.defaults | {"order": entry.kind.order, "aging": entry.kind.aging}
    chosen = _parse_parameters(words, defaults)
    if parameters is not None:
        chosen.update(parameters)
    unknown = sorted(chosen.keys() - defaults)
    if unknown:
        raise UsageError(
            f"the policy has no parameter {shown(unknown[0])}; it has {', '.join(defaults)}"
        )
    if "min_prefill" in defaults:  # its default may be more than a small budget allows
        least = min(defaults["min_prefill"], token_budget)
        chosen.setdefault("min_prefill", least)
    if entry.budget in signature(entry.kind).parameters:  # a user's own policy may have none
        chosen[entry.budget] = token_budget
    order = chosen.pop("order", defaults["order"])
    aging = chosen.pop("aging", defaults["aging"])
    policy = start_policy(entry.kind.ordered(order, aging), chosen)
    if swaps and not entry.attends_on_host:
        return PreemptingBySwap(policy)
    return policy


def _parse_parameters(words: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as "iterations=4" and "without_wt". Raises UsageError for one that comes twice or
    makes no sense."""
    parameters: dict[str, Any] = {}
    for word in words:
        key, equals, value = (piece.strip() for piece in word.partition("="))
        if key in parameters:
            raise UsageError(f"{key} is given twice: {shown(':'.join(words))}")
        kind = type(defaults.get(key, 0.0))
        if kind is str:
            parameters[key] = value
            continue
        if not equals:
            value = "true"
        try:
            number = _PARSERS[kind](value)
        except (KeyError, ValueError):
            number = math.nan
        if not -math.inf < number < math.inf:
            wanted = ""
            if kind is int:
                wanted = f"{key} is a whole number, "
            raise UsageError(
                f"{wanted}{shown(word)} is no parameter such as iterations=4 or without_wt"
            )
        parameters[key] = number
    return parameters


def parse_policies(text: str, token_budget: int) -> dict[str, Policy]:
    """Policies by name, from names separated by commas. Raises UsageError as `make_policy`, and for
    a repeated one."""
    policies: dict[str, Policy] = {}
    for part in text.split(","):
        name = part.strip()
        if name in policies:
            raise UsageError(
                f"{name} is named twice: give each parameters of its own, as "
                "throttling:iterations=4"
            )
        policies[name] = make_policy(name, token_budget)
    return policies
