"""Gets a GPU ready for a model: compiles its layers, finds out what steps need, captures the decode
steps and the mixed ones."""

import logging
import os
import sys
import time
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from nanoserve.engine_config import EngineConfig
from nanoserve.errors import first_line
from nanoserve.executor.compile.layer_runner import LayerRunner
from nanoserve.executor.sampling.sampler import SamplingRows, SamplingState, sample
from nanoserve.executor.start.memory import memory_errors, out_of_memory
from nanoserve.executor.start.model_loading import compiler_errors
from nanoserve.executor.step.answers import rows_per_chunk
from nanoserve.executor.step.decode_graphs import (
    LARGEST_DRAFT_BUCKET,
    CudaRecorder,
    DecodeGraphs,
    GraphRecorder,
    StaticInputs,
    bucket_sizes,
    graph_sizes,
)
from nanoserve.executor.step.forward_pass import ForwardPass, StepInputs, make_caches
from nanoserve.executor.step.mixed_graphs import (
    MixedGraphs,
    MixedInputs,
    mixed_sizes,
    most_tokens,
)
from nanoserve.executor.step.model_runner import ModelRunner
from nanoserve.executor.step.rank_graphs import RanksRecorder, on_all_ranks
from nanoserve.executor.step.sampling_graphs import SamplingGraphs
from nanoserve.executor.step.staging import Staging
from nanoserve.models.attention import AttentionBatch
from nanoserve.models.decoder import Decoder, LayerFunction, MixtureOfExperts
from nanoserve.models.hub import ProgressCallback
from nanoserve.models.packed import PackedExperts, num_weights
from nanoserve.request import SamplingParams
from nanoserve.scheduler.optional import NO_STATE
from nanoserve.scheduler.plan import Begin
from nanoserve.utils.sizes import format_size
from triton_ops.cache import SKIPPED_SLOT
from triton_ops.cpu import CannotBuild, cache_directory
from triton_ops.gpu.devices import gpu_of
from triton_ops.gpu.experts import most_captured_tokens, never_waits
from triton_ops.recurrent import SEGMENT_FIELDS

if TYPE_CHECKING:  # for models with such layers, and for drafts
    from nanoserve.executor.drafting.draft_model import DraftModel
    from nanoserve.models.mixer import RecurrentStates

COMPILING, WARMING_UP = "compiling layers", "warming up"
GRAPH_BYTES = 16 * 2**20
"""Memory of a graph beside the tensors of its step: a driver keeps its kernels' arguments on the
device."""
DRAFT_WIDTHS = (1, 2)
"""Tokens of a row in graphs of a draft model's steps. Its first step has one token that the model
has found, and perhaps the last draft token, which was right."""
MOST_SAMPLED = 256
"""Rows of the largest graph that samples: its logits take the memory of as many vocabularies."""
CAPTURE_WORKSPACE = 64 * 2**20
"""Products of matrices have a workspace per stream, and graphs are captured on one of their own."""

# Sampling that takes the most memory: over the whole vocabulary, after the logits are changed.
_SAMPLED = SamplingParams(temperature=1.0, top_p=0.5, min_p=0.1, repetition_penalty=1.5)
# The other ways of sampling, for which there is other code.
_OTHER_WAYS = (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=20))


NO_LIMIT = sys.maxsize
"""Tokens of a captured step, where their number does not matter."""


@dataclass(frozen=True, slots=True)
class GpuStartReport:
    """Seconds and bytes that getting a GPU ready took."""

    compiled: bool
    warm_up_seconds: float
    """Seconds of the first step, which compiles or loads layers and kernels."""
    step_memory: int  # bytes that the largest step needs beside weights and KV cache
    graphs: int = 0
    graph_seconds: float = 0.0
    graph_memory: int = 0
    """Number of captured decode steps; seconds and bytes that all captured steps took."""
    mixed_graphs: int = 0
    """Number of captured mixed steps."""

    def __str__(self) -> str:
        layers = "compiled" if self.compiled else "eager"
        captured = f"{self.graphs} decode steps"
        if self.mixed_graphs:
            captured += f" and {self.mixed_graphs} mixed steps"
        return (
            f"{layers} layers, warm after {self.warm_up_seconds:.1f} s; a step needs "
            f"{format_size(self.step_memory)};"
            f" {captured} captured in {self.graph_seconds:.1f} s,"
            f" which takes {format_size(self.graph_memory)}"
        )


