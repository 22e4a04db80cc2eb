"""Show an answer while it streams: plain, or on a terminal with every finished markdown block set anew in place.

The text of the unfinished block is written as it comes. When the block is complete, the cursor goes back to where it
began and the block is written again, rendered. That needs every row of it still to be on the screen: a block that has
grown beyond the screen stays as it was streamed. Lines are broken here, not by the terminal, so that the number of
rows is known.
"""

import shutil
import unicodedata
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TextIO

from nanoserve.commands.markdown_blocks import Block, BlockSplitter, Kind

if TYPE_CHECKING:
    from rich.console import Console

DIM, NORMAL = "\x1b[2m", "\x1b[0m"
_TAB = "    "
_EMOJI_PRESENTATION = "\ufe0f"  # widens the character before it
_CODE_THEME = "ansi_dark"  # the terminal's own colours

Size = Callable[[], tuple[int, int]]


class AnswerPrinter(Protocol):
    """Where the pieces of one answer go."""

    def thinking(self, text: str) -> None:
        """Show a piece of the reasoning."""

    def answer(self, text: str) -> None:
        """Show a piece of the answer."""

    def finish(self) -> None:
        """The answer has ended, or was interrupted."""


class PlainPrinter:
    """The answer as it is, to a pipe or a file; the reasoning goes to its own stream, if there is one."""

    def __init__(self, answers: TextIO, thoughts: TextIO | None = None):
        self._answers = answers
        self._thoughts = thoughts
        self._thought = False
        self._last = "\n"

    def thinking(self, text: str) -> None:
        if self._thoughts is not None:
            self._thoughts.write(f"{DIM}{visible(text)}{NORMAL}")
            self._thoughts.flush()
            self._thought = True

    def answer(self, text: str) -> None:
        if self._thought and self._thoughts is not None:
            self._thoughts.write("\n")
            self._thought = False
        self._answers.write(visible(text) if self._answers.isatty() else text)
        self._answers.flush()
        self._last = text[-1:] or self._last

    def finish(self) -> None:
        if self._last != "\n":
            self._answers.write("\n")
        self._answers.flush()


class MarkdownPrinter:
    """The answer on a terminal, rendered block by block."""

    def __init__(self, console: "Console", size: Size = shutil.get_terminal_size):
        self._console = console
        self._size = size
        self._splitter = BlockSplitter()
        self._raw = _RawText(size())
        self._thoughts: _RawText | None = None

    def thinking(self, text: str) -> None:
        if self._thoughts is None:
            self._thoughts = _RawText(self._size())
        self._write(f"{DIM}{self._thoughts.lay_out(visible(text))}{NORMAL}")

    def answer(self, text: str) -> None:
        output = self._end_of_thoughts()
        for piece in visible(text).splitlines(keepends=True):
            output += self._show(piece)
        self._write(output)

    def finish(self) -> None:
        output = self._end_of_thoughts()
        on_screen = self._raw.erasable(self._size())
        blocks = self._splitter.finish()
        if blocks and on_screen:
            output += self._raw.erase() + "".join(map(self._rendered, blocks))
        elif self._raw.column:
            output += "\n"
        self._raw = _RawText(self._size())
        self._write(output)

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
                return self._restart("") if self._raw.rows or self._raw.column else ""
            return self._raw.lay_out(piece)
        if self._raw.erasable(self._size()):
            return self._restart("".join(map(self._rendered, blocks)))
        blank_line = self._raw.column == 0 and not piece.strip()
        stays = self._raw.lay_out(piece)
        self._raw = _RawText(self._size())
        self._raw.lay_out(pending)  # it is on the screen already
        return stays if pending or blank_line else f"{stays}\n"

    def _restart(self, rendered: str) -> str:
        erase = self._raw.erase()
        self._raw = _RawText(self._size())
        return erase + rendered + self._raw.lay_out(self._splitter.pending)

    def _rendered(self, block: Block) -> str:
        from rich.markdown import Markdown

        source = block.source
        if block.kind is Kind.PARAGRAPH:  # lines of a poem stay lines
            source = source.replace("\n", "  \n")
        if block.kind is Kind.HEADING:  # rich would centre it in a box
            source = f"**{source.strip().strip('#').strip()}**"
        markdown = Markdown(source, code_theme=_CODE_THEME, hyperlinks=False)
        with self._console.capture() as capture:
            self._console.print(markdown, width=self._size()[0])
        return capture.get().strip("\n") + "\n\n"

    def _write(self, text: str) -> None:
        self._console.file.write(text)
        self._console.file.flush()


class _RawText:
    """Text written as it comes, broken at the terminal's width, of which the number of rows is known."""

    def __init__(self, size: tuple[int, int]):
        self._size = size
        self.rows = 0  # line breaks so far
        self.column = 0

    def lay_out(self, text: str) -> str:
        written = []
        for character in text:
            width = 1 if character == _EMOJI_PRESENTATION else _cells(character)
            if character == "\n":
                self.rows, self.column = self.rows + 1, 0
            elif self.column + width > self._size[0]:
                written.append("\n")
                self.rows, self.column = self.rows + 1, width
            else:
                self.column += width
            written.append(character)
        return "".join(written)

    def erasable(self, size: tuple[int, int]) -> bool:
        """Whether all rows are still on the screen, and as wide as when they were written."""
        return size == self._size and self.rows < size[1]

    def erase(self) -> str:
        up = f"\x1b[{self.rows}A" if self.rows else ""
        return f"\r{up}\x1b[J"


def visible(text: str) -> str:
    """Text without characters that would steer a terminal; a model's answer may hold escape sequences."""
    text = text.replace("\t", _TAB)
    return "".join(char for char in text if char == "\n" or unicodedata.category(char) not in ("Cc", "Zl", "Zp"))


def _cells(character: str) -> int:
    from rich.cells import cell_len

    return cell_len(character)
