"""What passes between device and host memory, and the phases of an engine with two layouts, in a trace. No torch."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from nanoserve.measures.chrome_trace import ChromeTraceFile, Track
from nanoserve.runtime.trace.phases import EngineState, Phase, phase_name
from nanoserve.runtime.trace.stage_times import ReshardTimes, SwapTimes

_GIGA = 1e9


@runtime_checkable
class Moving(Protocol):
    """An executor whose workers say what they moved between device and host memory."""

    def take_moves(self) -> list[ReshardTimes | SwapTimes]:
        """What they did since the last call."""


class MovesTrace:
    """Writes phases, transitions, swaps, and how full both tiers of the KV cache are.

    Args:
        file: to write into; it is not closed.
        began: the moment that becomes 0, on the clock of all others.
        layouts: what the parallel layouts are called, by number.
        host_link_bandwidth: bytes per second of one worker to or from host memory while all others do the same, as it
            was measured; None where it was not.
        scheduler, workers: what the tracks stand under.
    """

    def __init__(
        self,
        file: ChromeTraceFile,
        began: float,
        *,
        layouts: Sequence[str],
        host_link_bandwidth: float | None,
        scheduler: str,
        workers: str,
    ) -> None:
        self._file, self._began = file, began
        self._layouts, self._link = layouts, host_link_bandwidth
        self._scheduler, self._workers = scheduler, workers
        self._state: EngineState | None = None

    def on_phase(self, phase: Phase) -> None:
        """It is over. Of one layout there is nothing to tell."""
        if len(self._layouts) > 1:
            span = (phase.began - self._began, phase.ended - self._began)
            name = phase_name(phase, self._layouts)
            self._file.bar(Track(self._scheduler, "phases"), name, *span, _facts(phase))

    def on_state(self, state: EngineState, now: float) -> None:
        """How many blocks are in use; written where that has changed."""
        time, before = now - self._began, self._state
        if before is None or before[:2] != state[:2]:
            used, total = state.used_device_blocks, state.device_blocks
            self._file.counter(self._scheduler, "KV blocks on the device", time, {"used": used, "free": total - used})
        if state.host_blocks and (before is None or before[2:4] != state[2:4]):
            used, total = state.used_host_blocks, state.host_blocks
            self._file.counter(
                self._scheduler, "KV blocks in the host pool", time, {"used": used, "free": total - used}
            )
        self._state = state

    def on_move(self, move: ReshardTimes | SwapTimes) -> None:
        """A worker has moved its part."""
        arguments: dict[str, object] = self._amount(move)
        if isinstance(move, ReshardTimes):
            name = f"re-shard to {self._layouts[move.layout]}"
            place, arguments = f"worker {move.rank}", {"step": move.step, **arguments}
        else:
            name = f"swap {move.direction}" + (", layer by layer" if move.after_row else "")
            place, arguments = f"worker {move.rank}, swaps {move.direction}", {"swap": move.swap, **arguments}
        track = Track(self._workers, place)
        self._file.bar(track, name, move.began - self._began, move.ended - self._began, arguments)

    def _amount(self, move: ReshardTimes | SwapTimes) -> dict[str, object]:
        """Bytes, how fast they were, and what share of the measured host link that is: not so of what waited for layers
        meanwhile."""
        seconds = move.ended - move.began
        if seconds <= 0 or (isinstance(move, SwapTimes) and move.after_row):
            return {"bytes": move.num_bytes}
        speed = move.num_bytes / seconds
        share = {} if self._link is None else {"share of host link": round(speed / self._link, 3)}
        return {"bytes": move.num_bytes, "GB/s": round(speed / _GIGA, 3), **share}


def _facts(phase: Phase) -> dict[str, object]:
    """Arguments of its bar: what was planned in it, and at a turn what became of the sequences on the device."""
    swaps = {"swaps out": phase.swaps_out, "swaps in": phase.swaps_in}
    if phase.kind == "compute":
        return {"plans": phase.plans, "prompt_tokens": phase.prompt_tokens, "decodes": phase.decodes, **swaps}
    if phase.turn is None:
        return {}
    turn = phase.turn
    return {
        "sequences sent through the pool": turn.through_pool,
        "finished since the pool was empty": turn.finished,
        "to be computed again": turn.recomputed,
    }
