"""A terminal of a few rows that understands what the printers write."""

import re

from rich.cells import cell_len

_TOKEN = re.compile(r"\x1b\[([0-9;]*)([A-Za-z])|(.)", re.DOTALL)


class Screen:
    """``lines`` is all that was ever shown, scrolled away or not; only the last ``height`` can
    still be changed."""

    closed = False

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.lines = [""]
        self.row = self.column = 0
        self.top = 0  # the first row on the screen

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        pass

    def write(self, text: str) -> None:
        for number, command, character in _TOKEN.findall(text):
            if command == "A":
                self.row = max(self.top, self.row - int(number or 1))
            elif command == "H":
                self.row, self.column = self.top, 0
            elif command == "K":
                self.lines[self.row] = _cut(self.lines[self.row], self.column)
            # tmux keeps what it clears
            elif command == "J" and (self.row, self.column) == (self.top, 0):
                self.lines.append("")
                self.row = self.top = len(self.lines) - 1
            elif command == "J":
                self.lines = [*self.lines[: self.row], self.lines[self.row][: self.column]]
            elif character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.lines):
                    self.lines.append("")
                self.top = max(self.top, len(self.lines) - self.height)
            elif character:
                assert self.column + cell_len(character) <= self.width, (
                    "the terminal would have to break the line"
                )
                line = self.lines[self.row]
                assert cell_len(line) >= self.column
                self.lines[self.row] = line[: len(_cut(line, self.column))] + character
                self.column += cell_len(character)

    @property
    def window(self) -> list[str]:
        """Return the text on the screen now."""
        return self.lines[self.top :]

    @property
    def text(self) -> str:
        """Return all that a reader sees, scrolling back."""
        return "\n".join(line.rstrip() for line in self.lines).strip("\n")


def _cut(line: str, cells: int) -> str:
    while cell_len(line) > cells:
        line = line[:-1]
    return line
