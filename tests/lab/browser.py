"""Drives a real browser: Chromium, over a pipe, in its DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
import time

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
PATIENCE = 120  # seconds until a test gives up; no test depends on how long anything takes
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]


class Browser:
    """One page; console messages and network requests are recorded."""

    def __init__(self, profile):
        self.commands, theirs_in = os.pipe()[::-1]
        theirs_out, self.answers = os.pipe()[::-1]
        flags = [*FLAGS, "--remote-debugging-pipe", "--autoplay-policy=no-user-gesture-required", "--mute-audio"]
        # The protocol is spoken on the file descriptors 3 and 4.
        script = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", script, CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(theirs_in, theirs_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.number, self.unread, self.session = 0, b"", None
        self.console, self.addresses = [], []
        (page,) = (target for target in self.call("Target.getTargets")["targetInfos"] if target["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.close(self.commands)
        os.close(self.answers)
        self.process.terminate()
        self.process.wait(PATIENCE)

    def call(self, method, **parameters):
        """Send a command of the protocol; returns its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        while (answer := self.read()).get("id") != self.number:
            self.note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def read(self, seconds=PATIENCE):
        """The next message."""
        while b"\0" not in self.unread:
            assert select.select([self.answers], [], [], seconds)[0], "the browser does not answer"
            part = os.read(self.answers, 2**16)
            assert part, "the browser has ended"
            self.unread += part
        message, _, self.unread = self.unread.partition(b"\0")
        return json.loads(message)

    def note(self, event):
        name, content = event.get("method"), event.get("params", {})
        if name == "Runtime.exceptionThrown":
            self.console.append(content["exceptionDetails"])
        elif name == "Runtime.consoleAPICalled":
            self.console.append(content["args"])
        elif name == "Log.entryAdded":
            self.console.append(content["entry"])
        elif name == "Network.requestWillBeSent":
            self.addresses.append(content["request"]["url"])

    def run(self, expression):
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression, seconds=PATIENCE):
        """Wait until an expression is true; returns its value."""
        until = time.monotonic() + seconds
        while not (value := self.run(expression)):
            assert time.monotonic() < until, f"{expression} did not come true; {self.console}"
            time.sleep(0.05)
        return value

    def click(self, selector):
        """Click into the middle of an element."""
        x, y = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            "e.scrollIntoView({block: 'center'}); const r = e.getBoundingClientRect();"
            "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector, text):
        """Replace the content of a field."""
        self.click(selector)
        self.run(f"document.querySelector({json.dumps(selector)}).select()")
        self.call("Input.insertText", text=text)
