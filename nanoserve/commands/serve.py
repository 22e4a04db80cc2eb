"""``nanoserve serve``: an OpenAI-compatible server."""

import asyncio
import signal
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from nanoserve.commands.engine_options import WorkersOptions
from nanoserve.commands.options import Options, option
from nanoserve.commands.progress import Progress, show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.server.engine_client import EngineClient
from nanoserve.server.hosts import is_loopback
from nanoserve.server.messages import EngineStart
from nanoserve.text.grammar.checker import GrammarChecker
from nanoserve.text.tokenizer import load_tokenizer
from nanoserve.utils.installation import install_command
from nanoserve.utils.sizes import parse_size
from nanoserve.utils.threads import prepare_threads

_seconds = partial(option, metavar="SECONDS", minimum=0.1)


class HttpOptions(Options, panel="HTTP", has_variables=True):
    host: str = option("127.0.0.1", "Address to listen on.", metavar="ADDRESS")
    port: int = option(8000, "Port to listen on; 0 takes a free port.", minimum=0, maximum=65535)
    api_key: list[str] | None = option(
        None, "Key that clients must send (may be repeated).", metavar="KEY"
    )
    allowed_hosts: list[str] | None = option(
        None,
        "Name that the Host header may have, beside localhost (may be repeated).",
        metavar="NAME",
    )
    insecure: bool = option(False, "Accept every client that reaches --host, without a key.")
    served_model_name: str | None = option(None, "Name of the model for clients.", metavar="NAME")

    def check_exposure(self) -> None:
        """Raise UsageError for an empty key, or an address that strangers can reach unless that is
        wanted."""
        if not all(self.api_key or []):
            raise UsageError("--api-key is empty; leave it out to serve without a key")
        if not self.api_key and not self.insecure and not is_loopback(self.host):
            remedy = "give an --api-key, or --insecure to accept every client"
            raise UsageError(f"--host {self.host} can be reached from outside: {remedy}")

    def checked_hosts(self) -> set[str] | None:
        """Names that clients may call the server; None allows every name, as no page of the web
        knows the key."""
        is_open_to_pages = not self.api_key and is_loopback(self.host)
        names = {name.lower().strip("[]") for name in self.allowed_hosts or ()}
        if not names and not is_open_to_pages:
            return None
        return names


class LimitOptions(Options, panel="Limits", has_variables=True):
    max_queue: int = option(128, "Requests that may wait; more are answered 429.", minimum=0)
    max_body_size: str = option(
        "1MiB", "Largest request; a larger one is answered 413.", metavar="SIZE"
    )
    client_timeout: float = _seconds(
        30.0, "Limit for a client to send its request, and to take its answer."
    )
    request_timeout: float = _seconds(1800.0, "Limit for a whole answer.")
    drain_timeout: float = option(
        30.0, "Limit for running requests to end after SIGTERM.", metavar="SECONDS", minimum=0
    )


class ServeOptions(HttpOptions, LimitOptions, WorkersOptions):
    """All options of the command."""


@on_all_machines
def run(options: ServeOptions) -> None:
    """[bold]Examples[/bold]

      nanoserve serve                                   the bundled storyteller
      nanoserve serve -m Qwen/Qwen3-0.6B --port 8080
      curl http://127.0.0.1:8000/v1/models
      NANOSERVE_API_KEY=secret nanoserve serve --host 0.0.0.0

    A key in the environment is not seen in the list of processes. SIGTERM and
    Ctrl-C let the running requests end; a second one does not wait.
    """
    options.check_exposure()
    # Until the server counts them, Ctrl-C ends the process as SIGTERM does: there is nothing yet to
    # clean up, and an exception can get lost in the imports that follow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from nanoserve.server.service import ClientLimits, Service
        from nanoserve.server.serving import listen, run_server
    except ModuleNotFoundError as error:
        raise RuntimeFailure(
            f"the server needs {error.name}: {install_command('server')}"
        ) from None
    limits = ClientLimits(  # a size that is none is refused before anything is opened
        body_bytes=parse_size(options.max_body_size),
        client_seconds=options.client_timeout,
        request_seconds=options.request_timeout,
    )

    def tell(text: str) -> None:
        with suppress(OSError):  # a log that is full or gone is no reason to stop serving
            remark(text)

    with listen(options.host, options.port) as listener, ExitStack() as loading:
        address, port = listener.getsockname()[:2]
        if ":" in address:
            address = f"[{address}]"
        tell(f"listening on http://{address}:{port}")
        service = Service(
            **_service_settings(options, loading.enter_context(show_progress())), limits=limits
        )
        asyncio.run(
            run_server(service, listener, options.drain_timeout, on_ready=loading.close, say=tell)
        )
        if service.engine.trace_failure is not None:
            raise RuntimeFailure(f"the trace is not complete: {service.engine.trace_failure}")


def _service_settings(options: ServeOptions, progress: Progress) -> dict[str, Any]:
    """Open everything that the service works with. The engine process starts when the server
    runs."""
    config = EngineConfig(**options.settings())
    prepare_threads(options.threads)  # the engine process inherits it
    resolved = options.find_model()
    tokenizer = load_tokenizer(resolved.tokenizer_directory)
    start = EngineStart(resolved, config)
    return {
        "model_name": options.served_model_name or resolved.name,
        "root": resolved.name,
        "tokenizer": tokenizer,
        "engine": EngineClient(start, tokenizer, max_queue=options.max_queue, on_progress=progress),
        "grammars": GrammarChecker(resolved.tokenizer_directory),
        "api_keys": options.api_key or [],
        "allowed_hosts": options.checked_hosts(),
        "seed": options.seed,
    }
