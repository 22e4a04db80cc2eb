"""The baselines of Seesaw's figure 2: re-sharding without tiered buffering."""

from dataclasses import dataclass

from nanoserve.scheduler.load import Load
from nanoserve.scheduler.policies.transition_minimizing import TransitionMinimizing, device_fits_pool


@dataclass(frozen=True, slots=True)
class DecodePrioritizing(TransitionMinimizing):
    """Figure 2 (b): as many prompts as the device holds, and the next ones when the last answer has ended.

    Transitions are few, and batches shrink.
    """

    def _pool_room(self, load: Load) -> int:
        return _device_room(load)

    def _turns_back(self, load: Load) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class PrefillPrioritizing(TransitionMinimizing):
    """Figure 2 (a): re-sharding as soon as the device has room for a prompt; decodes pass through the pool twice.

    Batches are full, and every few answers that end cost a transition.
    """

    def _pool_room(self, load: Load) -> int:
        return _device_room(load)

    def _turns_back(self, load: Load) -> bool:
        return load.first_waiting_blocks + load.running_decodes <= load.free_blocks and device_fits_pool(load)


def _device_room(load: Load) -> int:
    """Blocks left for further prompts once the device holds all parked sequences, each with a block to grow into."""
    held = load.host_blocks - load.host_free_blocks + load.host_decodes + load.moving
    return min(load.host_free_blocks, load.total_blocks - held)


RESHARDING: dict[str, type[TransitionMinimizing]] = {
    "prefill-prioritizing": PrefillPrioritizing,
    "decode-prioritizing": DecodePrioritizing,
    "transition-minimizing": TransitionMinimizing,
}
"""Ways of changing between two layouts (Seesaw, figures 2 and 6)."""
