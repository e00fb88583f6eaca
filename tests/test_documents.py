"""Threads that meet a type for the first time at once: each reads what one thread alone reads."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
import msgspec
from pulse_rl.documents import convert, decode_json

sys.setswitchinterval(1e-6)
given = {"rows": [{f"f{n}": {"x": [1]} for n in range(12)}], **{f"g{n}": {"k": 1} for n in range(10)}}
data = msgspec.json.encode(given)
for _ in range(200):
    row = msgspec.defstruct("Row", [(f"f{n}", dict[str, list[int]]) for n in range(12)])
    kind = msgspec.defstruct("Kind", [("rows", list[row])] + [(f"g{n}", dict[str, int]) for n in range(10)])
    start, read = threading.Barrier(4), []

    def meet():
        start.wait()
        read.append(READ)

    threads = [threading.Thread(target=meet) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [msgspec.to_builtins(each) for each in read] == [given] * 4
"""


@pytest.mark.parametrize("reads", ["convert(given, kind)", "decode_json(data, kind, 'it')"])
def test_threads_that_meet_a_type_at_once_read_it_as_one_does(reads: str) -> None:
    """Msgspec alone ends the process by a segmentation fault within a few rounds."""
    program = PROGRAM.replace("READ", reads)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
