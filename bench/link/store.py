"""The object store of a benchmark over narrow links: `python -m bench.link.store`, in the hub's network namespace.

It is moto's S3 service, which honours put-if-absent, on all addresses, with one bucket. It prints a line when it is
ready, and ends when its standard input does.
"""

import logging
import sys
import urllib.request

from bench.link.orders import answer

PORT, BUCKET = 9000, "bench"  # in a new namespace every port is free


def access(host: str) -> dict[str, str]:
    """The environment in which `s3://bench/…` is the bucket of the store at this address."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{PORT}",
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
    }


if __name__ == "__main__":
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # it would print a line for every request
    ThreadedMotoServer("0.0.0.0", PORT, verbose=False).start()
    urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{PORT}/{BUCKET}", method="PUT")).close()
    answer({})
    sys.stdin.read()
