"""Show an answer while it streams: as it is, or on a terminal with every finished markdown block
rendered in its place.

On a terminal, the unfinished block (without markdown, the unfinished line) is drawn again with each
piece of text. It never grows beyond the window, so that it can always be erased.
"""

from itertools import pairwise
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.containers import Lines
from rich.live_render import LiveRender
from rich.text import Text

from nanoserve.commands.terminal import is_terminal, visible

_HEADING_OF_THOUGHTS = "Thinking…\n"
_CODE_THEME = "ansi_dark"  # the terminal's own colours
_HEADING, _PARAGRAPH, _TEXT = "heading_open", "paragraph_open", "text"
_OVER_AT_ONCE = (_HEADING, "hr")
# they go on behind blank lines
_OVER_BEFORE_ANOTHER = ("bullet_list_open", "ordered_list_open", "code_block")


class Block(NamedTuple):
    kind: str  # the type of its first token in the parser
    source: str  # its markdown without blank lines around it


class BlockSplitter:
    """Cuts streamed markdown into blocks as soon as each is complete; they do not depend on how the
    text comes."""

    def __init__(self) -> None:
        self.pending = ""  # the source of the block that is not finished yet

    def push(self, text: str) -> list[Block]:
        """Take in text; return the blocks that it completed."""
        blocks = []
        first, *others = text.split("\n")
        self.pending += first
        for line in others:
            self.pending += "\n"
            blocks += self.cut()
            self.pending += line
        return blocks

    def cut(self, *, ended: bool = False) -> list[Block]:
        """Cut off the complete blocks of the pending text; all of it when the text has ended."""
        if not self.pending.strip():
            self.pending = ""
            return []
        from rich.markdown import Markdown  # here and below: late, because it is large

        tops = [
            token
            for token in Markdown(self.pending).parsed
            if token.level == 0 and token.nesting >= 0
        ]
        if ended and not tops:  # it has only what other blocks would refer to
            rest, self.pending = self.pending.rstrip(), ""
            return [Block(_TEXT, rest)]
        lines = self.pending.split("\n")
        finished = tops
        if not ended and tops and not _is_over(tops[-1], lines):
            finished = tops[:-1]
        starts = [token.map[0] for token in tops[1:] if token.map]
        sources = [
            "\n".join(lines[start:end]) for start, end in pairwise([0] + starts + [len(lines)])
        ]
        self.pending = "\n".join(sources[len(finished) :])
        blocks = []
        for token, source in zip(finished, sources, strict=False):
            blocks.append(Block(token.type, source.strip("\n").rstrip()))
        return blocks


def _is_over(token: Any, lines: list[str]) -> bool:
    """Whether nothing more can come to the last block; ``lines`` end with the part behind the last
    line break."""
    last = lines[-2].strip()
    if token.type == "fence":
        closes = last.startswith(token.markup) and not last.strip(token.markup[0])
        return closes and token.map is not None and token.map[1] - token.map[0] > 1
    return token.type in _OVER_AT_ONCE or (not last and token.type not in _OVER_BEFORE_ANOTHER)


class _LineSplitter(BlockSplitter):
    """Every line is a block, also an empty one."""

    def cut(self, *, ended: bool = False) -> list[Block]:
        *lines, self.pending = self.pending.split("\n")
        if ended and self.pending:
            lines.append(self.pending)
            self.pending = ""
        return [Block(_TEXT, line) for line in lines]


class _ThoughtSplitter(BlockSplitter):
    """Reasoning under its heading, of which one line stays when it has ended."""

    def push(self, text: str) -> list[Block]:
        self.pending = (self.pending or _HEADING_OF_THOUGHTS) + text
        return []

    def cut(self, *, ended: bool = False) -> list[Block]:
        words, self.pending = self.pending.split()[1:], ""
        if len(words) == 1:
            return [Block(_TEXT, "Thought: 1 word")]
        return [Block(_TEXT, f"Thought: {len(words)} words")]


class AnswerPrinter:
    """Shows one answer: raw where nobody watches, else in whole words, and rendered if it is
    markdown.

    The reasoning goes to another terminal or the same, and is folded when it ends; None hides it.
    """

    def __init__(
        self, answers: Console, thoughts: Console | None = None, *, markdown: bool = False
    ) -> None:
        self._file, self._markdown = answers.file, markdown
        self._answer = self._thoughts = None
        if markdown:
            self._answer = _Redrawn(answers, BlockSplitter())
        elif is_terminal(answers.file):
            self._answer = _Redrawn(answers, _LineSplitter())
        if thoughts is not None:
            self._thoughts = _Redrawn(thoughts, _ThoughtSplitter(), style="dim")
        self._last = "\n"

    @property
    def shows_thoughts(self) -> bool:
        return self._thoughts is not None

    def thinking(self, text: str) -> None:
        if self._thoughts is not None:
            if self._answer is not None:
                self._answer.draft("")
            self._thoughts.write(text)

    def draft(self, thinking: str, answer: str) -> None:
        """Show text that may still change in faint type, in the place of the last draft. Nothing
        shows it where nobody watches."""
        thoughts = self._thoughts
        if thoughts is not None and (thinking or thoughts.written):
            if self._answer is not None:
                self._answer.draft("")
            heading = "" if thoughts.written else _HEADING_OF_THOUGHTS
            thoughts.draft(heading + "\n\n".join(part for part in (thinking, answer) if part))
            return
        if thoughts is not None:
            thoughts.draft("")
        if self._answer is not None:
            self._answer.draft(answer)

    def answer(self, text: str) -> None:
        self._end_thoughts()
        if self._answer is not None:
            self._answer.write(text)
            return
        if self._file.isatty():
            text = visible(text)
        self._file.write(text)
        self._file.flush()
        self._last = text[-1:] or self._last

    def finish(self) -> None:
        """End the line: the answer has ended, was interrupted, or something else is to be said
        below it."""
        self._end_thoughts()
        if self._answer is not None:
            self._answer.finish()
        elif self._last != "\n":
            self.answer("\n")

    def lose_place(self) -> None:
        """Something else has written to the terminal; the cursor is at the start of a line."""
        for shown in (self._answer, self._thoughts):
            if shown is not None:
                shown.lost = True

    def _end_thoughts(self) -> None:
        if self._thoughts is None:
            return
        if not self._thoughts.written:
            self._thoughts.draft("")
            return
        self._thoughts.finish()
        if self._markdown:
            self._file.write("\n")


