"""The front end's handle of one engine process: start it, exchange messages, watch it, end it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq.asyncio

from nanoserve.errors import RuntimeFailure
from nanoserve.processes.sockets import SocketKeys, listen, local_address
from nanoserve.processes.temporary import choose_directory, make_directory, remove_directory
from nanoserve.processes.watchdog import GRACE_SECONDS, TiedChild
from nanoserve.server.messages import EngineMessage, EngineStart, Mailbox

START_SECONDS = 60.0
"""Time to the first heartbeat: Python starts and imports ZeroMQ, nothing more."""
LOADING_SILENCE_SECONDS = 120.0
"""Importing torch can hold the interpreter for a while."""
SILENCE_SECONDS = 10.0
"""Twenty missed heartbeats: the process is stopped, or its machine is."""

ENGINE_PROGRAM = "from nanoserve.server.engine_process import main; main()"
"""The Python code of the process."""


class EngineChild:
    """A process that runs the engine. Make it with ``start``, and ``end`` it in any case."""

    def __init__(self, process: TiedChild, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self._mailbox: Mailbox[EngineMessage] = Mailbox(zmq.asyncio.Context(io_threads=1), EngineMessage)
        self.send = self._mailbox.send
        self.ready = False  # set by the owner when the engine is ready; from then on less silence is tolerated

    @property
    def dropped(self) -> int:
        """Messages that could not be decoded."""
        return self._mailbox.dropped

    @classmethod
    async def start(cls, start: EngineStart, program: str = ENGINE_PROGRAM) -> "EngineChild":
        """Start the process; the model is loaded while its messages are read.

        Raises RuntimeFailure if it does not come up.
        """
        directory = choose_directory()
        child = cls(TiedChild(program, directory), directory)
        try:
            make_directory(directory)
            address, keys = local_address(directory), SocketKeys.random()
            listen(child._mailbox.socket, address, keys)
            child._process.tell(msgspec.json.encode(msgspec.structs.replace(start, address=address, key=keys.public)))
            if not await child._beats(START_SECONDS):
                raise RuntimeFailure("the engine process died at once; its own words are above")
            return child
        except BaseException as error:
            await child.end(GRACE_SECONDS)
            if isinstance(error, TimeoutError):
                raise RuntimeFailure(f"the engine process did not start within {START_SECONDS:g} s") from None
            raise

    async def messages(self) -> AsyncIterator[EngineMessage]:
        """Yield the engine's messages; undecodable ones are counted."""
        while True:
            for message in self._mailbox.decoded(await self._mailbox.socket.recv()):
                yield message

    async def death(self) -> str:
        """Wait until the process is dead, or kill it after too long a silence; returns what happened."""
        silence = 0.0
        while silence < (SILENCE_SECONDS if self.ready else LOADING_SILENCE_SECONDS):
            try:
                # Second by second: if the machine was suspended for a minute, that counts as one second of silence.
                if not await self._beats(1.0):
                    return await asyncio.to_thread(self._process.ending)
                silence = 0.0
            except TimeoutError:
                silence += 1.0
        await asyncio.to_thread(self._process.end)
        return f"gave no sign of life for {silence:g} s and was killed"

    async def end(self, grace_seconds: float = 0.0) -> None:
        """Kill the process if it lives after this time, and remove its socket and directory."""
        self._process.let_go()
        await asyncio.to_thread(self._process.end, time.monotonic() + grace_seconds)
        self._mailbox.close(linger=0)
        remove_directory(self._directory)

    async def _beats(self, seconds: float) -> bool:
        """Whether the process gives a sign of life, or is dead; raises TimeoutError if it does neither in time."""
        readable, loop = asyncio.Event(), asyncio.get_running_loop()
        loop.add_reader(self._process.pulse, readable.set)
        try:
            async with asyncio.timeout(seconds):
                await readable.wait()
        finally:
            loop.remove_reader(self._process.pulse)
        return self._process.beats()
