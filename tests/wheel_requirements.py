"""Print what a wheel requires, one requirement a line, without some packages.

    python tests/wheel_requirements.py FILE.whl [PACKAGE …]

Requirements of extras are left out, and those whose markers are for another machine.
"""

import sys
import zipfile
from email.parser import Parser

from pip._vendor.packaging.requirements import Requirement


def main() -> None:
    path, *without = sys.argv[1:]
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(wheel.read(name).decode())
    for line in metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if requirement.name in without or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        requirement.marker = None
        print(requirement)


if __name__ == "__main__":
    main()
