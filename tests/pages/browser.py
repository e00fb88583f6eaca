"""A real browser for tests: Chromium, without a window, driven by its DevTools protocol."""

import asyncio
import base64
import json
import shutil
from itertools import count
from pathlib import Path
from typing import Any, Self

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--no-first-run")
PATIENCE_S = 60.0  # the suite's other processes may have the cores


class Browser:
    """One tab. scratch: an empty directory. A context manager.

    Attributes:
        errors: What the page's scripts have raised, and what its policy has refused.
    """

    def __init__(self, scratch: Path) -> None:
        self.errors: list[str] = []
        self._scratch = scratch
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def __aenter__(self) -> Self:
        assert CHROMIUM is not None
        self._process = await asyncio.create_subprocess_exec(
            CHROMIUM, *OPTIONS, f"--user-data-dir={self._scratch}", stderr=asyncio.subprocess.DEVNULL
        )
        port_file = self._scratch / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (port_file.exists() and port_file.read_text()):
                await asyncio.sleep(0.05)
        self._session = aiohttp.ClientSession()
        address = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/new?about:blank"
        async with self._session.put(address) as answer:
            target = (await answer.json())["webSocketDebuggerUrl"]
        self._socket = await self._session.ws_connect(target, max_msg_size=0)
        self._hearing = asyncio.create_task(self._hear())
        for domain in ("Page", "Runtime", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._hearing.cancel()
        await self._socket.close()
        await self._session.close()
        self._process.kill()
        await self._process.wait()

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
