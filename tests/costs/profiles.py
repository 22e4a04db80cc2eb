"""A profile made up for tests: times that can be worked out by hand."""

from collections.abc import Callable, Sequence

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.curves import MeasuredCurve, MeasuredGrid
from nanoserve.costs.hardware import Device
from nanoserve.costs.profile import KvMemory, Profile
from tests.costs.conftest import tiny_model


def curve(sizes: Sequence[int], seconds: Sequence[float]) -> MeasuredCurve:
    """Without any spread."""
    times = tuple(map(float, seconds))
    return MeasuredCurve(sizes=tuple(sizes), seconds=times, low=times, high=times)


def grid(
    batches: Sequence[int], contexts: Sequence[int], seconds: Callable[[int, int], float]
) -> MeasuredGrid:
    """Without any spread."""
    rows = tuple(tuple(seconds(batch, context) for context in contexts) for batch in batches)
    return MeasuredGrid(
        batches=tuple(batches), contexts=tuple(contexts), seconds=rows, low=rows, high=rows
    )


def made_up_profile(model: ModelConfig | None = None, **changes: object) -> Profile:
    """Two layers; a token takes 1 s in a layer, a key 0.01 s, on the host ten times that and 0.25 s
    for each sequence, a prompt of n tokens n² / 1000 s, a byte 1 ms."""
    machine = Device(name="abacus", memory_bytes=1e4, memory_bandwidth=100.0, flops=1000.0)
    settings: dict[str, str | int] = {
        "model": "tiny",
        "dtype": "bfloat16",
        "operators": "fingers",
        "layers": "eager",
    }
    fields: dict[str, object] = {
        "about": {},
        "settings": settings | {"threads": 1, "host_threads": 1, "rounds": 3},
        "foreign_cores": None,
        "model": model or tiny_model(),
        "bits": 16,
        "device": machine,
        "host": machine,
        "memory": KvMemory(kv_tokens=1000),
        "linear": curve((1, 10), (1, 10)),
        "decode_attention": grid((1, 4), (10, 100), lambda batch, context: batch * context / 100),
        "host_attention": grid(
            (1, 4), (10, 100), lambda batch, context: batch * context / 10 + batch / 4
        ),
        "host_exchange": curve((1, 5), (0.25, 1.25)),
        "prefill_attention": curve((10, 20, 40), (0.1, 0.4, 1.6)),
        "copy": curve((10, 1000), (0.01, 1)),
        "inputs": curve((1, 11), (2, 3)),
        "head": curve((1, 11), (1, 11)),
        "engine": curve((1, 11), (0.5, 1.5)),
    }
    return Profile(**(fields | changes))  # type: ignore[arg-type]
