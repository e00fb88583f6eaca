"""What a user's text for a store means: a path, a URL, or a URL with a slip in it, which must make no directory."""

import re
from pathlib import Path


def is_url(text: str) -> bool:
    """Whether text starts with a scheme, as a URL does, well formed or not ("s3:/bucket"). One letter is a drive."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", text) is not None


def as_path(text: str) -> Path:
    """A path, with a "~" at its start as the home directory. Raises ValueError where that is not known."""
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a path, found {text!r}, and no such home directory is known") from None


def refusal(text: str) -> ValueError:
    """The error for a URL that names no store, with a guess at what was meant."""
    scheme, _, rest = text.partition(":")
    hint = "" if "://" in text else f"; for a directory of that name write ./{text}"
    if not rest.startswith("//") and scheme.lower() in ("s3", "gs", "az", "http", "https") and rest.strip("/"):
        hint = f"; did you mean {scheme}://{rest.lstrip('/')}?"
    return ValueError(
        "store: expected file:///path, a path, memory://, s3://bucket/prefix, gs://bucket/prefix, "
        f"az://container/prefix or https://host/path, found {text!r}{hint}"
    )
