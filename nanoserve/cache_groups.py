"""Cache groups: which layers share a block table, and how many blocks a sequence holds in all groups together.

Layers of one kind see the same positions: all, or a window of the last W. Layers of a kind are dealt to groups of equal
size. A block holds some positions of all layers of one group, so blocks of all groups have the same bytes and come from
one pool: layer i of every group uses the same tensor i. This is how vLLM holds such models; the size of a group is
ours. A third kind, with a state in place of keys and values, would be a kind here and have a pool of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

MOST_GROUPS = 8
"""More groups than that would waste less memory, but the host fills a block table for each of them in every step."""


def first_seen(position: int, window: int) -> int:
    """The first position that a query sees through a window; one of 0 shows all."""
    return max(0, position + 1 - window) if window else 0


def most_blocks(windows: Iterable[int], tokens: int, block_size: int, chunk: int | None = None) -> int:
    """Blocks that a sequence of this many tokens holds at most, at any time, in groups with these windows. It is
    computed in chunks of at most ``chunk`` tokens; None stands for a block's worth, with which every sequence ends."""
    columns = -(-tokens // block_size)
    # A chunk's queries see W - 1 positions before it, and all of these begin anywhere in a block.
    before = (block_size if chunk is None else chunk) - 1 + block_size - 1
    return sum(min(columns, (window + before - 1) // block_size + 1) if window else columns for window in windows)


def most_tokens(windows: tuple[int, ...], num_blocks: int, block_size: int, longest: int) -> int:
    """Tokens, at most ``longest``, of a sequence that never holds more than this many blocks."""
    in_windows = most_blocks([window for window in windows if window], longest, block_size)
    full = windows.count(0)
    columns = num_blocks // len(windows)  # if no window has been left behind
    if in_windows <= num_blocks:
        columns = max(columns, (num_blocks - in_windows) // full if full else longest)
    return min(longest, columns * block_size)


@dataclass(frozen=True, slots=True)
class CacheGroups:
    """The groups of a model, or of a shard of it."""

    windows: tuple[int, ...]
    """Of each group: how many of the last positions its layers see; 0 means all."""
    places: tuple[tuple[int, int], ...]
    """Of each layer: its group, and which of the group's tensors holds its keys and values."""

    @classmethod
    @lru_cache(maxsize=64)
    def cut(cls, windows: tuple[int, ...], sources: tuple[int, ...], longest: int) -> "CacheGroups":
        """Cut layers with these windows into groups. ``sources`` names for each layer the one whose keys and values it
        reads; empty if each has its own. Sequences have at most ``longest`` tokens: wider windows show all.

        A group has as many layers as waste least in a sequence of that length, with at most MOST_GROUPS groups or, if
        there are more kinds, one for each. Layers are dealt in turn, so that stages of a pipeline get some of each.
        """
        kinds: dict[int, list[int]] = {}
        for layer, window in enumerate(windows):
            if not sources or sources[layer] == layer:
                kinds.setdefault(window if window < longest else 0, []).append(layer)
        held = {window: min(window or longest, longest) for window in kinds}

        def padding(size: int) -> int:
            return sum(-len(layers) % size * held[window] for window, layers in kinds.items())

        most = max(len(kinds), MOST_GROUPS)
        sizes = range(max(map(len, kinds.values())), 0, -1)
        few = [size for size in sizes if sum(-(-len(layers) // size) for layers in kinds.values()) <= most]
        size = min(few, key=padding)
        groups = list[int]()
        places = dict[int, tuple[int, int]]()
        for window, layers in kinds.items():
            count = -(-len(layers) // size)
            places |= {layer: (len(groups) + turn % count, turn // count) for turn, layer in enumerate(layers)}
            groups += [window] * count
        owners = sources or range(len(windows))
        return cls(tuple(groups), tuple(places[owner] for owner in owners))

    def of_layers(self, layers: range) -> "CacheGroups":
        """The groups as a stage of a pipeline has them. A block table is the same in all stages, and a stage has only
        its own layers' tensors."""
        kept, order = self.places[layers.start : layers.stop], dict[tuple[int, int], int]()
        for group, place in kept:
            order.setdefault((group, place), sum(one == group for one, _ in order))
        return CacheGroups(self.windows, tuple((group, order[group, place]) for group, place in kept))

    @property
    def num_tensors(self) -> int:
        """Tensors of the cache: one for each layer of the largest group."""
        return 1 + max(place for _, place in self.places)

    @property
    def padding(self) -> float:
        """The share of a block's memory, over all groups, that no layer uses."""
        return 1 - len(set(self.places)) / (self.num_tensors * len(self.windows))
