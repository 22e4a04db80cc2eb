"""A decoder small enough to run in a test, and what it computes without any cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nanoserve.config.mixers import MixerConfig, ShortConvolutionConfig
from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences, RecurrentConfig, RopeConfig
from nanoserve.executor.async_scheduling.placeholder_tokens import PlaceholderTokens
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.cpu_attention.cpu_attention import LocalCpuAttention
from nanoserve.executor.cpu_attention.host_processor import HostProcessor
from nanoserve.executor.drafting.drafter import Drafter
from nanoserve.executor.drafting.drafting import Drafting
from nanoserve.executor.drafting.verification import Verification
from nanoserve.executor.kv_transfer.host_pool import HostPool
from nanoserve.executor.kv_transfer.transfer import LocalKvTransfer
from nanoserve.executor.local import LocalExecutor
from nanoserve.executor.mechanism import Mechanism
from nanoserve.executor.recurrent_state.state_storage import StateStorage
from nanoserve.executor.stage import Stage
from nanoserve.models.attention import DenseCausalAttention
from nanoserve.models.decoder import Decoder, LayerFunction

VOCAB_SIZE = 61
MechanismType = TypeVar("MechanismType", bound=Mechanism)


def small_config(*, sliding_window: int = 0) -> ModelConfig:
    return ModelConfig(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        rope=RopeConfig(rotary_dim=8),
        layers=LayerDifferences(sliding_windows=(sliding_window, sliding_window)),
    )


def stateful_config() -> ModelConfig:
    """Three layers in four have a state: a short convolution."""
    states = RecurrentConfig(
        frozenset({0, 2, 3}),
        ShortConvolutionConfig(32),
        kernel_size=3,
        bias=True,
        kernel_bias=True,
    )
    return replace(small_config(), num_layers=4, recurrent=states, layers=LayerDifferences())


def state_space_config(mixer: MixerConfig) -> ModelConfig:
    """Two layers with this mixer, and nothing else."""
    parts = mixer.most_parts
    return replace(
        small_config(),
        intermediate_size=0,
        num_heads=parts,
        num_kv_heads=parts,
        head_dim=0,
        rope=RopeConfig(rotary_dim=0, kind="none"),
        recurrent=RecurrentConfig(frozenset({0, 1}), mixer, kernel_size=3, kernel_bias=True),
        layers=LayerDifferences(),
    )


def small_decoder(config: ModelConfig | None = None) -> Decoder:
    """Random weights, large enough that attention and logits are far from uniform."""
    torch.manual_seed(0)
    decoder = Decoder(config or small_config())
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return decoder.eval()


@torch.inference_mode()
def dense_logits(decoder: Decoder, tokens: Sequence[int]) -> torch.Tensor:
    """Logits at every position of one sequence, computed at once: [length, vocab_size]."""
    attention = DenseCausalAttention(decoder.config, 1, len(tokens))
    hidden = decoder(torch.tensor(tokens), torch.arange(len(tokens)), attention)
    return decoder.compute_logits(hidden)


def dense_greedy(decoder: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """The tokens of greedy decoding, with everything computed anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense_logits(decoder, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def local_executor(
    decoder: Decoder,
    *,
    host_pool: HostPool | None = None,
    processor: HostProcessor | None = None,
    async_scheduling: bool = False,
    verifies_drafts: bool = False,
    drafter: Drafter | None = None,
    layers: LayerRunner | None = None,
    state_slots: int = 0,
    **settings: Any,
) -> LocalExecutor:
    """A LocalExecutor on the CPU with the mechanisms that are asked for; settings as for
    `Stage.build`."""
    mechanisms = list[Mechanism]()
    if host_pool is not None:
        part = host_pool.part(decoder.shard)
        if processor is not None:
            mechanisms.append(LocalCpuAttention(processor, layers or LayerRunner(), part))
        mechanisms.append(LocalKvTransfer(part))
    if state_slots:
        mechanisms.append(StateStorage(state_slots))
    if async_scheduling:
        mechanisms.append(PlaceholderTokens())
    if verifies_drafts:
        mechanisms.append(Verification())
    if drafter is not None:
        mechanisms.append(Drafting(drafter))
    stage = Stage.build(decoder, device="cpu", layers=layers, mechanisms=mechanisms, **settings)
    return LocalExecutor(stage, async_scheduling=async_scheduling)


def mechanism_of(executor: LocalExecutor, kind: type[MechanismType]) -> MechanismType:
    """The executor's mechanism of that kind."""
    (found,) = [each for each in executor.stage.mechanisms if isinstance(each, kind)]
    return found


class LayersRunBy(LayerRunner):
    """Whole layers run by a function."""

    def __init__(self, run_layer: LayerFunction) -> None:
        super().__init__()
        self._run_layer = run_layer

    def __call__(self, *arguments: Any) -> Tensor:
        return self._run_layer(*arguments)
