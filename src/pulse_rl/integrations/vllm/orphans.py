"""An engine's processes end with the one that has started them, however that ends.

The core of vLLM 0.32 goes on when the server or the script before it is killed: it keeps its memory and its port, and
nothing can reach it. Here each process waits for its parent's end in a thread, and then ends, too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from functools import cache

GRACE_S = 5.0  # in which a process may end by itself


@cache
def end_with_parent() -> bool:
    """End this process a little after the one that has started it by `multiprocessing`. Returns whether one has."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return False

    def wait() -> None:
        parent.join()
        time.sleep(GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="pulse-rl-parent", daemon=True).start()
    return True
