"""llama.cpp through llama-cpp-python's low-level calls: one decode call per step for the whole
batch."""

import ctypes
import time
from pathlib import Path

import llama_cpp
import numpy as np

from nanoserve.errors import RuntimeFailure
from nanoserve.lab.benchmarks.driving import EngineRun
from nanoserve.lab.benchmarks.peers.process import Opening, Prompts
from nanoserve.record.metrics import RequestTiming

_KV_TYPES = {
    "float32": llama_cpp.GGML_TYPE_F32,
    "float16": llama_cpp.GGML_TYPE_F16,
    "bfloat16": llama_cpp.GGML_TYPE_F16,  # llama.cpp's default, of the same size
}
_MICRO_BATCH = 512
_FILE_TYPES = {"int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


# Untyped, but only where llama-cpp-python is installed.
@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
def _silence(_level: int, _text: bytes, _data: ctypes.c_void_p) -> None:
    """llama.cpp tells much about itself on stderr."""


def write_quantized(source: Path, target: Path, quantization: str) -> None:
    """Write the GGUF file as llama-quantize does, in Q4_0 for int4 and in Q8_0 for int8. Raises
    RuntimeFailure."""
    llama_cpp.llama_log_set(_silence, ctypes.c_void_p(0))
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = _FILE_TYPES[quantization]
    if llama_cpp.llama_model_quantize(bytes(source), bytes(target), settings) != 0:
        raise RuntimeFailure(
            f"llama.cpp cannot round {source} to {quantization}; if it is quantized already, leave "
            "out --quantization"
        )


class LlamaCppPeer:
    """A GGUF file on the CPU. Sequences have a part of the KV cache each, as in llama.cpp's own
    batched benchmark."""

    def __init__(self, opening: Opening) -> None:
        llama_cpp.llama_log_set(_silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_settings = llama_cpp.llama_model_default_params()
        model_settings.n_gpu_layers = 0
        model_settings.use_extra_bufts = opening.repacked  # buffers in which weights are repacked
        self._model = llama_cpp.llama_model_load_from_file(opening.model.encode(), model_settings)
        if not self._model:
            raise RuntimeFailure(f"llama.cpp cannot load {opening.model}")
        settings = llama_cpp.llama_context_default_params()
        self._capacity = opening.max_batch * opening.max_length
        settings.n_ctx = self._capacity
        settings.n_batch = self._capacity
        settings.n_ubatch = _MICRO_BATCH
        settings.n_seq_max = opening.max_batch
        settings.swa_full = False  # windows keep what they see, as in llama.cpp's own programs
        settings.n_threads = settings.n_threads_batch = opening.threads
        settings.type_k = settings.type_v = _KV_TYPES[opening.dtype]
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        if not self._context:
            raise RuntimeFailure(f"llama.cpp cannot make a context of {self._capacity} tokens")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(self._capacity, 0, 1)
        self.description = {
            "dtype": opening.dtype,
            "threads": opening.threads,
            "system": llama_cpp.llama_print_system_info().decode(errors="replace").strip(),
        }

    def run(self, prompts: Prompts, output_tokens: int) -> EngineRun:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        answers: list[list[int]] = [[] for _ in prompts]
        times: list[float] = []
        began = time.perf_counter()
        self._batch.n_tokens = 0
        last_rows = [self._put_prompt(sequence, prompt) for sequence, prompt in enumerate(prompts)]
        for step in range(output_tokens):
            if (code := llama_cpp.llama_decode(self._context, self._batch)) != 0:
                raise RuntimeFailure(f"llama.cpp gave up with code {code}")
            tokens = [self._likeliest(row) for row in last_rows]
            times.append(time.perf_counter() - began)
            self._batch.n_tokens = 0
            for sequence, token in enumerate(tokens):
                answers[sequence].append(token)
                last_rows[sequence] = self._put(
                    sequence, len(prompts[sequence]) + step, token, logits=True
                )
        timings = tuple(RequestTiming(len(prompt), tuple(times)) for prompt in prompts)
        return EngineRun(timings, tuple(tuple(answer) for answer in answers))

    def _put_prompt(self, sequence: int, prompt: tuple[int, ...]) -> int:
        last = len(prompt) - 1
        return [
            self._put(sequence, place, token, logits=place == last)
            for place, token in enumerate(prompt)
        ][-1]

    def _put(self, sequence: int, position: int, token: int, *, logits: bool) -> int:
        batch, row = self._batch, self._batch.n_tokens
        batch.token[row] = token
        batch.pos[row] = position
        batch.n_seq_id[row] = 1
        batch.seq_id[row][0] = sequence
        batch.logits[row] = logits
        batch.n_tokens = row + 1
        return int(row)

    def _likeliest(self, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())
