"""The README promises what is there: sizes, simulated figures, pictures, and cells that are read at
a glance."""

import json
import re
import tomllib
from math import prod
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from safetensors import safe_open

from nanoserve.commands.main import main
from nanoserve.config import families
from nanoserve.config.quantization import Quantization
from nanoserve.errors import ModelError
from nanoserve.models import gguf_directory
from nanoserve.scheduler.load import Load
from nanoserve.scheduler.policies.token_throttling import TokenThrottling
from scripts.pictures import COMMAND, QUESTION, animation, schedules

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
WORDS = " ".join(README.split())
POLICY = next(
    block for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "(Policy)" in block
)
PICTURES = ROOT / "docs" / "pictures"


def test_no_cell_of_a_table_is_longer_than_fifteen_words() -> None:
    for row in re.findall(r"^\|(.*)\|$", README, flags=re.MULTILINE):
        for cell in row.split("|"):
            shown = re.sub(r"\]\([^)]*\)", "", cell)
            assert len(shown.split()) <= 15, cell


def core_files() -> list[str]:
    """The files that a reader must read, one by one. `test_code_weight` compares them with what a
    token visits."""
    (paragraph,) = re.findall(r"A reader needs to read the core: (.*?) The papers' policies", WORDS)
    return re.findall(r"\]\((nanoserve/[\w./]+)\)", paragraph)


def test_the_core_has_the_files_and_lines_that_are_said() -> None:
    lines = sum(len((ROOT / name).read_text().splitlines()) for name in core_files())
    (said,) = re.findall(r"the core: nine files with about ([\d,]+) lines", WORDS)
    assert len(core_files()) == 9
    assert int(said.replace(",", "")) == pytest.approx(lines, rel=0.05), f"{lines} lines"


