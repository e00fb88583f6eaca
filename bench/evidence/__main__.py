"""docs/evidence.md's tables and picture, and what they are made from.

make evidence                                            # write them from the runs that are kept
python -m bench.evidence NAME RUN REPORT "COMMAND"       # keep a run, studied into REPORT, that COMMAND made
"""

import datetime
import re
import sys
from pathlib import Path

from bench.evidence.keep import HERE, SUFFIX, keep, read
from bench.evidence.picture import drawn
from bench.evidence.tables import TABLES

PAGE = HERE.parents[1] / "docs" / "evidence.md"
PICTURE = PAGE.with_name("evidence.svg")
PLACE = re.compile(r"(<!-- table: ([a-z ]+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def written(page: str) -> str:
    """The page with its tables as the runs that are kept make them."""
    runs = {path.stem: read(path) for path in sorted(HERE.glob(f"*{SUFFIX}"))}
    return PLACE.sub(lambda place: f"{place[1]}\n{TABLES[place[2]](runs)}\n{place[3]}", page)


def main(arguments: list[str]) -> None:
    if arguments:
        import pulse_rl as pulse

        name, run, report, command = arguments
        head = pulse.History(pulse.open_store(Path(run) / "store")).head()
        assert head is not None
        facts = {"command": command, "date": f"{datetime.date.today():%-d %B %Y}", "digest": head.digest}
        print(keep(name, Path(run), Path(report), facts))
        return
    PAGE.write_text(written(PAGE.read_text()))
    PICTURE.write_text(drawn({path.stem: read(path) for path in sorted(HERE.glob(f"*{SUFFIX}"))}))


if __name__ == "__main__":
    main(sys.argv[1:])
