"""obstore's failures: which of them may pass, and each in one line."""

import re

from obstore.exceptions import BaseError, GenericError, NotSupportedError

# What may pass, in obstore's words: no answer, or one of the server but those that say that it cannot do this at all.
# Every failure of a web server begins with "Generic HTTP error".
_MAY_PASS = re.compile(
    r"status code: (408|429|5\d\d)|(?<!Generic )HTTP error: (?!builder error)|error decoding response body"
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
_NEVER_PASS = re.compile(r"status code: (501|505)")


def may_pass(error: Exception) -> bool:
    """Whether a failure of obstore's may pass. Those of a directory are OSErrors or without an answer."""
    text = str(error).partition("\n\nDebug source")[0]
    return isinstance(error, GenericError) and bool(_MAY_PASS.search(text)) and not _NEVER_PASS.search(text)


def ignores_range(error: BaseError) -> bool:
    """Whether a server has sent a whole object in spite of a range; obstore then reads none of it."""
    return isinstance(error, NotSupportedError) or "Received non-partial response when range requested" in str(error)


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
