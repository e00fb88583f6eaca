"""docs/guarantees.md and docs/security.md: rows name tests that exist; what the first says of a publisher's proof."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import pulse_rl as pulse
from pulse_rl.codecs.gap import GapCodec
from tests import ROOT

PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text() for name in ("guarantees", "security", "upgrades")}
UNTESTED = ("What runs untested", "Who takes part", "What this release does with a newer format")


def rows() -> Iterator[tuple[str, str]]:
    """Each row of each table of both pages, with the section that it is in."""
    for section in [section for page in PAGES.values() for section in page.split("\n## ")[1:]]:
        title, _, text = section.partition("\n")
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert all(line.count("|") == lines[0].count("|") for line in lines), title
        yield from ((title, line) for line in lines[2:])


@cache
def functions(file: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("title", "row"), list(rows()))
def test_each_row_names_tests_that_exist(title: str, row: str) -> None:
    """A name with a star stands for files that may be there, beside others that are."""
    names = re.findall(r"`((?:tests|bench)/[^`]+)`", row.split(" | ")[-1])
    found = [name for name in names if "*" not in name]
    assert found or title in UNTESTED
    for name in found:
        file, _, test = name.partition("::")
        assert (ROOT / file).is_file(), name
        assert not test or test in functions(file), name


def test_every_table_is_read() -> None:
    assert len(list(rows())) > 60
    for name in PAGES:
        assert f"]({name}.md)" in (ROOT / "docs" / "index.md").read_text()
        assert f"](docs/{name}.md)" in (ROOT / "README.md").read_text()


def trained() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(999, dtype=torch.bfloat16).reshape(27, 37)}


def test_a_patch_that_does_not_lead_to_the_weights_is_not_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """A codec that gets one bit of one value wrong: an error, no version, and publishing goes on without it."""
    store, weights = pulse.open_store("memory://"), trained()
    publisher = pulse.Publisher(store, codec="gap")
    publisher.publish(weights, version=0)
    encode = GapCodec.encode

    def wrong(self: GapCodec, segments: Any, spans: Any) -> Any:
        for segment in segments:
            segment.changes.values[0] ^= 1
        try:
            return encode(self, segments, spans)
        finally:
            for segment in segments:
                segment.changes.values[0] ^= 1

    weights["w"][3, 5] += 8
    monkeypatch.setattr(GapCodec, "encode", wrong)
    with pytest.raises(pulse.IntegrityError, match="does not lead to version 1"):
        publisher.publish(weights, version=1)
    assert pulse.Subscriber(store).latest() == 0
    monkeypatch.undo()
    publisher.publish(weights, version=1)
    live = {"w": torch.zeros_like(weights["w"])}
    assert pulse.Subscriber(store).sync(live).version == 1
    assert torch.equal(live["w"], weights["w"])


def test_a_baseline_that_was_altered_is_found_by_the_next_anchor() -> None:
    """As by faulty memory: no version is committed whose anchor has another digest."""
    store, weights = pulse.open_store("memory://"), trained()
    publisher = pulse.Publisher(store)
    publisher.publish(weights, version=0)
    baseline = publisher._position.baseline
    assert baseline is not None
    bits = baseline.tensors["w"]
    bits.write(7, bits.read(7, 8) ^ 1)
    with pytest.raises(pulse.IntegrityError, match="the anchor: expected digest"):
        publisher.publish(weights, version=1, anchor=True)
    assert pulse.Subscriber(store).latest() == 0
    publisher = pulse.Publisher(store)
    publisher.publish(weights, version=1, anchor=True)
    assert pulse.Subscriber(store).sync({"w": torch.zeros_like(weights["w"])}).version == 1
