"""Alarms: what deserves a look, from a store's status and a run's records; the same wherever they are shown.

    not-finite    weights of the newest version are NaN or infinite
    no-signal     a policy had no gradient for versions in a row
    no-version    no version came for much longer than usual
    behind        a subscriber or a worker is further behind than its bound
    density       the newest version changed many times as much as usual
    anchors       the newest anchor is much older than usual

`Facts` is what is known of one history, from whichever source; `find_alarms` judges it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from pulse_rl import Status
from pulse_rl.units import count, seconds
from pulse_rl.watch.measurements import Labels, Measurement

AlarmName: TypeAlias = Literal["not-finite", "no-signal", "no-version", "behind", "density", "anchors"]
ALARMS: tuple[AlarmName, ...] = get_args(AlarmName)
LONG = 10  # versions in a row without a gradient
LATE, LATE_S = 5.0, 60.0  # times the usual time between two versions, and at least so long, until one is late
USUAL = 8  # versions before the newest, at least, that tell what is usual
RECENT = 64  # of which what is usual is the median
JUMP = 5.0  # times the usual
OVERDUE = 2.0  # times the usual distance between two anchors
PATIENT = 3  # versions at which a worker is behind: it takes the next one when it has finished sampling
NAMED = 3  # who is behind, in a sentence


class Alarm(msgspec.Struct, frozen=True):
    """What deserves a look.

    Attributes:
        name: Which kind it is.
        of: The policy or the store.
        sentence: What is wrong, and what it mostly means.
    """

    name: AlarmName
    of: str
    sentence: str


class Behind(NamedTuple):
    """Somebody who is further behind than the bound."""

    who: str
    versions: int
    bound: int


@dataclass(frozen=True)
class Facts:
    """What is known of one history. What is not known is left out, and alarms about nothing.

    of: the policy or the store. version: the newest. elements, nonfinite: of it. age_s: since it came. interval_s: the
    usual time between two. changed: how much each of the last versions changed, in any one unit, the newest last.
    density: of the newest. since_anchor: versions since the newest anchor; between_anchors: usually. silent: the
    sentence that there is nothing to learn from. ended: whether it is the last version.
    """

    of: str
    version: int
    elements: int = 0
    nonfinite: int = 0
    age_s: float = 0.0
    interval_s: float | None = None
    changed: Sequence[float] = ()
    density: float | None = None
    since_anchor: int = 0
    between_anchors: float | None = None
    behind: tuple[Behind, ...] = ()
    silent: str | None = None
    ended: bool = False


def find_alarms(facts: Facts) -> tuple[Alarm, ...]:
    """The alarms of a history, the worst first."""
    return tuple(Alarm(name, facts.of, sentence) for name, sentence in _sentences(facts))


def _sentences(facts: Facts) -> Iterator[tuple[AlarmName, str]]:
    if facts.nonfinite:
        of = f" of {facts.elements:,}" if facts.elements else ""
        yield "not-finite", f"{facts.nonfinite:,}{of} weights of version {facts.version} are NaN or infinite"
    if facts.silent is not None:
        yield "no-signal", facts.silent
    if facts.interval_s is not None and not facts.ended and facts.age_s > max(LATE * facts.interval_s, LATE_S):
        late = f"{seconds(facts.age_s)}, where {seconds(facts.interval_s)} is usual"
        yield "no-version", f"no version since {facts.version}, for {late}"
    if facts.behind:
        worst = sorted(facts.behind, key=lambda one: -one.versions)
        named = ", ".join(f"{one.who} {count(one.versions, 'version')}" for one in worst[:NAMED])
        more = f", and {len(worst) - NAMED} more" if len(worst) > NAMED else ""
        yield "behind", f"behind by more than {worst[0].bound}: {named}{more}"
    *before, newest = facts.changed or (0.0,)
    usual = median(before[-RECENT:]) if len(before) >= USUAL else 0.0
    if usual and newest > JUMP * usual:
        density = f"{facts.density:.3%} of the elements, " if facts.density is not None else ""
        yield (
            "density",
            f"version {facts.version} changed {density}{newest / usual:,.1f} times as much as usual: mostly a wrong "
            "learning rate, or another optimizer",
        )
    if facts.between_anchors is not None and facts.since_anchor > OVERDUE * facts.between_anchors:
        usual_text = f"where {facts.between_anchors:,.0f} are usual"
        since = count(facts.since_anchor, "version")
        yield "anchors", f"no anchor for {since}, {usual_text}: a new worker reads the patches of all of them"


def alarms_of_status(info: Status, *, max_lag: int | None = None) -> tuple[Alarm, ...]:
    """The alarms of a store. max_lag: the bound that `info` was judged by."""
    listing, recent = info.listing, info.recent
    anchors = listing.anchor_sequences if listing else ()
    line = tuple(sequence for sequence in anchors if sequence >= info.first)
    if len(line) > 2:  # those that `keep_every` keeps before it are further apart
        anchors = line
    apart = [later - earlier for earlier, later in zip(anchors, anchors[1:], strict=False)]
    behind = [
        Behind(one.id, one.lag, max_lag)
        for one in info.subscribers or ()
        if max_lag is not None and one.lag is not None and one.lag > max_lag
    ]
    return find_alarms(
        Facts(
            of=info.url,
            version=info.newest,
            elements=info.elements,
            nonfinite=info.nonfinite,
            age_s=listing.age_s if listing else 0.0,
            interval_s=listing.interval_s if listing else None,
            changed=recent.sizes if recent else (),
            density=info.density,
            since_anchor=info.sequence - info.anchor_sequence,
            between_anchors=median(apart[-RECENT:]) if len(apart) > 1 else None,
            behind=tuple(behind),
            ended=info.ended,
        )
    )


def alarms_of_records(
    policy: str,
    records: Sequence[Mapping[str, Any]],
    *,
    bound: int | None = None,
    age_s: float = 0.0,
    ended: bool = False,
) -> tuple[Alarm, ...]:
    """The alarms of a policy.

    records: its last ones. bound: how many versions a worker may be behind. age_s: seconds since the last one.
    """
    if not records:
        return ()
    newest = records[-1]
    lags = [lags_of(record) for record in records[-PATIENT:]]
    behind = [
        Behind(who, lag, bound)
        for who, lag in lags[-1].items()
        if bound is not None and len(lags) == PATIENT and all(one.get(who, 0) > bound for one in lags)
    ]
    return find_alarms(
        Facts(
            of=policy,
            version=newest["version"],
            elements=newest.get("elements", 0),
            nonfinite=newest.get("nonfinite", 0),
            age_s=age_s,
            interval_s=median(one["total_s"] for one in records[-RECENT:]) if len(records) >= USUAL else None,
            changed=[one["density"] for one in records[-RECENT - 1 :]],
            density=newest["density"],
            behind=tuple(behind),
            silent=without_signal(policy, records[-LONG:]),
            ended=ended,
        )
    )


def lags_of(record: Mapping[str, Any]) -> dict[str, int]:
    """How many versions each worker was behind when one came; of one that has proved none yet, nothing."""
    held = record.get("workers", {}).items()
    return {who: record["version"] - version for who, version in held if version is not None}


def without_signal(name: str, records: Sequence[Mapping[str, Any]]) -> str | None:
    """What to say of a policy that had no gradient for `LONG` versions in a row: of the longest such time.

    Without a signal a run goes on, and teaches nothing.
    """
    longest, begin = range(0), 0
    for end, record in enumerate(records, 1):
        if record["grad_norm"] or record["groups_with_variance"]:
            begin = end
        longest = max(longest, range(begin, end), key=len)
    if len(longest) < LONG:
        return None
    first, last = (records[at]["step"] for at in (longest[0], longest[-1]))
    return (
        f"policy {name} had nothing to learn from in steps {first} to {last}: in each group all rewards were equal, so "
        "there was no gradient. Change what is played (an easier or a harder task, a larger workflow.group_size, a "
        "higher workflow.temperature), or the reward, so that plays of one problem differ"
    )


def measured(run: str, alarms: Sequence[Alarm]) -> Iterator[Measurement]:
    """All kinds of alarms of a run as measurements: 1 for those that are raised, 0 for the others."""
    raised = {alarm.name for alarm in alarms}
    for name in ALARMS:
        yield Measurement("pulse_alarm", Labels(run), name in raised, name)


class Announcer:
    """Shows a person one line when an alarm is raised, and one when it is over. log: shows a line."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._raised: set[tuple[str, AlarmName]] = set()  # of what, and the name

    def look(self, alarms: Sequence[Alarm]) -> None:
        """alarms: all that are raised now."""
        now = {(alarm.of, alarm.name) for alarm in alarms}
        for alarm in alarms:
            if (alarm.of, alarm.name) not in self._raised:
                self._log(f"alarm: {alarm.of}: {alarm.sentence}")
        for of, name in sorted(self._raised - now):
            self._log(f"over: {of}: {name}")
        self._raised = now
