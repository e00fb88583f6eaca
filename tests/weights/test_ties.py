"""Tied tensors have several names: which of them a side gives, and in which order, makes no difference."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pulse_rl as pulse
from pulse_rl.weights.layout import names_of
from tests.loco.ranks import Ranks, good

GIVEN = {"module": ["embed", "head"], "parameters": ["embed"], "reversed": ["head", "embed"]}


def give(names: list[str], tensor: Any) -> dict[str, Any]:
    return {**dict.fromkeys(names, tensor), "norm": torch.ones(3)}


@pytest.mark.parametrize("published", GIVEN)
@pytest.mark.parametrize("held", [*GIVEN, "alias"])
def test_weights_sync_whichever_of_its_names_a_tied_tensor_has(tmp_path: Path, published: str, held: str) -> None:
    """Loaded, patched, recognised by a new Subscriber, staged, recounted: the memory has the bits of the trainer's."""
    names = GIVEN.get(held, ["head"])
    if published == "parameters" and held == "alias":
        names = ["tied", "embed"]  # the name that stands for it here is none of the history
    trained, live = torch.randn(50, 8), torch.zeros(50, 8)
    publisher, subscriber = pulse.Publisher(tmp_path), pulse.Subscriber(tmp_path)
    for version in range(3):
        trained[version] += 1
        publisher.publish(give(GIVEN[published], trained))
        weights = give(names, live)
        if version < 2:
            report = subscriber.sync(weights)
        else:
            report = subscriber.stage(weights).apply()
        assert report.route == ("patches" if version else "anchor")
        assert report.recovered is None
        assert torch.equal(live, trained)
        assert subscriber.verify(give(names, live)) == publisher.digest
    assert pulse.Subscriber(tmp_path).sync(give(names, live)).route == "none"


@pytest.mark.parametrize("published", ["module", "reversed"])
def test_tied_names_in_memory_apart_are_both_written(tmp_path: Path, published: str) -> None:
    trained = torch.randn(50, 8)
    weights = {"head": torch.zeros(50, 8), "embed": torch.zeros(50, 8), "norm": torch.zeros(3)}
    publisher, subscriber = pulse.Publisher(tmp_path), pulse.Subscriber(tmp_path)
    for version in range(2):
        trained[version] += 1
        publisher.publish(give(GIVEN[published], trained))
        subscriber.sync(weights)
        assert torch.equal(weights["head"], trained)
        assert torch.equal(weights["embed"], trained)
    weights["head"][7] += 1
    with pytest.raises(pulse.IntegrityError):
        subscriber.verify(weights)


def test_a_name_in_other_memory_is_not_left_out(tmp_path: Path) -> None:
    """Only a further name of a tensor that the version has needs no name there."""
    pulse.Publisher(tmp_path).publish(give(["embed"], torch.randn(50, 8)))
    live = torch.zeros(50, 8)
    with pytest.raises(pulse.BaseMismatchError) as raised:
        pulse.Subscriber(tmp_path).sync({**give(["embed"], live), "head": torch.zeros(50, 8)})
    assert list(raised.value.unexpected) == ["head"]
    assert not live.any()


def test_a_patch_file_meets_a_module_and_its_parameters() -> None:
    old = torch.randn(50, 8)
    new = old + 1
    for made in GIVEN.values():
        patch = pulse.diff(give(made, old), give(made, new))
        for held in GIVEN.values():
            live = old.clone()
            pulse.apply(give(held, live), patch)
            assert torch.equal(live, new)


@pytest.mark.parametrize("first", GIVEN)
def test_a_history_is_continued_under_its_names(tmp_path: Path, first: str) -> None:
    """By one publisher, and by a new one for each version, with the tensor's names as each has them."""
    trained = torch.randn(50, 8)
    one, digests = pulse.Publisher(tmp_path), set()
    for then in [first, *GIVEN]:
        for publisher in (one, pulse.Publisher(tmp_path)):
            trained[0] += 1
            digests.add(publisher.publish(give(GIVEN[then], trained)).digest)
            head = publisher.history.head()
            assert head is not None
            assert head.tied == dict.fromkeys(GIVEN[first][1:], GIVEN[first][0])
            one = publisher
    assert len(digests) == 8
    assert pulse.verify(str(tmp_path)).problems == ()


