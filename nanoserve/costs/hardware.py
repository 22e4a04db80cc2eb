"""Devices, links, processors and the machines made of them; the figures are data, each with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from nanoserve.costs.tables import read_toml
from nanoserve.errors import UsageError

SHIPPED = Path(__file__).with_name("hardware.toml")
GIGA = 1e9
GIBI = 2**30
MICROSECONDS = 1e6  # in a second

_LARGEST = 1e12
"""Limit for any figure, in its unit: far beyond all hardware, and small enough for products."""

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=_LARGEST)]
Tables = Mapping[str, Mapping[str, Any]]


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a table, such as ``devices.a10``; the units are in the keys' names."""

    source: _Text


class _DeviceEntry(_Entry, frozen=True, kw_only=True):
    memory_gib: _Positive
    memory_gb_per_s: _Positive
    tflops: _Positive
    link: _Text
    host_link: _Text | None = None
    measured: bool = False


class _LinkEntry(_Entry, frozen=True, kw_only=True):
    gb_per_s: _Positive
    latency_us: _Positive
    measured: bool = False


class _ProcessorEntry(_Entry, frozen=True, kw_only=True):
    memory_gb_per_s: _Positive
    gflops: _Positive
    measured: bool = False


class _MachineEntry(_Entry, frozen=True, kw_only=True):
    device: _Text
    devices: Annotated[int, msgspec.Meta(ge=1)]
    link: _Text | None = None
    network: _Text | None = None
    host_link: _Text | None = None
    processor: _Text | None = None
    host_memory_gib: _Positive | None = None


_KINDS: dict[type[_Entry], str] = {
    _DeviceEntry: "devices",
    _LinkEntry: "links",
    _ProcessorEntry: "processors",
    _MachineEntry: "machines",
}
"""The table of each kind of entry."""
AnyEntry = TypeVar("AnyEntry", bound=_Entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What computes: a GPU, a CPU in its place, or the CPUs of a host."""

    name: str
    memory_bytes: float = 0.0
    """Total bytes; 0 for the CPUs of a host, whose memory belongs to the machine."""
    memory_bandwidth: float
    """Bytes per second."""
    flops: float
    """Operations per second of 16-bit matrix products; of a host's CPUs, of float32."""
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

    def send_seconds(self, num_bytes: float) -> float:
        """Seconds to send one message from one device to another."""
        return self.latency + num_bytes / self.bandwidth

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """The sum of ``num_bytes`` on each of `devices` devices, known to all of them.

        Every device sends and receives 2 (t - 1) / t of the bytes (a ring, reduce-scatter then all-gather), at *bus*
        bandwidth; *algorithm* bandwidth, bytes over time, is lower by that factor. The shortest way there and back is
        a tree: 2 ceil(log2 t) messages after one another.
        """
        if devices == 1:
            return 0.0
        return 2 * (devices - 1).bit_length() * self.latency + 2 * (devices - 1) / devices * num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices in one or more nodes."""

    name: str
    device: Device
    devices_per_node: int
    """Devices of a node, which share ``link``."""
    link: Link
    """Between the devices of a node."""
    network: Link | None = None
    """Between nodes; None if there is but one."""
    host_link: Link
    """Between each device and the host's memory."""
    processor: Device | None = None
    """The host's CPUs, None if unknown."""
    host_memory_bytes: float = 0.0
    """Host memory of a node; 0 if unknown."""
    source: str
    """Source of the device's data."""

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
        if kind not in _KINDS.values() or not isinstance(table, Mapping):
            raise UsageError(f"{path}: {kind} is none of the tables {', '.join(_KINDS.values())}")
    meant = list(added.get("machines") or added.get("devices") or ())
    if len(meant) != 1:
        raise UsageError(f"{path} must describe one machine, or one device, but describes {len(meant)}")
    tables = {kind: {**_shipped()[kind], **added.get(kind, {})} for kind in _KINDS.values()}
    return _machine(tables, meant[0], str(path))


def _machine(tables: Tables, name: str, source: str) -> Machine:
    """The machine of that name; a device stands for a node of eight of them."""
    if name in tables["machines"]:
        entry = _entry(tables, _MachineEntry, name, source)
        device = _entry(tables, _DeviceEntry, entry.device, source)
    else:
        device = _entry(tables, _DeviceEntry, name, source)
        entry = _MachineEntry(source=device.source, device=name, devices=8)
    link = entry.link or device.link
    return Machine(
        name=name,
        device=Device(
            name=entry.device,
            memory_bytes=device.memory_gib * GIBI,
            memory_bandwidth=device.memory_gb_per_s * GIGA,
            flops=device.tflops * 1000 * GIGA,
            measured=device.measured,
        ),
        devices_per_node=entry.devices,
        link=_link(tables, link, source),
        network=None if entry.network is None else _link(tables, entry.network, source),
        host_link=_link(tables, entry.host_link or device.host_link or link, source),
        processor=None if entry.processor is None else _processor(tables, entry.processor, source),
        host_memory_bytes=(entry.host_memory_gib or 0.0) * GIBI,
        source=device.source,
    )


def _entry(tables: Tables, kind: type[AnyEntry], name: str, source: str) -> AnyEntry:
    """The entry of that name in the kind's table.

    Raises:
        UsageError: listing what there is, or naming the key that is wrong.
    """
    table = tables[_KINDS[kind]]
    if name not in table:
        raise UsageError(f"{source}: there is no {_KINDS[kind]}.{name}; there are {', '.join(sorted(table))}")
    try:
        return msgspec.convert(table[name], kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{source}: {_KINDS[kind]}.{name}: {error}") from error


def _link(tables: Tables, name: str, source: str) -> Link:
    entry = _entry(tables, _LinkEntry, name, source)
    bandwidth, latency = entry.gb_per_s * GIGA, entry.latency_us / MICROSECONDS
    return Link(name=name, bandwidth=bandwidth, latency=latency, measured=entry.measured)


def _processor(tables: Tables, name: str, source: str) -> Device:
    entry = _entry(tables, _ProcessorEntry, name, source)
    bandwidth, flops = entry.memory_gb_per_s * GIGA, entry.gflops * GIGA
    return Device(name=name, memory_bandwidth=bandwidth, flops=flops, measured=entry.measured)