class GpuStart:
    """Between the weights and the KV cache, `measure`; with the cache, `capture`."""

    def __init__(self, decoder: Decoder, config: EngineConfig, device: torch.device) -> None:
        self._decoder = decoder
        self._config = config
        self._device = device
        keep_compiled_code(os.environ)
        self.layers = LayerRunner() if config.eager else LayerRunner.torch_compile(decoder)
        """Runs the layers from now on."""
        most_captured = 0 if config.eager else _most_captured_tokens(decoder, device)
        captures = not config.eager and on_all_ranks(decoder, holds=most_captured > 0)
        buckets: tuple[int, ...] = ()
        if captures:
            buckets = bucket_sizes(min(config.max_num_seqs, most_captured))
        sizes = graph_sizes(buckets, draft_tokens=config.speculate is not None)
        self._sizes = [(rows, width) for rows, width in sizes if rows * width <= most_captured]
        # Where tokens are drafted, a mechanism samples in its own way; ranks gather logits first.
        samples_alone = decoder.shard.is_last and decoder.shard.degree == 1
        captures_sampling = captures and config.speculate is None and samples_alone
        sampled = [size for size in buckets if size <= MOST_SAMPLED]
        self._sampling = SamplingGraphs(decoder, sampled) if captures_sampling else None
        # Draft tokens have graphs of their own. Packed experts, which limit the tokens, would look
        # up the experts of tokens that pad.
        captures_mixed = captures and config.speculate is None and most_captured == NO_LIMIT
        self._mixed_sizes = list[tuple[int, int]]()
        if captures_mixed and config.num_workers == 1:
            self._mixed_sizes = _mixed_sizes(decoder, config, device)
        self._draft_sizes = list[tuple[int, int]]()
        self.draft_model: DraftModel | None = None
        """Drafts tokens on this GPU."""
        self._warm_up_seconds = 0.0
        self._step_memory = 0
        self.graph_bytes = 0
        """Memory that the graphs will take, once it is estimated."""

    def measure(self, longest: int, progress: ProgressCallback | None) -> int:
        """Run the largest step twice: to compile what it needs, then to see its memory; also in
        pieces of layers, if the policy has such steps. Returns bytes to keep free for steps, and
        for capturing them; `longest` is the number of tokens of the longest sequence. Raises
        RuntimeFailure if there is no room, or kernels cannot be built."""
        config = self._config
        num_tokens = min(config.max_num_batched_tokens, config.max_num_seqs * longest)
        num_rows = min(num_tokens, config.max_num_seqs)
        began, stage = time.monotonic(), WARMING_UP if config.eager else COMPILING
        advice = "lower --max-num-batched-tokens or --max-num-seqs"
        problem = f"a step of {num_tokens} tokens does not fit"
        ways: list[LayerFunction] = [self.layers]
        if config.attends_on_host:
            ways.append(self.layers.in_pieces)
        sizes = {"num_tokens": num_tokens, "num_rows": num_rows, "block_size": config.block_size}
        runs = [partial(run_largest_step, self._decoder, run_layer, **sizes) for run_layer in ways]
        parts: list[Callable[[], object]] = []
        for run in runs:  # one token has code of its own in layers
            parts += [run, partial(run, num_tokens=1, num_rows=1)]
        parts.append(partial(warm_sampling, self._decoder, num_rows))
        with memory_errors(self._device, problem, advice), compiler_errors(self._device):
            for done, part in enumerate(parts):
                if progress is not None:
                    progress(stage, done, len(parts))
                part()
            torch.cuda.synchronize(self._device)
            self._warm_up_seconds = time.monotonic() - began
            self._step_memory = max(measured_memory(self._device, run) for run in runs)
        if progress is not None:
            progress(stage, len(parts), len(parts))
        if not self._sizes:
            return self._step_memory
        decoded = [rows * width for rows, width in self._sizes]
        captured = max(decoded + [tokens for tokens, _ in self._mixed_sizes])
        # The graphs keep the memory of the largest of their steps, whose activations grow with its
        # tokens at most.
        activations = -(-self._step_memory * min(captured, num_tokens) // num_tokens)
        graphs = GRAPH_BYTES * len(self._sizes)
        if self._sampling is not None:
            graphs += self._sampling.memory()
        of_token = self._decoder.config.hidden_size * self._decoder.dtype.itemsize
        # each graph of a mixed step keeps its own hidden states
        graphs += sum(GRAPH_BYTES + tokens * of_token for tokens, _ in self._mixed_sizes)
        if self._draft_sizes:
            graphs += CAPTURE_WORKSPACE + GRAPH_BYTES * len(self._draft_sizes)
        self.graph_bytes = activations + CAPTURE_WORKSPACE + graphs
        return self._step_memory + self.graph_bytes

    def capture(
        self, runner: ModelRunner, max_model_len: int, progress: ProgressCallback | None
    ) -> GpuStartReport:
        """Have the runner replay its decode steps from now on, and mixed ones where that pays,
        unless all runs eagerly; RuntimeFailure without room."""
        free, began = torch.cuda.mem_get_info(self._device)[0], time.monotonic()
        captured = (
            len(self._sizes)
            if self._sizes and self._captured(runner, max_model_len, progress)
            else 0
        )
        return GpuStartReport(
            compiled=self.layers.loaded,
            warm_up_seconds=self._warm_up_seconds,
            step_memory=self._step_memory,
            graphs=captured,
            graph_seconds=time.monotonic() - began if captured else 0.0,
            graph_memory=max(0, free - torch.cuda.mem_get_info(self._device)[0]) if captured else 0,
            mixed_graphs=len(self._mixed_sizes) if captured else 0,
        )

    def expect_draft_model(self, decoder: Decoder) -> None:
        """Keep memory for graphs of a draft model, unless the model's own steps are not captured or
        those of the draft model wait for the GPU."""
        if self._sizes and _most_captured_tokens(decoder, self._device) == NO_LIMIT:
            buckets = bucket_sizes(min(self._config.max_num_seqs, LARGEST_DRAFT_BUCKET))
            self._draft_sizes = [(rows, width) for width in DRAFT_WIDTHS for rows in buckets]

    def _capture_drafts(self, draft_model: "DraftModel", most_blocks: int) -> None:
        """Have a draft model replay its steps of few rows from now on; RuntimeFailure without
        room."""
        problem = f"capturing {len(self._draft_sizes)} steps of the draft model does not fit"
        advice = "lower --kv-cache-memory, or leave --speculate out"
        with memory_errors(self._device, problem, advice), compiler_errors(self._device):
            static = StaticInputs(self._draft_sizes, most_blocks=most_blocks, device=self._device)
            graphs = DecodeGraphs(draft_model.forward, static)
            recorder = CudaRecorder(self._device)
            if _recorded(lambda: graphs.capture(recorder), "a draft model's steps"):
                draft_model.forward = graphs

    def _captured(
        self, runner: ModelRunner, max_model_len: int, progress: ProgressCallback | None
    ) -> bool:
        most_blocks = -(-max_model_len // self._config.block_size)
        advice = "lower --max-num-seqs or --kv-cache-memory, or choose --eager"
        problem = f"capturing {len(self._sizes)} decode steps does not fit"
        with memory_errors(self._device, problem, advice), compiler_errors(self._device):
            groups = len(runner.config.cache_groups.windows)
            shard, hidden_states = self._decoder.shard, None
            if not shard.is_first:
                hidden_states = self._decoder.config.hidden_size, self._decoder.dtype
            static = StaticInputs(
                self._sizes,
                most_blocks=most_blocks,
                device=self._device,
                groups=groups,
                hidden_states=hidden_states,
            )
            graphs = DecodeGraphs(runner.forward, static, sends=not shard.is_last)
            recorder: GraphRecorder = CudaRecorder(self._device)
            if shard.degree > 1:
                recorder = RanksRecorder(recorder, self._decoder)
            mixed = self._mixed_graphs(runner, graphs, most_blocks)

            def capture_all() -> None:
                for steps in self._largest_first(graphs, mixed):
                    steps.capture(recorder, progress)
                if self._sampling is not None:
                    self._sampling.capture(recorder)

            if not _recorded(capture_all, "decode steps"):
                return False
        runner.forward = mixed or graphs
        if self._sampling is not None:
            runner.stage_sampled = self._sampling.stage
        # Last, for torch records nothing more after a recording that failed.
        if self.draft_model is not None and self._draft_sizes:
            self._capture_drafts(self.draft_model, most_blocks)
        return True

    def _mixed_graphs(
        self, runner: ModelRunner, others: DecodeGraphs, most_blocks: int
    ) -> MixedGraphs | None:
        """Make the graphs of mixed steps, uncaptured; None if there are none."""
        if not self._mixed_sizes:
            return None
        static = MixedInputs(
            self._mixed_sizes,
            most_blocks=most_blocks,
            device=self._device,
            groups=len(runner.config.cache_groups.windows),
        )
        return MixedGraphs(runner.forward, static, others)

    def _largest_first(
        self, graphs: DecodeGraphs, mixed: MixedGraphs | None
    ) -> list[DecodeGraphs | MixedGraphs]:
        """Return what is captured in order of its most tokens: the smaller graphs find room in the
        memory that the larger ones took."""
        if mixed is None:
            return [graphs]
        decode_tokens = max(rows * width for rows, width in self._sizes)
        mixed_tokens, _ = self._mixed_sizes[-1]
        return [mixed, graphs] if mixed_tokens >= decode_tokens else [graphs, mixed]


def _recorded(capture: Callable[[], None], computed: str) -> bool:
    """Capture graphs, and tell whether that worked. If not, a notice says why, and what they would
    have `computed` is computed without them."""
    try:
        capture()
    except RuntimeError as error:  # whatever cannot be captured can still be run
        # Ending a recording that failed fails as well, and that error comes in the place of the
        # first.
        first = error.__context__ or error
        for each in (first, error):
            if out_of_memory(each):
                raise each from None
        notice = "nanoserve: %s run uncaptured, which is slower: %s"
        logging.getLogger("nanoserve").warning(notice, computed, first_line(first))
        return False
    return True


def _mixed_sizes(
    decoder: Decoder, config: EngineConfig, device: torch.device
) -> list[tuple[int, int]]:
    """Tokens and rows of the mixed steps whose capture pays."""
    weights_of_layer = num_weights(decoder.layers) // len(decoder.layers)
    largest = most_tokens(weights_of_layer, gpu_of(device).generation)
    return mixed_sizes(min(largest, config.max_num_batched_tokens), config.max_num_seqs)


def keep_compiled_code(environment: MutableMapping[str, str]) -> None:
    """Have what torch's compiler and Triton make kept in the user's cache folder, where it outlasts
    the machine's next start. Folders that the environment names already stay as they are."""
    with suppress(CannotBuild):  # then they are kept where torch and Triton keep them
        for name, folder in (
            ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
            ("TRITON_CACHE_DIR", "triton"),
        ):
            if not environment.get(name):
                environment[name] = str(cache_directory(environment, folder))


@torch.inference_mode()
def run_largest_step(
    decoder: Decoder, run_layer: LayerFunction, *, num_tokens: int, num_rows: int, block_size: int
) -> Tensor | None:
    """Compute and sample the largest step: as many tokens as a step may have, one row as long as
    possible, the others decodes. Returns its tokens, or None on a shard that does not sample.

    All positions read the same block of a cache of one block, and nothing is written: the tokens
    mean nothing.
    """
    caches = make_caches(
        decoder.config,
        num_blocks=1,
        block_size=block_size,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    for cache in (*caches.keys, *caches.values):
        cache.zero_()
    hidden = ForwardPass(decoder, caches, run_layer)(
        _largest_inputs(decoder, num_tokens, num_rows, block_size)
    )
    if not decoder.shard.is_last:
        return None
    vocab_size = decoder.config.vocab_size
    # A prompt's log probabilities are computed for this many positions at a time.
    num_sampled = max(num_rows, rows_per_chunk(vocab_size))
    canvas = decoder.config.canvas
    if canvas is not None:  # tokens are sampled at each of its positions
        num_sampled = max(num_sampled, num_rows * canvas.length)
    num_sampled = min(num_tokens, num_sampled)
    states = [SamplingState(Begin(0, (0,), 1, 0, 0, _SAMPLED), vocab_size)] * num_sampled
    staging = Staging(hidden.device)
    last_tokens = staging.add(np.arange(num_sampled))
    settings = SamplingRows.stage(states, [1] * num_sampled, staging)
    staging.transfer()
    logits = decoder.compute_logits(hidden[last_tokens])
    return sample(logits, settings).tokens if len(logits) else None  # another rank gathered them


@torch.inference_mode()
def warm_sampling(decoder: Decoder, num_rows: int) -> None:
    """Compile what the largest step does not sample with, for one row and for more."""
    if not decoder.shard.is_last:
        return
    vocab_size = decoder.config.vocab_size
    for params in _OTHER_WAYS:
        for count in {1, num_rows}:
            states = [SamplingState(Begin(0, (0,), 1, 0, 0, params), vocab_size)] * count
            staging = Staging(decoder.device)
            settings = SamplingRows.stage(states, [1] * count, staging)
            staging.transfer()
            sample(torch.zeros(count, vocab_size, device=decoder.device), settings)


def _largest_inputs(
    decoder: Decoder, num_tokens: int, num_rows: int, block_size: int
) -> StepInputs:
    device, longest = decoder.device, num_tokens - (num_rows - 1)
    lengths = torch.tensor([longest] + [1] * (num_rows - 1), dtype=torch.int32, device=device)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
    starts[1:] = lengths.cumsum(0)
    tables = torch.zeros(num_rows, -(-longest // block_size), dtype=torch.int32, device=device)
    slots = torch.full((num_tokens,), SKIPPED_SLOT, device=device)
    batch = AttentionBatch(tables, starts, lengths, slots)
    if decoder.config.canvas is not None:
        spans = [[decoder.config.canvas.length, 0]] * num_rows
        batch.spans = torch.tensor(spans, dtype=torch.int32, device=device)
    intermediate_hidden_states = None
    if not decoder.shard.is_first:
        intermediate_hidden_states = torch.zeros(
            num_tokens, decoder.config.hidden_size, dtype=decoder.dtype, device=device
        )
    return StepInputs(
        token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=torch.arange(num_tokens, device=device),
        batch=batch,
        longest=longest,
        intermediate_hidden_states=intermediate_hidden_states,
        more=(batch,) * (len(decoder.config.cache_groups.windows) - 1),
        states=_states_of_one_slot(decoder, starts),
    )


def _states_of_one_slot(
    decoder: Decoder, starts: torch.Tensor
) -> "Sequence[RecurrentStates | None]":
    """Recurrent states of the layers that have them, one for all rows, whose tokens begin and end
    at these places: [R + 1]."""
    config = decoder.config
    if config.recurrent is None:
        return ()
    from nanoserve.models.mixer import make_states  # for models that have such layers

    segments = torch.zeros(
        len(starts) - 1, SEGMENT_FIELDS, dtype=torch.int32, device=decoder.device
    )
    segments[:, 0], segments[:, 1] = starts[:-1], starts[1:]
    segments[:, 2] = NO_STATE
    of_layers: list[RecurrentStates | None] = []
    with decoder.device:
        for layer in range(config.num_layers):
            states = None
            if config.is_recurrent(layer):
                states = make_states(config, 1, decoder.dtype)
                states.segments = segments
            of_layers.append(states)
    return of_layers


def measured_memory(device: torch.device, step: Callable[[], object]) -> int:
    """Bytes that a step takes on a GPU beyond what is held before and after it. The step has run
    once already."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_reserved(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    return peak - held


def _most_captured_tokens(decoder: Decoder, device: torch.device) -> int:
    """Tokens of the largest decode step in which nothing waits for the device, or NO_LIMIT; 0 if
    all of them wait, or if the model has no decode steps. Trying would not do: a recording that
    fails leaves torch's allocator in a state in which memory cannot be given back."""
    config, most = decoder.config, NO_LIMIT
    if config.recurrent is not None:  # the host cuts its scans
        return 0
    if config.canvas is not None:  # its rows are longer than those of decode steps
        return 0
    for module in decoder.modules():
        if isinstance(module, PackedExperts):
            moe = module.moe
            captured = most_captured_tokens(decoder.dtype, moe.num_experts, moe.experts_per_token)
            most = min(most, captured)
        elif isinstance(module, MixtureOfExperts):
            widths = (config.hidden_size, module.moe.intermediate_size)
            if not never_waits(decoder.dtype, device, widths):
                return 0
    return most
