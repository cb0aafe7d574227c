"""A real browser for the report: Chromium without a window, driven over its own pipe.

The protocol is Chrome DevTools': JSON messages with a zero byte behind each. Nothing but the
standard library is needed, and no port is opened.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEADLINE_S = 120.0


def find() -> str | None:
    """A Chromium on the path."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Page:
    """What a page did while it was loaded."""

    size: dict[str, Any]
    """Width of the view and of the document, and elements that stick out."""
    said: list[str] = field(default_factory=list)
    """Console messages and exceptions."""
    asked: list[str] = field(default_factory=list)
    """Addresses that were asked for, besides the page itself."""


_MEASURE = """(() => {
  const wide = document.documentElement.scrollWidth, view = document.documentElement.clientWidth;
  const inside = e => { for (let p = e.parentElement; p; p = p.parentElement)
    if (getComputedStyle(p).overflowX !== "visible") return true; return false; };
  const out = [...document.querySelectorAll("body *")].filter(e =>
    !inside(e) && e.getBoundingClientRect().right > view + 1);
  return JSON.stringify({view, wide, out: out.slice(0, 5).map(e => e.outerHTML.slice(0, 120)),
    text: document.body.innerText.length, scripts: document.scripts.length,
    images: document.images.length, svgs: document.querySelectorAll("svg").length,
    small: [...document.querySelectorAll("p, td, th, h1, h2, h3")].filter(e =>
      parseFloat(getComputedStyle(e).fontSize) < 12).length});
})()"""


class Browser:
    """One running Chromium."""

    def __init__(self, program: str, profile: Path) -> None:
        to_r, self._to = os.pipe()
        self._from, from_w = os.pipe()
        words = [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "about:blank",
        ]
        # Chromium reads from descriptor 3 and writes to 4.
        self._child = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{to_r} 4>&{from_w}', "bash", *words],
            pass_fds=(to_r, from_w),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_r)
        os.close(from_w)
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; events on the way are kept."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(DEADLINE_S)
            if answer is None:
                raise TimeoutError(method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self, seconds: float) -> dict[str, Any] | None:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                return None
            data = os.read(self._from, 1 << 20)
            if not data:
                raise EOFError("the browser has ended")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def evaluate(self, session: str, script: str) -> Any:
        """The value of a script in a page, awaited when it is a promise."""
        answer = self.send(
            "Runtime.evaluate",
            session,
            expression=script,
            awaitPromise=True,
            returnByValue=True,
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def open(self, url: str) -> str:
        """A page on an address; the session for `evaluate`."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session: str = self.send("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.send("Runtime.enable", session)
        self.send("Page.enable", session)
        self.events.clear()
        self.send("Page.navigate", session, url=url)
        end = time.monotonic() + DEADLINE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            event = self._next(max(end - time.monotonic(), 0.01))
            if event is None:
                raise TimeoutError(f"{url} is never loaded")
            self.events.append(event)
        return session

    def look(self, path: Path, width: int, picture: Path, height: int = 900) -> Page:
        """Load a file in a view so wide, photograph it, and say what it did."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable", session)
        self.send(
            "Emulation.setDeviceMetricsOverride",
            session,
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.events.clear()
        url = path.resolve().as_uri()
        self.send("Page.navigate", session, url=url)
        end = time.monotonic() + DEADLINE_S
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            event = self._next(max(end - time.monotonic(), 0.01))
            if event is None:
                raise TimeoutError("the page is never loaded")
            self.events.append(event)
        # What a page asks for late, it asks for now.
        late = time.monotonic() + 0.5
        while (event := self._next(max(late - time.monotonic(), 0.01))) is not None:
            self.events.append(event)
        value = self.send("Runtime.evaluate", session, expression=_MEASURE)["result"]["value"]
        shot = self.send(
            "Page.captureScreenshot", session, format="png", captureBeyondViewport=True
        )
        picture.write_bytes(base64.b64decode(shot["data"]))
        page = Page(json.loads(value))
        for event in self.events:
            what, inside = event.get("method"), event.get("params", {})
            if what == "Runtime.consoleAPICalled":
                page.said.append(json.dumps(inside.get("args")))
            elif what == "Runtime.exceptionThrown":
                page.said.append(json.dumps(inside.get("exceptionDetails")))
            elif what == "Log.entryAdded":
                page.said.append(inside["entry"]["text"])
            elif what == "Network.requestWillBeSent" and inside["request"]["url"] != url:
                page.asked.append(inside["request"]["url"])
        self.send("Target.closeTarget", targetId=target)
        return page

    def close(self) -> None:
        """End it."""
        try:
            self.send("Browser.close")
            self._child.wait(10)
        except (OSError, EOFError, TimeoutError, RuntimeError, subprocess.TimeoutExpired):
            self._child.kill()
            self._child.wait()
        os.close(self._to)
        os.close(self._from)


@contextmanager
def started(profile: Path) -> Iterator[Browser]:
    """A Chromium for the length of a block."""
    program = find()
    assert program is not None
    browser = Browser(program, profile)
    try:
        yield browser
    finally:
        browser.close()
