"""A store whose calls pass a rule first: it counts them, waits, fails, or gives other bytes than there are."""

import threading
from collections.abc import Callable
from typing import Any

import pulse_rl as pulse
from pulse_rl.errors import CannotListError

CALLS = ("put", "get", "stream", "list", "delete", "check_create")


class Through:
    """The calls of a store, each by way of rules, which may be exchanged at any time.

    before: asked before a call takes effect, with its name and the object's. after: asked when it has, before it is
    answered. Either may raise, wait or count. read: the bytes that a read gives instead of those that are there.
    """

    def __init__(
        self,
        inner: Any,
        *,
        before: Callable[[str, str], object] | None = None,
        after: Callable[[str, str], object] | None = None,
        read: Callable[[str, bytes], bytes] | None = None,
    ) -> None:
        self.inner, self.before, self.after, self.read = inner, before or nothing, after or nothing, read

    def __getattr__(self, call: str) -> Any:
        real = getattr(self.inner, call)
        if call not in CALLS:
            return real

        def made(*arguments: Any, **options: Any) -> Any:
            name = arguments[0] if arguments else ""
            self.before(call, name)
            found = real(*arguments, **options)
            self.after(call, name)
            if self.read is None or call not in ("get", "stream"):
                return found
            data = memoryview(self.read(name, bytes(found if call == "get" else b"".join(found))))
            return data if call == "get" else iter([data])

        return made


def failing(prefix: str, *, call: str = "put") -> Callable[[str, str], None]:
    """A rule: calls of this kind fail for objects whose names begin so."""

    def rule(made: str, name: str) -> None:
        if made == call and name.startswith(prefix):
            raise pulse.StoreError(f"cannot {call} {name}: no more credit", name=name)

    return rule


def waiting(until: threading.Event) -> Callable[[str, str], None]:
    """A rule: puts wait for an event."""

    def rule(made: str, name: str) -> None:
        assert made != "put" or until.wait(30)

    return rule


def after_some(calls: int, *, call: str = "put") -> Callable[[str, str], None]:
    """A rule: after so many calls of this kind the connection has ended."""
    left = calls

    def rule(made: str, name: str) -> None:
        nonlocal left
        left -= made == call
        if left < 0:
            raise pulse.StoreError("the connection has ended", name=name)

    return rule


def unlisted(call: str, name: str) -> None:
    """The rule of a store without a listing."""
    if call == "list":
        raise CannotListError(name)


def nothing(call: str, name: str) -> None:
    """The rule that lets everything pass."""
