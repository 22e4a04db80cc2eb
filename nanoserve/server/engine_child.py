"""The front end's handle of one engine process: start it, exchange messages, watch it, end it."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.processes.children import describe_exit, kill_group, python_command
from nanoserve.processes.sockets import SocketKeys, connect, listen, local_address
from nanoserve.processes.temporary import choose_directory, make_directory, remove_directory
from nanoserve.server.messages import Command, EngineMessage, EngineSockets, EngineStart

START_SECONDS = 60.0
"""Time to the first heartbeat: Python starts and imports ZeroMQ, nothing more."""
LOADING_SILENCE_SECONDS = 120.0
"""Importing torch can hold the interpreter for a while."""
SILENCE_SECONDS = 10.0
"""Twenty missed heartbeats: the process is stopped, or its machine is."""
GRACE_SECONDS = 2.0
"""Time for a process to end by itself before it is killed."""

ENGINE_PROGRAM = "from nanoserve.server.engine_process import main; main()"
"""The Python code of the process."""


class EngineChild:
    """A process that runs the engine. Make it with ``start``, and ``end`` it in any case."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, sockets: EngineSockets) -> None:
        self._process = process
        self._directory = directory
        self._context = zmq.Context(io_threads=1)
        self._commands = self._context.socket(zmq.PUSH)
        self._commands.set(zmq.SNDHWM, 0)
        receiver = self._context.socket(zmq.PULL)
        receiver.set(zmq.RCVHWM, 0)
        listen(receiver, sockets.reports, sockets.keys)
        connect(self._commands, sockets.commands, sockets.keys.public)
        self._reports = zmq.asyncio.Socket.from_socket(receiver)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(EngineMessage)
        self.ready = False
        """Set by the owner when the engine is ready; from then on less silence is tolerated."""
        self.dropped = 0

    @classmethod
    async def start(cls, start: EngineStart, program: str = ENGINE_PROGRAM) -> "EngineChild":
        """Start the process; the model is loaded while its messages are read.

        Raises:
            RuntimeFailure: if it does not come up.
        """
        directory = choose_directory()
        sockets = EngineSockets(local_address(directory), local_address(directory), SocketKeys.random())
        process = await asyncio.create_subprocess_exec(
            *python_command(program, str(directory)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,  # Ctrl-C is for the front end, which then ends its engine
        )
        assert process.stdin is not None and process.stdout is not None
        try:
            make_directory(directory)
            process.stdin.write(msgspec.json.encode(sockets) + b"\n" + msgspec.json.encode(start) + b"\n")
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
            if not line.endswith(b"\n"):
                raise RuntimeFailure("the engine process died at once; its own words are above")
            return cls(process, directory, sockets)
        except BaseException as error:
            process.stdin.close()
            await _end_within(process, GRACE_SECONDS)
            remove_directory(directory)
            if isinstance(error, TimeoutError):
                raise RuntimeFailure(f"the engine process did not start within {START_SECONDS:g} s") from None
            raise

    def send(self, command: Command) -> None:
        """Queue a command; never waits."""
        self._commands.send(self._encoder.encode(command), zmq.NOBLOCK)

    async def messages(self) -> AsyncIterator[EngineMessage]:
        """Yield the engine's messages; undecodable ones are counted."""
        while True:
            data = await self._reports.recv()
            try:
                yield self._decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, NanoserveError):
                self.dropped += 1

    async def death(self) -> str:
        """Wait until the process is dead, or kill it after too long a silence; returns what happened."""
        assert self._process.stdout is not None
        silence = 0.0
        while silence < (SILENCE_SECONDS if self.ready else LOADING_SILENCE_SECONDS):
            try:
                # Second by second: if the machine was suspended for a minute, that counts as one second of silence.
                async with asyncio.timeout(1.0):
                    if not await self._process.stdout.read(4096):
                        return describe_exit(await self._process.wait())
                silence = 0.0
            except TimeoutError:
                silence += 1.0
        await _kill(self._process)
        return f"gave no sign of life for {silence:g} s and was killed"

    async def end(self) -> None:
        """Kill the process if it lives, and remove its sockets and directory."""
        await _kill(self._process)
        self._reports.close(linger=0)
        self._context.destroy(linger=0)
        remove_directory(self._directory)


async def _end_within(process: asyncio.subprocess.Process, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await process.wait()
    await _kill(process)


async def _kill(process: asyncio.subprocess.Process) -> None:
    kill_group(process.pid)
    await process.wait()
