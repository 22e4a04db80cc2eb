"""Show an answer while it streams: plain, or on a terminal with every finished markdown block rendered in its place.

The text of the unfinished block is a preview. When the block is complete, the cursor goes back to where it began and
the block is written again, rendered. So that every row of the preview is still on the screen then, a preview never
grows beyond the window: when it fills all rows, the first one goes for each that comes. Lines are broken here, not by
the terminal, so that the number of rows is known.
"""

import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.markdown import Markdown

from nanoserve.commands.terminal import DIM, NORMAL, is_terminal

_TAB = "    "
_EMOJI_PRESENTATION = "\ufe0f"  # widens the character before it
_CODE_THEME = "ansi_dark"  # the terminal's own colours
_HEADING, _PARAGRAPH = "heading_open", "paragraph_open"
_OVER_AT_ONCE = (_HEADING, "hr")
_OVER_BEFORE_ANOTHER = ("bullet_list_open", "ordered_list_open", "code_block")  # they go on behind blank lines

Size = Callable[[], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Block:
    """A finished block: the type of its first token in the parser, and its markdown without blank lines around it."""

    kind: str
    source: str


class BlockSplitter:
    """Cuts streamed markdown into blocks as soon as each is complete; they do not depend on how the text comes."""

    def __init__(self) -> None:
        self.pending = ""  # the source of the block that is not finished yet

    def push(self, text: str) -> list[Block]:
        """Take in text; return the blocks that it completed."""
        blocks = []
        first, *others = text.split("\n")
        self.pending += first
        for line in others:
            self.pending += "\n"
            blocks += self._cut(ended=False)
            self.pending += line
        return blocks

    def finish(self) -> list[Block]:
        """The text has ended: return what was pending."""
        return self._cut(ended=True)

    def _cut(self, *, ended: bool) -> list[Block]:
        if not self.pending.strip():
            self.pending = ""
            return []
        tops = [token for token in Markdown(self.pending).parsed if token.level == 0 and token.nesting >= 0]
        lines = self.pending.split("\n")
        whole = len(tops) if ended or (tops and _is_over(tops[-1], lines)) else max(0, len(tops) - 1)
        starts = [0, *(token.map[0] for token in tops[1:] if token.map), len(lines)]
        sources = ["\n".join(lines[start:end]) for start, end in pairwise(starts)]
        self.pending = "\n".join(sources[whole:])
        return [
            Block(token.type, source.strip("\n").rstrip()) for token, source in zip(tops[:whole], sources, strict=False)
        ]


def _is_over(token: Any, lines: list[str]) -> bool:
    """Whether nothing more can come to the last block; ``lines`` end with the part behind the last line break."""
    last = lines[-2].strip()
    if token.type == "fence":
        closes = last.startswith(token.markup) and not last.strip(token.markup[0])
        return closes and token.map is not None and token.map[1] - token.map[0] > 1
    return token.type in _OVER_AT_ONCE or (not last and token.type not in _OVER_BEFORE_ANOTHER)


class PlainPrinter:
    """The answer as it is; the reasoning goes to its own stream, if there is one. Terminals get whole words."""

    def __init__(self, answers: TextIO, thoughts: TextIO | None = None, size: Size = shutil.get_terminal_size):
        self._answers, self._thoughts, self._size = answers, thoughts, size
        self._laid_out = _Words(size) if is_terminal(answers) else None
        self._laid_out_thoughts = _Words(size)
        self._thought = False
        self._last = "\n"

    def thinking(self, text: str) -> None:
        """Show a piece of the reasoning."""
        if self._thoughts is not None:
            self._thoughts.write(f"{DIM}{self._laid_out_thoughts.lay_out(visible(text))}{NORMAL}")
            self._thoughts.flush()
            self._thought = True

    def answer(self, text: str) -> None:
        """Show a piece of the answer."""
        self._end_thoughts()
        shown = visible(text) if self._answers.isatty() else text
        self._answers.write(shown if self._laid_out is None else self._laid_out.lay_out(shown))
        self._answers.flush()
        self._last = text[-1:] or self._last

    def finish(self) -> None:
        """End the line: the answer has ended, was interrupted, or something else is to be said below it."""
        self._end_thoughts()
        if self._last != "\n":
            self.answer("\n")
        self._answers.flush()

    def lose_place(self) -> None:
        """Something else has written to the terminal; the cursor is at the start of a line."""
        self._laid_out_thoughts = _Words(self._size)
        if self._laid_out is not None:
            self._laid_out = _Words(self._size)

    def _end_thoughts(self) -> None:
        if self._thought and self._thoughts is not None:
            self._thoughts.write("\n")
            self._laid_out_thoughts = _Words(self._size)
            self._thought = False


class MarkdownPrinter:
    """The answer on a terminal, rendered block by block."""

    def __init__(self, console: Console, size: Size = shutil.get_terminal_size):
        self._console = console
        self._size = size
        self._splitter = BlockSplitter()
        self._preview = _Preview(size)
        self._thoughts: _Words | None = None

    def thinking(self, text: str) -> None:
        if self._thoughts is None:
            self._thoughts = _Words(self._size)
        self._write(f"{DIM}{self._thoughts.lay_out(visible(text))}{NORMAL}")

    def answer(self, text: str) -> None:
        output = self._end_of_thoughts()
        for piece in visible(text).splitlines(keepends=True):
            output += self._show(piece)
        self._write(output)

    def finish(self) -> None:
        output = self._end_of_thoughts()
        blocks = self._splitter.finish()
        if blocks and self._preview.erasable:
            output += self._preview.erase() + "".join(map(self._rendered, blocks))
        elif self._preview.column:
            output += "\n"
        self._preview = _Preview(self._size)
        self._write(output)

    def lose_place(self) -> None:
        for text in (self._preview, self._thoughts):
            if text is not None:
                text.lose_place()

    def _end_of_thoughts(self) -> str:
        if self._thoughts is None:
            return ""
        on_line = self._thoughts.column > 0
        self._thoughts = None
        return "\n\n" if on_line else "\n"

    def _show(self, piece: str) -> str:
        """What to write for a piece that ends with a line break or has none."""
        blocks = self._splitter.push(piece)
        pending = self._splitter.pending
        if not blocks:
            if not pending:  # a blank line between blocks: the space after a block is already there
                return self._restart("") if self._preview.rows or self._preview.column else ""
            return self._preview.lay_out(piece)
        if self._preview.erasable:
            return self._restart("".join(map(self._rendered, blocks)))
        blank_line = self._preview.column == 0 and not piece.strip()
        stays = self._preview.lay_out(piece)
        self._preview = _Preview(self._size)
        self._preview.lay_out(pending)  # it is on the screen already
        return stays if pending or blank_line else f"{stays}\n"

    def _restart(self, rendered: str) -> str:
        erase = self._preview.erase()
        self._preview = _Preview(self._size)
        return erase + rendered + self._preview.lay_out(self._splitter.pending)

    def _rendered(self, block: Block) -> str:
        source = block.source
        if block.kind == _PARAGRAPH:  # lines of a poem stay lines
            source = source.replace("\n", "  \n")
        if block.kind == _HEADING and source.lstrip().startswith("#"):  # rich would centre it in a box
            source = f"**{source.strip().strip('#').strip()}**"
        markdown = Markdown(source, code_theme=_CODE_THEME, hyperlinks=False)
        with self._console.capture() as capture:
            self._console.print(markdown, width=self._size()[0])
        return capture.get().strip("\n") + "\n\n"

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


AnswerPrinter = PlainPrinter | MarkdownPrinter
"""Where the pieces of one answer go."""


class _Words:
    """Text written as it comes, of which a word that does not fit on its line moves to the next one."""

    def __init__(self, size: Size):
        self._size = size
        self._began = size()
        self.column = 0
        self._word = ""  # what may move: written since the last blank
        self._word_column = 0
        self._lost = False

    def lose_place(self) -> None:
        self._lost = True
        self._begin_word(0)

    @property
    def moved(self) -> bool:
        """Whether nobody knows where its lines are: the terminal has another size, or others have written to it."""
        return self._lost or self._size() != self._began

    def lay_out(self, text: str) -> str:
        """What to write for ``text``."""
        stays = self._size() != self._began
        written = []
        for character in text:
            cells = 1 if character == _EMOJI_PRESENTATION else cell_len(character)
            if character == "\n":
                written.append(self._break_line())
                self._begin_word(0)
            elif character == " " and self.column == self._began[0]:  # the break takes its place
                self._begin_word(self.column)
            else:
                if self.column + cells > self._began[0]:
                    written.append(self._move_word(stays=stays or cells > 1))
                written.append(character)
                self.column += cells
                self._word += character
                if character == " " or cells > 1:  # a line may end behind every wide character
                    self._begin_word(self.column)
        return "".join(written)

    def _begin_word(self, column: int) -> None:
        self._word, self._word_column, self.column = "", column, column

    def _move_word(self, *, stays: bool) -> str:
        """Go to the next line, and take along what there is of the last word unless it fills the line."""
        word, start, end = self._word, self._word_column, self.column
        if stays or start in (0, end):
            self._begin_word(0)
            return self._break_line()
        self._word_column, self.column = 0, end - start
        return f"\r\x1b[{start}C\x1b[K{self._break_line()}{word}"

    def _break_line(self) -> str:
        return "\n"


class _Preview(_Words):
    """Text that will be erased, and so never fills more than the window."""

    def __init__(self, size: Size):
        super().__init__(size)
        self.rows = 0  # line breaks on the screen
        self._has_scrolled = False

    @property
    def erasable(self) -> bool:
        """Whether it can be replaced: its rows are where they were, or not all of it is there to be left as it is."""
        return self._has_scrolled or not self.moved

    def erase(self) -> str:
        if self._lost:
            return "\n"
        # Row by row: some terminals keep what is on a screen that is cleared as a whole.
        return "\r\x1b[K" + "\x1b[A\x1b[K" * self.rows

    def _break_line(self) -> str:
        fills_window = self.rows == self._began[1] - 1 and not self.moved
        if not (fills_window or self._has_scrolled):
            self.rows += 1
            return "\n"
        self._has_scrolled = True
        return f"\r\x1b[{self.rows}A\x1b[M\x1b[{self.rows}B"  # deletes the first row, so that the last one is blank


def visible(text: str) -> str:
    """Text without characters that would steer a terminal; a model's answer may hold escape sequences."""
    text = text.replace("\t", _TAB)
    return "".join(char for char in text if char == "\n" or unicodedata.category(char) not in ("Cc", "Zl", "Zp"))
