"""The front end's handle of one engine process: start it, exchange messages, watch it, end it."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq.asyncio

from nanoserve.errors import RuntimeFailure
from nanoserve.processes.sockets import SocketKeys, local_address
from nanoserve.processes.temporary import choose_directory, make_directory, remove_directory
from nanoserve.processes.watchdog import GRACE_SECONDS, TiedChild
from nanoserve.server.messages import EngineMessage, EngineSockets, EngineStart, Mailbox

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

    def __init__(self, process: TiedChild, directory: Path, sockets: EngineSockets) -> None:
        self._process = process
        self._directory = directory
        self._mailbox: Mailbox[EngineMessage] = Mailbox(sockets, EngineMessage)
        self._reports = zmq.asyncio.Socket.from_socket(self._mailbox.incoming)
        self.send = self._mailbox.send
        self.ready = False  # set by the owner when the engine is ready; from then on less silence is tolerated

    @property
    def dropped(self) -> int:
        """Messages that could not be decoded."""
        return self._mailbox.dropped

    @classmethod
    async def start(cls, start: EngineStart, program: str = ENGINE_PROGRAM) -> "EngineChild":
        """Start the process; the model is loaded while its messages are read.

        Raises:
            RuntimeFailure: if it does not come up.
        """
        directory = choose_directory()
        sockets = EngineSockets(local_address(directory), local_address(directory), SocketKeys.random())
        process = TiedChild(program, directory)
        try:
            make_directory(directory)
            process.tell(msgspec.json.encode(sockets))
            process.tell(msgspec.json.encode(start))
            if not await _beats(process, START_SECONDS):
                raise RuntimeFailure("the engine process died at once; its own words are above")
            return cls(process, directory, sockets)
        except BaseException as error:
            process.let_go()
            await asyncio.to_thread(process.end, time.monotonic() + GRACE_SECONDS)
            remove_directory(directory)
            if isinstance(error, TimeoutError):
                raise RuntimeFailure(f"the engine process did not start within {START_SECONDS:g} s") from None
            raise

    async def messages(self) -> AsyncIterator[EngineMessage]:
        """Yield the engine's messages; undecodable ones are counted."""
        while True:
            for message in self._mailbox.decoded(await self._reports.recv()):
                yield message

    async def death(self) -> str:
        """Wait until the process is dead, or kill it after too long a silence; returns what happened."""
        silence = 0.0
        while silence < (SILENCE_SECONDS if self.ready else LOADING_SILENCE_SECONDS):
            try:
                # Second by second: if the machine was suspended for a minute, that counts as one second of silence.
                if not await _beats(self._process, 1.0):
                    return await asyncio.to_thread(self._process.ending)
                silence = 0.0
            except TimeoutError:
                silence += 1.0
        await asyncio.to_thread(self._process.end)
        return f"gave no sign of life for {silence:g} s and was killed"

    async def end(self) -> None:
        """Kill the process if it lives, and remove its sockets and directory."""
        await asyncio.to_thread(self._process.end)
        self._process.let_go()
        self._reports.close(linger=0)
        self._mailbox.close(linger=0)
        remove_directory(self._directory)


async def _beats(process: TiedChild, seconds: float) -> bool:
    """Whether the process gives a sign of life, or is dead.

    Raises:
        TimeoutError: if it does neither within this time.
    """
    readable, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_reader(process.pulse, readable.set)
    try:
        async with asyncio.timeout(seconds):
            await readable.wait()
    finally:
        loop.remove_reader(process.pulse)
    return process.beats()
