"""Records ``docs/play.gif``: networks that train on the page of ``dmu play``, a frame whenever the page changes.

Needs Chromium: ``python docs/record_play.py``
"""

import base64
import re
import subprocess
import sys
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests" / "lab"))
from browser import Browser  # noqa: E402

FRAMES = 40  # at most, spread over the training
WIDTH, HEIGHT = 1100, 820  # of the window
SCALE = 0.75  # of the recording
COLOURS = 128
MILLISECONDS, LAST_MILLISECONDS = 200, 3000  # a frame is shown; the last one
PATIENCE = 900  # seconds that training may take


def screenshot(browser: Browser) -> Image.Image:
    """The part of the page about training."""
    place = browser.run(
        "(() => { scrollTo(0, 0); const r = document.getElementById('training').getBoundingClientRect();"
        "return {x: r.x, y: r.y, width: r.width, height: r.height}; })()"
    )
    picture = browser.call("Page.captureScreenshot", clip=place | {"scale": SCALE}, captureBeyondViewport=True)
    return Image.open(BytesIO(base64.b64decode(picture["data"]))).convert("RGB")


def record(browser: Browser) -> list[Image.Image]:
    """From the press of Start to the end of training."""
    changed = (
        "(now => now !== window.recorded && (window.recorded = now, true))"
        "(document.getElementById('curves').innerHTML + document.getElementById('stop').disabled)"
    )
    browser.click("#start")
    browser.wait("!document.getElementById('gates-figure').hidden", PATIENCE)
    frames, running = [], True
    while running:
        browser.wait(changed, PATIENCE)
        running = not browser.run("document.getElementById('stop').disabled")
        frames.append(screenshot(browser))
    return frames


def save(frames: list[Image.Image], path: Path) -> None:
    """As many frames as are wanted, all of the size of the last and in its colours."""
    whole = [frame for frame in frames if frame.size == frames[-1].size]  # the page grows when results appear
    chosen = [*whole[: -1 : max(1, -(-len(whole) // FRAMES))], whole[-1]]
    palette = chosen[-1].quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in chosen]
    shown = [MILLISECONDS] * (len(drawn) - 1) + [LAST_MILLISECONDS]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=shown, loop=0, optimize=True)


def main() -> None:
    """Serve the page, drive a browser through a training and keep what it shows."""
    command = [sys.executable, "-u", "-m", "deepmemory.lab", "play", "--no-open", "--port", "0"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server,
        tempfile.TemporaryDirectory() as profile,
    ):
        try:
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://[\d.]+:\d+/", line)))
            with Browser(profile) as browser:
                browser.call(
                    "Emulation.setDeviceMetricsOverride", width=WIDTH, height=HEIGHT, deviceScaleFactor=1, mobile=False
                )
                browser.call("Emulation.setScrollbarsHidden", hidden=True)
                browser.call("Page.navigate", url=address)
                browser.wait("document.getElementById('runs')?.value")
                save(record(browser), DOCS / "play.gif")
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
