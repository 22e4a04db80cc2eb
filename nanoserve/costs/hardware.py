"""Devices, links, processors and the machines made of them; the figures are data, each with its
source."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from nanoserve.errors import UsageError, shown
from nanoserve.utils.files import read_toml

SHIPPED = Path(__file__).with_name("hardware.toml")
GIGA = 1e9
MEBI, GIBI = 2**20, 2**30

_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Above0 = Annotated[float, msgspec.Meta(gt=0)]
_Text = Annotated[str, msgspec.Meta(min_length=1)]
# far beyond all hardware, and small enough for products
_Figure = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
Tables = Mapping[str, Mapping[str, Any]]


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Factors between what data sheets promise and what programs reach; docs/costs.md gives each
    default's source. Shares do not apply to figures marked as measured."""

    matrix: _Share = 0.7  # of a device's operations, for matrix products
    attention: _Share = 0.5  # of a device's operations, for the attention of prompts
    memory: _Share = 0.8  # of a device's memory bandwidth
    link: _Share = 0.75
    processor: _Share = 0.6  # of a CPU's memory bandwidth and operations, for attention
    # of a device's memory, for weights and KV cache, not activations and libraries
    usable_memory: _Share = 0.9
    # seconds from one kernel's end to the next one's full speed
    kernel_seconds: _NotNegative = 3e-6
    kernels_per_layer: Annotated[int, msgspec.Meta(ge=0)] = 10
    """Norms, qkv, rotary embedding, cache write, attention, output, gate_up, activation, down; no
    all-reduces."""
    step_seconds: _NotNegative = 1e-3  # the host's work for a step
    row_seconds: _NotNegative = 10e-6  # and for each sequence in it

    @classmethod
    def ideal(cls) -> "Efficiency":
        """Everything that data sheets promise, and no overhead: the limits that closed forms
        describe."""
        shares = dict.fromkeys(
            ("matrix", "attention", "memory", "link", "processor", "usable_memory"), 1.0
        )
        return cls(
            kernel_seconds=0.0, kernels_per_layer=0, step_seconds=0.0, row_seconds=0.0, **shares
        )


class Device(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    omit_defaults=True,
    rename={"memory_bandwidth": "read_bytes_per_second", "flops": "operations_per_second"},
):
    """A GPU, a CPU in its place, or the CPUs of a host. The names in profiles are older."""

    name: str
    # total bytes; 0 for the CPUs of a host, whose memory belongs to the machine
    memory_bytes: _Above0 = 0.0
    memory_bandwidth: _Above0  # bytes per second
    flops: _Above0  # operations per second of 16-bit matrix products; of a host's CPUs, of float32
    measured: bool = False  # whether the figures were reached, or printed in a data sheet
    # whether it computes while it reads, as a GPU; else the times add up, as on a CPU's core
    overlaps: bool = True

    @property
    def intensity(self) -> float:
        """Operations per byte at which it computes as long as it reads: the lecture's accelerator
        intensity, eq. 5."""
        return self.flops / self.memory_bandwidth


@dataclass(frozen=True, slots=True)
class Link:
    """A connection between devices, or of a device and its host."""

    name: str
    # bytes per second of one device in one direction; in an all-reduce, bus bandwidth
    bandwidth: float
    latency: float  # seconds of a message beside its bytes
    measured: bool

    def scaled(self, factor: float) -> "Link":
        """Multiply the bandwidth by a factor. Raises UsageError for a factor that is not above
        0."""
        if not factor > 0:
            raise UsageError(f"a link's bandwidth is scaled by a factor above 0, not {factor}")
        return replace(self, bandwidth=self.bandwidth * factor)

    def send_seconds(self, num_bytes: float) -> float:
        return self.latency + num_bytes / self.bandwidth

    def all_reduce_seconds(self, num_bytes: float, devices: int) -> float:
        """A ring moves 2 (t - 1) / t of the bytes of each of t devices, reduce-scatter then
        all-gather. The shortest way there and back is a tree: 2 ceil(log2 t) messages after one
        another."""
        if devices == 1:
            return 0.0
        messages = 2 * (devices - 1).bit_length()
        return messages * self.latency + 2 * (devices - 1) / devices * num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Equal devices in one or more nodes, of which those of a node share ``link``."""

    name: str
    device: Device
    devices_per_node: int
    link: Link
    network: Link | None = None  # between nodes
    host_link: Link  # between each device and the host's memory
    processor: Device | None = None  # the host's CPUs
    host_memory_bytes: float = 0.0  # of a node; 0 if unknown
    source: str

    def link_among(self, first: int, count: int) -> Link:
        """The link of ``count`` devices from the one numbered ``first``: the node's, or the network
        between nodes. Raises UsageError for several nodes without a network."""
        if first // self.devices_per_node == (first + count - 1) // self.devices_per_node:
            return self.link
        if self.network is None:
            raise UsageError(
                f"{self.name} has {self.devices_per_node} devices and no network to further ones;"
                " use fewer, or describe a machine with more in a file for --hardware"
            )
        return self.network


class MachineSpeeds(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds that each worker reaches while all work: means over workers, measured within a
    second at a start."""

    memory_bandwidth: _Above0  # bytes of weights per second that products with a small batch read
    # operations per second of products with many rows, in the number format of the weights
    flops: _Above0
    # to host memory and back, the slower direction; on a CPU, copied within memory
    host_link_bandwidth: _Above0
    # between workers: bus bandwidth of an all-reduce; infinite for one worker
    link_bandwidth: _Above0 = math.inf
    # seconds of a message; an all-reduce over t workers takes 2 ceil(log2 t)
    link_latency: _NotNegative = 0.0
    overlaps: bool = True  # see Device

    def machine(
        self, *, devices: int, memory_bytes: float = 0.0, host_memory_bytes: float = 0.0
    ) -> Machine:
        """A node of workers, each a device to the cost model. Memory that does not matter may be
        0."""
        return Machine(
            name="this machine",
            device=Device(
                name="this machine",
                memory_bytes=memory_bytes,
                memory_bandwidth=self.memory_bandwidth,
                flops=self.flops,
                measured=True,
                overlaps=self.overlaps,
            ),
            devices_per_node=devices,
            link=Link("between workers", self.link_bandwidth, self.link_latency, measured=True),
            host_link=Link("to host memory", self.host_link_bandwidth, latency=0.0, measured=True),
            host_memory_bytes=host_memory_bytes,
            source="measured at start",
        )


