"""obstore's requests: their timeouts, retries and threads; which of their failures may pass, and each in one line."""

import os
import re
from datetime import timedelta
from typing import Any

from obstore.exceptions import BaseError, GenericError, NotSupportedError

from pulse_rl.errors import StoreError

# obstore's default of 30 s for a whole request would end every download of an anchor over a home connection. What
# counts is that bytes arrive: the response to one part of an upload may take read_timeout, which is enough for three
# concurrent parts at 1.6 Mbit/s.
CLIENT = {"timeout": "1 day", "read_timeout": "2 min", "connect_timeout": "10 s"}
# Options given in code make obstore ignore those of the environment, so these are passed on: AWS_ALLOW_HTTP, ….
_FROM_ENVIRONMENT = (*CLIENT, "allow_http", "allow_invalid_certificates", "proxy_url", "proxy_excludes")
# obstore itself repeats a request (a part of an upload, the rest of a download) over a short interruption, for about a
# second in all. Outages are the part of `patient`, whose time is a setting.
RETRY: Any = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=5),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1)},
}

# What may pass, in obstore's words: no answer, or one of the server but those that say that it cannot do this at all.
# An "error response" has status 200, and InternalError or SlowDown in its body: S3 had begun to respond. Every failure
# of a web server begins with "Generic HTTP error".
_MAY_PASS = re.compile(
    r"status code: (408|429|5\d\d)|returned error response|(?<!Generic )HTTP error: (?!builder error)"
    r"|error decoding response body"
)
# Without credentials in the environment obstore asks the machine's own service for those of its role. No other request
# has such an address, nor does a service of storage.
_OWN_ROLE = re.compile(r"http://[^/ ]+/(latest/(api/token|meta-data/)|computeMetadata/v1/|metadata/identity/oauth2/)")
_INCOMPLETE = re.compile(r"Missing (AccessKeyId|SecretAccessKey)|Account must be specified")
# By the name that obstore's message begins with.
_CREDENTIALS = {
    "Generic S3 error": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION (files in ~/.aws are not read)",
    "Generic GCS error": "GOOGLE_APPLICATION_CREDENTIALS, the path of a service account's JSON key",
    "Generic MicrosoftAzure error": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}
# Codes of S3 whose status says otherwise. Where the end of an upload gets no answer, obstore aborts the upload and
# raises what that gives: the first, if it has ended all the same; the next attempt is a new upload. The second does not
# say whether an object exists: another put of it, perhaps this one's last attempt, or a deletion was under way.
_TRY_AGAIN = ("<Code>NoSuchUpload</Code>", "<Code>ConditionalRequestConflict</Code>")
_NEVER_PASS = re.compile(r"status code: (501|505)")


def client_of(prefix: str) -> dict[str, str]:
    """The client options of a cloud whose environment variables have this prefix, as "AWS"."""
    given = {name: os.environ.get(f"{prefix}_{name.upper()}") for name in _FROM_ENVIRONMENT}
    return CLIENT | {name: value for name, value in given.items() if value is not None}


_threads = {"started": False, "lost": False}  # obstore's own threads, which make all requests


def _forked() -> None:
    _threads["lost"] = _threads["started"]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def need_threads() -> None:
    """Raise StoreError in a forked child of a process that has used a store: its requests would wait for ever."""
    if _threads["lost"]:
        raise StoreError(
            "no store can be used in this process: it was forked from one that had used a store, and a fork takes no "
            'threads along; start it by spawn (multiprocessing.get_context("spawn")), or fork before the first use'
        )
    _threads["started"] = True


def may_pass(error: Exception) -> bool:
    """Whether a failure of obstore's may pass. Those of a directory are OSErrors or without an answer."""
    text = str(error).partition("\n\nDebug source")[0]
    passing = isinstance(error, GenericError) and bool(_MAY_PASS.search(text)) and not _NEVER_PASS.search(text)
    return passing or any(code in text for code in _TRY_AGAIN)


def ignores_range(error: BaseError) -> bool:
    """Whether a server has sent a whole object in spite of a range; obstore then reads none of it."""
    return isinstance(error, NotSupportedError) or "Received non-partial response when range requested" in str(error)


def is_missing(error: BaseError) -> bool:
    """Whether a service refuses to delete an object as it has none of that name. S3 itself says that it is deleted."""
    return "(code: NoSuchKey)" in str(error)


def is_beyond(error: BaseError) -> bool:
    """Whether a range begins at the end of an object or after it, as any does of an empty one."""
    beyond = ("status code: 416", "Wanted range starting at", "Requested range was invalid")
    return any(words in str(error) for words in beyond)


def one_line(error: Exception) -> str:
    """obstore's message as one line, without its counts of retries and its debug output; before it, what to do."""
    if "HTTP error: builder error" in str(error):
        return (
            "its address begins with http:// and the environment does not allow that: set AWS_ALLOW_HTTP=true "
            "(GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP), or use https://"
        )
    text = str(error).partition("\n\nDebug source")[0]
    line = re.sub(r" in [0-9.]+m?µ?s(, after \d+ retries)?(, max_retries: .*?)? +- ", r"\1: ", text.splitlines()[0])
    answer = re.search(r"<Message>([^<]*)", text)  # the body of an S3 or Azure error
    line = line.partition(": <?xml")[0] + (f": {answer[1].splitlines()[0]}" if answer and answer[1] else "")
    variables = _CREDENTIALS.get(line.partition(":")[0])
    if variables and _INCOMPLETE.search(line):
        return f"the environment lacks credentials: set {variables} ({line})"
    if variables and _OWN_ROLE.search(line):
        return (
            f"no credentials: the environment has none, and this machine gives none of a role: set {variables}, or run "
            f"where the machine has a role ({line})"
        )
    return line
