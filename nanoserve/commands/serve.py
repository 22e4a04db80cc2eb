"""``nanoserve serve``: an OpenAI-compatible server."""

import asyncio
import ipaddress
import signal
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated

from nanoserve.commands.failures import EXIT_OK
from nanoserve.commands.options import EngineOptions, Progress, option, switch
from nanoserve.commands.terminal import load_progress, remark
from nanoserve.errors import RuntimeFailure, UsageError
from nanoserve.threads import prepare_threads

if TYPE_CHECKING:
    from socket import socket

    from nanoserve.server.service import Limits, Service

HTTP_PANEL = "HTTP"
LIMITS_PANEL = "Limits"


def serve(
    *,
    host: Annotated[str, option("--host", panel=HTTP_PANEL, metavar="ADDRESS", help="Where to listen.")] = "127.0.0.1",
    port: Annotated[int, option("--port", panel=HTTP_PANEL, help="0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None,
        option("--api-key", panel=HTTP_PANEL, metavar="KEY", help="Clients must show it (may be repeated)."),
    ] = None,
    insecure: Annotated[
        bool, switch("--insecure", panel=HTTP_PANEL, help="Let everyone in who reaches --host, without a key.")
    ] = False,
    served_model_name: Annotated[
        str | None,
        option("--served-model-name", panel=HTTP_PANEL, metavar="NAME", help="What clients call the model."),
    ] = None,
    max_queue: Annotated[
        int, option("--max-queue", panel=LIMITS_PANEL, help="Requests that may wait; more are answered 429.", min=0)
    ] = 128,
    max_body_size: Annotated[
        str, option("--max-body-size", panel=LIMITS_PANEL, metavar="SIZE", help="Of a request; longer ones get 413.")
    ] = "1MiB",
    client_timeout: Annotated[
        float,
        option(
            "--client-timeout",
            panel=LIMITS_PANEL,
            metavar="SECONDS",
            help="For a client to send its request, and to take what it is sent.",
            min=0.1,
        ),
    ] = 30.0,
    request_timeout: Annotated[
        float,
        option("--request-timeout", panel=LIMITS_PANEL, metavar="SECONDS", help="For a whole answer.", min=0.1),
    ] = 1800.0,
    drain_timeout: Annotated[
        float,
        option(
            "--drain-timeout",
            panel=LIMITS_PANEL,
            metavar="SECONDS",
            help="After SIGTERM, for the running requests to end.",
            min=0,
        ),
    ] = 30.0,
    engine: EngineOptions,
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
    _check_exposure(host, api_key or [], insecure=insecure)
    # Until the server counts them, Ctrl-C ends the process as SIGTERM does: there is nothing yet to clean up, and an
    # exception can get lost in the imports that follow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from nanoserve.server.service import Limits
        from nanoserve.server.serving import Callbacks, listen, run_server
    except ModuleNotFoundError as error:
        raise RuntimeFailure(f"the server needs {error.name}: pip install 'nanoserve[server]'") from None
    from nanoserve.sizes import parse_size

    limits = Limits(
        body_bytes=parse_size(max_body_size), client_seconds=client_timeout, request_seconds=request_timeout
    )
    with listen(host, port) as listener, ExitStack() as loading:
        _say(f"listening on {_url(listener)}")
        progress = loading.enter_context(load_progress())
        service = _open_service(engine, limits, api_key or [], served_model_name, max_queue, progress)
        asyncio.run(run_server(service, listener, drain_timeout, Callbacks(loading.close, _say)))
    return EXIT_OK


def _say(text: str) -> None:
    """A line on stderr; a log that is full or gone is no reason to stop serving."""
    with suppress(OSError):
        remark(text)


def _open_service(
    engine: EngineOptions,
    limits: "Limits",
    api_keys: list[str],
    served_model_name: str | None,
    max_queue: int,
    progress: Progress | None,
) -> "Service":
    """Everything but the engine process, which starts when the server runs."""
    from nanoserve.config import EngineConfig
    from nanoserve.files import unreadable_as_model_error
    from nanoserve.models.hub import resolve_model
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
        model_name=served_model_name or resolved.name,
        tokenizer=tokenizer,
        engine=EngineClient(start, tokenizer, max_queue=max_queue, on_progress=progress),
        limits=limits,
        api_keys=api_keys,
        seed=engine.seed,
    )


def _check_exposure(host: str, keys: list[str], *, insecure: bool) -> None:
    if not all(keys):
        raise UsageError("--api-key is empty; leave it away to serve without a key")
    if not keys and not insecure and not _is_loopback(host):
        raise UsageError(
            f"--host {host} can be reached from outside: give an --api-key, or --insecure to let everyone in"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _url(listener: "socket") -> str:
    address, port = listener.getsockname()[:2]
    return f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
