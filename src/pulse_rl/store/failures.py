"""obstore's failures: which of them may pass, and each in one line."""

import re

from obstore.exceptions import BaseError, GenericError, NotSupportedError

# What may pass, in obstore's words: no answer, or one of the server but those that say that it cannot do this at all.
# Every failure of a web server begins with "Generic HTTP error".
_MAY_PASS = re.compile(
    r"status code: (408|429|5\d\d)|(?<!Generic )HTTP error: (?!builder error)|error decoding response body"
)
_NEVER_PASS = re.compile(r"status code: (501|505)")


def may_pass(error: Exception) -> bool:
    """Whether a failure of obstore's may pass. Those of a directory are OSErrors or without an answer."""
    text = str(error).partition("\n\nDebug source")[0]
    return isinstance(error, GenericError) and bool(_MAY_PASS.search(text)) and not _NEVER_PASS.search(text)


def ignores_range(error: BaseError) -> bool:
    """Whether a server has sent a whole object in spite of a range; obstore then reads none of it."""
    return isinstance(error, NotSupportedError) or "Received non-partial response when range requested" in str(error)


def one_line(error: Exception) -> str:
    """obstore's message as one line, without its counts of retries and its debug output."""
    if "HTTP error: builder error" in str(error):
        return (
            "its address begins with http:// and the environment does not allow that: set AWS_ALLOW_HTTP=true "
            "(GOOGLE_ALLOW_HTTP, AZURE_ALLOW_HTTP), or use https://"
        )
    text = str(error).partition("\n\nDebug source")[0]
    line = re.sub(r" in [0-9.]+m?µ?s(, after \d+ retries)?(, max_retries: .*?)? +- ", r"\1: ", text.splitlines()[0])
    answer = re.search(r"<Message>([^<]*)", text)  # the body of an S3 or Azure error
    return line.partition(": <?xml")[0] + (f": {answer[1].splitlines()[0]}" if answer and answer[1] else "")
