"""Drafters that --speculate names: read and checked before the KV cache is made."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanoserve.engine_config import HEADS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.drafting.draft_model import DraftModel
from nanoserve.executor.drafting.drafter import Drafter
from nanoserve.executor.drafting.features import FeatureCache
from nanoserve.executor.drafting.medusa_drafter import MedusaDrafter
from nanoserve.executor.stage import compiled_layers
from nanoserve.executor.start.memory import kv_bytes_per_block, memory_errors
from nanoserve.executor.start.model_loading import load_decoder
from nanoserve.models.decoder import Decoder, DecoderLayer
from nanoserve.models.draft_heads import Eagle3Head, EagleHead, MedusaHeads, load_eagle, load_medusa
from nanoserve.models.hub import ResolvedModel, resolve_model
from nanoserve.models.shards import Shard
from nanoserve.utils.files import unreadable_as_model_error
from nanoserve.utils.sizes import format_size

if TYPE_CHECKING:
    from nanoserve.executor.start.gpu_start import GpuStart


class DrafterStart:
    """A drafter between its weights and its KV cache."""

    def __init__(
        self,
        config: EngineConfig,
        network: Decoder | MedusaHeads,
        feature_size: int,
        dtype: torch.dtype,
        gpu: "GpuStart | None",
    ) -> None:
        """feature_size: of what the model's steps keep for it; 0 for a draft model. gpu: that of
        the model."""
        self._config, self._network, self._feature_size, self._dtype = (
            config,
            network,
            feature_size,
            dtype,
        )
        self._gpu = gpu
        self.block_bytes = feature_size * config.block_size * dtype.itemsize
        """Bytes of the drafter's caches for each KV block of the model."""
        self.layers: LayerRunner | None = None
        if isinstance(network, Decoder):
            self.block_bytes += kv_bytes_per_block(network.config, config.block_size, dtype)
        # its layer is of a kind of its own
        if isinstance(network, Decoder) and not isinstance(network, Eagle3Head):
            if gpu is None:
                self.layers = compiled_layers(network, config)
            elif not config.eager:
                self.layers = LayerRunner.torch_compile(network)
        # a head is one layer, which the host launches in time
        if gpu is not None and isinstance(network, Decoder) and not isinstance(network, EagleHead):
            gpu.expect_draft_model(network)

    def build(self, num_blocks: int) -> Drafter:
        """Make the drafter, with caches for this number of blocks. Raises RuntimeFailure if memory
        does not suffice."""
        network, block_size = self._network, self._config.block_size
        device = next(network.parameters()).device
        problem = (
            f"the {format_size(num_blocks * self.block_bytes)} of --speculate "
            f"{self._config.speculate} do not fit"
        )
        with memory_errors(device, problem, "lower --kv-cache-memory, or leave --speculate out"):
            features = None
            if isinstance(network, EagleHead | MedusaHeads):
                features = FeatureCache(
                    self._feature_size,
                    layers=network.feature_layers,
                    fuse=network.fuse,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    dtype=self._dtype,
                    device=device,
                )
            if isinstance(network, Decoder):
                run_layer = self.layers or DecoderLayer.__call__
                model = DraftModel(
                    network,
                    features,
                    num_blocks=num_blocks,
                    block_size=block_size,
                    run_layer=run_layer,
                )
                if self._gpu is not None:
                    self._gpu.draft_model = model
                return model
            assert features is not None
            return MedusaDrafter(network, features, block_size=block_size)


@unreadable_as_model_error()
def load_drafter(
    config: EngineConfig, resolved: ResolvedModel, decoder: Decoder, gpu: "GpuStart | None"
) -> DrafterStart | None:
    """Load the drafter that runs on this device, for a decoder that samples, and for its GPU if it
    is on one. None if nothing drafts, or the scheduler does. Raises UsageError if the drafter was
    made for another model, and what `load_decoder` and `load_eagle` raise."""
    kind, _, name = (config.speculate or "").partition(":")
    model, device, dtype = decoder.model_config, decoder.device, decoder.dtype
    if kind == "draft":
        network, draft = load_decoder(
            resolve_model(name, offline=config.offline), config, device, None
        )
        if draft.vocab_size > model.vocab_size:
            raise UsageError(
                f"--speculate {config.speculate}: it has {draft.vocab_size} tokens and the model "
                f"{model.vocab_size}; "
                "choose a draft with the model's tokenizer"
            )
        return DrafterStart(config, network, 0, network.dtype, gpu)
    if kind not in HEADS:
        return None
    # embedding and lm_head are elsewhere, or divided; a layer is needed for its sizes
    if config.num_workers > 1:
        decoder, _ = load_decoder(resolved, config, device, None, shard=Shard(range(1)))
    directory = Path(name).expanduser()
    if kind == "medusa":
        heads = load_medusa(directory, decoder)
        return DrafterStart(config, heads, model.hidden_size, dtype, gpu)
    head = load_eagle(directory, decoder)
    return DrafterStart(config, head, head.config.hidden_size, dtype, gpu)
