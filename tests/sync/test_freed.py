"""Freed memory: a process allocates 64 MB again, and counts the pages that the system gives it anew."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
import numpy as np
from pulse_rl.sync.freed import keep_freed, return_freed

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def held():
    return int(open("/proc/self/statm").read().split()[1])

if {keep}:
    keep_freed()
np.ones(64 << 20, np.uint8)
before = pages()
np.ones(64 << 20, np.uint8)
fresh, full = pages() - before, held()
return_freed()
print(fresh, full - held())
"""
PAGES = 16384  # of 4 KB in 64 MB; a fault may bring 2 MB


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="freed memory is glibc's to keep")
@pytest.mark.parametrize("keep", [False, True])
def test_what_is_freed_is_kept_or_returned(keep: bool) -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT.format(keep=keep)], capture_output=True, check=True)
    fresh, returned = map(int, found.stdout.split())
    if keep:
        assert fresh < 16
        assert returned > PAGES // 2
    else:
        assert fresh >= PAGES // 512
        assert returned < PAGES // 2
