"""The live page in a real Chromium: what it shows follows what is committed, for whoever reads it in whatever way."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pulse_rl as pulse
from pulse_rl.flow.driver.watching import RunSource
from pulse_rl.watch.live import Watched, serving
from pulse_rl.watch.store_page import StoreSource
from tests.pages.browser import CHROMIUM, Browser
from tests.pages.made_run import HOSTILE, MadeRun

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here to show the page in")
SOON_S = 2.0  # from a commit until it is on the page
BUSY_S = 8.0  # more, as other processes of the suite may have the cores; measured alone: docs/measurements.md
TEXT = "document.querySelector('main').innerText"
DRAWN = "document.querySelectorAll('svg.marks').length"
NO_SCROLL = "document.documentElement.scrollWidth <= innerWidth"


@asynccontextmanager
async def opened(*sources: Watched, **look: Any) -> AsyncIterator[Browser]:
    """A browser that shows sources, as they are served."""
    async with serving(sources, "127.0.0.1", 0) as address, Browser() as browser:
        await browser.look(**({"width": 1280} | look))
        await browser.open(address)
        await browser.wait("document.getElementById('state').textContent === 'live'")
        yield browser
        assert browser.errors == []


async def reaches(browser: Browser, text: str) -> None:
    """Wait until the page shows a text."""
    await browser.wait(f"{TEXT}.includes({json.dumps(text)})", SOON_S + BUSY_S)


def test_versions_come_as_they_are_committed(tmp_path: Path) -> None:
    """A run and a store on one page; then the run's driver dies, and the page says so."""
    run = MadeRun(tmp_path / "run")
    run.start()
    run.publish(3)
    weights = {"w": np.arange(5000, dtype=np.float32)}
    publisher = pulse.Publisher(tmp_path / "store", codec="gap")
    publisher.publish(weights, version=40)

    async def work() -> None:
        async with opened(RunSource(run.directory), StoreSource(str(tmp_path / "store"))) as browser:
            await browser.wait(f"{DRAWN} === 8")  # a store of one version has nothing to draw
            for _ in range(2):
                run.publish()
                weights["w"][::100] += 1
                publisher.publish(weights, version=40 + run.version)
                await reaches(browser, f"{run.version}/100")
                await reaches(browser, f"\n{40 + run.version}\n")
            await browser.wait(f"{DRAWN} >= 9")
            points = "[...document.querySelectorAll('svg.marks')][0].querySelectorAll('.mark-symbol path').length"
            assert await browser.run(points) >= 3 * 5  # the reward's three lines
            run.die()
            await reaches(browser, "killed or has crashed")

    asyncio.run(work())


def test_what_the_reader_does_stays_while_the_page_changes(tmp_path: Path) -> None:
    """By keyboard alone: pause, go on, unfold a table; its focus and its place stay as versions come."""
    run = MadeRun(tmp_path / "run", workers=3)
    run.start()
    run.publish(30)

    async def work() -> None:
        async with opened(RunSource(run.directory), width=390, height=800) as browser:
            await browser.wait(f"{DRAWN} === 8")
            focused = "document.activeElement"
            await browser.press("Tab", 9)
            assert await browser.run(f"{focused}.id") == "hold"
            outline = f"getComputedStyle({focused}).outlineStyle"
            assert await browser.run(outline) == "solid"  # the focus can be seen
            await browser.press("Enter", 13)
            await browser.wait("document.getElementById('state').textContent === 'paused'")
            before = await browser.run(TEXT)
            run.publish()
            await asyncio.sleep(2)
            assert await browser.run(TEXT) == before
            await browser.press("Enter", 13)
            await reaches(browser, f"{run.version}/100")
            for _ in range(30):
                await browser.press("Tab", 9)
                if await browser.run(f"{focused}.tagName") == "SUMMARY":
                    break
            await browser.press("Enter", 13)
            await browser.wait(f"{focused}.parentElement.open")
            await browser.run(f"{focused}.parentElement.querySelector('.scroll').scrollLeft = 120")
            top = await browser.run("scrollY")
            run.publish()
            await reaches(browser, f"{run.version}/100")
            assert await browser.run(f"{focused}.tagName") == "SUMMARY"
            assert await browser.run(f"{focused}.parentElement.open")
            assert await browser.run(f"{focused}.parentElement.querySelector('.scroll').scrollLeft") == 120
            assert await browser.run("scrollY") == top
            assert f">{run.version}<" in await browser.run(f"{focused}.parentElement.innerHTML")

    asyncio.run(work())


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_it_fits_the_window_in_the_scheme_of_the_reader(tmp_path: Path, width: int, dark: bool) -> None:
    run = MadeRun(tmp_path / "run", workers=9)
    run.start()
    run.publish(40)

    async def work() -> None:
        async with opened(RunSource(run.directory), width=width, dark=dark) as browser:
            await browser.wait(f"{DRAWN} === 8")
            assert await browser.run(NO_SCROLL)  # tables scroll by themselves
            inner = "document.querySelector('figure').clientWidth"
            widest = "Math.max(...[...document.querySelectorAll('svg.marks')].map(one => one.clientWidth))"
            assert await browser.run(f"{widest} <= {inner}")
            lightness = "getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0]"
            assert (int(await browser.run(lightness)) < 64) == dark
            axis = "getComputedStyle(document.querySelector('.mark-text text')).fill.match(/\\d+/g)[0]"
            assert (int(await browser.run(axis)) > 128) == dark

    asyncio.run(work())


def test_ten_thousand_versions_of_a_hundred_workers(tmp_path: Path) -> None:
    """The page stays small, and follows."""
    run = MadeRun(tmp_path / "run", workers=100)
    run.start()
    run.publish(10_000)

    async def work() -> None:
        async with opened(RunSource(run.directory)) as browser:
            await browser.wait(f"{DRAWN} === 8")
            assert await browser.run("document.querySelectorAll('*').length") < 30_000
            began = time.monotonic()
            run.publish()
            await reaches(browser, f"{run.version:d}/100")
            assert time.monotonic() - began < SOON_S + BUSY_S
            assert "The last 100 of 10,001 versions" in await browser.run("document.body.textContent")

    asyncio.run(work())


def test_hostile_names_are_text_on_the_live_page_too(tmp_path: Path) -> None:
    """Of a run's directory, its workers and their errors: no element comes of them, and nothing is run."""
    name = HOSTILE.replace("alert('a&b')", "document.title='broken'")

    def elements(where: Path, worker: str) -> tuple[MadeRun, RunSource]:
        run = MadeRun(where, workers=2, name=worker)
        run.error = lambda number: worker  # type: ignore[method-assign]
        run.start()
        run.publish(3, codec=worker)
        return run, RunSource(run.directory)

    async def counted(run: MadeRun, source: RunSource) -> tuple[int, str, str]:
        async with opened(source) as browser:
            await browser.wait(f"{DRAWN} === 8")
            run.publish()
            await reaches(browser, f"{run.version}/100")
            inside = "[...document.querySelectorAll('main *:not(svg *)')].length"
            return await browser.run(inside), await browser.run("document.title"), await browser.run(TEXT)

    plain = asyncio.run(counted(*elements(tmp_path / "plain", "worker-{}")))
    hostile_name = f"{name.replace('{{model}}', 'model')}-{{}}"
    hostile = asyncio.run(counted(*elements(tmp_path / name.replace("/", "∕"), hostile_name)))
    assert hostile[0] == plain[0]
    assert hostile[1] != "broken"
    assert "<script>" in hostile[2]
