"""What a user's text for a store means: a path, a URL, or a URL with a slip in it, which must make no directory."""

import os
import re
from pathlib import Path
from urllib.parse import unquote_to_bytes

from pulse_rl.errors import without_secrets

_SCHEMES = "s3|gs|az|https?|file|memory"
_URL = re.compile(rf"\s*(?:[A-Z][A-Z0-9+.-]+:|(?:{_SCHEMES})//)", re.IGNORECASE)
_SLIP = re.compile(rf"\s*({_SCHEMES})(:|//)/*(.*?)[/\s]*", re.IGNORECASE | re.DOTALL)


def is_url(text: str) -> bool:
    """Whether text is meant as a URL, well formed or not ("s3:/bucket", "s3//bucket"). One letter is a drive."""
    return _URL.match(text) is not None


def as_path(text: str) -> Path:
    """A path, with a "~" at its start as the home directory.

    Raises ValueError where that is not known, and for nothing, as of a variable that is not set: no working directory.
    """
    if not text:
        raise ValueError("expected a URL or a path, found an empty string")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError(f"expected a path, found {text!r}, and no such home directory is known") from None


def path_in(quoted: str) -> str:
    """The path in a file URL, as `Path.as_uri` has quoted it: its bytes need not be UTF-8."""
    return os.fsdecode(unquote_to_bytes(quoted))


def refusal(text: str) -> ValueError:
    """The error for a URL that names no store, with a guess at what was meant."""
    text = without_secrets(text)
    hint = "" if "://" in text else f"; for a directory of that name write ./{text}"
    if (slip := _SLIP.fullmatch(text)) and (guess := _guess(*slip.groups())) and guess != text:
        hint = f"; did you mean {guess}?"
    return ValueError(
        "store: expected file:///path, a path, memory://, s3://bucket/prefix, gs://bucket/prefix, "
        f"az://container/prefix or https://host/path, found {text!r}{hint}"
    )


def _guess(scheme: str, mark: str, rest: str) -> str | None:
    if scheme.lower() == "memory":
        return "memory://"
    if scheme.lower() == "file":
        return f"file:///{rest}" if mark == "//" and rest else None  # "file:runs" may be meant as a path
    return f"{scheme.lower()}://{rest}" if rest else None
