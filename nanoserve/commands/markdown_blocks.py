"""Cut streamed markdown into blocks (paragraph, list, code, heading) as soon as each is complete."""

import re
from dataclasses import dataclass, field
from enum import Enum

_FENCE = re.compile(r"^(\s*)(`{3,}|~{3,})(.*)$")
_HEADING = re.compile(r"^ {0,3}#{1,6}(\s|$)")
_LIST_ITEM = re.compile(r"^\s*([-*+]|\d{1,9}[.)])\s+\S")


class Kind(Enum):
    """What a block is; every kind ends by a rule of its own."""

    PARAGRAPH = "paragraph"
    LIST = "list"
    CODE = "code"
    HEADING = "heading"


@dataclass(frozen=True, slots=True)
class Block:
    """A finished block and its markdown source, without blank lines around it."""

    kind: Kind
    source: str


@dataclass(slots=True)
class BlockSplitter:
    """Takes text in any pieces; the blocks do not depend on how it was cut."""

    _kind: Kind | None = None
    _lines: list[str] = field(default_factory=list)
    _partial: str = ""
    _fence: str | None = None
    _finished: list[Block] = field(default_factory=list)

    @property
    def pending(self) -> str:
        """The source of the block that is not finished yet."""
        return "".join(f"{line}\n" for line in self._lines) + self._partial

    def push(self, text: str) -> list[Block]:
        """Take in text; return the blocks that it completed."""
        *lines, self._partial = (self._partial + text).split("\n")
        for line in lines:
            self._take_line(line)
        return self._hand_out()

    def finish(self) -> list[Block]:
        """The text has ended: return what was pending."""
        if self._partial:
            self._take_line(self._partial)
            self._partial = ""
        self._end_block()
        return self._hand_out()

    def _hand_out(self) -> list[Block]:
        finished, self._finished = self._finished, []
        return finished

    def _take_line(self, line: str) -> None:
        if self._fence is not None:
            self._take_code(line)
        elif self._kind is not None and not self._ends_before(line):
            self._lines.append(line)
            if self._kind is Kind.LIST:
                self._fence = _opening_fence(line)
        else:
            self._end_block()
            if line.strip():
                self._begin(line)

    def _take_code(self, line: str) -> None:
        self._lines.append(line)
        if line.strip().startswith(self._fence or "") and not line.strip().strip("`~"):
            self._fence = None
            if self._kind is Kind.CODE:
                self._end_block()

    def _ends_before(self, line: str) -> bool:
        """Whether the block that is open does not hold this line."""
        blank = not line.strip()
        if self._kind is Kind.PARAGRAPH:
            return blank or _begins_block(line)
        if blank or line[0] in " \t" or _LIST_ITEM.match(line):  # a list goes on over blank lines
            return False
        return not self._lines[-1].strip() or _begins_block(line)

    def _begin(self, line: str) -> None:
        self._lines = [line]
        if fence := _opening_fence(line):
            self._kind, self._fence = Kind.CODE, fence
        elif _HEADING.match(line):
            self._kind = Kind.HEADING
            self._end_block()
        elif _LIST_ITEM.match(line):
            self._kind = Kind.LIST
        else:
            self._kind = Kind.PARAGRAPH

    def _end_block(self) -> None:
        if self._kind is not None:
            source = "\n".join(self._lines).rstrip()
            self._finished.append(Block(self._kind, source))
        self._kind, self._lines, self._fence = None, [], None


def _opening_fence(line: str) -> str | None:
    match = _FENCE.match(line)
    if match is None or (match[2][0] == "`" and "`" in match[3]):  # ```code``` on one line is no fence
        return None
    return match[2]


def _begins_block(line: str) -> bool:
    return bool(_opening_fence(line) or _HEADING.match(line) or _LIST_ITEM.match(line))
