"""A cable that delays: `python -m bench.link.delay HERE THERE SECONDS`, in a network namespace. Linux and root only.

It makes two TUN devices of those names, and hands what one sends to the other, so many seconds later. It prints a line
once they are there; one of them is then moved to another namespace. It ends when its standard input does. Packets are
large, so that Python keeps up with 4 Gbit/s; what bounds the rate is the device's own queue (see `network`).
"""

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

MTU = 60_000
TUNSETIFF, TUN, BARE = 0x400454CA, 0x1, 0x1000  # of linux/if_tun.h; bare: without four bytes before each packet


def device(name: str) -> int:
    """A new TUN device; it goes with its descriptor."""
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(made, TUNSETIFF, struct.pack("16sH", name.encode(), TUN | BARE))
    return made


def carry(here: int, there: int, seconds: float) -> None:
    """Carry packets both ways until standard input ends."""
    other, end_of_input = {here: there, there: here}, sys.stdin.fileno()
    late = {end: deque[tuple[float, bytes]]() for end in other}  # by the device that gets them
    while True:
        now = time.monotonic()
        for end, packets in late.items():
            while packets and packets[0][0] <= now:
                _give(end, packets.popleft()[1])
        due = [packets[0][0] - now for packets in late.values() if packets]
        for ready in select.select([*other, end_of_input], [], [], max(0.0, min(due)) if due else None)[0]:
            if ready == end_of_input:
                return
            late[other[ready]].append((time.monotonic() + seconds, os.read(ready, MTU + 1)))


def _give(end: int, packet: bytes) -> None:
    with suppress(OSError):  # the device is not up yet, or is going: a network loses packets
        os.write(end, packet)


if __name__ == "__main__":
    here, there, seconds = sys.argv[1:]
    ends = device(here), device(there)
    print(flush=True)
    carry(*ends, float(seconds))
