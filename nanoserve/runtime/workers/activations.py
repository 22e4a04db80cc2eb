"""Hidden states on their way from one pipeline stage to the next, over torch.distributed, without waiting."""

from collections import deque
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from nanoserve.runtime.workers.ranks import Ranks

_UNSENT = 2
"""Sends that may be on their way: the one before need not have left when the next step is computed."""
_Sent = list[tuple[dist.Work, Tensor]]
"""What was sent together: its tensors must stay until they have left."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Hidden states [T, hidden_size] that are being received."""

    work: dist.Work
    hidden: Tensor

    def wait(self) -> Tensor:
        """On a GPU, work that is issued from here on waits for them; on a CPU this returns when they are there."""
        self.work.wait()
        return self.hidden


class Activations:
    """A worker's links to the stages before and behind it. What is received lies in two buffers in turn.

    Args:
        num_tokens: that most steps will not exceed.
    """

    def __init__(
        self, ranks: Ranks, *, hidden_size: int, num_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._ranks = ranks
        self._shape = (num_tokens, hidden_size)
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._buffers = [self._like.new_empty(0), self._like.new_empty(0)]
        if ranks.before is not None:
            with torch.inference_mode():  # as steps run
                self._buffers = [self._like.new_empty(self._shape) for _ in range(2)]
        self._turn = cycle((0, 1))
        self._hidden_states: deque[_Sent] = deque()
        self._plans: deque[_Sent] = deque()

    @torch.inference_mode()
    def expect(self, num_tokens: int) -> Expected | None:
        """Begin to receive the hidden states of so many tokens; None where there is nothing to come.

        The step before may still use those that came before these, no other.
        """
        before = self._ranks.before
        if before is None or num_tokens == 0:
            return None
        place = next(self._turn)
        if num_tokens > len(self._buffers[place]):
            self._buffers[place] = self._like.new_empty((2 * num_tokens, self._shape[1]))
        hidden = self._buffers[place][:num_tokens]
        return Expected(_started(dist.irecv(hidden, before)), hidden)

    def send(self, hidden: Tensor) -> None:
        """Put hidden states on their way to the stage behind; waits only if earlier ones have not left."""
        self._send(self._hidden_states, hidden.contiguous())

    def send_plan(self, encoded: bytes) -> None:
        """Send a plan ahead of its hidden states, as a coupled design does: the receiver knows nothing of it before.

        Waits as `send` does. Were it to wait until the stage behind receives, that one would be through with the step
        before by then, and no two stages would ever compute at a time.
        """
        data = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(self._like.device)
        self._send(self._plans, torch.tensor([len(data)], device=data.device), data)

    def _send(self, sending: deque[_Sent], *tensors: Tensor) -> None:
        """Put what belongs together on its way, behind others of its kind."""
        behind = self._ranks.behind
        assert behind is not None
        if len(sending) == _UNSENT:
            for work, _ in sending.popleft():
                work.wait()
        sending.append([(_started(dist.isend(tensor, behind)), tensor) for tensor in tensors])

    def receive_plan(self) -> bytes:
        """Wait for what `send_plan` sends."""
        before = self._ranks.before
        assert before is not None
        size = torch.zeros(1, dtype=torch.int64, device=self._like.device)
        dist.recv(size, before)
        data = torch.empty(int(size.item()), dtype=torch.uint8, device=self._like.device)
        dist.recv(data, before)
        return bytes(data.cpu().numpy())


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this worker is a member of the group of all"
    return work
