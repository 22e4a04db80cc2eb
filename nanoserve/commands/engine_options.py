"""Options about the model, the engine, its workers, sampling, and a server: most can be set by
variables as well."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import Field, fields
from functools import partial
from typing import Any

import msgspec

import nanoserve
from nanoserve.commands.options import Options, flag_of, option
from nanoserve.commands.progress import Progress, show_progress
from nanoserve.commands.terminal import remark, say
from nanoserve.engine_config import (
    AUTO,
    DRAFTERS,
    MOST_PARALLEL,
    PAIR_OPTIONS,
    EngineConfig,
    layout_settings,
)
from nanoserve.errors import UsageError, shown
from nanoserve.layout import ParallelLayout
from nanoserve.models.hub import ResolvedModel, model_suggestions, resolve_model
from nanoserve.request import SamplingParams
from nanoserve.scheduler.policies import POLICIES, make_policy
from nanoserve.server.client.address import parse_url
from nanoserve.server.client.connection import ApiClient
from nanoserve.utils.interrupts import deferred_interrupts
from nanoserve.utils.sizes import parse_size
from nanoserve.utils.threads import MOST_THREADS, load_library_of_torch, prepare_threads

MODEL_PANEL = "Model"
SAMPLING_PANEL = "Sampling (the model's own defaults unless given)"
DTYPES = ("auto", "float32", "bfloat16", "float16")


def engine_option(name: str, **settings: Any) -> Any:
    """The option of one setting of the engine, with the default and the help of EngineConfig's
    field."""
    declared = EngineConfig.__dataclass_fields__[name]
    return option(declared.default, declared.metadata["help"], **settings)


quantization_option = partial(engine_option, "quantization", metavar="INT[:N]", panel=MODEL_PANEL)
_degree = partial(engine_option, minimum=1, maximum=MOST_PARALLEL)


def _checked_policy(name: str, flag: str) -> str:
    """The name, before anything is loaded. Raises UsageError if there is no such policy; a file is
    executed."""
    if name != AUTO:
        make_policy(name, token_budget=2**31)  # the engine checks again, with its own
    return name


def locate_model(name: str | None, *, offline: bool = False) -> ResolvedModel:
    """Find a model's files by its name. A download shows its license and how far it is. No torch.
    Raises ModelError."""
    with show_progress() as progress:
        return resolve_model(name, offline=offline, progress=progress, announce=remark)


class EngineOptions(Options, panel="Engine", has_variables=True):
    model: str | None = option(
        None,
        "Name (nanoserve models lists them), directory, .gguf file, hub id (owner/name or "
        "owner/name:Q4_K_M), or dummy:NAME (random weights). Default: the bundled storyteller.",
        "-m",
        metavar="MODEL",
        panel=MODEL_PANEL,
        suggestions=model_suggestions,
    )
    quantization: str | None = quantization_option()
    dtype: str = engine_option("dtype", choices=DTYPES, panel=MODEL_PANEL)
    device: str = engine_option("device", metavar="DEVICE")
    offline: bool = engine_option(
        "offline", panel=MODEL_PANEL, variables=["NANOSERVE_OFFLINE", "HF_HUB_OFFLINE"]
    )
    max_model_len: int | None = engine_option("max_model_len")
    kv_cache_memory: str | None = engine_option("kv_cache_memory", metavar="SIZE")
    block_size: int = engine_option("block_size")
    max_num_seqs: int = engine_option("max_num_seqs")
    max_num_batched_tokens: int = engine_option("max_num_batched_tokens")
    policy: str | None = engine_option(
        "policy", metavar="NAME", suggestions=(*POLICIES, AUTO), parse=_checked_policy
    )
    no_prefix_caching: bool = option(False, "Compute every prompt from its start.")
    eager: bool = engine_option("eager")
    speculate: str | None = engine_option(
        "speculate", metavar="DRAFTER", suggestions=tuple(DRAFTERS)
    )
    batch_invariant: bool = engine_option("batch_invariant")
    denoising: str | None = engine_option("denoising")
    threads: int | None = option(
        None,
        "CPU threads, which the workers of a machine share; default: one per physical core.",
        minimum=1,
        maximum=MOST_THREADS,
    )
    seed: int | None = engine_option("seed", minimum=0, panel=SAMPLING_PANEL)

    def settings(self) -> dict[str, Any]:
        """The fields of EngineConfig, as LLM takes them. Raises UsageError for a size that is
        none."""
        known = {field.name for field in fields(EngineConfig)}
        settings = {
            field.name: getattr(self, field.name)
            for field in self._declared()
            if field.name in known
        }
        if self.seed is None:
            del settings["seed"]
        for name in ("kv_cache_memory", "host_kv_memory"):
            if settings.get(name) is not None:
                settings[name] = parse_size(settings[name])
        return settings | {"enable_prefix_caching": not self.no_prefix_caching}

    def _declared(self) -> tuple[Field[Any], ...]:
        """The options that an engine has; a command's own options are not among them."""
        if isinstance(self, WorkersOptions):
            return fields(WorkersOptions)
        return fields(EngineOptions)

    def check_is_for_cpu(self) -> None:
        """Raise UsageError for a GPU: the command compares the engine with the best that this CPU
        can do."""
        if self.device != "cpu":
            raise UsageError(
                f"--device {self.device}: this command measures CPUs; for a GPU there is nanoserve "
                "bench gpu"
            )

    def flags(self) -> list[str]:
        """All options of the engine as they are typed, so that environment variables have no effect
        on a child."""
        words = []
        for field in self._declared():
            value = getattr(self, field.name)
            if value is None or value is False:
                continue
            words.append(flag_of(field.name))
            if value is not True:
                words.append(str(value))
        return words

    def find_model(self) -> ResolvedModel:
        """Find the model's files, which may be downloaded. No torch. Raises ModelError."""
        return locate_model(self.model, offline=self.offline)

    def open_llm(
        self,
        model: ResolvedModel | None = None,
        progress: Progress | None = None,
        expected: Any = None,
    ) -> "nanoserve.LLM":
        """Load the model, by default the one that --model names; the caller closes it. Its progress
        and what was chosen are shown, unless there is a function for the progress. What is chosen
        depends on the requests that LLM is told to expect. Raises NanoserveError."""
        settings = self.settings()
        EngineConfig(**settings)  # wrong settings are refused before anything is downloaded
        if model is None:
            model = self.find_model()
        prepare_threads(self.threads)
        load_library_of_torch()
        # libraries go on half imported, and fail later in their own words
        with deferred_interrupts():
            from nanoserve.llm import LLM
        with show_progress() if progress is None else nullcontext(progress) as told:
            llm = LLM(model, progress=told, expected=expected, **settings)
        if progress is None and llm.built.choice is not None:
            remark(llm.built.choice)
        return llm


