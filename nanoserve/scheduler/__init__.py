"""What runs next: policies, the Scheduler that carries them out, and the words it says to executors. No torch."""

from nanoserve.scheduler.policies import POLICIES, make_policy

__all__ = ["POLICIES", "make_policy"]
