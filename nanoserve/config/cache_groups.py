"""Cache groups: which layers share a block table, and which tensors hold their keys and values.

Layers of one kind see the same positions, all or a window of the last W, and cache as many numbers
of each. Layers of a kind are dealt to groups of equal size. A block holds some positions of all
layers of one group, so blocks of all groups have the same bytes and come from one pool: layer i of
every group uses the same tensor i. Where a layer of one kind caches half of what one of another
does, its groups have twice as many, and two of them share each tensor. This is how vLLM holds
layers that are alike; the size of a group, and sharing tensors, is ours. A layer with a state in
place of keys and values is in no group: states have a pool of their own.
"""

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm

MOST_GROUPS = 12
"""More groups than that would waste less memory, but the host fills a block table for each of them
in every step."""
NO_PLACE = (-1, -1)
"""The place of a layer that caches no keys and values."""


@dataclass(frozen=True, slots=True)
class _LayerKind:
    """Layers that see the same positions, and cache as many numbers of each."""

    window: int
    numbers: int
    stages: list[list[int]]
    """The layers in each stage of a pipeline."""

    @property
    def num_layers(self) -> int:
        return sum(map(len, self.stages))


class _Division:
    """Possible numbers of groups for each kind of layers, and the memory that they would waste."""

    def __init__(self, kinds: list[_LayerKind]) -> None:
        self._kinds = kinds
        self.tensor_numbers = lcm(*(kind.numbers for kind in kinds))

    def group_counts(self, tensors: int) -> list[int]:
        """The number of groups of each kind, if none may take more tensors than these."""
        counts = []
        for kind in self._kinds:
            group_size = tensors * self.tensor_numbers // kind.numbers
            counts.append(-(-kind.num_layers // group_size))
        return counts

    def stage_tensors(self, counts: list[int]) -> list[int]:
        """The number of tensors in each stage: as many as the kind takes that needs most of them
        there."""
        most = [0] * len(self._kinds[0].stages)
        for kind, groups in zip(self._kinds, counts, strict=True):
            for stage, layers in enumerate(kind.stages):
                needed = -(-len(layers) * kind.numbers // (groups * self.tensor_numbers))
                most[stage] = max(most[stage], needed)
        return most

    def padding(self, counts: list[int], longest: int) -> int:
        """Numbers that no layer uses, for a sequence of the longest length."""
        block_numbers = sum(self.stage_tensors(counts)) * self.tensor_numbers
        unused = 0
        for kind, groups in zip(self._kinds, counts, strict=True):
            of_token = groups * block_numbers - kind.num_layers * kind.numbers
            unused += of_token * (kind.window or longest)
        return unused

    def best_counts(self, longest: int) -> list[int]:
        """The number of groups of each kind that wastes least, with at most MOST_GROUPS in all, or
        one of each kind."""
        largest = max(kind.num_layers for kind in self._kinds)
        most = max(len(self._kinds), MOST_GROUPS)
        possible = [self.group_counts(tensors) for tensors in range(largest, 0, -1)]
        allowed = [counts for counts in possible if sum(counts) <= most]
        return min(allowed, key=lambda counts: self.padding(counts, longest))


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model, or of a shard of it."""

    windows: tuple[int, ...]
    """For each group, the number of last positions that its layers see; 0 means all."""
    places: tuple[tuple[int, int], ...]
    """The group of each layer, and its place there, or NO_PLACE. See `tensor_of`."""
    numbers: tuple[int, ...]
    """For each group, the numbers that one of its layers caches of a token."""

    @classmethod
    @lru_cache(maxsize=64)
    def cut(
        cls,
        windows: tuple[int, ...],
        sources: tuple[int, ...],
        longest: int,
        numbers: tuple[int, ...],
        starts: tuple[int, ...] = (0,),
    ) -> "CacheGroups":
        """Cut layers with these windows, which cache these numbers of a token, into groups.
        ``sources`` names for each layer the one whose keys and values it reads; empty if each has
        its own. Sequences have at most ``longest`` tokens: wider windows show all. A stage of a
        pipeline begins at each of the ``starts``.

        There are as many groups as waste least in a sequence of that length, with at most
        MOST_GROUPS or, if there are more kinds, one for each. Layers are dealt stage by stage, and
        in turn, so a stage's layers have tensors of their own, which are neighbours. So whatever
        pipeline has its stages begin there, each stage's part of a block is the same part in all
        groups.

        A model without attention has one group all the same: its blocks hold nothing, but they name
        the positions whose states the prefix cache finds.
        """
        owners = sources or tuple(range(len(windows)))
        kinds = _kinds_of(windows, owners, longest, numbers, starts)
        if not kinds:
            return cls(windows=(0,), places=(NO_PLACE,) * len(windows), numbers=(1,))
        division = _Division(kinds)
        counts = division.best_counts(longest)
        first_tensors = list(accumulate(division.stage_tensors(counts), initial=0))
        groups = list[_LayerKind]()
        places = dict.fromkeys(range(len(windows)), NO_PLACE)
        for kind, count in zip(kinds, counts, strict=True):
            shares = division.tensor_numbers // kind.numbers
            for first_tensor, layers in zip(first_tensors, kind.stages, strict=False):
                for turn, layer in enumerate(layers):
                    place, group = divmod(turn, count)
                    places[layer] = len(groups) + group, first_tensor * shares + place
            groups += [kind] * count
        return cls(
            windows=tuple(kind.window for kind in groups),
            places=tuple(places[owner] for owner in owners),
            numbers=tuple(kind.numbers for kind in groups),
        )

    def of_layers(self, layers: range, numbers: tuple[int, ...]) -> "CacheGroups":
        """The groups as a shard with these layers has them; ``numbers`` says for every layer of the
        model how many it caches there. A block table is the same in all stages of a pipeline. A
        stage has only its own layers' tensors.
        """
        first_tensor = self.tensors(layers).start
        places = []
        found: dict[int, int] = {}
        for layer in layers:
            group, place = self.places[layer]
            if group < 0:
                places.append(NO_PLACE)
                continue
            places.append((group, place - first_tensor * self.shares[group]))
            found[group] = numbers[layer]
        without_layers = lcm(*found.values())
        own = tuple(found.get(group, without_layers) for group in range(len(self.windows)))
        return CacheGroups(self.windows, tuple(places), own)

    def tensors(self, layers: range) -> range:
        """The tensors that hold the keys and values of a stage's layers."""
        found = {self.tensor_of(layer)[0] for layer in layers if self.places[layer] != NO_PLACE}
        if not found:
            return range(0)
        return range(min(found), max(found) + 1)

    @property
    def tensor_numbers(self) -> int:
        """Numbers of a token in each tensor of the cache."""
        return lcm(*self.numbers)

    @property
    def shares(self) -> tuple[int, ...]:
        """For each group, the number of its layers that share a tensor."""
        return tuple(self.tensor_numbers // number for number in self.numbers)

    def tensor_of(self, layer: int) -> tuple[int, int]:
        """The tensor that holds the layer's keys and values, and the number of the layer's part of
        each block there."""
        group, place = self.places[layer]
        return divmod(place, self.shares[group])

    @property
    def num_tensors(self) -> int:
        """Tensors of the cache, as many as the largest group needs."""
        return self.tensors(range(len(self.places))).stop

    @property
    def block_numbers(self) -> int:
        """Numbers of a token in a block of any group."""
        return self.num_tensors * self.tensor_numbers

    @property
    def token_numbers(self) -> int:
        """Numbers of a token that all layers cache, as long as no window has left it behind."""
        return sum(self.numbers[group] for group, _ in set(self.places) - {NO_PLACE})

    @property
    def padding(self) -> float:
        """The share of a block's memory, over all groups, that no layer uses."""
        if self.block_numbers == 0:
            return 0.0
        return 1 - self.token_numbers / (self.block_numbers * len(self.windows))


def _kinds_of(
    windows: tuple[int, ...],
    owners: tuple[int, ...],
    longest: int,
    numbers: tuple[int, ...],
    starts: tuple[int, ...],
) -> list[_LayerKind]:
    """The kinds of layers that have keys and values of their own, in the order of their first
    layers."""
    kinds: dict[tuple[int, int], _LayerKind] = {}
    for layer, owner in enumerate(owners):
        if owner != layer or numbers[layer] == 0:
            continue
        window = windows[layer]
        if window >= longest:
            window = 0
        key = window, numbers[layer]
        if key not in kinds:
            kinds[key] = _LayerKind(window, numbers[layer], [[] for _ in starts])
        stage = bisect(starts, layer) - 1
        kinds[key].stages[stage].append(layer)
    return list(kinds.values())
