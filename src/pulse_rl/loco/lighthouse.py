"""torchft's lighthouse: who is alive, and one table of all trainers' reports that is the same for all who ask.

Only the lower interface of torchft is used (https://docs.pytorch.org/torchft/coordination.html): heartbeats, and one
question, the quorum. What trainers make of the answer is decided in `elastic`.
"""

import socket
import threading
import time
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import msgspec
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from pulse_rl.documents import convert
from pulse_rl.errors import ExchangeError, require
from pulse_rl.loco.members import SILENCE_S
from pulse_rl.logs import logger

HEARTBEAT = timedelta(milliseconds=100)  # torchft's default; its lighthouse declares a death after 5 s without one
PATIENCE = timedelta(days=1)  # for an answer: a newcomer waits for the end of a round, however long that takes

log = logger(__name__)


class QuorumReport(msgspec.Struct, frozen=True):
    """What a trainer reports to the others when it asks for a quorum."""

    round: int  # rounds done
    whole: bool  # False while another trainer's state is transferred to it
    arrived: bool  # whether all of the next round is here
    group: str  # the last group that was agreed on; "" for a newcomer; later ones sort higher
    options: str  # a hash of what must be the same on all trainers, apart from the state

    @property
    def progress(self) -> tuple[bool, bool, int, str]:
        """How far the trainer's state is; those with the most hold the state of the run. A newcomer was in no group."""
        return self.group != "", self.whole, self.round, self.group


class Quorum(NamedTuple):
    """The lighthouse's answer, the same for all that are in it."""

    name: str  # later ones sort higher
    reports: dict[str, QuorumReport]  # by trainer
    stores: dict[str, str]  # by trainer: host:port where the others can meet


class Lighthouse:
    """One trainer's connection to the lighthouse: it sends heartbeats until it is closed.

    url: the lighthouse's. id: the trainer's, unlike every other's. host: where the other trainers reach this one.
    Raises MissingExtraError without torchft, ExchangeError if the lighthouse does not answer within the timeout.
    """

    def __init__(self, url: str, id: str, *, timeout: timedelta, host: str | None) -> None:
        coordination = require("torchft.coordination", "ft")
        self.url = url
        self.id = id
        self._timeout = timeout
        self._silence = SILENCE_S
        host = host or socket.gethostname()
        try:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except RuntimeError as error:
            raise ExchangeError(
                f"host: expected a name or address where other trainers reach this one, found {host!r}, where it does "
                f"not reach itself ({str(error).splitlines()[0]})"
            ) from error
        self._address = f"{host}:{self._store.port}"
        try:
            # It sends heartbeats from a thread that no Python code can hold up.
            self._server = coordination.ManagerServer(
                replica_id=id,
                lighthouse_addr=url,
                hostname=host,
                bind="[::]:0",
                store_addr=self._address,
                world_size=1,
                heartbeat_interval=HEARTBEAT,
                connect_timeout=timeout,
                quorum_retries=0,
            )
            self._client = coordination.LighthouseClient(url, timeout)
        except (RuntimeError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def close(self) -> None:
        """Stop the heartbeats."""
        self._server.shutdown()

    def ask(self, report: QuorumReport) -> Quorum:
        """Wait until all trainers that live have asked; returns what each reports. Raises ExchangeError."""
        answers: SimpleQueue[Any] = SimpleQueue()
        # In a thread, since Ctrl-C does not end a call into torchft.
        threading.Thread(target=self._ask, args=(report, answers), daemon=True).start()
        while True:
            try:
                answer = answers.get(timeout=self._silence)
                break
            except Empty:
                log.warning(
                    "%s: no answer in %g s from the lighthouse at %s: where it waits for other trainers, its own log "
                    "says for how many",
                    self.id.rpartition(":")[0],
                    self._silence,
                    self.url,
                )
                self._silence *= 2  # a trainer that is always slow is not told of in each round
        if isinstance(answer, Exception):
            raise self._unreachable(answer) from answer
        reports, stores = {}, {}
        for member in answer.participants:
            try:
                reports[member.replica_id] = convert(member.data, QuorumReport)
            except msgspec.ValidationError as error:
                raise ExchangeError(
                    f"expected the trainers of one run at the lighthouse {self.url}, found {member.replica_id} "
                    f"({error}): give each run its own lighthouse"
                ) from error
            stores[member.replica_id] = member.store_address
        return Quorum(f"{answer.created.seconds:012}.{answer.created.nanos:09}", reports, stores)

    def _ask(self, report: QuorumReport, answers: "SimpleQueue[Any]") -> None:
        """Put the answer, or the error after `timeout` seconds of errors."""
        until = None
        while True:
            try:
                answer = self._client.quorum(
                    replica_id=self.id,
                    timeout=PATIENCE,
                    address=self._server.address(),
                    store_address=self._address,
                    step=report.round,
                    world_size=1,
                    shrink_only=False,
                    data=msgspec.to_builtins(report),
                )
                return answers.put(answer)
            except (RuntimeError, TimeoutError) as error:
                # A lighthouse keeps no state: one that is started again serves as well.
                until = until or time.monotonic() + self._timeout.total_seconds()
                if time.monotonic() > until:
                    return answers.put(error)
                time.sleep(0.5)

    def _unreachable(self, error: Exception) -> ExchangeError:
        return ExchangeError(
            f"no answer from the lighthouse at {self.url}: check that it runs and can be reached, then start the "
            f"trainers again from their last checkpoint ({error})"
        )