class _Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of a table, such as ``devices.a10``; the units are in the keys' names."""

    source: _Text


class _DeviceEntry(_Entry, frozen=True, kw_only=True):
    memory_gib: _Figure
    memory_gb_per_s: _Figure
    tflops: _Figure
    link: _Text
    host_link: _Text | None = None
    measured: bool = False
    overlaps: bool = True


class _LinkEntry(_Entry, frozen=True, kw_only=True):
    gb_per_s: _Figure
    latency_us: _Figure
    measured: bool = False


class _ProcessorEntry(_Entry, frozen=True, kw_only=True):
    memory_gb_per_s: _Figure
    gflops: _Figure
    measured: bool = False


class _MachineEntry(_Entry, frozen=True, kw_only=True):
    device: _Text
    devices: Annotated[int, msgspec.Meta(ge=1)]
    link: _Text | None = None
    network: _Text | None = None
    host_link: _Text | None = None
    processor: _Text | None = None
    host_memory_gib: _Figure | None = None


_KINDS = {
    _DeviceEntry: "devices",
    _LinkEntry: "links",
    _ProcessorEntry: "processors",
    _MachineEntry: "machines",
}
AnyEntry = TypeVar("AnyEntry", _DeviceEntry, _LinkEntry, _ProcessorEntry, _MachineEntry)


def load_machine(name: str) -> Machine:
    """A machine or device of the shipped table, or the only one of a TOML file, which adds to that
    table. Raises UsageError for an unknown name, listing the known ones, and for what is wrong in a
    file, naming the key."""
    if name.endswith(".toml"):
        return _machine_of_file(Path(name))
    tables = _shipped()
    if name not in tables["machines"] and name not in tables["devices"]:
        raise UsageError(
            f"unknown hardware {shown(name)}; use a .toml file, a device "
            f"({', '.join(tables['devices'])})"
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
        raise UsageError(
            f"{path} must describe one machine, or one device, but describes {len(meant)}"
        )
    tables = {kind: {**_shipped()[kind], **added.get(kind, {})} for kind in _KINDS.values()}
    return _machine(tables, meant[0], str(path))


def _machine(tables: Tables, name: str, source: str) -> Machine:
    """The machine of that name; a device stands for a node of eight of them."""

    def entry(kind: type[AnyEntry], name: str) -> AnyEntry:
        table = tables[_KINDS[kind]]
        if name not in table:
            raise UsageError(
                f"{source}: there is no {_KINDS[kind]}.{name}; there are {', '.join(sorted(table))}"
            )
        try:
            return msgspec.convert(table[name], kind)
        except msgspec.ValidationError as error:
            raise UsageError(f"{source}: {_KINDS[kind]}.{name}: {error}") from error

    def link(name: str) -> Link:
        found = entry(_LinkEntry, name)
        return Link(name, found.gb_per_s * GIGA, found.latency_us / 1e6, measured=found.measured)

    def processor(name: str) -> Device:
        found = entry(_ProcessorEntry, name)
        bandwidth, flops = found.memory_gb_per_s * GIGA, found.gflops * GIGA
        return Device(name=name, memory_bandwidth=bandwidth, flops=flops, measured=found.measured)

    if name in tables["machines"]:
        machine = entry(_MachineEntry, name)
        device = entry(_DeviceEntry, machine.device)
    else:
        device = entry(_DeviceEntry, name)
        machine = _MachineEntry(source=device.source, device=name, devices=8)
    joined = machine.link or device.link
    return Machine(
        name=name,
        device=Device(
            name=machine.device,
            memory_bytes=device.memory_gib * GIBI,
            memory_bandwidth=device.memory_gb_per_s * GIGA,
            flops=device.tflops * 1000 * GIGA,
            measured=device.measured,
            overlaps=device.overlaps,
        ),
        devices_per_node=machine.devices,
        link=link(joined),
        network=link(machine.network) if machine.network else None,
        host_link=link(machine.host_link or device.host_link or joined),
        processor=processor(machine.processor) if machine.processor else None,
        host_memory_bytes=(machine.host_memory_gib or 0.0) * GIBI,
        source=device.source,
    )
