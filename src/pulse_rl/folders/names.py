"""The names of folders that hold a version each, as "step_{version}" or "v{version:08d}"."""

import re

_TEMPLATE = re.compile(r"([^{}/\\]*)\{version(?::0([1-9]|1[0-9])d)?\}([^{}/\\]*)")


class FolderName:
    """A template of names. Raises ValueError for one that does not hold the version once, or that begins with a dot."""

    def __init__(self, template: str) -> None:
        match = _TEMPLATE.fullmatch(template)
        if match is None or template.startswith(".") or not template.isprintable():
            raise ValueError(
                "name: expected the name of a folder with {version} or {version:08d} in it, not beginning with a dot, "
                f"found {template!r}"
            )
        before, digits, after = match.groups()
        self.template = template
        self._width = int(digits or 1)
        self._pattern = re.compile(f"{re.escape(before)}([0-9]{{{self._width},19}}){re.escape(after)}")

    def of(self, version: int) -> str:
        """The name of a version's folder."""
        return self.template.format(version=version)

    def version(self, name: str) -> int | None:
        """The version in a name; None for a name that no version has."""
        match = self._pattern.fullmatch(name)
        return int(match[1]) if match and self.of(int(match[1])) == name else None