class _Redrawn:
    """Text on a terminal: finished blocks stay, and what is pending is drawn again in its place,
    with a draft after it."""

    def __init__(self, console: Console, splitter: BlockSplitter, style: str = "") -> None:
        self._console, self._splitter, self._style, self._size = (
            console,
            splitter,
            style,
            console.size,
        )
        self._begin()

    def _begin(self) -> None:
        self._region, self._rows, self._last_row = LiveRender(""), 0, ""
        self._left = 0  # pending characters that stay as they are, above the region
        self._draft = ""
        self.written = self.lost = False  # lost: something else has written to the terminal

    def write(self, text: str) -> None:
        text = visible(text)
        goes_on = self.written and not self._draft and "\n" not in text
        erased, row = self._erased(), self._last_row + text
        self._draft = ""
        blocks = self._splitter.push(text)
        if self._rows and goes_on and cell_len(row) <= self._size.width:  # much cheaper
            self._last_row = row
            self._console.file.write(self._ansi(Text(text, self._style)))
            self._console.file.flush()
        else:
            self._draw(erased, blocks)
        self.written = True

    def draft(self, text: str) -> None:
        """Show this behind the text in faint type until the next text or draft; an empty one takes
        the last one away."""
        text = visible(text)
        if text != self._draft:
            erased = self._erased()
            self._draft = text
            self._draw(erased, [])

    def finish(self) -> None:
        erased = self._erased()
        self._draft = ""
        self._draw(erased, self._splitter.cut(ended=True))
        self._begin()

    def _draw(self, output: str, blocks: list[Block]) -> None:
        """Write the finished blocks, and below them the end of what is pending and the draft."""
        for block in blocks:
            output += self._rendered(block)
            self._left = 0
        height = self._size.height
        lines = self._splitter.pending[self._left :].split("\n")[-height:]
        text = Text("\n".join(lines), self._style).append(self._draft, "dim")
        rows = text.wrap(self._console, self._size.width)[-height:]
        self._region.set_renderable(Text("\n").join(rows))
        self._rows, self._last_row = len(rows), rows[-1].plain
        self._console.file.write(output + self._ansi(self._region))
        self._console.file.flush()

    def _erased(self) -> str:
        """Codes that take the cursor back to the start of the region; if its place is unknown, the
        region stays."""
        # not all of the text is there to be left as it is
        fills_window = self._rows >= self._size.height
        was_resized = self._console.size != self._size
        self._size = self._console.size
        if not self.lost and (fills_window or not was_resized):
            return self._ansi(self._region.position_cursor())
        pending, draft, was_lost = self._splitter.pending, self._draft, self.lost
        self._begin()
        if not fills_window:
            self._left = len(pending)
        if was_lost or not (pending or draft):
            return ""
        return "\n"

    def _rendered(self, block: Block) -> str:
        source = block.source
        if self._left:
            return self._rendered_rest(block)
        if block.kind == _TEXT:
            return self._plain(source) + "\n"
        if block.kind == _PARAGRAPH:  # lines of a poem stay lines
            source = source.replace("\n", "  \n")
        # rich would centre it in a box
        if block.kind == _HEADING and source.lstrip().startswith("#"):
            source = f"**{source.strip().strip('#').strip()}**"
        from rich.markdown import Markdown

        return (
            self._ansi(Markdown(source, code_theme=_CODE_THEME, hyperlinks=False)).strip("\n")
            + "\n\n"
        )

    def _rendered_rest(self, block: Block) -> str:
        """The end of a block whose beginning stays as it is."""
        line_breaks = "\n" if block.kind == _TEXT else "\n\n"
        rest = block.source[self._left :].strip()
        if not rest:
            return line_breaks.removeprefix("\n")
        return self._plain(rest) + line_breaks

    def _plain(self, text: str) -> str:
        return self._ansi(Text("\n").join(self._wrapped(text)))

    def _wrapped(self, text: str) -> Lines:
        return Text(text, self._style).wrap(self._console, self._size.width)

    def _ansi(self, shown: RenderableType) -> str:
        with self._console.capture() as capture:
            self._console.print(shown, end="")
        return capture.get()
