"""A pipeline's profile: its first stage is measured, whose layers are as good as any other stage's.

What policies are told are times of one layer, and of what is before and behind all layers. The first stage has layers
and the embedding; the head would read as many weights as the embedding has, and so it reads these.
"""

import torch
from torch import Tensor, nn

from nanoserve.config import ModelConfig
from nanoserve.costs.measured_machine import MachineSpeeds
from nanoserve.engine_config import EngineConfig
from nanoserve.models.decoder import Decoder, LayerFunction, RMSNorm
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.launch.start_profile import StartingEngine
from nanoserve.runtime.step.model_runner import ModelRunner


def starting_engine(
    stage: ModelRunner,
    run_layer: LayerFunction,
    *,
    storage: Tensor,
    processor: HostProcessor,
    config: EngineConfig,
    model: ModelConfig,
    speeds: MachineSpeeds,
    compiled: bool,
) -> StartingEngine:
    """The first stage as an engine that can be measured, over the cache that the stage will have.

    Args:
        run_layer: runs the stage's layers.
        storage: of its cache.
        model: the whole one.
        speeds, compiled: as in StartingEngine.
    """
    block_size, num_blocks = config.block_size, len(stage.caches.keys[0])
    whole = as_whole_model(stage.decoder)
    return StartingEngine(
        runner=ModelRunner(
            whole,
            num_blocks=num_blocks,
            block_size=block_size,
            device=stage.device,
            run_layer=run_layer,
            storage=storage,
        ),
        processor=processor,
        config=config,
        max_model_len=min(config.max_model_len or model.max_position_embeddings, num_blocks * block_size),
        speeds=speeds,
        compiled=compiled,
        whole_model=model,
    )


def as_whole_model(stage: Decoder) -> Decoder:
    """The layers of a first stage as a model of so many layers, which answers nonsense. It takes no further memory."""
    config = stage.config
    with torch.device("meta"):
        whole = Decoder(config, initialize=False)
    whole.embedding, whole.rotary, whole.layers = stage.embedding, stage.rotary, stage.layers
    whole.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps).to(stage.device, stage.dtype)
    whole.lm_head.weight = nn.Parameter(stage.embedding.weight.detach(), requires_grad=False)
    return whole.eval()
