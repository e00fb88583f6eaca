"""What a patch over several steps takes: python -m bench.evidence.spans STORE > bench/evidence/spans.tsv

Patches from a few versions of a history to those 1, 2, 4, … 32 steps later, by each codec, beside plain indices and
values as SparseRL-Sync sends them (arXiv 2605.07330): 4 bytes for an index and 2 for a value.
"""

import sys

import pulse_rl as pulse
from bench.evidence.keep import lines
from bench.evidence.markdown import mean, table
from pulse_rl.units import seconds

SPANS, BASES = (1, 2, 4, 8, 16, 32), (64, 160, 256, 352)
COLUMNS = ("base", "steps", "elements", "changes", "context", "gap")
PLAIN_NBYTES, BF16_NBYTES = 6, 2
LINKS = (1e8, 1e9)  # bit/s


def measure(store: str) -> None:
    """Print a line for each pair."""
    before, after = pulse.Subscriber(store), pulse.Subscriber(store)
    old, new = before.allocate(), after.allocate()
    head = before.history.head()
    assert head is not None
    print(*COLUMNS, sep="\t")
    for base in BASES:
        before.sync(old, version=base)
        for steps in SPANS:
            after.sync(new, version=base + steps)
            patches = [pulse.inspect(pulse.diff(old, new, codec=codec)) for codec in ("context", "gap")]
            sizes = [patch.nbytes for patch in patches]
            print(base, steps, head.elements, patches[0].changes, *sizes, sep="\t", flush=True)


def means() -> list[tuple[int, float, float, float]]:
    """Steps, changes, bytes by `context` and by `gap`: means over the bases."""
    found = []
    for steps in SPANS:
        rows = [line for line in lines("spans") if line["steps"] == str(steps)]
        found.append((steps, mean(rows, "changes"), mean(rows, "context"), mean(rows, "gap")))
    return found


def spans() -> str:
    """The table."""
    elements = int(lines("spans")[0]["elements"])
    rows = []
    for steps, changes, context, gap in means():
        dense, plain = BF16_NBYTES * elements, PLAIN_NBYTES * changes
        sizes = [f"{size / 1e6:.2f} MB, {dense / size:,.0f} ×" for size in (plain, gap, context)]
        times = [seconds(8 * size / link) for link in LINKS for size in (dense, plain, context)]
        rows.append([str(steps), f"{changes / elements:.2%}", *sizes, *times])
    over = [f"{what}, {link}" for link in ("100 Mbit/s", "1 Gbit/s") for what in ("dense", "plain", "`context`")]
    return table(("steps", "changed", "plain", "`gap`", "`context`", *over), rows)


if __name__ == "__main__":
    measure(sys.argv[1])
