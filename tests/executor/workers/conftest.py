"""Groups of workers that many tests share: to start one takes seconds."""

from collections.abc import Iterator

import pytest

from nanoserve.executor.workers.executor import WorkersExecutor
from nanoserve.models.hub import ResolvedModel, resolve_model
from tests.executor.workers.loads import Reference, start_workers
from tests.models.test_shards import write_checkpoint


@pytest.fixture(scope="package")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Three layers, of which the second sees all positions, norms of queries and keys, and the
    bundled tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    write_checkpoint("qwen3-layer-types", directory, vocab_size=4096)
    return Reference(ResolvedModel("small", directory, resolve_model(None).tokenizer_directory))


@pytest.fixture(scope="module")
def two_stages(reference: Reference) -> Iterator[WorkersExecutor]:
    workers = start_workers(reference, pipeline_parallel=2)
    yield workers
    workers.close()


@pytest.fixture(scope="package")
def rounded(reference: Reference) -> Reference:
    """That model with weights in 4 bits."""
    return Reference(reference.resolved, quantization="int4")


@pytest.fixture(scope="module")
def rounded_stages(rounded: Reference) -> Iterator[WorkersExecutor]:
    workers = start_workers(rounded, pipeline_parallel=2)
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def two_ranks(reference: Reference) -> Iterator[WorkersExecutor]:
    workers = start_workers(reference, tensor_parallel=2)
    yield workers
    workers.close()
