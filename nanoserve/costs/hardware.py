"""Devices, links, processors and the machines made of them; the figures are data, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from nanoserve.costs.tables import Entry, Tables, read_toml
from nanoserve.errors import UsageError

SHIPPED = Path(__file__).with_name("hardware.toml")
GIGA = 1e9
GIBI = 2**30
MICROSECONDS = 1e6  # in a second

_KEYS = {
    "devices": ("memory_gib", "memory_gb_per_s", "tflops", "measured", "link", "host_link"),
    "links": ("gb_per_s", "measured", "latency_us"),
    "processors": ("memory_gb_per_s", "gflops", "measured"),
    "machines": ("device", "devices", "link", "network", "host_link", "processor", "host_memory_gib"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What computes: a GPU, or a CPU in its place."""

    name: str
    memory_bytes: float
    """Total bytes."""
    memory_bandwidth: float
    """Bytes per second."""
    flops: float
    """Operations per second of 16-bit matrix products."""
    measured: bool
    """The figures were reached, not printed in a data sheet."""

    @property
    def intensity(self) -> float:
        """Operations per byte at which it computes as long as it reads: the lecture's accelerator intensity, eq. 5."""
        return self.flops / self.memory_bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What joins devices, or a device and its host."""

    name: str
    bandwidth: float
    """Bytes per second of one device in one direction; in an all-reduce, bus bandwidth."""
    latency: float
    """Seconds that one message takes beside its bytes."""
    measured: bool
    """The bandwidth was reached, not printed in a data sheet."""

    def scaled(self, factor: float) -> "Link":
        """The same with another bandwidth; the latency stays.

        Raises:
            UsageError: for a factor that is not above 0.
        """
        if not factor > 0:
            raise UsageError(f"a bandwidth is scaled by a factor above 0, not {factor}")
        return replace(self, bandwidth=self.bandwidth * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCpu:
    """The CPUs of a host: bytes per second of their memory and float32 operations per second."""

    name: str
    memory_bandwidth: float
    flops: float
    measured: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices in one or more nodes."""

    name: str
    device: Device
    devices_per_node: int
    """Devices of a node, which share ``link``."""
    link: Link
    """Between the devices of a node."""
    network: Link | None
    """Between nodes; None if there is but one."""
    host_link: Link
    """Between each device and the host's memory."""
    processor: HostCpu | None
    """The host's CPUs, None if unknown."""
    host_memory_bytes: float
    """Host memory of a node; 0 if unknown."""
    source: str
    """Where the figures of the device come from."""

    def link_among(self, first: int, count: int) -> Link:
        """What joins ``count`` devices from the one numbered ``first``: the node's link, or the network between nodes.

        Raises:
            UsageError: if they lie in several nodes and no network is named.
        """
        if first // self.devices_per_node == (first + count - 1) // self.devices_per_node:
            return self.link
        if self.network is None:
            raise UsageError(
                f"{self.name} has {self.devices_per_node} devices and no network to further ones;"
                " use fewer, or describe a machine with more in a file for --hardware"
            )
        return self.network


def load_machine(name: str) -> Machine:
    """A machine or device of the shipped table, or of a TOML file of the same form, which adds to that table.

    A file must describe exactly one machine, or none and one device: that one is meant.

    Raises:
        UsageError: for an unknown name, listing the known ones, and for what is wrong in a file, naming the key.
    """
    if name.endswith(".toml"):
        return _machine_of_file(Path(name))
    tables = _shipped()
    if name not in tables["machines"] and name not in tables["devices"]:
        raise UsageError(
            f"unknown hardware {name!r}; use a .toml file, a device ({', '.join(tables['devices'])})"
            f" or a machine ({', '.join(tables['machines'])})"
        )
    return _machine(tables, name, SHIPPED.name)


@cache
def _shipped() -> Tables:
    return read_toml(SHIPPED)


def _machine_of_file(path: Path) -> Machine:
    added = read_toml(path)
    for kind, table in added.items():
        if kind not in _KEYS or not isinstance(table, Mapping):
            raise UsageError(f"{path}: {kind} is none of the tables {', '.join(_KEYS)}")
    meant = list(added.get("machines") or added.get("devices") or ())
    if len(meant) != 1:
        raise UsageError(f"{path} must describe one machine, or one device, but describes {len(meant)}")
    tables = {kind: {**_shipped()[kind], **added.get(kind, {})} for kind in _KEYS}
    return _machine(tables, meant[0], str(path))


def _machine(tables: Tables, name: str, source: str) -> Machine:
    """The machine of that name; a device stands for a node of eight of them."""
    if name not in tables["machines"]:
        tables = {**tables, "machines": {name: _node_of(Entry.of(tables, "devices", name, source))}}
    entry = _entry(tables, "machines", name, source)
    device = _entry(tables, "devices", entry.text("device"), source)
    link = entry.text("link", device.text("link"))
    host_link = entry.text("host_link", device.text("host_link", link))
    network, processor = entry.values.get("network"), entry.values.get("processor")
    return Machine(
        name=name,
        device=Device(
            name=entry.text("device"),
            memory_bytes=device.positive("memory_gib") * GIBI,
            memory_bandwidth=device.positive("memory_gb_per_s") * GIGA,
            flops=device.positive("tflops") * 1000 * GIGA,
            measured=device.flag("measured"),
        ),
        devices_per_node=entry.count("devices"),
        link=_link(tables, link, source),
        network=None if network is None else _link(tables, entry.text("network"), source),
        host_link=_link(tables, host_link, source),
        processor=None if processor is None else _processor(tables, entry.text("processor"), source),
        host_memory_bytes=entry.positive("host_memory_gib") * GIBI if "host_memory_gib" in entry.values else 0.0,
        source=device.text("source"),
    )


def _node_of(device: Entry) -> dict[str, Any]:
    name = device.place.rpartition(".")[2]
    return {"device": name, "devices": 8, "source": device.text("source")}


def _entry(tables: Tables, kind: str, name: str, source: str) -> Entry:
    return Entry.of(tables, kind, name, source).check_keys(_KEYS[kind])


def _link(tables: Tables, name: str, source: str) -> Link:
    entry = _entry(tables, "links", name, source)
    return Link(
        name=name,
        bandwidth=entry.positive("gb_per_s") * GIGA,
        latency=entry.positive("latency_us") / MICROSECONDS,
        measured=entry.flag("measured"),
    )


def _processor(tables: Tables, name: str, source: str) -> HostCpu:
    entry = _entry(tables, "processors", name, source)
    return HostCpu(
        name=name,
        memory_bandwidth=entry.positive("memory_gb_per_s") * GIGA,
        flops=entry.positive("gflops") * GIGA,
        measured=entry.flag("measured"),
    )
