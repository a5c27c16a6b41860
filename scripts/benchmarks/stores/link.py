"""A line between clients and a server on this machine: as fast and as far as it is told, in both directions.

Not here: the server (tests/support/faults/bucket). A process of its own: `python -m benchmarks.stores.link PORT RATE`,
in bytes per second in each direction. Connections take turns, a piece each, as with the queues of Linux (fq_codel):
otherwise a request for a chunk would wait for all that others are sending.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

LATENCY_SECONDS = 0.02  # there and back
QUEUE_SECONDS = 0.05  # of pieces that wait to leave, so that this process may be late by as much
PIECE_SECONDS, LEAST_PIECE, LARGEST_PIECE = 1e-3, 1 << 14, 1 << 17
WINDOW_BYTES = 1 << 21  # of a connection, on their way


class Direction:
    """One direction of the line: pieces leave it one after the other, each as long after it came as the line is far."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._turn = rate, 0.0, asyncio.Lock()
        self.piece = min(LARGEST_PIECE, max(LEAST_PIECE, int(rate * PIECE_SECONDS)))

    async def arrival(self, num_bytes: int) -> float:
        """Return when a piece arrives, once it is its turn."""
        clock = asyncio.get_running_loop().time
        async with self._turn:  # in the order in which they came
            await asyncio.sleep(self._free - clock() - QUEUE_SECONDS)
            self._free = max(clock(), self._free) + num_bytes / self._rate
            return self._free + LATENCY_SECONDS / 2


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: Direction) -> None:
    """Bring what `reader` gives to `writer` by `line`, until the connection ends."""
    clock = asyncio.get_running_loop().time
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(WINDOW_BYTES // line.piece)

    async def send() -> None:
        while True:
            at, piece = await pieces.get()
            await asyncio.sleep(at - clock())
            if not piece:
                break
            writer.write(piece)
            await writer.drain()

    sender = asyncio.create_task(send())
    with contextlib.suppress(ConnectionError):
        while piece := await reader.read(line.piece):
            await pieces.put((await line.arrival(len(piece)), piece))
    await pieces.put((clock(), b""))
    with contextlib.suppress(ConnectionError):
        await sender
        writer.close()


async def serve(port: int, rate: float) -> None:
    """Carry connections to `port` of this machine; print the port that they are to come to."""
    there, back = Direction(rate), Direction(rate)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port, limit=LARGEST_PIECE)
        await asyncio.gather(carry(reader, far_writer, there), carry(far_reader, writer, back))

    server = await asyncio.start_server(connect, "127.0.0.1", 0, limit=LARGEST_PIECE, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2])))
