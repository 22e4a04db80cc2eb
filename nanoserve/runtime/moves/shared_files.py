"""Files in memory that an engine makes and its workers open by name."""

import os
from pathlib import Path


class SharedFiles:
    """Such files, in a private directory of the engine; each is there as long as it is open or mapped anywhere.

    On Linux the name leads to a descriptor of this process, and the file is in no file system: however all processes
    end, and whenever, nothing of it is left. Elsewhere it is a file of that directory.
    """

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def make(self, path: Path) -> None:
        """An empty file under a name that nothing has.

        Raises:
            OSError: if that cannot be.
        """
        if not hasattr(os, "memfd_create"):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))
            return
        self._descriptors[path] = descriptor = os.memfd_create(path.name)
        path.symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")

    def close(self) -> None:
        """Everybody has opened them: they need no names any more."""
        while self._descriptors:
            path, descriptor = self._descriptors.popitem()
            path.unlink(missing_ok=True)
            os.close(descriptor)
