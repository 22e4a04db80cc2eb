"""Cache groups: which layers share a block table, and which tensors hold their keys and values.

Layers of one kind see the same positions, all or a window of the last W, and cache as many numbers of each. Layers of a
kind are dealt to groups of equal size. A block holds some positions of all layers of one group, so blocks of all groups
have the same bytes and come from one pool: layer i of every group uses the same tensor i. Where a layer of one kind
caches half of what one of another does, its groups have twice as many, and two of them share each tensor. This is how
vLLM holds layers that are alike; the size of a group, and sharing tensors, is ours. A third kind, with a state in place
of keys and values, would be a kind here and have a pool of its own.
"""

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import lcm

MOST_GROUPS = 12
"""More groups than that would waste less memory, but the host fills a block table for each of them in every step."""


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model, or of a shard of it."""

    windows: tuple[int, ...]
    """How many of the last positions each group's layers see; 0 means all."""
    places: tuple[tuple[int, int], ...]
    """The group of each layer, and its place there. See `tensor_of`."""
    numbers: tuple[int, ...]
    """How many numbers each layer of a group caches of a token, for each group."""

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
        """Cut layers with these windows, which cache these numbers of a token, into groups. ``sources`` names for each
        layer the one whose keys and values it reads; empty if each has its own. Sequences have at most ``longest``
        tokens: wider windows show all. A stage of a pipeline begins at each of the ``starts``.

        There are as many groups as waste least in a sequence of that length, with at most MOST_GROUPS or, if there are
        more kinds, one for each. Layers are dealt stage by stage, and in turn, so a stage's layers have tensors of
        their own, which are neighbours. So whatever pipeline has its stages begin there, each stage's part of a block
        is the same part in all groups.
        """
        kinds: dict[tuple[int, int], list[list[int]]] = {}
        for layer, (window, number) in enumerate(zip(windows, numbers, strict=True)):
            if not sources or sources[layer] == layer:
                kind = window if window < longest else 0, number
                kinds.setdefault(kind, [[] for _ in starts])[bisect(starts, layer) - 1].append(layer)
        whole = lcm(*(number for _, number in kinds))
        sizes = {kind: sum(map(len, stages)) for kind, stages in kinds.items()}

        def counts(size: int) -> dict[tuple[int, int], int]:
            return {kind: -(-layers // (size * whole // kind[1])) for kind, layers in sizes.items()}

        def tensors(counts: dict[tuple[int, int], int]) -> list[int]:
            return [
                max(-(-len(of) * kind[1] // (counts[kind] * whole)) for kind, of in zip(kinds, stage, strict=True))
                for stage in zip(*kinds.values(), strict=True)
            ]

        def padding(counts: dict[tuple[int, int], int]) -> int:
            room = {kind: counts[kind] * sum(tensors(counts)) * whole - sizes[kind] * kind[1] for kind in kinds}
            return sum(numbers * (window or longest) for (window, _), numbers in room.items())

        possible = map(counts, range(max(sizes.values()), 0, -1))
        most = max(len(kinds), MOST_GROUPS)
        chosen = min((counts for counts in possible if sum(counts.values()) <= most), key=padding)
        groups = list[tuple[int, int]]()
        places = dict[int, tuple[int, int]]()
        firsts = [0, *accumulate(tensors(chosen))]
        for kind, stages in kinds.items():
            for first, layers in zip(firsts, stages, strict=False):
                for turn, layer in enumerate(layers):
                    place, group = divmod(turn, chosen[kind])
                    places[layer] = len(groups) + group, first * whole // kind[1] + place
            groups += [kind] * chosen[kind]
        owners, (of_groups, sizes_of_groups) = sources or range(len(windows)), zip(*groups, strict=True)
        return cls(of_groups, tuple(places[owner] for owner in owners), sizes_of_groups)

    def of_layers(self, layers: range, numbers: tuple[int, ...]) -> "CacheGroups":
        """The groups as a shard with these layers has them; ``numbers`` are those that every layer of the model caches
        there. A block table is the same in all stages of a pipeline, and a stage has only its own layers' tensors."""
        first, kept = self.tensors(layers).start, self.places[layers.start : layers.stop]
        found = {self.places[layer][0]: numbers[layer] for layer in layers}
        own = tuple(found.get(group, lcm(*found.values())) for group in range(len(self.windows)))
        return CacheGroups(
            self.windows, tuple((group, place - first * self.shares[group]) for group, place in kept), own
        )

    def tensors(self, layers: range) -> range:
        """The tensors that hold the keys and values of a stage's layers."""
        found = {self.tensor_of(layer)[0] for layer in layers}
        return range(min(found), max(found) + 1)

    @property
    def tensor_numbers(self) -> int:
        """Numbers of a token in each tensor of the cache."""
        return lcm(*self.numbers)

    @property
    def shares(self) -> tuple[int, ...]:
        """How many layers of each group share a tensor."""
        return tuple(self.tensor_numbers // number for number in self.numbers)

    def tensor_of(self, layer: int) -> tuple[int, int]:
        """Which tensor holds the layer's keys and values, and which of the equal parts of each block there."""
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
        return sum(self.numbers[group] for group, _ in set(self.places))

    @property
    def padding(self) -> float:
        """The share of a block's memory, over all groups, that no layer uses."""
        return 1 - self.token_numbers / (self.block_numbers * len(self.windows))
