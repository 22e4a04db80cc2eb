"""The lecture's sections 2.1 and 2.2, counted: what a sequence keeps of its tokens, by the kinds of
layers of its model."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from nanoserve.commands.tables import columns
from nanoserve.config.published_shapes import load_shape
from nanoserve.costs.counts import ModelCounts
from nanoserve.costs.hardware import GIBI, MEBI
from nanoserve.lab.charts import Chart, panel
from nanoserve.lab.papers.claims import Claim, claims
from nanoserve.lab.papers.framework import Finding, Run, Scale

_SIXTEEN_BITS = 2
LENGTHS = tuple(1024 * 2**power for power in range(8))
SHOWN_LENGTHS, LONG = (1024, 8192, 32768, 131072), 32768
FULL_MODELS = ("llama-2-13b", "llama-2-70b", "llama-3.1-8b")
WINDOW_MODELS = ("mistral-7b", "gemma-3-27b", "gpt-oss-20b", "olmo-3-7b", "command-r7b")
_OLDER_MISTRAL = (4096,) * 32  # Mistral 7B before version 0.3 had this window on all layers


class Latent(NamedTuple):
    """Multi-head latent attention (arXiv 2405.04434): a layer keeps a latent and a rotated key for
    all heads."""

    layers: int
    heads: int
    rank: int = 512
    rotated: int = 64
    key_size: int = 192
    value_size: int = 128

    @property
    def width(self) -> int:
        """Numbers that a layer keeps of a token."""
        return self.rank + self.rotated


LATENT_MODELS = {"deepseek-v2-lite": Latent(27, 16), "deepseek-v3": Latent(61, 128)}


class Kept(NamedTuple):
    """Bytes that a sequence keeps of its tokens' keys and values."""

    how: str
    sizes: list[float]
    """Bytes at each of some lengths."""
    over: float
    """By how much that is less than what it would be without `how`, at LONG."""


def _kept(model: str, lengths: Sequence[int] = LENGTHS) -> Kept:
    shape = load_shape(model)
    layer = ModelCounts(shape).kv_bytes_per_token(0) / shape.num_layers
    windows = shape.layers.sliding_windows or (0,) * shape.num_layers
    if model == "mistral-7b":
        windows = _OLDER_MISTRAL
    sizes = [layer * sum(min(length, window or length) for window in windows) for length in lengths]
    if not any(windows):
        return Kept(
            f"query heads that share a key head: {shape.group_size}", sizes, shape.group_size
        )
    how = f"windows of {max(windows)} in {sum(map(bool, windows))} of {len(windows)} layers"
    return Kept(how, sizes, layer * len(windows) * LONG / sizes[lengths.index(LONG)])


def _kept_of_latents(latent: Latent) -> Kept:
    token = latent.layers * latent.width * _SIXTEEN_BITS
    over = latent.heads * (latent.key_size + latent.value_size) / latent.width
    return Kept(
        f"a latent of {latent.rank} + {latent.rotated}",
        [token * length for length in LENGTHS],
        over,
    )


KV_COLUMNS = columns(
    ("", "model", ("what makes it smaller", "how")),
    (",.0f", ("bytes per token at 1k", "token")),
    (",.3f", *((f"GiB at {length // 1024}k", f"{length // 1024}k") for length in SHOWN_LENGTHS)),
    (".1f", (f"smaller by, at {LONG // 1024}k", "over")),
)


