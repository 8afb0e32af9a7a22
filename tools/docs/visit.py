"""Visits every page of the built site in headless Chromium, and prints faults: ``make docs-check``.

Each page is loaded once and shown as on a desktop and on a phone, in the light and in the dark theme. Faults
are: a page that is wider than its window, errors on the console, images that do not load, diagrams that are
not drawn, and serious or critical violations that axe-core finds. The exit code is 1 if there is a fault.

    python -m tools.docs.visit                          # all pages of build/site
    python -m tools.docs.visit store howto/races --shots DIR  # some pages, with a picture of each view
"""

from __future__ import annotations

import argparse
import base64
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.docs.site import PACKAGES, SITE

WIDTHS = {"desktop": 1280, "phone": 390}
THEMES = {"light": "default", "dark": "slate"}
TIMEOUT_SECONDS = 60

# The theme replaces <pre class="mermaid"> by a <div> with a closed shadow root; on failure it is empty.
_UNDRAWN = """return [...document.querySelectorAll(".mermaid")].filter(
    each => each.tagName == "PRE" || each.getBoundingClientRect().height < 20).length"""
_BROKEN = """return [...document.images]
    .filter(each => each.complete && !each.naturalWidth).map(each => each.src)"""
_OVERFLOW = """const root = document.documentElement, width = root.clientWidth
if (root.scrollWidth <= width) return null
const scrolls = each => each.closest("pre, .md-typeset__scrollwrap, .mermaid")
const wide = [...document.querySelectorAll("main *")].find(
    each => each.getBoundingClientRect().right > width + 1 && !scrolls(each))
return root.scrollWidth + " pixels wide: " + (wide ? wide.outerHTML.slice(0, 100) : "?")"""
_AXE = """const done = arguments[arguments.length - 1]
axe.run({preload: false, resultTypes: ["violations"]}).then(found => done(found.violations
    .filter(each => ["serious", "critical"].includes(each.impact))
    .map(each => each.id + ": " + each.nodes.map(node => node.html).join(" | ").slice(0, 400))))"""


@contextmanager
def chromium() -> Iterator[Any]:
    """A headless browser, which ends with the block. Raises SystemExit if it is not installed."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    program, driver_program = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver_program is None:
        sys.exit("tools.docs.visit: install chromium and chromedriver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-background-networking"):
            options.add_argument(f"--{argument}")
        options.add_argument("--force-prefers-reduced-motion")
        options.add_argument(f"--user-data-dir={profile}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(driver_program))
        driver.set_page_load_timeout(TIMEOUT_SECONDS)
        driver.set_script_timeout(TIMEOUT_SECONDS)
        try:
            yield driver
        finally:
            driver.quit()


def visit(driver: Any, page: Path, axe: str, shots: Path | None) -> Iterator[str]:
    """The faults of ``page`` in all views."""
    show(driver, "desktop", "light")
    driver.get(page.as_uri())
    yield from faults_of_loading(driver)
    driver.execute_script(axe)
    for width in WIDTHS:
        for theme in THEMES:
            show(driver, width, theme)
            if overflow := driver.execute_script(_OVERFLOW):
                yield f"{width}: {overflow}"
            yield from (f"{width}, {theme}: {each}" for each in driver.execute_async_script(_AXE))
            if shots is not None:
                name = "-".join(page.relative_to(SITE).with_suffix("").parts)
                save(driver, shots / f"{name}-{width}-{theme}.png")


def faults_of_loading(driver: Any) -> Iterator[str]:
    """Waits for the diagrams and returns the faults that no view changes."""
    from selenium.common.exceptions import TimeoutException
    from selenium.webdriver.support.ui import WebDriverWait

    try:
        WebDriverWait(driver, 10, poll_frequency=0.1).until(lambda _: not driver.execute_script(_UNDRAWN))
    except TimeoutException:
        yield f"{driver.execute_script(_UNDRAWN)} diagrams are not drawn"
    yield from (f"image does not load: {source}" for source in driver.execute_script(_BROKEN))
    yield from (
        f"console: {entry['message']}" for entry in driver.get_log("browser") if entry["level"] == "SEVERE"
    )


def show(driver: Any, width: str, theme: str) -> None:
    """Sets the size of the window and the theme."""
    size = {"width": WIDTHS[width], "height": 900, "deviceScaleFactor": 1, "mobile": width == "phone"}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.execute_script("document.body?.setAttribute('data-md-color-scheme', arguments[0])", THEMES[theme])


def save(driver: Any, path: Path) -> None:
    """Saves a picture of the whole page."""
    whole = {**driver.execute_cdp_cmd("Page.getLayoutMetrics", {})["cssContentSize"], "scale": 1}
    shot = driver.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True, "clip": whole})
    path.write_bytes(base64.b64decode(shot["data"]))


def is_chosen(page: Path, names: list[str]) -> bool:
    """Whether to visit ``page``. 404.html has absolute links: it needs a server, as its readers do."""
    path = str(page.relative_to(SITE).with_suffix(""))
    return path in names or page.stem in names if names else page.name != "404.html"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.docs.visit", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("names", nargs="*", help="pages without .html; default: all")
    parser.add_argument("--shots", type=Path, metavar="DIR", help="save a picture of each view")
    args = parser.parse_args()
    pages = [page for page in sorted(SITE.rglob("*.html")) if is_chosen(page, args.names)]
    if not pages:
        sys.exit(f"tools.docs.visit: no page in {SITE}; build the site with `make docs`")
    if args.shots is not None:
        args.shots.mkdir(parents=True, exist_ok=True)
    axe = (PACKAGES / "axe-core" / "axe.min.js").read_text()
    count = 0
    with chromium() as driver:
        for page in pages:
            for fault in visit(driver, page, axe, args.shots):
                print(f"{page.relative_to(SITE)}: {fault}", flush=True)
                count += 1
    print(f"{len(pages)} pages, {count} faults")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