def test_the_bundled_model_has_the_parameters_that_are_said() -> None:
    with safe_open(
        ROOT / "nanoserve/assets/storyteller/model.safetensors", framework="numpy"
    ) as weights:
        parameters = sum(prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    assert f"{parameters / 1e6:.0f} million parameters" in WORDS


def test_the_readme_asks_for_the_python_of_the_package() -> None:
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert re.findall(r"Python ([\d.]+) or later", README) == [asked.removeprefix(">=")]


FAMILIES = {
    "Llama 2/3.x": {"llama"},
    "Mistral": {"mistral"},
    "Mixtral": {"mixtral"},
    "Qwen2/2.5/3": {"qwen2", "qwen3"},
    "Qwen3-MoE": {"qwen3_moe"},
    "GLM-4-0414": {"glm4"},
    "Ministral": {"ministral"},
    "Ministral 3": {"ministral3"},
    "the first GLM-4": {"glm"},
    "Gemma 2/3/4 (text)": {"gemma2", "gemma3_text", "gemma4_text"},
    "gpt-oss": {"gpt_oss"},
    "Olmo 3": {"olmo3"},
    "SmolLM3": {"smollm3"},
    "Cohere 2": {"cohere2"},
    "DeepSeek-V2/V3": {"deepseek_v2", "deepseek_v3"},
    "GLM-4.7-Flash": {"glm4_moe_lite"},
    "LFM2 (also MoE)": {"lfm2", "lfm2_moe"},
    "Nemotron-H": {"nemotron_h"},
    "Mamba": {"mamba"},
    "Mamba-2": {"mamba2"},
    "Qwen3-Next": {"qwen3_next"},
    "SDAR": {"sdar"},
    "DiffusionGemma (text)": {"diffusion_gemma_text"},
    "Qwen3.5/3.6 (text; also MoE)": {"qwen3_5_text", "qwen3_5_moe_text"},
    "Jamba": {"jamba"},
    "Granite 4 (also MoE)": {"granitemoehybrid"},
    "Granite 3 (also MoE)": {"granite", "granitemoe"},
}
"""The model_type of Hugging Face for each name in the table of what is here."""


def test_the_families_are_those_that_the_loaders_read() -> None:
    by_files: dict[str, set[str]] = {}
    for names, files in re.findall(
        r"^\| ([^|]*); (safetensors[^|]*) \|", README, flags=re.MULTILINE
    ):
        for name in names.rpartition(": ")[2].split(", "):
            by_files.setdefault(files, set()).update(FAMILIES[name])
    assert set().union(*by_files.values()) == {*families.FAMILIES}
    # llama.cpp calls three families llama: with windows it is Mistral, with experts Mixtral. Three
    # families are deepseek2 there, which differ in their routers.
    assert by_files["safetensors and GGUF"] == {
        *gguf_directory._FAMILIES.values(),
        "mistral",
        "mixtral",
        "deepseek_v3",
        "glm4_moe_lite",
    }


def test_the_formats_of_quantized_weights_are_read() -> None:
    (said,) = re.findall(
        r"^\| ([^|]*) weights; `nanoserve quantize` \|", README, flags=re.MULTILINE
    )
    for method in re.split(", | and ", said.lower()):
        assert _refusal(method) is None or "quantization method" not in str(_refusal(method)), (
            method
        )
    assert "quantization method 'bitsandbytes' is not read" in str(_refusal("bitsandbytes"))


def _refusal(method: str) -> ModelError | None:
    """Why a checkpoint with no more than the name of its format does not load, if it does not."""
    try:
        Quantization.from_hf({"quant_method": method, "tensor_types": {}}, "config.json")
    except ModelError as error:
        return error
    return None


def test_the_claims_about_gpus_are_those_of_the_results() -> None:
    first, last = (
        json.loads((ROOT / f"docs/results/nvidia-h200-2026-11-26{part}.json").read_text())
        for part in ("-first", "")
    )
    names = {
        json.loads(path.read_text())["device"]["name"]
        for path in (ROOT / "docs/results").glob("*.json")
    }
    assert names == {"NVIDIA H200"}
    assert "| one NVIDIA H200 |" in README
    checks = first["parts"]["correctness"]["rows"]
    assert all(row["ok"] for row in checks)
    assert f"all {len(checks)} checks were right" in WORDS
    shares = {row["case"]: row.get("of_floor") for row in last["parts"]["engine"]["rows"]}
    large, small = (shares[f"{model}: decode, batch 1"] for model in ("llama-3.1-8b", "qwen3-0.6b"))
    assert f"**{large:.0%} of the floor**".replace("%", " %") in README
    assert f"{small:.0%} in Qwen3-0.6B".replace("%", " %") in README
    assert f"a step of a small model takes {1 / small:.0f} times its floor" in WORDS


def test_the_ratio_to_llama_cpp_is_that_of_the_benchmarks() -> None:
    (ratio,) = re.findall(r"\*\*([\d.]+) times llama.cpp's decoding speed\*\*", README)
    notebook = (ROOT / "docs/results/xeon-avx512-2026-11-21.md").read_text()
    rows = re.findall(r"^\| 1 x 128\+32 \|(.*)\|$", notebook, flags=re.MULTILINE)
    assert rows[0].split("|")[4].split()[0] == ratio


@given(
    st.builds(
        Load,
        previous=st.none(),
        waiting_tokens=st.integers(0, 30_000),
        first_waiting_tokens=st.integers(0, 4_000),
        running_decodes=st.integers(0, 300),
        ready_decodes=st.integers(0, 300),
        ready_prefills=st.integers(0, 2),
        context_tokens=st.just(0),
        free_blocks=st.integers(0, 1_000),
        total_blocks=st.just(1_000),
        block_size=st.just(16),
        free_slots=st.just(256),
        steps_in_flight=st.integers(0, 1),
        pipeline_depth=st.integers(1, 4),
    )
)
def test_the_policy_of_twelve_lines_decides_as_token_throttling(load: Load) -> None:
    # the first prompt is one of those that wait
    assume(load.first_waiting_tokens <= load.waiting_tokens)
    assert len([line for line in POLICY.splitlines() if line]) <= 12
    defined: dict[str, Any] = {}
    exec(POLICY, defined)
    assert defined["Mine"]().decide(load) == TokenThrottling().decide(load)


def test_the_simulated_figure_is_what_the_simulator_says() -> None:
    command = "nanoserve simulate --policy sarathi,throttling --rate 3 --requests 200"
    assert command in README
    assert schedules.__doc__ is not None and command in schedules.__doc__
    gaps = [
        int(re.findall(r"p99 gap between tokens (\d+) ms", panel.title)[0])
        for panel in schedules().panels
    ]
    assert f"**{gaps[1] / gaps[0]:.2f} times the gap between tokens** (p99)" in README


def test_the_price_of_the_smaller_gap_stands_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["simulate", "--policy", "sarathi,throttling", "--rate", "3", "--requests", "200"])
        == 0
    )
    ratios = capsys.readouterr().out.partition("over sarathi")[2]
    heads, values = (
        re.split("[┃│]", line) for line in ratios.splitlines() if re.match("┃|│ throttling", line)
    )
    found = dict(zip(map(str.strip, heads), map(str.strip, values), strict=True))
    assert (
        f"**{found['ITL p99']} times the gap between tokens** (p99), for {found['TTFT ms']} times "
        "the mean TTFT" in README
    )


@pytest.mark.parametrize("name", ["chat.svg", "schedule.png"])
def test_a_picture_is_shown_and_small(name: str) -> None:
    assert f"](docs/pictures/{name})" in README
    assert (PICTURES / name).stat().st_size < (60_000 if name.endswith("svg") else 120_000)


def test_the_chat_is_the_one_that_the_script_records() -> None:
    root = ElementTree.parse(PICTURES / "chat.svg").getroot()
    texts = ["".join(element.itertext()) for element in root if element.tag.endswith("text")]
    assert texts[0] == f"$ {COMMAND}"
    assert QUESTION.replace(" ", "") in "".join(texts)  # it was typed letter by letter


def test_pieces_of_an_animation_come_and_go_at_their_times() -> None:
    first = {(0, 0): ("a", ""), (0, 1): ("b", "")}
    drawn = animation([(0.0, {}), (1.0, first), (2.0, {(0, 0): ("a", "")})])
    texts = {"".join(element.itertext()): element for element in ElementTree.fromstring(drawn)[3:]}
    assert {letter: element[0].get("keyTimes") for letter, element in texts.items()} == {
        "a": "0.0000;0.1250",
        "b": "0.0000;0.1250;0.2500",
    }