def kv(scale: Scale, run: Run) -> Finding:
    """Section 2.1: what a sequence keeps of its tokens, in 16 bits, by what makes it smaller."""
    found = {model: _kept(model) for model in FULL_MODELS + WINDOW_MODELS}
    found |= {model: _kept_of_latents(latent) for model, latent in LATENT_MODELS.items()}
    plain = FULL_MODELS[0]
    pairs = [size / 2 for size in found[plain].sizes]
    found[f"{plain}, layers in pairs"] = Kept("one cache for two layers", pairs, 2.0)
    latent, local = LATENT_MODELS["deepseek-v3"], 1024 / LONG
    ours = {
        "2.1.1": found["llama-3.1-8b"].over,
        "2.1.2 keys": latent.heads * 128 / latent.width,
        "2.1.2 both": 2 * latent.heads * 128 / latent.width,
        "2.1.2 own": found["deepseek-v3"].over,
        "2.1.3": found[plain].sizes[0] / pairs[0],
        "2.1.4 pattern": 100 * (1 + 6 * local) / 7,
        "2.1.4 gemma": found["gemma-3-27b"].over,
        "2.1.4 gpt-oss": found["gpt-oss-20b"].over,
        "2.1.4 mistral": found["mistral-7b"].over,
    }
    gib = {model: [size / GIBI for size in kept.sizes] for model, kept in found.items()}
    rows = [
        {"model": model, "how": kept.how, "token": kept.sizes[0] / LENGTHS[0], "over": kept.over}
        | {f"{length // 1024}k": gib[model][LENGTHS.index(length)] for length in SHOWN_LENGTHS}
        for model, kept in found.items()
    ]
    thousands = [length / 1024 for length in LENGTHS]
    lines = panel(
        "one sequence, 16 bits", "tokens / 1,024", "GiB", thousands, gib, log_x=True, log_y=True
    )
    return Finding(claims("lecture", ours), Chart("Keys and values of a sequence", [lines]), rows)


STATE_LENGTHS = (*LENGTHS, 262144)
SHOWN_STATE_LENGTHS, SHORT = (1024, 8192, 32768, 262144), 512
_FLOAT32 = 4


class Recurrent(NamedTuple):
    """A model most of whose layers have a state: a float32 matrix, and the last inputs of a
    convolution in 16 bits. The others attend."""

    layers: int
    """The number of layers with a state."""
    matrix: int
    """Numbers of a layer's matrix."""
    convolution: int
    """Numbers of the last inputs of its convolution."""
    attending: int = 0
    """The number of layers that attend."""
    kv_numbers: int = 0
    """Numbers that one of these keeps of a token."""

    @property
    def state_bytes(self) -> int:
        return self.layers * (self.matrix * _FLOAT32 + self.convolution * _SIXTEEN_BITS)

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return self.attending * self.kv_numbers * _SIXTEEN_BITS

    def bytes_at(self, tokens: int) -> int:
        """Bytes of a sequence of that many tokens."""
        return self.state_bytes + tokens * self.token_bytes

    @property
    def shortest(self) -> float:
        """Tokens from which on states take less than keys and values of the same layers."""
        return self.state_bytes / (self.layers * self.kv_numbers * _SIXTEEN_BITS)

    def facts(self) -> dict[str, Any]:
        """The model's row of the table, but for sizes of sequences."""
        worth = None
        if self.token_bytes:
            worth = self.state_bytes / self.token_bytes
        return {
            "how": f"a state in {self.layers} of {self.layers + self.attending} layers",
            "state": self.state_bytes / MEBI,
            "token": self.token_bytes,
            "worth": worth,
        }


def _recurrent(model: str) -> Recurrent:
    """The sizes of a published model."""
    shape = load_shape(model)
    recurrent = shape.recurrent
    assert recurrent is not None, "most of its layers have a state"
    layers = len(recurrent.recurrent_layers)
    return Recurrent(
        layers=layers,
        matrix=prod(recurrent.mixer.matrix_shape or ()),
        convolution=(recurrent.kernel_size - 1) * recurrent.mixer.channels,
        attending=shape.num_layers - layers,
        kv_numbers=shape.kv_numbers,
    )


