"""``nanoserve serve``: an OpenAI-compatible server."""

import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import EngineOptions, Progress, option, switch
from nanoserve.commands.progress import show_progress
from nanoserve.commands.terminal import remark
from nanoserve.commands.torchrun import on_all_machines
from nanoserve.commands.workers_options import ServingOptions
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.processes.threads import prepare_threads

if TYPE_CHECKING:
    from socket import socket

    from nanoserve.server.hosts import AllowedHosts
    from nanoserve.server.service import ClientLimits, Service

HTTP_PANEL = "HTTP"
LIMITS_PANEL = "Limits"


def _seconds(name: str, help: str, minimum: float) -> Any:
    return option(name, panel=LIMITS_PANEL, metavar="SECONDS", help=help, min=minimum)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Where the server listens, and to whom."""

    host: Annotated[str, option("--host", panel=HTTP_PANEL, metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1"
    port: Annotated[int, option("--port", panel=HTTP_PANEL, help="0 takes a free one.", min=0, max=65535)] = 8000
    api_key: Annotated[
        list[str] | None,
        option("--api-key", panel=HTTP_PANEL, metavar="KEY", help="Clients must show it (may be repeated)."),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        option(
            "--allowed-hosts",
            panel=HTTP_PANEL,
            metavar="NAME",
            help="Names in the Host header that are let in, beside localhost (may be repeated).",
        ),
    ] = None
    insecure: Annotated[
        bool, switch("--insecure", panel=HTTP_PANEL, help="Let everyone in who reaches --host, without a key.")
    ] = False
    served_model_name: Annotated[
        str | None,
        option("--served-model-name", panel=HTTP_PANEL, metavar="NAME", help="What clients call the model."),
    ] = None

    def check_exposure(self) -> None:
        """That nobody unknown can reach the server unless that is wanted.

        Raises:
            UsageError: for an empty key, or an address of the network without a key.
        """
        from nanoserve.server.hosts import is_loopback

        if not all(self.api_key or []):
            raise UsageError("--api-key is empty; leave it away to serve without a key")
        if not self.api_key and not self.insecure and not is_loopback(self.host):
            raise UsageError(
                f"--host {self.host} can be reached from outside: give an --api-key, or --insecure to let everyone in"
            )

    def checked_hosts(self) -> "AllowedHosts | None":
        """Names that clients may call the server; None allows every name, as no page of the web knows the key."""
        from nanoserve.server.hosts import AllowedHosts, is_loopback

        is_open_to_pages = not self.api_key and is_loopback(self.host)
        return AllowedHosts(self.allowed_hosts or []) if self.allowed_hosts or is_open_to_pages else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """How much, and how long."""

    max_queue: Annotated[
        int, option("--max-queue", panel=LIMITS_PANEL, help="Requests that may wait; more are answered 429.", min=0)
    ] = 128
    max_body_size: Annotated[
        str, option("--max-body-size", panel=LIMITS_PANEL, metavar="SIZE", help="Of a request; longer ones get 413.")
    ] = "1MiB"
    client_timeout: Annotated[
        float, _seconds("--client-timeout", "For a client to send its request, and to take what it is sent.", 0.1)
    ] = 30.0
    request_timeout: Annotated[float, _seconds("--request-timeout", "For a whole answer.", 0.1)] = 1800.0
    drain_timeout: Annotated[
        float, _seconds("--drain-timeout", "After SIGTERM, for the running requests to end.", 0)
    ] = 30.0

    def limits(self) -> "ClientLimits":
        """Those that each request meets."""
        from nanoserve.processes.sizes import parse_size
        from nanoserve.server.service import ClientLimits

        return ClientLimits(
            body_bytes=parse_size(self.max_body_size),
            client_seconds=self.client_timeout,
            request_seconds=self.request_timeout,
        )


@on_all_machines
def serve(
    *,
    http: HttpOptions,
    limits: LimitOptions,
    engine: ServingOptions,
) -> int:
    """Serve a model over HTTP, as OpenAI does.

    [bold]Examples[/bold]

      nanoserve serve                                   the bundled storyteller
      nanoserve serve -m Qwen/Qwen3-0.6B --port 8080
      curl http://127.0.0.1:8000/v1/models
      NANOSERVE_API_KEY=secret nanoserve serve --host 0.0.0.0

    A key in the environment is not seen in the list of processes. SIGTERM and
    Ctrl-C let the running requests end; a second one does not wait.
    """
    http.check_exposure()
    # Until the server counts them, Ctrl-C ends the process as SIGTERM does: there is nothing yet to clean up, and an
    # exception can get lost in the imports that follow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        import asyncio

        from nanoserve.server.serving import Callbacks, listen, run_server
    except ModuleNotFoundError as error:
        from nanoserve.processes.installation import install_command

        raise RuntimeFailure(f"the server needs {error.name}: {install_command('server')}") from None
    of_each_request = limits.limits()  # a size that is none is refused before anything is opened
    with listen(http.host, http.port) as listener, ExitStack() as loading:
        _say(f"listening on {_url(listener)}")
        progress = loading.enter_context(show_progress())
        service = _open_service(engine, http, of_each_request, limits.max_queue, progress)
        asyncio.run(run_server(service, listener, limits.drain_timeout, Callbacks(loading.close, _say)))
    return EXIT_OK


def _say(text: str) -> None:
    """A line on stderr; a log that is full or gone is no reason to stop serving."""
    with suppress(OSError):
        remark(text)


def _open_service(
    engine: EngineOptions, http: HttpOptions, limits: "ClientLimits", max_queue: int, progress: Progress | None
) -> "Service":
    """Everything but the engine process, which starts when the server runs."""
    from nanoserve.engine_config import EngineConfig
    from nanoserve.grammar.checker import GrammarChecker
    from nanoserve.models.hub import resolve_model
    from nanoserve.processes.files import unreadable_as_model_error
    from nanoserve.server.engine_client import EngineClient
    from nanoserve.server.messages import EngineStart
    from nanoserve.server.service import Service
    from nanoserve.text.tokenizer import load_tokenizer

    config = EngineConfig(**engine.settings())
    prepare_threads(engine.threads)  # the engine process inherits it
    with unreadable_as_model_error():
        resolved = resolve_model(engine.model, offline=engine.offline, progress=progress)
        tokenizer = load_tokenizer(resolved.tokenizer_directory)
    directory = None if resolved.directory is None else str(resolved.directory)
    start = EngineStart(resolved.name, directory, str(resolved.tokenizer_directory), config)
    return Service(
        model_name=http.served_model_name or resolved.name,
        root=resolved.name,
        tokenizer=tokenizer,
        engine=EngineClient(start, tokenizer, max_queue=max_queue, on_progress=progress),
        grammars=GrammarChecker(resolved.tokenizer_directory),
        limits=limits,
        api_keys=http.api_key or [],
        allowed_hosts=http.checked_hosts(),
        seed=engine.seed,
    )


def _url(listener: "socket") -> str:
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