class WorkersOptions(EngineOptions, panel="Workers", has_variables=True):
    """An engine whose model may be divided over several worker processes, and whose run can be
    recorded."""

    parallel: str | None = engine_option("parallel", choices=(AUTO,))
    devices: int | None = _degree("devices")
    dp: int = _degree("data_parallel")
    pp: int = _degree("pipeline_parallel")
    tp: int = _degree("tensor_parallel")
    pp_split: str | None = engine_option("pipeline_split", metavar="N,N")
    prefill_parallel: str | None = option(
        None,
        "Layout for prompts, such as p4 or d2t2p2; with --decode-parallel, instead of --pp and "
        "--tp.",
        metavar="NAME",
    )
    decode_parallel: str | None = option(
        None,
        "Layout for decodes, such as t4: the same workers with other shares of the weights.",
        metavar="NAME",
    )
    host_kv_memory: str | None = engine_option("host_kv_memory", metavar="SIZE")
    host_threads: int | None = engine_option("host_threads", minimum=1, maximum=MOST_THREADS)
    profile: str | None = engine_option("profile", metavar="FILE")
    record: str | None = engine_option("trace", metavar="FILE")

    def settings(self) -> dict[str, Any]:
        settings = EngineOptions.settings(self) | layout_settings(self.layouts())
        return settings | {"pipeline_split": parsed_split(self.pp_split), "trace": self.record}

    def layouts(self) -> tuple[ParallelLayout, ...]:
        """The only layout of all engines together, or the layouts of prompts and of decodes. Raises
        UsageError."""
        names = parallel_pair(self.prefill_parallel, self.decode_parallel)
        if names is None:
            return (
                ParallelLayout(
                    data_parallel=self.dp, tensor_parallel=self.tp, pipeline_parallel=self.pp
                ),
            )
        if (self.dp, self.pp, self.tp, self.pp_split) != (1, 1, 1, None):
            both = " and ".join(PAIR_OPTIONS)
            raise UsageError(f"{both} replace --dp, --pp, --tp and --pp-split: leave these out")
        if names[0].data_parallel != names[1].data_parallel:
            both = " and ".join(
                f"{option} {layout.name}"
                for option, layout in zip(PAIR_OPTIONS, names, strict=True)
            )
            raise UsageError(
                f"{both} differ in D, the number of whole engines: give both layouts the same D"
            )
        return names


