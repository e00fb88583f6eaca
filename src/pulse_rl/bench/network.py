"""Narrow links, for real: a hub and workers in network namespaces of their own, joined by shaped Ethernet pairs.

The namespaces have no names. Each lives as long as the processes in it, and the first of these ends when this
process does, however it ends, since nobody holds its standard input open any more; then the kernel takes the
namespace down and its links with it. Nothing is ever to be seen in the host's own namespace. Linux and root only.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from pulse_rl.errors import PulseError

TOOLS = ("ip", "tc", "unshare", "nsenter")  # of Debian's iproute2 and util-linux
BURST_S = 0.002  # of the rate: what an idle link may send at once. Small, as patches are
MIN_BURST_NBYTES = 2000  # more than one packet, or none would ever go
QUEUE_S = 0.1  # what waits longer for its turn is dropped


class Network:
    """A hub with a link to each of some workers; a context manager that takes everything down again."""

    def __init__(self, workers: int) -> None:
        """Raises PermissionError where this user may not make namespaces, PulseError if a tool is missing or fails."""
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise PermissionError(
                "bench link: expected Linux and root, who may make network namespaces and shape their links, found "
                f"{sys.platform} and user {os.getuid() if hasattr(os, 'getuid') else 'unknown'}; run it as root"
            )
        missing = [tool for tool in TOOLS if _path(tool) is None]
        if missing:
            raise PulseError(f"bench link: no {', '.join(missing)}: install the packages iproute2 and util-linux")
        self._holders: list[subprocess.Popen[bytes]] = []
        try:
            for place in range(workers + 1):
                self._holders.append(_namespace())
                self._do(place, "ip", "link", "set", "lo", "up")
            for worker in range(1, workers + 1):
                far = str(self._holders[worker].pid)
                self._do(0, "ip", "link", "add", f"w{worker}", "type", "veth", "peer", "name", "hub", "netns", far)
                ends = ((0, f"w{worker}", self.hub(worker)), (worker, "hub", f"10.0.{worker}.2"))
                for place, device, address in ends:
                    self._do(place, "ip", "address", "add", f"{address}/24", "dev", device)
                    self._do(place, "ip", "link", "set", device, "up")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Network":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the namespaces. They are gone when the last process in them has ended."""
        for holder in self._holders:
            holder.communicate()  # closes its standard input

    def hub(self, worker: int) -> str:
        """The hub's address on the link to a worker, 1 for the first one."""
        return f"10.0.{worker}.1"

    def shape(self, mbit: float) -> None:
        """Set the rate of all links, in both directions, in Mbit/s of whole packets."""
        burst = max(MIN_BURST_NBYTES, int(mbit * 1e6 / 8 * BURST_S))
        rule = ["rate", f"{int(mbit * 1e6)}bit", "burst", str(burst), "latency", f"{QUEUE_S * 1e3:.0f}ms"]
        for worker in range(1, len(self._holders)):
            for place, device in ((0, f"w{worker}"), (worker, "hub")):
                self._do(place, "tc", "qdisc", "replace", "dev", device, "root", "tbf", *rule)

    def inside(self, place: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in a namespace: 0 for the hub, 1 for the first worker."""
        return ["nsenter", "--net", f"--target={self._holders[place].pid}", "--", *command]

    def _do(self, place: int, *command: str) -> None:
        tool = _path(command[0]) or command[0]
        done = subprocess.run(self.inside(place, [tool, *command[1:]]), capture_output=True, text=True)
        if done.returncode:
            raise PulseError(f"bench link: `{' '.join(command)}` failed: {' '.join(done.stderr.split())}")


def _path(tool: str) -> str | None:
    """Where a tool is; an administrator's are not on everybody's PATH."""
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


def _namespace() -> subprocess.Popen[bytes]:
    """A process that holds a new namespace until its standard input ends; returns when it is there."""
    pipe = subprocess.PIPE
    # A process group of its own: Ctrl-C is for the bench, which ends what runs in the namespaces first.
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
    assert holder.stdout is not None
    if not holder.stdout.readline():
        reason = " ".join(holder.communicate()[1].decode().split())
        raise PermissionError(f"bench link: expected to be allowed to make a network namespace, found: {reason}")
    return holder
