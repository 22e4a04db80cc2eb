"""Options that several commands share, almost all also read from a ``NANOSERVE_*`` environment variable.

A command takes whole groups (``engine: EngineOptions``); ``with_options`` spells the fields of each group out as
flags for typer and gathers them again. Parsing only prepares: it yields a callable that does the work, so that no
frame of the parser, with its own ideas of errors and exits, lies below the running command.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from nanoserve.engine_config import DEFAULT_POLICY, POLICY_OF_TWO_LAYOUTS, EngineConfig
from nanoserve.errors import UsageError
from nanoserve.processes.interrupts import deferred_interrupts
from nanoserve.processes.threads import MOST_THREADS, prepare_threads
from nanoserve.scheduler.policies import POLICIES

if TYPE_CHECKING:
    from nanoserve.client.connection import ApiClient
    from nanoserve.llm import LLM
    from nanoserve.request import SamplingParams

Progress = Callable[[str, int, int], None]
Action = Callable[[], int]

MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling (the model's own defaults unless given)"
ENGINE_PANEL = "Engine"
SERVER_PANEL = "Server"
DTYPES = ("auto", "float32", "bfloat16", "float16")
_DEFAULTS = EngineConfig()


def option(*names: str, panel: str, help: str, metavar: str = "N", **settings: Any) -> Any:
    """A typer option whose environment variable is named after its long flag."""
    long_name = next(name for name in names if name.startswith("--"))
    variable = "NANOSERVE_" + long_name.removeprefix("--").replace("-", "_").upper()
    settings = {"envvar": variable, "rich_help_panel": panel, "metavar": metavar} | settings
    return typer.Option(*names, help=help, **settings)


def switch(*names: str, panel: str, help: str, **settings: Any) -> Any:
    """An option without a value: giving it says yes."""
    return option(*names, panel=panel, help=help, metavar="", **settings)


def _one_of(choices: tuple[str, ...]) -> Callable[[str | None], str | None]:
    def check(value: str | None) -> str | None:
        if value is not None and value not in choices:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(choices)}")
        return value

    return check


def at_most(most: int) -> Callable[[int | None], int | None]:
    """An upper bound that help does not show: beside it, the names of variables would not fit into 80 columns."""

    def check(value: int | None) -> int | None:
        if value is not None and value > most:
            raise typer.BadParameter(f"{value} is more than {most}")
        return value

    return check


def _choice(*names: str, choices: tuple[str, ...], panel: str, help: str) -> Any:
    return option(
        *names,
        panel=panel,
        help=f"{help} One of {', '.join(choices)}.",
        callback=_one_of(choices),
        metavar="NAME",
        autocompletion=lambda incomplete: [choice for choice in choices if choice.startswith(incomplete)],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Which model to load, and how the engine runs it."""

    model: Annotated[
        str | None,
        option(
            "--model",
            "-m",
            panel=MODEL_PANEL,
            help="Directory, Hugging Face hub id, or dummy:NAME (random weights). Default: the bundled storyteller.",
            metavar="MODEL",
        ),
    ] = None
    dtype: Annotated[
        str, _choice("--dtype", choices=DTYPES, panel=MODEL_PANEL, help="Number format of weights and KV cache.")
    ] = _DEFAULTS.dtype
    device: Annotated[
        str, option("--device", panel=ENGINE_PANEL, help="What computes: cpu, cuda or cuda:N.", metavar="DEVICE")
    ] = _DEFAULTS.device
    offline: Annotated[
        bool,
        switch(
            "--offline",
            panel=MODEL_PANEL,
            help="Never use the network.",
            envvar=["NANOSERVE_OFFLINE", "HF_HUB_OFFLINE"],
        ),
    ] = False
    max_model_len: Annotated[
        int | None, option("--max-model-len", panel=ENGINE_PANEL, help="Longest context in tokens; default: model's.")
    ] = None
    kv_cache_memory: Annotated[
        str | None,
        option(
            "--kv-cache-memory",
            panel=ENGINE_PANEL,
            help="Memory of the KV cache, as 2GiB; default: from what is free.",
            metavar="SIZE",
        ),
    ] = None
    block_size: Annotated[int, option("--block-size", panel=ENGINE_PANEL, help="Tokens in a KV block.")] = (
        _DEFAULTS.block_size
    )
    max_num_seqs: Annotated[int, option("--max-num-seqs", panel=ENGINE_PANEL, help="Most sequences in one step.")] = (
        _DEFAULTS.max_num_seqs
    )
    max_num_batched_tokens: Annotated[
        int, option("--max-num-batched-tokens", panel=ENGINE_PANEL, help="Token budget of one step.")
    ] = _DEFAULTS.max_num_batched_tokens
    policy: Annotated[
        str | None,
        _choice(
            "--policy",
            choices=tuple(POLICIES),
            panel=ENGINE_PANEL,
            help=f"What runs next; default: {DEFAULT_POLICY}, with two layouts {POLICY_OF_TWO_LAYOUTS}.",
        ),
    ] = None
    no_prefix_caching: Annotated[
        bool,
        switch("--no-prefix-caching", panel=ENGINE_PANEL, help="Compute every prompt from its start."),
    ] = False
    eager: Annotated[
        bool, switch("--eager", panel=ENGINE_PANEL, help="Compile and capture nothing; slower, same answers.")
    ] = False
    threads: Annotated[
        int | None,
        option(
            "--threads",
            panel=ENGINE_PANEL,
            help="CPU threads, which the workers of a machine share; default: one per physical core.",
            min=1,
            callback=at_most(MOST_THREADS),
        ),
    ] = None
    seed: Annotated[
        int | None,
        option("--seed", panel=SAMPLING_PANEL, help="Makes the run repeatable; default: a new one each time.", min=0),
    ] = None

    def settings(self) -> dict[str, Any]:
        """What LLM takes, without the model and the threads.

        Raises:
            UsageError: for a size that is none.
        """
        settings: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "max_model_len": self.max_model_len,
            "kv_cache_memory": parsed_bytes(self.kv_cache_memory),
            "block_size": self.block_size,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "policy": self.policy,
            "enable_prefix_caching": not self.no_prefix_caching,
            "eager": self.eager,
            "offline": self.offline,
        }
        if self.seed is not None:
            settings["seed"] = self.seed
        return settings

    def check_is_for_cpu(self) -> None:
        """For commands that hold the engine against what this machine's CPU can do at best.

        Raises:
            UsageError: for another device.
        """
        if self.device != _DEFAULTS.device:
            raise UsageError(
                f"--device {self.device}: this command measures CPUs; for a GPU there is nanoserve bench gpu"
            )

    def flags(self) -> list[str]:
        """These options as they are typed, all of them, so that no environment variable has a say any more."""
        words = []
        for field in fields(self):
            flag, value = _flag(field.name), getattr(self, field.name)
            if value is True:
                words.append(flag)
            elif value is not None and value is not False:
                words += [flag, str(value)]
        return words

    def without_effect_on_servers(self) -> list[str]:
        """The flags that were given and that say nothing to a server which runs already.

        Not named are those that people set once for all commands: --offline and --threads.
        """
        told = ("model", "seed", "offline", "threads")
        given = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return [_flag(name) for name in given if name not in told]

    def open_llm(self, progress: Progress | None) -> "LLM":
        """Load the model; the caller closes it.

        Raises:
            NanoserveError: for settings that make no sense and models that cannot be used.
        """
        settings = self.settings()
        prepare_threads(self.threads)
        with deferred_interrupts():  # libraries go on half imported, and fail later in their own words
            from nanoserve.llm import LLM

        return LLM(self.model, progress=progress, **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server to ask, instead of an engine in this process."""

    url: Annotated[
        str | None,
        option(
            "--url",
            panel=SERVER_PANEL,
            metavar="URL",
            help="An OpenAI-compatible server, as http://127.0.0.1:8000; --model is then a name that it knows.",
        ),
    ] = None
    api_key: Annotated[
        str | None,
        option(
            "--api-key",
            panel=SERVER_PANEL,
            metavar="KEY",
            help="What the server wants to be shown.",
            envvar=["NANOSERVE_API_KEY", "OPENAI_API_KEY"],
        ),
    ] = None

    def client(self) -> "ApiClient":
        """For the server at --url.

        Raises:
            UsageError: for what is no URL, and for a key that no header can hold.
        """
        from nanoserve.client.address import parse_url
        from nanoserve.client.connection import ApiClient

        return ApiClient(parse_url(self.url or ""), self.api_key)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """How tokens are drawn; what is not given comes from the model's generation_config."""

    temperature: Annotated[
        float | None, option("--temperature", "-t", panel=SAMPLING_PANEL, help="0 always takes the likeliest token.")
    ] = None
    top_k: Annotated[
        int | None, option("--top-k", panel=SAMPLING_PANEL, help="Keep the k likeliest tokens; 0 keeps all.")
    ] = None
    top_p: Annotated[
        float | None, option("--top-p", panel=SAMPLING_PANEL, help="Keep the likeliest tokens up to this probability.")
    ] = None
    min_p: Annotated[
        float | None,
        option("--min-p", panel=SAMPLING_PANEL, help="Drop tokens below this share of the likeliest one."),
    ] = None
    max_tokens: Annotated[
        int | None, option("--max-tokens", "-n", panel=SAMPLING_PANEL, help="Longest answer; default: what fits.")
    ] = None
    # No environment variable: the parser would cut it at blanks, which stop texts often hold.
    stop: Annotated[
        list[str] | None,
        option(
            "--stop",
            panel=SAMPLING_PANEL,
            envvar=None,
            metavar="TEXT",
            help="Text that ends the answer (may be repeated).",
        ),
    ] = None
    repetition_penalty: Annotated[
        float | None, option("--repetition-penalty", panel=SAMPLING_PANEL, help="Above 1 discourages seen tokens.")
    ] = None
    presence_penalty: Annotated[
        float | None, option("--presence-penalty", panel=SAMPLING_PANEL, help="Subtracted once per seen token.")
    ] = None
    frequency_penalty: Annotated[
        float | None, option("--frequency-penalty", panel=SAMPLING_PANEL, help="Subtracted per occurrence.")
    ] = None

    def given(self) -> dict[str, Any]:
        """The settings that were given, checked.

        Raises:
            UsageError: for a value out of range.
        """
        from nanoserve.request import SamplingParams

        values = {field.name: getattr(self, field.name) for field in fields(self)}
        settings = {name: value for name, value in values.items() if value is not None and value != []}
        SamplingParams.from_mapping(settings)
        return settings


def sampling_params(defaults: "SamplingParams", *settings: dict[str, Any]) -> "SamplingParams":
    """The defaults with each mapping of ``settings`` laid over them in turn.

    Raises:
        UsageError: for unknown names and values out of range.
    """
    import msgspec

    from nanoserve.request import SamplingParams

    merged = msgspec.structs.asdict(defaults)
    for layer in settings:
        merged |= layer
    return SamplingParams.from_mapping(merged)


def with_options(command: Callable[..., int]) -> Callable[..., Action]:
    """Turn a command that takes option groups into what typer understands: one flag per field, and an Action back."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type] = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if isinstance(parameter.annotation, type) and is_dataclass(parameter.annotation)
    }
    flags: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        flags += _spelled_out(groups[name]) if name in groups else [parameter]

    def prepare(**values: Any) -> Action:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return partial(command, **values)

    keyword_only = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags]
    # inspect honours the attribute, though the type of functions does not name it.
    prepare.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    prepare.__annotations__ = {flag.name: flag.annotation for flag in keyword_only}
    prepare.__name__, prepare.__doc__ = command.__name__, command.__doc__
    return prepare


def _spelled_out(group: type) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    return [
        inspect.Parameter(field.name, kind, default=field.default, annotation=hints[field.name])
        for field in fields(group)
    ]


def _flag(field: str) -> str:
    """The long flag of a field."""
    return "--" + field.replace("_", "-")


def parsed_bytes(size: str | None) -> int | None:
    """Bytes of a size that was given.

    Raises:
        UsageError: for what is no size.
    """
    if size is None:
        return None
    from nanoserve.processes.sizes import parse_size

    return parse_size(size)


def check_utf8(text: str, what: str) -> str:
    """Arguments that were no valid UTF-8 arrive with lone surrogates; no tokenizer takes those.

    Raises:
        UsageError: if ``text`` holds one.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None
    return text
