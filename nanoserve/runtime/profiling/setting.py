"""What a profile is of: machine, model, number format and threads."""

from dataclasses import dataclass, replace

import torch

from nanoserve.config import ModelConfig, SamplingDefaults
from nanoserve.costs.profile import Profile
from nanoserve.runtime.host.host_processor import HostProcessor
from nanoserve.runtime.launch.this_machine import processor as processor_facts
from nanoserve.runtime.step.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Setting:
    """What measured times depend on most: those of one setting say nothing of another."""

    device: str
    host: str
    """Names of what computes, and of the CPU beside it, which is the device itself where there is no other."""
    model: ModelConfig
    """Without what makes no step longer or shorter."""
    dtype: str
    """Of weights and KV cache."""
    threads: int | None
    """Of a device that is the CPU; None of a GPU."""
    host_threads: int
    """That attend in host memory."""

    @classmethod
    def of_engine(cls, runner: ModelRunner, processor: HostProcessor, model: ModelConfig) -> "Setting":
        """Of the one at hand; to be asked by the thread that computes.

        Args:
            model: the whole one, of which the runner may have some layers.
        """
        host, _ = processor_facts()
        on_gpu = runner.device.type == "cuda"
        return cls(
            device=torch.cuda.get_device_properties(runner.device).name if on_gpu else host,
            host=host,
            model=_shape(model),
            dtype=str(runner.decoder.dtype).removeprefix("torch."),
            threads=None if on_gpu else torch.get_num_threads(),
            host_threads=processor.threads,
        )

    def difference(self, profile: Profile) -> str | None:
        """What the profile is of, in words, where that is something else; None if it is of this."""
        settings = profile.settings
        if (profile.device.name, profile.host.name) != (self.device, self.host):
            names = dict.fromkeys((profile.device.name, profile.host.name))
            return f"another machine ({' with '.join(names)})"
        if _shape(profile.model) != self.model:
            return f"another model ({settings['model']})"
        if settings["dtype"] != self.dtype:
            return f"{settings['dtype']} numbers, not {self.dtype}"
        if settings["host_threads"] != self.host_threads:
            return f"{settings['host_threads']} threads that attend in host memory, not {self.host_threads}"
        if self.threads is not None and settings["threads"] != self.threads:
            return f"a device of {settings['threads']} threads, not {self.threads}"
        return None


def _shape(model: ModelConfig) -> ModelConfig:
    """What a step's work depends on."""
    return replace(
        model,
        family="",
        dtype="",
        bos_token_id=None,
        eos_token_ids=(),
        sampling_defaults=SamplingDefaults(),
        renamed_as_chatglm=False,
    )
