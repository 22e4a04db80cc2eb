"""Decisions about the next step: policies, the Scheduler that carries them out, and the types that
it exchanges with executors. No torch."""

from nanoserve.scheduler.load import Decision, Load, Policy, parameter
from nanoserve.scheduler.policies import POLICIES, make_policy

__all__ = ["POLICIES", "Decision", "Load", "Policy", "make_policy", "parameter"]
