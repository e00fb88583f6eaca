"""The process in which the code of the tool `python` runs: it gives up what it does not need, then runs the code.

`tools` runs this file as a script, so it imports nothing of this package. The process is all that there is to kill: a
filter of the kernel (seccomp) refuses it every system call that makes another process or runs another program, as root
too, and for good. Threads it may start, which end with it. It also ends with the worker that has started it.
Where the kernel takes no such filter, no code is run.
"""

import ctypes
import os
import platform
import signal
import struct
import sys

READY = "\n"  # its first output: the limits hold, the code begins
NO_FILTER = "the tool python runs code only where the kernel can keep it from starting processes"

_PDEATHSIG, _SECCOMP, _NO_NEW_PRIVS, _FILTER = 1, 22, 38, 2  # of prctl
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of a filter
_ALLOW, _END, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # answers; the latter: EPERM, ENOSYS
_NUMBER, _ARCHITECTURE, _FLAGS = 0, 4, 16  # where in a call's data: the lower half of the first argument
_X32 = 0x40000000  # in the number of a call in another convention, on x86-64
_CLONE_THREAD = 0x00010000
_CLONE3, _IO_URING = 435, 425  # a filter cannot see the flags of the one, nor what is asked through the other
# machine → its number; the call whose flags tell threads from processes; calls that make processes or run programs
_MACHINES = {
    "x86_64": (0xC000003E, 56, (57, 58, 59, 322)),  # fork, vfork, execve, execveat
    "aarch64": (0xC00000B7, 220, (221, 281)),  # execve, execveat
}


def limit(cpu: int, memory: int, output: int) -> None:
    """Lower the limits of this process. cpu: seconds. memory, output: bytes."""
    import resource  # not everywhere, and `tools` imports this module

    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_FSIZE, (output, output))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))


def stay_alone(parent: int) -> None:
    """Let this process start no other one, and end with its parent. Raises OSError where the kernel has no filter."""
    if sys.platform != "linux" or platform.machine() not in _MACHINES:
        raise OSError(f"{NO_FILTER}: expected Linux on x86_64 or aarch64, found {sys.platform}, {platform.machine()}")
    code = program(*_MACHINES[platform.machine()])
    held = ctypes.create_string_buffer(code, len(code))
    whole = struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    for arguments in ((_PDEATHSIG, signal.SIGKILL), (_NO_NEW_PRIVS, 1), (_SECCOMP, _FILTER, whole)):
        _prctl(*arguments)
    if os.getppid() != parent:  # it died before this process could ask to end with it
        os.kill(os.getpid(), signal.SIGKILL)


def program(machine: int, clone: int, refused: tuple[int, ...]) -> bytes:
    """The filter: 8 bytes for each instruction. Every call is allowed but those that would leave a process behind."""
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine),
        (_RETURN, 0, 0, _END),  # of another convention, whose numbers mean other calls
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for number in refused:
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    for number in (_CLONE3, _IO_URING):  # as in an older kernel: libraries then do without
        lines += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _UNKNOWN)]
    lines += [
        (_EQUAL, 1, 0, clone),
        (_RETURN, 0, 0, _ALLOW),
        (_LOAD, 0, 0, _FLAGS),
        (_ANY_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("@HBBI", *line) for line in lines)


def _prctl(option: int, *arguments: int | bytes) -> None:
    """Raises OSError where the kernel refuses."""
    kernel = ctypes.CDLL(None, use_errno=True)
    given = [ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value) for value in arguments]
    rest = [ctypes.c_ulong(0)] * (4 - len(given))
    if kernel.prctl(ctypes.c_int(option), *given, *rest):
        number = ctypes.get_errno()
        raise OSError(number, f"{NO_FILTER}; this one refuses the filter: {os.strerror(number)}")


def main() -> None:
    """Run the code that comes on stdin. Arguments: the parent's id, seconds, bytes of memory, bytes of output."""
    parent, cpu, memory, output = map(int, sys.argv[1:])
    try:
        stay_alone(parent)
        limit(cpu, memory, output)
    except OSError as error:
        sys.exit(error.strerror or str(error))
    sys.stdout.write(READY)
    sys.stdout.flush()
    code = sys.stdin.read()
    sys.stdin.close()
    del sys.argv[1:]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})  # noqa: S102  # what it is for
    except SystemExit:
        pass
    except BaseException as error:  # noqa: BLE001  # of the code: its last line is the answer
        sys.stdout.flush()
        sys.exit(f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
