"""StepCosts: the time of each part of a step, and the room in memory, from counts and data-sheet
figures."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache

from nanoserve.config.model_config import ModelConfig
from nanoserve.costs.counts import STORED_BITS, ModelCounts, Operator, OperatorKind, Precision
from nanoserve.costs.hardware import GIBI, Efficiency, Link, Machine
from nanoserve.errors import UsageError
from nanoserve.layout import ParallelLayout
from nanoserve.scheduler.windows import empty_blocks
from nanoserve.scheduler.work import Chunk, StepWork

_KERNELS_OF_HEAD = 3  # norm, logits, sampling
_MOST_STAGES = 1024
_USEFUL_TOKENS = 4096  # room for fewer keys and values is no advice
_LIBRARY_BYTES = GIBI / 2  # the CUDA context, workspaces of cuBLAS and buffers of NCCL, about


class DoesNotFit(UsageError):
    """The model is too large for its devices; the message says by how much, and what would fit."""


class DeviceMemory:
    """The memory of the devices of one replica. `step_tokens` are those of the largest step; 0
    leaves steps out."""

    def __init__(self, counts: ModelCounts, machine: Machine, efficiency: Efficiency) -> None:
        self._counts, self._machine, self._efficiency = counts, machine, efficiency
        self._usable = machine.device.memory_bytes * efficiency.usable_memory

    def kv_bytes(self, stage: int, step_tokens: int = 0) -> float:
        """Bytes left for keys, values and recurrent states on one device of the stage; negative if
        the weights do not fit. A step that needs more than the rest of memory takes from the usable
        share, as an engine measures it."""
        usable = self._usable
        if step_tokens:
            step = self._counts.step_bytes(step_tokens, stage)
            usable = min(usable, self._machine.device.memory_bytes - _LIBRARY_BYTES - step)
        return usable - self._counts.stage_weight_bytes(stage)

    def kv_blocks(self, block_size: int, step_tokens: int = 0, states: int = 0) -> int:
        """Blocks of the cache groups that every stage can hold: all share one block table.
        ``states`` are the sequences whose recurrent states have their place beside them. Those of a
        model without attention take no memory. Raises DoesNotFit if not one block fits."""
        blocks = empty_blocks(self._counts.model.max_position_embeddings, block_size)
        fitting = []
        for stage in range(len(self._counts.stages)):
            block_bytes = self._counts.block_bytes(block_size, stage)
            beside = states * self._counts.state_bytes(stage)
            room = self.kv_bytes(stage, step_tokens) - beside
            if block_bytes:
                fitting.append(int(room // block_bytes))
            elif room < 0:
                fitting.append(0)
        if fitting:
            blocks = min(fitting)
        if blocks < 1 and states:
            self.kv_blocks(block_size, step_tokens)  # says what is missing without states
            raise DoesNotFit(
                f"the states of {states:,} sequences leave no room for one KV block; let fewer "
                "sequences run"
            )
        if blocks < 1 and step_tokens:
            self.kv_blocks(block_size)  # says what is missing without a step, if anything is
            raise DoesNotFit(
                f"a step of {step_tokens:,} tokens leaves no room for one KV block; let steps have "
                "fewer"
            )
        if blocks < 1 and self._fits(self._counts):
            raise DoesNotFit(
                f"not one KV block of {block_size} tokens fits beside the weights; choose smaller "
                "blocks"
            )
        if blocks < 1:
            raise DoesNotFit(self._refusal())
        return blocks

    def sequences(self, blocks: int, block_size: int, step_tokens: int = 0) -> int:
        """Sequences that fit, each with this many blocks and its recurrent states."""
        return min(
            int(room // needed) for room, needed in self._rooms(blocks, block_size, step_tokens)
        )

    def share(self, sequences: int, blocks: int, block_size: int) -> float:
        """The share of what weights leave that so many such sequences take, in the stage where it
        is largest; above 1 they do not fit."""
        return max(sequences * needed / room for room, needed in self._rooms(blocks, block_size, 0))

    def states(self, most: int, step_tokens: int = 0) -> int:
        """Sequences whose recurrent states get a place where their lengths are not known: ``most``,
        or as many as half of what weights leave can hold, all of it if blocks hold nothing, but at
        least one."""
        found, share = most, 0.5
        if self._counts.groups.block_numbers == 0:
            share = 1.0
        for room, state_bytes in self._rooms(0, 1, step_tokens):
            if state_bytes:
                found = min(found, int(room * share // state_bytes))
        return max(1, found)

    def _rooms(
        self, blocks: int, block_size: int, step_tokens: int
    ) -> Iterator[tuple[float, float]]:
        """For each stage, the bytes beside its weights, and those of a sequence with this many
        blocks."""
        counts = self._counts
        for stage in range(len(counts.stages)):
            needed = blocks * counts.block_bytes(block_size, stage) + counts.state_bytes(stage)
            yield self.kv_bytes(stage, step_tokens), needed

    def host_kv_blocks(self, host_bytes: float, block_size: int) -> int:
        """Blocks of whole cache groups, with all heads."""
        per_token = self._counts.groups.block_numbers * self._counts.precision.kv_bytes
        if per_token == 0:
            return empty_blocks(self._counts.model.max_position_embeddings, block_size)
        return int(host_bytes // (block_size * per_token))

    def _refusal(self) -> str:
        counts, device, usable = self._counts, self._machine.device, self._usable / GIBI
        needed = max(map(counts.stage_weight_bytes, range(len(counts.stages)))) / GIBI
        return (
            f"the model does not fit: {needed:.1f} GiB of weights on each {device.name} in layout "
            f"{counts.layout.name},"
            f" {max(needed - usable, 0.0):.1f} GiB more than the {usable:.1f} GiB that can be used"
            f" ({self._efficiency.usable_memory:.0%} of {device.memory_bytes / GIBI:.4g} GiB), so "
            "that keys and values"
            f" have no room; {self._advice()}"
        )

    def _advice(self) -> str:
        """Name the first number of stages that fits, and fewer bits that do."""
        counts, fitting = self._counts, []
        layout = self._fitting_layout()
        if layout is not None:
            fitting.append(f"{layout.devices} devices (layout {layout.name})")
        split = [counts.layers(stage) for stage in range(len(counts.stages))]
        for bits in STORED_BITS:
            if bits >= counts.precision.weight_bits:
                continue
            precision = replace(counts.precision, weight_bits=bits)
            if self._fits(ModelCounts(counts.model, counts.layout, precision, split)):
                fitting.append(f"{bits}-bit weights")
        if not fitting:
            return "no number of these devices would fit it"
        return f"what would fit: {' or '.join(fitting)}"

    def _fitting_layout(self) -> ParallelLayout | None:
        """The layout with the fewest stages in which the model fits; None if not even the most
        stages are enough."""
        counts = self._counts
        alone = replace(counts.layout, data_parallel=1)
        first, last = (
            counts.layout.pipeline_parallel + 1,
            min(counts.model.num_layers, _MOST_STAGES),
        )
        layouts = [replace(alone, pipeline_parallel=stages) for stages in range(first, last + 1)]
        if not layouts or not self._fits(ModelCounts(counts.model, layouts[-1], counts.precision)):
            return None
        for layout in layouts:
            if self._fits(ModelCounts(counts.model, layout, counts.precision)):
                return layout
        return None

    def _fits(self, counts: ModelCounts) -> bool:
        """Whether these weights fit with room for a few thousand tokens."""
        for stage in range(len(counts.stages)):
            room = self._usable - counts.stage_weight_bytes(stage)
            tokens_bytes = _USEFUL_TOKENS * counts.kv_bytes_per_token(stage)
            if room < tokens_bytes + counts.state_bytes(stage):
                return False
        return True


class StepCosts:
    """The times of one replica of a model on a machine; the data parallel degree of the layout is
    ignored. ``pipeline_split`` gives the layers of each stage; None divides them by cost. Raises
    UsageError if the layout does not suit the model or the machine."""

    def __init__(
        self,
        model: ModelConfig,
        machine: Machine,
        layout: ParallelLayout | None = None,
        precision: Precision | None = None,
        efficiency: Efficiency | None = None,
        pipeline_split: Sequence[int] | None = None,
    ) -> None:
        self.machine, self.efficiency = machine, efficiency or Efficiency()
        self.counts = ModelCounts(model, layout, precision, pipeline_split)
        self.layout, self.num_layers = self.counts.layout, model.num_layers
        self.num_stages = self.layout.pipeline_parallel
        self.memory = DeviceMemory(self.counts, machine, self.efficiency)
        device, factors = machine.device, self.efficiency
        if device.measured:
            factors = Efficiency.ideal()
        self._bandwidth = device.memory_bandwidth * factors.memory
        flops = device.flops * factors.matrix
        self._flops: dict[OperatorKind, float] = {
            "prefill attention": device.flops * factors.attention,
            "matrix": flops,
            "look-up": flops,
            "decode attention": flops,
            "recurrence": device.flops * factors.attention,
        }
        self._degree = self.layout.tensor_parallel
        self._group = [self._joining(stage, 1) for stage in range(self.num_stages)]
        self._onward = [self._joining(stage, 2) for stage in range(self.num_stages - 1)]
        self._host = self._reached(machine.host_link)
        stages = [
            (tuple(self.counts.stages[stage].items()), self._group[stage])
            for stage in range(self.num_stages)
        ]
        # the first stage with the same layers and links
        self._first_alike = [stages.index(stage) for stage in stages]
        self._inner_seconds = lru_cache(maxsize=self.num_stages)(self._inner)
        self.layers_seconds = cache(self._layers)  # many steps have as many tokens
        self._embedding_seconds, self._head_seconds = cache(self._embedding), cache(self._head)

    def work(
        self,
        decode_contexts: Sequence[int] = (),
        chunks: Iterable[Chunk] = (),
        sampled: int | None = None,
    ) -> StepWork:
        return StepWork.of(decode_contexts, chunks, sampled, self.counts.windows)

    def stage_seconds(self, work: StepWork, stage: int) -> float:
        """Device time of one stage: operators, the gaps between kernels, all-reduces. 0 for an
        empty step."""
        if not work.tokens:
            return 0.0
        return self._inner_seconds(work, self._first_alike[stage]) + self.ends_seconds(work, stage)

    def _inner(self, work: StepWork, stage: int) -> float:
        return self.layers_seconds(work.tokens, stage) + self.attention_seconds(work, stage)

    def _layers(self, tokens: int, stage: int) -> float:
        """A stage's layers without their attention: products, gaps between kernels, all-reduces. 0
        for no tokens."""
        if not tokens:
            return 0.0
        factors, reduce = self.efficiency, self._all_reduce_seconds(tokens, stage)
        kernels = factors.kernels_per_layer * factors.kernel_seconds
        beside = self.counts.layers(stage) * kernels + self.counts.outputs(stage) * reduce
        products = sum(
            map(self.operator_seconds, self.counts.products(StepWork(decodes=tokens), stage))
        )
        return beside + products

    def attention_seconds(self, work: StepWork, stage: int) -> float:
        """Attention of a stage's layers, and the recurrence of those with a state."""
        return sum(
            [self.operator_seconds(operator) for operator in self.counts.attention(work, stage)]
        )

    def ends_seconds(self, work: StepWork, stage: int) -> float:
        """Device time of a stage outside its layers: the embedding before the first, the head
        behind the last."""
        seconds = 0.0
        if stage == 0 and work.tokens:
            seconds += self._embedding_seconds(work.tokens)
        if stage == self.num_stages - 1 and work.sampled:
            seconds += self._head_seconds(work.sampled)
        return seconds

    def _embedding(self, tokens: int) -> float:
        embedding = self.operator_seconds(self.counts.embedding(tokens))
        return embedding + self.efficiency.kernel_seconds + self._all_reduce_seconds(tokens, 0)

    def _head(self, sampled: int) -> float:
        head = self.operator_seconds(self.counts.product(self.counts.head, sampled))
        return (
            head + self._gather_seconds(sampled) + _KERNELS_OF_HEAD * self.efficiency.kernel_seconds
        )

    def send_seconds(self, work: StepWork, stage: int) -> float:
        """Each device sends the hidden states whole to its peer in the next stage. 0 after the last
        stage."""
        if stage == self.num_stages - 1 or not work.tokens:
            return 0.0
        return self._onward[stage].send_seconds(self.counts.activation_bytes(work.tokens))

    def host_seconds(self, work: StepWork) -> float:
        """The CPU's part of a step: scheduling, inputs, outputs. The runtime may overlap it."""
        return self.efficiency.step_seconds + work.rows * self.efficiency.row_seconds

    def step_seconds(self, work: StepWork) -> float:
        """Seconds from the first stage to the last in an empty pipeline, with the host's part
        before."""
        stages = range(self.num_stages)
        device = sum(
            self.stage_seconds(work, stage) + self.send_seconds(work, stage) for stage in stages
        )
        return self.host_seconds(work) + device

    def operator_seconds(self, operator: Operator) -> float:
        """The longer of moving its bytes and computing its operations (the roofline), or both after
        one another."""
        moving, computing = (
            operator.bytes / self._bandwidth,
            operator.flops / self._flops[operator.kind],
        )
        if self.machine.device.overlaps:
            return max(moving, computing)
        return moving + computing

    def is_compute_bound(self, operator: Operator) -> bool:
        return operator.flops / self._flops[operator.kind] > operator.bytes / self._bandwidth

    def kernel_seconds(self, work: StepWork, stage: int) -> float:
        """The gaps between a stage's kernels."""
        kernels = self.counts.layers(stage) * self.efficiency.kernels_per_layer
        if stage == 0:
            kernels += 1  # the embedding
        if stage == self.num_stages - 1 and work.sampled:
            kernels += _KERNELS_OF_HEAD
        return kernels * self.efficiency.kernel_seconds

    def all_reduces(self, stage: int) -> int:
        """The number of a stage's all-reduces of hidden states: one for each divided output of a
        layer, one after the divided embedding. Those inside mixers, which are short, are left
        out."""
        if self._degree == 1:
            return 0
        all_reduces = self.counts.outputs(stage)
        if stage == 0:
            all_reduces += 1
        return all_reduces

    def all_reduce_seconds(self, work: StepWork, stage: int) -> float:
        """All of a stage's all-reduces, and gathering the divided logits on the last one."""
        seconds = self.all_reduces(stage) * self._all_reduce_seconds(work.tokens, stage)
        if stage == self.num_stages - 1:
            seconds += self._gather_seconds(work.sampled)
        return seconds

    def swap_seconds(self, tokens: int, stage: int) -> float:
        """The KV of these tokens between device and host, one way; the devices of all stages work
        at once."""
        return self._host.send_seconds(tokens * self.counts.kv_bytes_per_token(stage))

    def reload_seconds(self, stage: int) -> float:
        """A stage's weights from host memory, as Seesaw re-shards; the devices of all stages do it
        at once."""
        return self._host.send_seconds(self.counts.stage_weight_bytes(stage))

    def host_attention_seconds(self, context: int) -> float:
        """One layer's decode attention over `context` keys on the CPU (APEX). Raises UsageError
        without a processor."""
        processor = self.machine.processor
        if processor is None:
            raise UsageError(f"{self.machine.name} names no processor for attention on the host")
        model = self.counts.model
        share = 1.0 if processor.measured else self.efficiency.processor
        moving = (
            context * model.kv_numbers * self.counts.precision.kv_bytes / processor.memory_bandwidth
        )
        computing = context * 4.0 * model.num_heads * model.head_dim / processor.flops
        return max(moving, computing) / share

    def host_exchange_seconds(self, rows: int) -> float:
        """One layer's queries, keys and values of `rows` rows to the host, and the attention's
        result back."""
        if not rows:
            return 0.0
        counts = self.counts
        size = rows * counts.model.head_dim * counts.precision.other_bytes
        send = self._host.send_seconds
        return send(size * (counts.heads + 2 * counts.kv_heads)) + send(size * counts.heads)

    def _all_reduce_seconds(self, tokens: int, stage: int) -> float:
        """One all-reduce; 0 without tensor parallelism."""
        return self._group[stage].all_reduce_seconds(
            self.counts.activation_bytes(tokens), self._degree
        )

    def _gather_seconds(self, sampled: int) -> float:
        """The divided logits on the last stage: one device receives all the others' parts."""
        if self._degree == 1 or not sampled:
            return 0.0
        logits = sampled * self.counts.vocabulary * self.counts.precision.other_bytes
        return self._group[-1].send_seconds(logits * (self._degree - 1))

    def _joining(self, stage: int, stages: int) -> Link:
        """The link among the devices of this many stages, as programs reach it."""
        return self._reached(self.machine.link_among(stage * self._degree, stages * self._degree))

    def _reached(self, link: Link) -> Link:
        """The link as programs reach it."""
        if link.measured:
            return link
        return link.scaled(self.efficiency.link)
