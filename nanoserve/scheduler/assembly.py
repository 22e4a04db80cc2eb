"""Which mechanisms are attached to a scheduler: the only module that imports their folders."""

from collections.abc import Sequence

from nanoserve.scheduler.canvas.canvases import Canvases
from nanoserve.scheduler.cpu_attention.host_decoding import HostDecoding
from nanoserve.scheduler.extension import Extensions
from nanoserve.scheduler.host_tier.host_tier import HostTier
from nanoserve.scheduler.layout_change.layouts import Layouts
from nanoserve.scheduler.optional import LayoutCapacity
from nanoserve.scheduler.recurrent_state.recurrent_state import RecurrentState
from nanoserve.scheduler.speculation.draft_proposer import DraftProposer
from nanoserve.scheduler.speculation.drafts import Drafts


def make_extensions(
    *,
    host_blocks: int = 0,
    attends_on_host: bool = True,
    other_layouts: Sequence[LayoutCapacity] = (),
    proposer: DraftProposer | None = None,
    state_slots: int = 0,
    canvases: Canvases | None = None,
) -> Extensions:
    """Make the mechanisms that are asked for.

    ``host_blocks`` are the KV blocks in host memory; with none, nothing ever moves there. Sequences
    there decode if it ``attends_on_host``. ``other_layouts`` are the parallel layouts 1, 2, ...;
    the scheduler's own is 0. A ``proposer`` adds draft tokens to what the policy has decided.
    ``state_slots`` hold the recurrent states of a model that has such layers. ``canvases`` are
    those of a model that writes them. Raises ValueError if there are recurrent states or canvases
    and any of the others: these would have to move them or take them back.
    """
    alone = {"recurrent states": state_slots > 0, "canvases": canvases is not None}
    others = {
        "host memory": host_blocks > 0,
        "a change of layouts": len(other_layouts) > 0,
        "draft tokens": proposer is not None,
        "recurrent states": state_slots > 0,
    }
    for name in [name for name, is_used in alone.items() if is_used]:
        for other, is_used in others.items():
            if is_used and other != name:
                raise ValueError(f"{name} together with {other}: choose one")
    host = HostTier(host_blocks) if host_blocks else None
    return Extensions(
        layouts=Layouts(other_layouts, host) if other_layouts else None,
        host=host,
        cpu_attention=HostDecoding(host) if host is not None and attends_on_host else None,
        drafts=Drafts(proposer) if proposer is not None else None,
        state=RecurrentState(state_slots) if state_slots else None,
        canvases=canvases,
    )
