"""A model divided over devices: pipeline stages of whole layers, each stage over the ranks of a
tensor-parallel group.

Within a stage, as in Megatron-LM (arXiv 1909.08053, section 3), the matrices that fan out (query,
key and value; gate and up) are divided by rows of the weight, and those that fan in (output, down)
by columns. So a layer needs two all-reduces and nothing else. Key-value heads are divided while
there are enough, and replicated otherwise. The vocabulary's rows are divided too. Norms and routers
are replicated.

A mixture of experts is divided inside each expert, like a dense layer. Every rank then has the same
work whichever experts the tokens choose, and one all-reduce serves both kinds of layers.

Inner sizes and the vocabulary are padded with zeros where they do not divide evenly. Where weights
are packed, a rank gets whole groups of an inner size, so that the integers and scales are those of
one rank. No torch here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from nanoserve.config.model_config import ModelConfig
from nanoserve.config.model_parts import LayerDifferences
from nanoserve.engine_config import PAIR_OPTIONS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.layout import stage_layers, tensor_degrees


@dataclass(frozen=True, slots=True)
class Shard:
    """One device's part of a model."""

    layers: range
    """The stage's layers, numbered as in the whole model."""
    stage: int = 0
    num_stages: int = 1
    """Place in the pipeline, and its length."""
    rank: int = 0
    degree: int = 1
    """Place in the stage's tensor-parallel group, and its size."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def worker(self) -> int:
        """Number of the worker that has it. Workers are stage-major: ``stage * degree + rank``."""
        return self.stage * self.degree + self.rank

    @property
    def worker_before(self) -> int | None:
        """The worker that sends hidden states to this one; None in the first stage."""
        if self.is_first:
            return None
        return self.worker - self.degree

    @property
    def worker_behind(self) -> int | None:
        """The worker that this one sends hidden states to; None in the last stage."""
        if self.is_last:
            return None
        return self.worker + self.degree

    @property
    def answers(self) -> bool:
        """Whether its worker samples and answers: the first rank of the last stage does."""
        return self.is_last and self.rank == 0

    def share(self, size: int, part: int | None = None) -> range:
        """This rank's range of `size` rows or columns: equal parts, of `part` each if that is
        given, except that the last may be shorter."""
        if part is None:
            part = divided(size, self.degree)
        first = min(self.rank * part, size)
        after = min(first + part, size)
        return range(first, after)

    def kv_heads(self, num_kv_heads: int) -> range:
        """The key-value heads that this rank's query heads use. With more ranks than heads, ranks
        share heads."""
        first = self.rank * num_kv_heads // self.degree
        count = max(1, num_kv_heads // self.degree)
        return range(first, first + count)


def whole_model(config: ModelConfig) -> Shard:
    """The only shard of a model on one device."""
    return Shard(range(config.num_layers))


def shards_of_layouts(config: ModelConfig, engine: EngineConfig) -> tuple[list[Shard], ...]:
    """The shards of each of the engine's layouts, by layout and rank. Raises UsageError if the
    model cannot be divided like this; the line names the option that asked for it."""
    options: tuple[str | None, ...] = PAIR_OPTIONS
    if engine.decode_layout is None:
        options = (None,)
    found = []
    for option, layout in zip(options, engine.layouts, strict=True):
        asked = None
        if option is not None:
            asked = f"{option} {layout.name}"
        shards = make_shards(
            config,
            pipeline_parallel=layout.pipeline_parallel,
            tensor_parallel=layout.tensor_parallel,
            pipeline_split=engine.pipeline_split,
            asked=asked,
        )
        found.append(shards)
    return tuple(found)


def make_shards(
    config: ModelConfig,
    *,
    pipeline_parallel: int,
    tensor_parallel: int,
    pipeline_split: tuple[int, ...] | None = None,
    asked: str | None = None,
) -> list[Shard]:
    """The shards of a model by rank: rank = stage * tensor_parallel + rank in the group.
    `pipeline_split` names the layers of each stage; None divides by cost. Raises UsageError if the
    model cannot be divided like this; the line names `asked`, the option and value that ask for
    this layout, or else --pp, --pp-split or --tp."""
    stages = stage_layers(config, pipeline_parallel, pipeline_split, _divide_layers, asked=asked)
    _check_degree(config, tensor_parallel, asked)
    _check_stages(config, stages, asked or f"--pp {pipeline_parallel}")
    shards = []
    for stage, layers in enumerate(stages):
        for rank in range(tensor_parallel):
            shards.append(Shard(layers, stage, len(stages), rank, tensor_parallel))
    return shards


def _check_stages(config: ModelConfig, stages: Sequence[range], told: str) -> None:
    """Raise UsageError if stages part layers that need each other."""
    if config.embedding.per_layer_size and len(stages) > 1:
        raise UsageError(
            f"{told}: all layers of this {config.family} read the tokens, so they are one stage"
        )
    if config.writes_free_canvases and len(stages) > 1:
        raise UsageError(
            f"{told}: the first layer of {config.family} reads what the last one expects of a "
            "canvas, so they are one stage"
        )
    for layers in stages:
        sources = config.layers.kv_sources[layers.start : layers.stop]
        if not all(source in layers for source in sources):
            raise UsageError(
                f"{told}: layers that share keys and values must be in one stage; choose --pp-split"
            )


def shard_config(config: ModelConfig, shard: Shard) -> ModelConfig:
    """The shard as a model of its own: layers counted from 0, its own heads and inner sizes, the
    whole vocabulary."""
    layers, degree = shard.layers, shard.degree
    moe = config.moe
    if moe is not None:
        moe = replace(
            moe,
            sparse_layers=frozenset(
                layer - layers.start for layer in moe.sparse_layers if layer in layers
            ),
            intermediate_size=config.inner_part(moe.intermediate_size, degree),
            shared_size=config.inner_part(moe.shared_size, degree),
        )
    recurrent = config.recurrent
    if recurrent is not None:
        recurrent = recurrent.part(layers, degree)
    shapes = []
    for shape in config.layers.shapes[layers.start : layers.stop]:
        own_shape = shape._replace(
            num_kv_heads=max(1, shape.num_kv_heads // degree),
            intermediate_size=config.inner_part(shape.intermediate_size, degree),
        )
        shapes.append(own_shape)
    sources = config.layers.kv_sources[layers.start : layers.stop]
    differences = LayerDifferences(
        sliding_windows=config.layers.sliding_windows[layers.start : layers.stop],
        kv_sources=tuple(source - layers.start for source in sources),
        ropes=config.layers.ropes[layers.start : layers.stop],
        shapes=tuple(shapes),
        feed_forwards=config.layers.feed_forwards[layers.start : layers.stop],
        stored_blocks=config.layers.stored_blocks[layers.start : layers.stop],
    )
    part = replace(
        config,
        num_layers=len(layers),
        num_heads=config.num_heads // degree,
        num_kv_heads=max(1, config.num_kv_heads // degree),
        intermediate_size=config.inner_part(config.intermediate_size, degree),
        moe=moe,
        recurrent=recurrent,
        layers=differences,
    )
    if degree == 1 and part.num_layers == config.num_layers:
        return part
    return replace(
        part, groups=config.cache_groups.of_layers(layers, config.layer_kv_numbers(degree))
    )


def divided(size: int, degree: int) -> int:
    """One of `degree` equal parts of `size`, the last one padded."""
    return -(-size // degree)


def _check_degree(config: ModelConfig, degree: int, asked: str | None) -> None:
    if degree < 1:
        raise UsageError(f"--tp must be at least 1, not {degree}")
    possible = tensor_degrees(config)
    told = f"--tp {degree}"
    if asked is not None:
        told = f"{asked}: a tensor degree of {degree}"
    if config.writes_free_canvases and degree > 1:
        raise UsageError(
            f"{told}: {config.family} reads what it expects of a canvas, from all of its "
            "vocabulary, so it runs on one device"
        )
    if degree in possible:
        return
    problem = f"{config.num_kv_heads} key-value heads evenly"
    if config.recurrent is not None and config.recurrent.mixer.most_parts % degree:
        mixer = config.recurrent.mixer
        problem = f"{mixer.most_parts} {mixer.part_name}"
    elif config.num_heads % degree:
        problem = f"{config.num_heads} attention heads"
    choice = str(possible[-1])
    if len(possible) > 1:
        choice = f"{', '.join(map(str, possible[:-1]))} or {choice}"
    raise UsageError(f"{told} does not divide {problem}; choose {choice}")


def _divide_layers(model: ModelConfig, stages: int) -> tuple[int, ...]:
    """Choose how many layers each stage gets, by their costs if there are several stages."""
    if stages == 1:
        return (model.num_layers,)
    from nanoserve.costs.counts import divide_layers

    return divide_layers(model, stages)
