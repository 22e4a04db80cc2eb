"""The scheduling policies by name: the choices of ``--policy`` and the table of ``nanoserve policies``."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from nanoserve.errors import UsageError
from nanoserve.scheduler.load import Policy
from nanoserve.scheduler.policies.apex import ApexAlgorithm1, AsymmetricPipelining, AsynchronousOverlap
from nanoserve.scheduler.policies.baselines import ChunkedPrefill, DecodeFirst, PrefillFirst
from nanoserve.scheduler.policies.hybrid import HybridByPrediction
from nanoserve.scheduler.policies.placement import HybridPolicy, PreemptingBySwap
from nanoserve.scheduler.policies.token_throttling import AdaptiveThrottling, TokenThrottling
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing


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
        parameters = fields(self.kind)  # type: ignore[arg-type]  # every policy is a dataclass
        return {one.name: one.default for one in parameters if one.default is not MISSING and one.name != self.budget}


POLICIES: dict[str, PolicyEntry] = {
    "prefill-first": PolicyEntry(
        PrefillFirst, "Orca, OSDI 2022", "the first token matters most; running answers may stall"
    ),
    "decode-first": PolicyEntry(DecodeFirst, "FasterTransformer", "equal requests in closed batches, to compare with"),
    "sarathi": PolicyEntry(ChunkedPrefill, "Sarathi-Serve, OSDI 2024", "one device, or tensor parallel: even steps"),
    "throttling": PolicyEntry(
        TokenThrottling, "gLLM, sections 3.1, 3.2", "pipeline parallel: equal micro-batches, no bubbles", "max_prefill"
    ),
    "adaptive": PolicyEntry(
        AdaptiveThrottling,
        "ours, after gLLM",
        "as throttling, where KV memory is short or first tokens shall come soon",
        "max_prefill",
    ),
    "seesaw": PolicyEntry(
        TransitionMinimizing, "Seesaw, section 4.2", "offline work with two parallel layouts and KV memory on the host"
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
        ApexAlgorithm1, "APEX, algorithm 1", "as printed, to compare with: neo or overlap by inequality 5"
    ),
    "hybrid": PolicyEntry(
        HybridByPrediction,
        "ours, after APEX",
        "KV memory on the host: the device alone, neo or overlap, whichever is predicted best",
    ),
}
"""Choices of ``--policy``."""


def make_policy(
    name: str, token_budget: int, parameters: Mapping[str, Any] | None = None, *, swaps: bool = False
) -> Policy:
    """The policy of that name, with parameters that differ from its defaults. With ``swaps`` preempted sequences may
    move to host memory; a policy that attends there decides so itself. Raises UsageError for an unknown name or
    parameter, or one out of its range."""
    if name not in POLICIES:
        raise UsageError(f"unknown policy {name!r}; choose one of {', '.join(POLICIES)}")
    if token_budget < 1:
        raise UsageError(f"the token budget of a step must be at least 1, not {token_budget}")
    entry, chosen = POLICIES[name], dict(parameters or {})
    defaults = entry.defaults
    if unknown := sorted(chosen.keys() - defaults):
        known = f"it has {', '.join(defaults)}" if defaults else "it has none"
        raise UsageError(f"the policy has no parameter {unknown[0]!r}; {known}")
    if "min_prefill" in defaults:  # its default may be more than a small budget allows
        chosen.setdefault("min_prefill", min(defaults["min_prefill"], token_budget))
    construct: Callable[..., Policy] = entry.kind
    policy = construct(**{entry.budget: token_budget}, **chosen)
    return PreemptingBySwap(policy) if swaps and not entry.attends_on_host else policy
