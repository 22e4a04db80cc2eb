"""The data files load, every entry says where it is from, and what is wrong in a user's file is
named."""

import json
from pathlib import Path

import pytest

from nanoserve.config.published_shapes import SHIPPED_MODELS as MODELS
from nanoserve.config.published_shapes import load_shape, published_shapes
from nanoserve.costs.hardware import SHIPPED, load_machine
from nanoserve.errors import ModelError, UsageError
from nanoserve.utils.files import read_toml

TABLES = read_toml(SHIPPED)

DEVICE = """
[devices.toy]
memory_gib = 2
memory_gb_per_s = 3
tflops = 4
link = "pcie4-x16"
source = "the shelf"
"""


def test_every_entry_has_a_source() -> None:
    entries = [entry for table in (*TABLES.values(), read_toml(MODELS)) for entry in table.values()]
    assert len(entries) > 50
    assert all(len(entry["source"]) > 10 for entry in entries)


@pytest.mark.parametrize("name", [*TABLES["devices"], *TABLES["machines"]])
def test_every_machine_and_device_loads(name: str) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.source == TABLES["devices"][machine.device.name]["source"]


def test_every_link_and_processor_is_used() -> None:
    entries = [*TABLES["devices"].values(), *TABLES["machines"].values()]
    named = {
        entry.get(key) for entry in entries for key in ("link", "host_link", "network", "processor")
    }
    assert {*TABLES["links"], *TABLES["processors"]} <= named


@pytest.mark.parametrize("name", published_shapes())
def test_every_model_loads(name: str) -> None:
    assert load_shape(name.upper()).num_layers > 0


def test_units() -> None:
    machine = load_machine("seesaw-a10")
    assert machine.device.memory_bytes == 21.99 * 2**30
    assert (machine.device.memory_bandwidth, machine.device.flops) == (600e9, 125e12)
    assert (machine.link.bandwidth, machine.link.latency) == (15.75e9, 15e-6)
    assert machine.host_link == machine.link
    assert machine.host_memory_bytes == 640 * 2**30
    assert load_machine("seesaw-a100-nvlink").host_link.name == "pcie4-x8"
    assert load_machine("h100").host_link.name == "pcie5-x16"


def test_memory_is_what_a_driver_gives_and_not_what_is_printed_on_the_card() -> None:
    assert load_machine("t4").device.memory_bytes == 15_843_721_216
    printed = {
        "t4": 16,
        "a10": 24,
        "l4": 24,
        "l20": 48,
        "a100-40": 40,
        "a100-40-pcie": 40,
        "a100-80": 80,
    }
    printed |= {"a100-80-pcie": 80, "a800-80": 80, "h100": 80, "h100-pcie": 80, "h200": 141}
    shares = {
        name: load_machine(name).device.memory_bytes / 2**30 / size
        for name, size in printed.items()
    }
    assert all(0.9 < share < 0.995 for share in shares.values()), shares
    assert {name for name in TABLES["devices"] if not load_machine(name).device.measured} == set(
        printed
    )


def test_a_file_adds_a_device_or_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(DEVICE)
    assert load_machine(str(path)).device.memory_bandwidth == 3e9
    path.write_text(
        DEVICE
        + '[machines.pair]\ndevice = "toy"\ndevices = 2\nlink = "nvlink4"\nsource = "two of them"\n'
    )
    machine = load_machine(str(path))
    assert (machine.name, machine.devices_per_node, machine.link.name) == ("pair", 2, "nvlink4")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("memory_gib = 2", "memory_gib = -2"),
            "mine.toml: devices.toy: Expected `float` > 0.0 - at `$.memory_gib`",
        ),
        (("tflops = 4\n", ""), "devices.toy: Object missing required field `tflops`"),
        (("tflops = 4", "tflops = nan"), "devices.toy: Expected `float` > 0.0 - at `$.tflops`"),
        (
            ("tflops = 4", "tflops = true"),
            "devices.toy: Expected `float`, got `bool` - at `$.tflops`",
        ),
        (('source = "the shelf"', ""), "devices.toy: Object missing required field `source`"),
        (("pcie4-x16", "string"), "there is no links.string; there are network-73gbps, nvlink3"),
        (
            ("tflops = 4", "tflops = 4\nprice = 5"),
            "devices.toy: Object contains unknown field `price`",
        ),
        (("[devices.toy]", "[gadgets.toy]"), "gadgets is none of the tables devices, links"),
        (("[devices.toy]", "[devices.toy"), "is not TOML"),
        (
            ("[devices.toy]", "[devices]\nother = 5\n[devices.toy]"),
            "must describe one machine, or one device, but",
        ),
        (
            ('source = "the shelf"', 'source = "x"\nmeasured = "yes"'),
            "devices.toy: Expected `bool`, got `str` - at `$.measured`",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(
    tmp_path: Path, change: tuple[str, str], message: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(DEVICE.replace(*change))
    with pytest.raises(UsageError) as refusal:
        load_machine(str(path))
    assert message in str(refusal.value)


def test_a_machine_in_a_file_needs_a_whole_number_of_devices(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('[machines.half]\ndevice = "a10"\ndevices = 0.5\nsource = "a wish"\n')
    with pytest.raises(
        UsageError, match=r"machines.half: Expected `int`, got `float` - at `\$.devices`"
    ):
        load_machine(str(path))


def test_unknown_names_list_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"unknown hardware 'h900'.*a100-40.*gllm-l20"):
        load_machine("h900")
    with pytest.raises(UsageError, match=r"unknown model 'gpt-9'.*qwen3-0.6b"):
        load_shape("gpt-9")
    with pytest.raises(UsageError, match="cannot read"):
        load_machine(str(tmp_path / "none.toml"))


def test_a_shape_comes_from_a_config_json_or_its_directory(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dict(published_shapes()["qwen3-0.6b"])))
    assert load_shape(str(config)) == load_shape(str(tmp_path)) == load_shape("dummy:qwen3-0.6b")
    config.write_text(json.dumps({**published_shapes()["qwen3-0.6b"], "hidden_size": -1}))
    with pytest.raises(ModelError, match="hidden_size must be a positive integer, found -1"):
        load_shape(str(config))
