"""Narrow links: a hub and workers in new network namespaces, joined by shaped devices. Linux and root only.

A link is an Ethernet pair; one with a delay is a pair of TUN devices, as kernels without `netem` cannot delay.

The namespaces have no names; each lives as long as a process in it. The first process ends when this one does,
however it ends, because its standard input closes; then the kernel removes the namespace and its links. Nothing
appears in the host's namespace.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from bench import ROOT
from bench.link.delay import MTU
from pulse_rl.errors import PulseError

TOOLS = ("ip", "tc", "unshare", "nsenter")  # of Debian's iproute2 and util-linux
BURST_S = 0.002  # an idle link may send this many seconds of its rate at once; short, because patches are small
MIN_BURST_NBYTES = 2000  # more than one packet, or no packet would ever be sent
QUEUE_S = 0.1  # packets that would wait longer are dropped
MEMORY = "4096 131072 268435456"  # bytes of a connection, least to most, as hosts for long fat links are tuned
WAITING = 10_000  # packets that may wait for the process that delays them


class Network:
    """A hub with a link to each of `workers` workers; a context manager that removes everything at its end.

    delay_s: of each packet, in each direction.
    Raises PermissionError where this user may not make namespaces, PulseError if a tool is missing or fails.
    """

    def __init__(self, workers: int, *, delay_s: float = 0.0) -> None:
        if not sys.platform.startswith("linux") or os.geteuid() != 0:
            raise PermissionError(
                "network namespaces need Linux and root, found "
                f"{sys.platform} and user {os.getuid() if hasattr(os, 'getuid') else 'unknown'}; run this as root"
            )
        missing = [tool for tool in TOOLS if _path(tool) is None]
        if missing:
            raise PulseError(f"{', '.join(missing)} not found: install the packages iproute2 and util-linux")
        self._holders: list[subprocess.Popen[bytes]] = []
        self._delays: list[subprocess.Popen[bytes]] = []
        try:
            for place in range(workers + 1):
                self._holders.append(_namespace())
                self._do(place, "ip", "link", "set", "lo", "up")
            for worker in range(1, workers + 1):
                far = str(self._holders[worker].pid)
                if delay_s:
                    self._delays.append(self._delayed(f"w{worker}", f"far{worker}", delay_s))
                    self._do(0, "ip", "link", "set", f"far{worker}", "netns", far, "name", "hub")
                    for place, device in ((0, f"w{worker}"), (worker, "hub")):
                        self._do(place, "ip", "link", "set", device, "mtu", str(MTU), "txqueuelen", str(WAITING))
                        self._do(place, "sysctl", "-q", "-w", *(f"net.ipv4.tcp_{way}mem={MEMORY}" for way in "rw"))
                else:
                    pair = ("type", "veth", "peer", "name", "hub", "netns", far)
                    self._do(0, "ip", "link", "add", f"w{worker}", *pair)
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
        """Release the namespaces. The kernel removes each when the last process in it has ended."""
        for process in (*self._delays, *self._holders):
            process.communicate()  # closes its standard input

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

    def _delayed(self, here: str, there: str, seconds: float) -> subprocess.Popen[bytes]:
        """Start the process that carries packets between two devices, at first both of the hub."""
        command = self.inside(0, [sys.executable, "-m", "bench.link.delay", here, there, str(seconds)])
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, process_group=0, cwd=ROOT)
        assert process.stdout is not None
        if not process.stdout.readline():
            raise PulseError(f"`{' '.join(command)}` ended with exit code {process.wait()}")
        return process

    def _do(self, place: int, *command: str) -> None:
        tool = _path(command[0]) or command[0]
        done = subprocess.run(self.inside(place, [tool, *command[1:]]), capture_output=True, text=True)
        if done.returncode:
            raise PulseError(f"`{' '.join(command)}` failed: {' '.join(done.stderr.split())}")


def _path(tool: str) -> str | None:
    """Where a tool is, also if only an administrator's PATH holds it."""
    return shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")


def _namespace() -> subprocess.Popen[bytes]:
    """Start a process that holds a new namespace until its standard input ends; return once the namespace exists."""
    pipe = subprocess.PIPE
    # A new process group: Ctrl-C is for the benchmark, which ends the processes in the namespaces first.
    command = ["unshare", "--net", "sh", "-c", "echo; exec cat"]
    holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0)
    assert holder.stdout is not None
    if not holder.stdout.readline():
        reason = " ".join(holder.communicate()[1].decode().split())
        raise PermissionError(f"this user may not make a network namespace: {reason}")
    return holder
