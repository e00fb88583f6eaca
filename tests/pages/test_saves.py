"""The page "What it saves you": its table is the planner's, and so is what its script calculates in a browser."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench import saves
from pulse_rl import plan
from tests import ROOT
from tests.pages.browser import CHROMIUM, Browser

SCRIPT = ROOT / "docs" / "javascripts" / "saves.js"


def test_the_page_has_what_the_planner_says() -> None:
    text = saves.PAGE.read_text()
    found = text.partition(saves.BEGIN)[2].partition(saves.END)[0].strip()
    assert found == saves.written().strip(), "the planner has changed: run python -m bench.saves"


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to run the page's script in")
def test_the_script_calculates_as_the_planner(tmp_path: Path) -> None:
    """Bytes and seconds of each way, for what a reader may type; then that typing changes the page."""
    (place,) = re.findall(r"<div id=\"saves\".*</div>", saves.PAGE.read_text())
    page = tmp_path / "page.html"
    page.write_text(f'<!DOCTYPE html><meta charset="utf-8"><body>{place}<script>{SCRIPT.read_text()}</script></body>')

    async def work() -> None:
        async with Browser() as browser:
            await browser.open(page.as_uri())
            for params, density, link in (
                (134_515_008, 0.0021, 1e7),
                (7_000_000_000, 0.006, 1e9),
                (10**12, 0.25, 4e11),
            ):
                typed = {"params": params, "density": density, "link": link, "threads": 16, "ranks": 8}
                call = f"document.getElementById('saves').calculate({json.dumps(typed)})"
                found: dict[str, Any] = await browser.run(call)
                full, gap, context, _ = plan(params=params, density=density, bandwidth=link, compute_s=1.0).weights
                pause = saves.PAUSE_S + saves.CHANGE_S * density * params / 8
                ours = [one.seconds + one.coding_seconds / 16 + pause for one in (gap, context)]
                assert found["NCCL broadcast"]["seconds"] == pytest.approx(full.seconds)
                assert found["full reload"]["nbytes"] == full.nbytes
                assert found["the paper's codec"]["nbytes"] == pytest.approx(gap.nbytes, abs=1)
                assert found["the paper's codec"]["seconds"] == pytest.approx(ours[0])
                assert found["ours"]["seconds"] == pytest.approx(min(ours), rel=1e-5)  # the planner gives whole bytes
                assert found["ours"]["pause"] == pytest.approx(pause)
            body = "document.querySelector('#saves tbody').innerText"
            before = await browser.run(body)
            change = "one.value = 10; one.dispatchEvent(new Event('input', {bubbles: true}))"
            await browser.run(f"(one => {{ {change} }})(document.querySelector('[name=link]'))")
            assert await browser.run(body) != before
            await browser.run(f"(one => {{ {change.replace('10', '-1')} }})(document.querySelector('[name=link]'))")
            assert "expected numbers above 0" in await browser.run(body)
            assert browser.errors == []

    asyncio.run(work())