def follow_in_shares(group: Any, rank: int, size: int, store: str, published: str, held: str) -> list[bool]:
    whole, found = torch.arange(48.0).reshape(12, 4), []
    rows = slice(rank * 6, rank * 6 + 6)

    def shard(names: list[str], rows_of: torch.Tensor) -> dict[str, Any]:
        return {
            **dict.fromkeys(names, pulse.Shard(rows_of, offset=(rank * 6, 0), shape=(12, 4))),
            "norm": torch.ones(3),
        }

    live = torch.zeros(6, 4)
    for version in range(4):
        whole += 1
        if version % 2 == 0:  # resumed: each rank reads its share of the version before
            publisher, subscriber = pulse.Publisher(store, group=group), pulse.Subscriber(store, group=group)
        names = GIVEN[held if version in (1, 2) else published]
        publisher.publish(shard(names, whole[rows]))
        subscriber.sync(shard(GIVEN[held], live))
        found.append(torch.equal(live, whole[rows]))
    return found


@pytest.mark.parametrize(("published", "held"), [("parameters", "reversed"), ("reversed", "parameters")])
def test_ranks_sync_whichever_names_a_tied_tensor_has(ranks: Ranks, tmp_path: Path, published: str, held: str) -> None:
    """Two ranks hold half a tied tensor each, which is published and held under other names."""
    assert good(ranks(follow_in_shares, 2, str(tmp_path / "store"), published, held)) == [[True] * 4] * 2


NAMES = list("abcdef")


