"""A real headless browser for the pages we write. No driver: Chromium dumps the page, or what its console says."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "chrome-headless-shell")
REQUIRED = "PRISM_REQUIRE_BROWSER"  # set by CI: there a browser that is missing is a failure, not a skip

# Measures the page once it is laid out, in a frame (a window cannot be as narrow as a phone), and leaves what it found
# in the outer document.
MEASURE = """
<script>
addEventListener("load", () => {
  const charts = [...document.querySelectorAll("svg.chart")].map(svg => {
    const box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
    const texts = [...svg.querySelectorAll("text")];
    return {
      title: svg.querySelector("title").textContent, spoken: svg.querySelector("desc").textContent,
      width: box.width, height: box.height, right: box.right,
      smallest: Math.min(...texts.map(t => scale * parseFloat(getComputedStyle(t).fontSize))),
      outside: texts.filter(t => { const b = t.getBoundingClientRect();
        return b.left < box.left - 2 || b.right > box.right + 2; }).map(t => t.textContent),
      labels: texts.map(t => t.textContent), marks: svg.querySelectorAll(".line,circle,rect").length,
      colour: getComputedStyle(texts[0]).color};
  });
  const found = {width: innerWidth, scroll: document.documentElement.scrollWidth, charts,
    requests: performance.getEntriesByType("resource").length,
    tables: [...document.querySelectorAll("table")].map(t => t.rows.length),
    background: getComputedStyle(document.body).backgroundColor};
  const pre = parent.document.createElement("pre");
  pre.id = "measured"; pre.textContent = JSON.stringify(found); parent.document.body.append(pre);
});
</script>
"""


@dataclass(frozen=True)
class Browser:
    path: str

    def console(self, page: Path) -> list[str]:
        """What the page, as it is, makes the browser's console say: errors, blocked loads, warnings."""
        said = self._run(page, "--enable-logging=stderr", "--log-level=0", "--dump-dom").stderr
        return [line for line in said.splitlines() if re.search(r":CONSOLE[:(]", line)]

    def measure(self, page: Path, width: int, height: int = 900, *, dark: bool = False) -> dict[str, Any]:
        """The page's layout where it is `width` pixels wide: of a copy that may run the measuring script."""
        text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
        text = text.replace("</body>", MEASURE + "</body>")
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "page.html"
            copy.write_text(
                f'<!doctype html><body style="margin:0"><iframe style="border:0;width:{width}px;height:{height}px" '
                f'srcdoc="{html.escape(text)}"></iframe></body>'
            )
            options = [f"--window-size={width + 100},{height}", "--dump-dom"]
            options += ["--blink-settings=preferredColorScheme=0"] if dark else []
            dumped = self._run(copy, *options).stdout
        found = re.search(r'<pre id="measured">(.*?)</pre>', dumped, re.DOTALL)
        assert found, dumped[-2000:]
        return json.loads(html.unescape(found[1]))

    def _run(self, page: Path, *options: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory() as profile:
            return subprocess.run(
                [
                    self.path, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                    "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={profile}", *options,
                    page.absolute().as_uri(),
                ],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
            )  # fmt: skip


def find_browser() -> Browser:
    """Skips the test where no Chromium is installed, and fails it there if PRISM_REQUIRE_BROWSER is set."""
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        reason = f"no headless browser here ({', '.join(NAMES)}); Debian and Ubuntu: apt-get install chromium"
        if os.environ.get(REQUIRED):
            pytest.fail(reason)
        pytest.skip(reason)
    return Browser(path)
