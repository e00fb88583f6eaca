"""Does every link of the built site lead somewhere, and does the site load nothing from elsewhere?

    python tests/links.py site        # prints what is wrong; exit code 1 if anything is

Zensical checks the links of pages when it builds; this also sees those of docstrings and of included files.
"""

import html
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_LINK = re.compile(r'<(\w+)[^>]*? (?:href|src)="([^"]*)"')
_REMOTE = re.compile(r"[a-z]+:|//")


@cache
def anchors(page: Path) -> frozenset[str]:
    """The ids of a page."""
    return frozenset(re.findall(r' id="([^"]+)"', page.read_text()))


def wrong(site: Path) -> Iterator[str]:
    """Every link that leads nowhere, and everything that a page would load from another place."""
    for page in sorted(site.rglob("*.html")):
        if page.name == "404.html":  # its links are the server's
            continue
        for tag, link in _LINK.findall(page.read_text()):
            path, _, anchor = html.unescape(link).partition("#")
            where = f"{page.relative_to(site)}: {link}"
            if _REMOTE.match(path):
                if tag != "a" and not path.startswith("data:"):
                    yield f"{where} is loaded from another place"
                continue
            target = page.parent / path if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                yield f"{where} leads nowhere"
            elif anchor and target.suffix == ".html" and anchor not in anchors(target.resolve()):
                yield f"{where} has no such place"


if __name__ == "__main__":
    found = list(wrong(Path(sys.argv[1])))
    print("\n".join(found), file=sys.stderr)
    sys.exit(1 if found else 0)