@st.composite
def memories(draw: st.DrawFn) -> dict[str, int]:
    """Name → number of the memory behind it, in some order."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(1, 6))]
    return {name: draw(st.integers(0, 2)) for name in names}


def ties_of(weights: dict[str, int]) -> tuple[list[str], dict[str, str]]:
    first: dict[int, str] = {}
    owners = {name: first.setdefault(memory, name) for name, memory in weights.items()}
    return list(first.values()), {name: owner for name, owner in owners.items() if name != owner}


@settings(max_examples=200, deadline=None)
@given(memories(), memories())
def test_each_memory_has_one_name_and_no_name_two_memories(here: dict[str, int], there: dict[str, int]) -> None:
    """Whatever is tied here and there, tensors keep their memory; what both sides tie alike meets in full."""
    (tensors, ties), (theirs, tied) = ties_of(here), ties_of(there)
    for known in (None, list(there)):
        names, further = names_of(tensors, ties, known, tied)
        assert sorted(names) == sorted(tensors)
        assert len(set(names.values())) == len(names)
        assert further.keys().isdisjoint(names.values())
        assert set(further.values()) <= set(names.values())
        for name, new in {name: names[ties.get(name, name)] for name in here}.items():
            owner = further.get(name, name)
            assert owner == new or (known is not None and name not in there)  # left out, and only such a one
        again = names_of(list(names.values()), further, known, tied)
        assert again == ({name: name for name in names.values()}, further)
    if all((here[a] == here[b]) == (there[a] == there[b]) for a in here for b in here if {a, b} <= there.keys()) and (
        {there[name] for name in here if name in there} == set(there.values())
        and {here[name] for name in there if name in here} == set(here.values())
    ):
        names, further = names_of(tensors, ties, list(there), tied)
        assert (sorted(names.values()), further) == (sorted(theirs), tied)


TIED = {"head": "embed"}


def copies(embed: torch.Tensor, head: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    return {"embed": embed, "norm": torch.ones(3), "head": embed.clone() if head is None else head}


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float32]),
    st.lists(
        st.tuples(st.sampled_from(["copies", "stream", "tied", "absent", "owner absent"]), st.booleans()), max_size=4
    ),
    st.integers(0, 2**32),
)
def test_copies_are_published_once(dtype: torch.dtype, steps: list[tuple[str, bool]], seed: int) -> None:
    """However a tensor and its copy are given, the version has the digest and the bytes of the one tensor alone."""
    torch.manual_seed(seed)
    embed = torch.randn(40, 8).to(dtype)
    store, plain = pulse.open_store("memory://"), pulse.Publisher(pulse.open_store("memory://"), codec="gap")
    publisher = pulse.Publisher(store, tied=TIED, codec="gap")
    for form, anew in [("copies", False), *steps]:
        embed[torch.randint(40, (3,))] += 1
        if anew:
            publisher = pulse.Publisher(store, tied=TIED, codec="gap")
        weights: Any = copies(embed)
        if form == "stream":
            weights = iter(weights.items())
        elif form == "tied":
            weights = {**weights, "head": embed}
        elif form == "absent":
            del weights["head"]
        elif form == "owner absent":
            del weights["embed"]
        report, alone = (
            publisher.publish(weights),
            plain.publish({"embed": embed, "norm": torch.ones(3)}),
        )
        assert (report.digest, report.changes, report.elements) == (alone.digest, alone.changes, alone.elements)
        head = publisher.history.head()
        assert head is not None
        assert head.tied == TIED
    received = copies(torch.zeros(40, 8, dtype=dtype))
    pulse.Subscriber(store).sync(received)
    assert torch.equal(received["head"], embed)
    assert torch.equal(received["embed"], embed)


@pytest.mark.parametrize("stream", [False, True])
def test_copies_that_differ_are_refused(stream: bool) -> None:
    """In one bit, also one of −0; nothing is published, and equal ones are published after."""
    publisher, embed = pulse.Publisher(pulse.open_store("memory://"), tied=TIED), torch.zeros(40, 8)
    for version in range(2):
        head = embed.clone()
        head[39, 7] = -0.0
        weights = copies(embed, head)
        with pytest.raises(pulse.IntegrityError) as raised:
            publisher.publish(iter(weights.items()) if stream else weights)
        assert raised.value.name == "head"
        assert publisher.version == (version - 1 if version else None)
        assert publisher.publish(copies(embed)).version == version


def test_what_ties_cannot_be() -> None:
    store = pulse.open_store("memory://")
    for wrong in ({"a": "b", "b": "c"}, {"a": "a"}, {"a": 1}):
        with pytest.raises(ValueError, match="tied: expected"):
            pulse.Publisher(store, tied=wrong)  # type: ignore[arg-type]
    for weights in ({"embed": torch.ones(2), "head": torch.ones(3)}, {"norm": torch.ones(3)}):
        with pytest.raises(ValueError, match="tied: expected 'head' and 'embed'"):
            pulse.Publisher(store, tied=TIED).publish(weights)
    other = torch.ones(3)
    with pytest.raises(ValueError, match="found it tied to 'norm'"):
        pulse.Publisher(store, tied=TIED).publish({"norm": other, "head": other, "embed": torch.ones(3)})
    pulse.Publisher(store).publish(copies(torch.ones(4)))
    with pytest.raises(pulse.BaseMismatchError):  # a history keeps what it began with
        pulse.Publisher(store, tied=TIED).publish(copies(torch.ones(4)))


def publish_copies(group: Any, rank: int, size: int, store: str) -> list[Any]:
    """Shards of one, replicas of the other; anew for each version; then another bit on rank 1, in its replica alone."""
    found: list[Any] = []
    embed = torch.arange(48.0).reshape(12, 4)
    for version in range(3):
        embed += 1
        publisher = pulse.Publisher(store, group=group, tied=TIED)
        shard = pulse.Shard(embed[rank * 6 : rank * 6 + 6], offset=(rank * 6, 0), shape=(12, 4))
        weights = {"embed": shard, "norm": torch.ones(3), "head": embed.clone()}
        if version == 1:
            weights = {**weights, "embed": embed}
        found.append(publisher.publish(weights).digest == pulse.digest({"embed": embed, "norm": torch.ones(3)}))
    for place in (0, 47):
        wrong = embed.clone()
        wrong.view(-1)[place] += rank
        try:
            publisher.publish({**weights, "head": wrong})
        except pulse.IntegrityError as error:
            found.append(error.name)
    found.append(publisher.version)
    return found


def test_ranks_publish_copies_once(ranks: Ranks, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert good(ranks(publish_copies, 2, store)) == [[True, True, True, "head", "head", 2]] * 2
    assert [manifest.tied for manifest in pulse.Publisher(store).history.manifests()] == [TIED] * 3
    assert pulse.verify(store).problems == ()