class ServerOptions(Options, panel="Server", has_variables=True):
    url: str | None = option(
        None,
        "An OpenAI-compatible server, such as http://127.0.0.1:8000; --model is then a name that "
        "it knows.",
        metavar="URL",
    )
    api_key: str | None = option(
        None,
        "API key of the server.",
        metavar="KEY",
        variables=["NANOSERVE_API_KEY", "OPENAI_API_KEY"],
    )

    def client(self, engine: WorkersOptions) -> ApiClient:
        """A client of the server at --url. The user is told which options of an ``engine`` of this
        process are given and have no effect there. Raises UsageError for a wrong URL or key."""
        client = ApiClient(parse_url(self.url or ""), self.api_key)
        # people set the last two once for all commands
        effective = ("model", "seed", "offline", "threads")
        idle = []
        for field in fields(WorkersOptions):
            if field.name not in effective and getattr(engine, field.name) != field.default:
                idle.append(flag_of(field.name))
        if idle:
            say(f"with --url these have no effect: {', '.join(idle)}")
        return client


class SamplingOptions(Options, panel=SAMPLING_PANEL, has_variables=True):
    """Sampling; settings that are not given come from the model's generation_config."""

    temperature: float | None = option(None, "0 always takes the likeliest token.", "-t")
    top_k: int | None = option(None, "Keep the k likeliest tokens; 0 keeps all.")
    top_p: float | None = option(None, "Keep the likeliest tokens up to this probability.")
    min_p: float | None = option(None, "Drop tokens below this share of the likeliest one.")
    max_tokens: int | None = option(None, "Longest answer; default: what fits.", "-n")
    # No environment variable: the parser would cut it at blanks, which stop texts often hold.
    stop: list[str] | None = option(
        None, "Text that ends the answer (may be repeated).", metavar="TEXT", variables=()
    )
    repetition_penalty: float | None = option(None, "Above 1 discourages seen tokens.")
    presence_penalty: float | None = option(None, "Subtracted once per seen token.")
    frequency_penalty: float | None = option(None, "Subtracted per occurrence.")

    def given(self) -> dict[str, Any]:
        """The settings that were given, checked. Raises UsageError for a value out of range."""
        settings = {}
        for field in fields(SamplingOptions):
            value = getattr(self, field.name)
            if value is not None and value != []:
                settings[field.name] = value
        SamplingParams.from_mapping(settings)
        return settings


def sampling_params(defaults: SamplingParams, *settings: Mapping[str, Any]) -> SamplingParams:
    """The defaults with each mapping laid over them in turn. Raises UsageError for wrong names and
    values."""
    merged = msgspec.structs.asdict(defaults)
    for layer in settings:
        merged |= layer
    return SamplingParams.from_mapping(merged)


def parallel_pair(
    prefill: str | None, decode: str | None
) -> tuple[ParallelLayout, ParallelLayout] | None:
    """The layouts of --prefill-parallel and --decode-parallel; None without both. Raises UsageError
    for one alone."""
    if prefill is None and decode is None:
        return None
    if prefill is None or decode is None:
        raise UsageError(f"give both {' and '.join(PAIR_OPTIONS)}, or neither")
    return ParallelLayout.parse(prefill), ParallelLayout.parse(decode)


def parsed_split(layers: str | None) -> tuple[int, ...] | None:
    """The layers of each stage, as --pp-split names them. Raises UsageError for what is no list of
    numbers."""
    if layers is None:
        return None
    words = layers.split(",")
    if not all(word.isascii() and word.isdigit() and len(word) < 6 for word in words):
        raise UsageError(f"--pp-split {shown(layers)} is no list of layers such as 14,14")
    return tuple(int(word) for word in words)


def check_utf8(text: str, what: str) -> str:
    """The text. Raises UsageError for lone surrogates, which stand for arguments that were no valid
    UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not valid UTF-8") from None
    return text