STATE_MODELS = {
    "qwen3-next-80b-a3b": _recurrent("qwen3-next-80b-a3b"),
    "jamba-v0.1": _recurrent("jamba-v0.1"),
    # config.json of state-spaces/mamba2-2.7b, and the defaults of Mamba2 in mamba_ssm: 64 layers,
    # 80 heads of 64 x 128; a convolution over 4 positions of 5120 channels and two vectors of 128.
    "mamba2-2.7b": Recurrent(64, 80 * 64 * 128, 3 * (5120 + 2 * 128)),
}
STATELESS_MODELS = ("mixtral-8x7b", "qwen3-30b-a3b", "gemma-3-27b")

STATE_COLUMNS = columns(
    ("", "model", ("what it keeps", "how")),
    (",.1f", ("MiB of state", "state")),
    (",.0f", ("bytes of a further token", "token")),
    (
        ",.3f",
        *((f"GiB at {length // 1024}k", f"{length // 1024}k") for length in SHOWN_STATE_LENGTHS),
    ),
    (",.0f", ("tokens that take as much as the state", "worth")),
)


def state(scale: Scale, run: Run) -> Finding:
    """Section 2.2: what a sequence keeps in layers with a state, beside full attention and
    windows."""
    sizes: dict[str, Sequence[float]] = {
        model: [recurrent.bytes_at(length) for length in STATE_LENGTHS]
        for model, recurrent in STATE_MODELS.items()
    }
    facts = {model: recurrent.facts() for model, recurrent in STATE_MODELS.items()}
    for model in STATELESS_MODELS:
        kept, shape = _kept(model, STATE_LENGTHS), load_shape(model)
        sizes[model] = kept.sizes
        how = f"keys and values in {shape.num_layers} layers"
        if shape.layers.sliding_windows:
            how = kept.how
        further = kept.sizes[-1] - kept.sizes[-2]
        token = further / (STATE_LENGTHS[-1] - STATE_LENGTHS[-2])
        facts[model] = {"how": how, "state": None, "token": token, "worth": None}
    gib = {model: [size / GIBI for size in found] for model, found in sizes.items()}
    shown = {f"{length // 1024}k": STATE_LENGTHS.index(length) for length in SHOWN_STATE_LENGTHS}
    rows = [
        {"model": model, **facts[model], **{name: gib[model][at] for name, at in shown.items()}}
        for model in sizes
    ]
    lines = panel(
        "one sequence: keys and values in 16 bits, states in float32",
        "tokens / 1,024",
        "GiB",
        [length / 1024 for length in STATE_LENGTHS],
        gib,
        log_x=True,
        log_y=True,
    )
    return Finding(_state_claims(sizes), Chart("Bytes of a sequence", [lines]), rows)


def _state_claims(sizes: Mapping[str, Sequence[float]]) -> list[Claim]:
    """The claims of section 2.2, from the bytes at each of STATE_LENGTHS."""
    qwen, jamba = STATE_MODELS["qwen3-next-80b-a3b"], STATE_MODELS["jamba-v0.1"]
    mamba, longest = sizes["mamba2-2.7b"], STATE_LENGTHS[-1]
    all_attend = (qwen.layers + qwen.attending) * qwen.kv_numbers * _SIXTEEN_BITS
    ours = {
        "2.2.1 mamba": mamba[-1] / mamba[0],
        "2.2.2 jamba": sizes["mixtral-8x7b"][-1] / sizes["jamba-v0.1"][-1],
        "2.2.2 jamba state": 100 * jamba.state_bytes / jamba.bytes_at(longest),
        "2.2.2 qwen": qwen.state_bytes / qwen.token_bytes,
        "2.2.2 qwen from": qwen.shortest,
        "2.2.2 qwen short": qwen.bytes_at(SHORT) / (SHORT * all_attend),
    }
    words = {
        "keys": f"{longest * jamba.token_bytes / GIBI:.1f} GiB",
        "states": f"{jamba.state_bytes / MEBI:.1f} MiB",
        "full": f"{sizes['mixtral-8x7b'][-1] / GIBI:.0f} GiB",
        "qwen": f"{qwen.state_bytes / MEBI:.1f} MiB",
        "short": SHORT,
    }
    return claims("lecture", ours, **words)
