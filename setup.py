"""What pyproject.toml cannot say: the README as an index shows it, which has none of the files that links name.

They lead to the release's tag in the repository, once pyproject.toml has its address (`urls.Repository`). Until then
the index shows their texts alone.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def for_an_index(text: str, repository: str | None) -> str:
    def link(found: re.Match[str]) -> str:
        picture, said, path = found.groups()
        kind = "raw" if picture else "blob"
        return f"{picture}[{said}]({repository}/{kind}/v{PROJECT['version']}/{path})" if repository else said

    return re.sub(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]*)\)", link, text)


if __name__ == "__main__":
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    setup(
        long_description=for_an_index(readme, PROJECT.get("urls", {}).get("Repository")),
        long_description_content_type="text/markdown",
    )
