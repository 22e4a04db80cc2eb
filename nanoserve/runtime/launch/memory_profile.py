"""What a step needs beside weights and KV cache, found by running the largest that there can be."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder, LayerFunction
from nanoserve.request import SamplingParams
from nanoserve.runtime.sampling.logprobs import rows_per_chunk
from nanoserve.runtime.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.runtime.step.forward_pass import Caches, ForwardPass, StepInputs
from nanoserve.runtime.step.staging import Staging
from nanoserve.scheduler.plan import Begin

# Sampled in the way that takes the most memory: over the whole vocabulary, with logits that are changed before.
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1, repetition_penalty=1.5)


@dataclass(frozen=True, slots=True)
class MemoryProfileRun:
    """A step of as many tokens as a step may have, one of its rows as long as possible, the others decodes."""

    num_tokens: int
    num_rows: int
    """At most num_tokens."""
    block_size: int

    def run(self, decoder: Decoder, run_layer: LayerFunction) -> Tensor | None:
        """Compute and sample it; its tokens, or None of a shard that does not sample. All positions read one block of a
        cache of one block, nothing is written: what comes out is meaningless."""
        with torch.inference_mode():
            forward = ForwardPass(decoder, self._caches(decoder), run_layer)
            hidden = forward(self._inputs(decoder))
            if not decoder.shard.is_last:
                return None
            vocab_size = decoder.config.vocab_size
            # Log probabilities of a prompt's tokens are computed for so many positions at a time.
            num_sampled = min(self.num_tokens, max(self.num_rows, rows_per_chunk(vocab_size)))
            states = [SamplingState(Begin(0, (0,), 1, 0, 0, _SAMPLED), vocab_size)] * num_sampled
            staging = Staging(hidden.device)
            last_tokens = staging.add(np.arange(num_sampled))
            settings = SamplingRows.stage(states, [1] * num_sampled, staging)
            staging.transfer()
            logits = decoder.compute_logits(hidden[last_tokens])
            return sample(logits, settings).tokens if len(logits) else None  # another rank has gathered them

    def _caches(self, decoder: Decoder) -> Caches:
        config = decoder.config
        shape = (1, config.num_kv_heads, self.block_size, config.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=decoder.dtype, device=decoder.device) for _ in range(config.num_layers)]
            for _ in range(2)
        )
        return Caches(keys, values)

    def _inputs(self, decoder: Decoder) -> StepInputs:
        device = decoder.device
        longest = self.num_tokens - (self.num_rows - 1)
        lengths = torch.tensor([longest] + [1] * (self.num_rows - 1), dtype=torch.int32, device=device)
        starts = torch.zeros(self.num_rows + 1, dtype=torch.int32, device=device)
        starts[1:] = lengths.cumsum(0)
        batch = AttentionBatch(
            block_tables=torch.zeros(self.num_rows, -(-longest // self.block_size), dtype=torch.int32, device=device),
            query_starts=starts,
            context_lengths=lengths,
            slot_mapping=torch.full((self.num_tokens,), -1, device=device),
        )
        return StepInputs(
            token_ids=torch.zeros(self.num_tokens, dtype=torch.int64, device=device),
            positions=torch.arange(self.num_tokens, device=device),
            batch=batch,
            entering=None if decoder.shard.is_first else self._entering(decoder),
        )

    def _entering(self, decoder: Decoder) -> Tensor:
        shape = (self.num_tokens, decoder.config.hidden_size)
        return torch.zeros(shape, dtype=decoder.dtype, device=decoder.device)


def measured_memory(device: torch.device, step: Callable[[], object]) -> int:
    """Bytes that a step takes from a GPU beyond what is held before and after it. The step has run before."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_reserved(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - held
