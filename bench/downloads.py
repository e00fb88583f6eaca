"""What several requests at once gain for a large object: python -m bench.downloads

A server of this file bounds what each connection brings and answers after a delay, as services and distances do; the
link itself is the loopback. The same object is streamed by one request and as `RemoteStore` does, in turns.
"""

import asyncio
import multiprocessing
import os
import re
import secrets
import statistics
import time
from contextlib import suppress
from multiprocessing.connection import Connection

import pulse_rl as pulse
from pulse_rl.store import remote

NBYTES = 1 << 28
ROUNDS = 3
LINKS = ((0.0, 0.0), (90e6, 0.02), (16e6, 0.3))  # bytes a second of a connection, 0 for no bound; seconds to an answer
PART_NBYTES = 1 << 18


def serve(rate: float, delay: float, told: Connection) -> None:
    """Serve one object, by any name, to GET requests with or without a range; says its port."""
    data = secrets.token_bytes(PART_NBYTES) * (NBYTES // PART_NBYTES)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                wanted = re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d+)", head)
                start, stop = (int(wanted[1]), min(int(wanted[2]) + 1, NBYTES)) if wanted else (0, NBYTES)
                await asyncio.sleep(delay)
                status = f"206 P\r\nContent-Range: bytes {start}-{stop - 1}/{NBYTES}" if wanted else "200 OK"
                more = f"Content-Length: {stop - start}\r\nLast-Modified: Sat, 21 Nov 2026 00:00:00 GMT\r\nETag: x"
                writer.write(f"HTTP/1.1 {status}\r\n{more}\r\n\r\n".encode())
                began = time.monotonic()
                for at in range(start, stop, PART_NBYTES):
                    writer.write(data[at : min(at + PART_NBYTES, stop)])
                    await writer.drain()
                    if rate:
                        await asyncio.sleep(max(0.0, (at + PART_NBYTES - start) / rate - (time.monotonic() - began)))
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        told.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


def main() -> None:
    ranges = {"one request": 2 * NBYTES, "eight at once": remote.RANGE_NBYTES}
    for rate, delay in LINKS:
        here, there = multiprocessing.Pipe()
        server = multiprocessing.Process(target=serve, args=(rate, delay, there), daemon=True)
        server.start()
        endpoint = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{here.recv()}", "AWS_ALLOW_HTTP": "true"}
        os.environ |= endpoint | {"AWS_SKIP_SIGNATURE": "true", "AWS_REGION": "us-east-1"}
        store = pulse.open_store("s3://bucket/run")
        seconds: dict[str, list[float]] = {name: [] for name in ranges}
        for _ in range(ROUNDS):
            for name, nbytes in ranges.items():
                remote.RANGE_NBYTES = nbytes
                began = time.perf_counter()
                assert sum(len(part) for part in store.stream("x")) == NBYTES
                seconds[name].append(time.perf_counter() - began)
        server.kill()
        bound = f"{rate / 1e6:.0f} MB/s a connection" if rate else "no bound"
        found = ", ".join(f"{name} {statistics.median(each):.2f} s" for name, each in seconds.items())
        print(f"{NBYTES / 1e6:.0f} MB, {bound}, answers after {delay * 1e3:.0f} ms: {found}")


if __name__ == "__main__":
    main()
