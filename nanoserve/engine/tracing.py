"""Write what engines do into a file for ui.perfetto.dev, as `--record` asks."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from nanoserve.engine.assembly import BuiltEngine
from nanoserve.errors import RuntimeFailure
from nanoserve.record.chrome_trace import ChromeTraceFile
from nanoserve.record.recorder import TimedExecutor, recorder_of
from nanoserve.record.trace import RunTrace


def build_traced(
    path: Path, build: Callable[[], BuiltEngine], on_failure: Callable[[RuntimeFailure], None]
) -> BuiltEngine:
    """Build an engine that is traced; the end of the run closes the file.

    Raises RuntimeFailure before anything is built if the file cannot be written.
    """
    with ExitStack() as failing:
        file = failing.enter_context(ChromeTraceFile(path))
        built = build()
        _trace(built, file, on_failure)
        failing.pop_all()
    return built


def _trace(
    built: BuiltEngine, file: ChromeTraceFile, on_failure: Callable[[RuntimeFailure], None]
) -> None:
    """Have every engine traced in one file. The first engine closes it, as it ends last."""
    engines = built.engine.engines
    for number, engine in enumerate(engines):
        is_first = number == 0
        trace = RunTrace(
            file,
            engine.now(),
            layouts=built.config.layouts,
            reports_times=isinstance(engine.executor, TimedExecutor),
            host_link_bandwidth=None if built.speeds is None else built.speeds.host_link_bandwidth,
            name=f"engine {number}" if len(engines) > 1 else None,
            close=file.close if is_first else file.flush,
            on_failure=on_failure,
        )
        recorder_of(engine).add(trace)
