"""A real browser for tests: Chromium, without a window, driven by its DevTools protocol."""

import asyncio
import atexit
import base64
import json
import shutil
import subprocess
import tempfile
import time
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Self

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
PATIENCE_S = 60.0  # the suite's other processes may have the cores


@cache
def _devtools() -> str:
    """The address of Chromium's DevTools, which is started once and ends with this process: a start takes seconds."""
    assert CHROMIUM is not None
    scratch = Path(tempfile.mkdtemp(prefix="pulse-rl-chromium-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    process = subprocess.Popen([CHROMIUM, *OPTIONS, f"--user-data-dir={scratch}"], stderr=subprocess.DEVNULL)
    atexit.register(process.wait)
    atexit.register(process.kill)
    port_file, deadline = scratch / "DevToolsActivePort", time.monotonic() + PATIENCE_S
    while not (port_file.exists() and port_file.read_text()):
        assert time.monotonic() < deadline, "Chromium did not start"
        time.sleep(0.05)
    return f"http://127.0.0.1:{port_file.read_text().split()[0]}/json"


class Browser:
    """One tab. A context manager.

    Attributes:
        errors: What the page's scripts have raised, and what its policy has refused.
    """

    def __init__(self) -> None:
        self.errors: list[str] = []
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession()
        async with self._session.put(f"{_devtools()}/new?about:blank") as answer:
            tab = await answer.json()
        self._id = tab["id"]
        self._socket = await self._session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)
        self._hearing = asyncio.create_task(self._hear())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hearing.cancel()
        await self._socket.close()
        async with self._session.get(f"{_devtools()}/close/{self._id}"):
            pass
        await self._session.close()

    async def _hear(self) -> None:
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
            elif found["method"] == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(found["params"]["exceptionDetails"])[:2000])
            elif found["method"] == "Log.entryAdded" and found["params"]["entry"]["source"] == "security":
                self.errors.append(found["params"]["entry"]["text"])

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            found = await answer
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    async def run(self, script: str) -> Any:
        """The value of an expression on the page."""
        found = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def wait(self, script: str, seconds: float = PATIENCE_S) -> Any:
        """The value of an expression, once it is true. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not (value := await self.run(script)):
                await asyncio.sleep(0.02)
        return value

    async def look(self, *, width: int, height: int = 1000, dark: bool = False) -> None:
        """Set the window's size, and the scheme that the reader prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def open(self, address: str) -> None:
        """Go to a page."""
        await self.call("Page.navigate", url=address)
        await self.wait(f"location.href.startsWith({json.dumps(address)}) && document.readyState === 'complete'")

    async def press(self, key: str, code: int) -> None:
        """Press a key: its name, and its number."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def picture(self, file: Path) -> None:
        """Save what the window shows."""
        found = await self.call("Page.captureScreenshot", format="png")
        file.write_bytes(base64.b64decode(found["data"]))
