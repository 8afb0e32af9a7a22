"""The page of a report in a real browser: zoom, search, clicks, themes, a narrow window."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.trace.test_job import CALL, Writer
from tests.trace.test_report import MS, served_call, workers
from zmqgrad.trace import Job, events
from zmqgrad.trace.events import tag_of
from zmqgrad.trace.report import render

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver"),
]

CALLS = 3000
EVIL = "m:<img src=x onerror=alert(1)>"


def record(directory: Path) -> None:
    """Calls of three workers in turn, one of them slow; each has an autograd send."""
    a, b, c = found = workers(directory, 3)
    a.rows.append((tag_of(events.NameDeclared), 0, 2, EVIL))
    for i in range(CALLS):
        served_call(a, (b, c)[i % 2], i + 1, MS + i * 100_000, 30_000)
    _slow(a, b)
    for each in found:
        each.rows.append((tag_of(events.ActorStopped), 400 * MS, 1))
        each.write()


def _slow(a: Writer, b: Writer) -> None:
    name = len(a.rows)
    served_call(a, b, CALLS + 1, 350 * MS, 20 * MS)
    a.rows = [
        (*r[:8], 2, *r[9:]) if i >= name and r[6] == CALLS + 1 and r[0] == 6 else r
        for i, r in enumerate(a.rows)
    ]
    a.add(events.SendRecorded, 350 * MS, 5, 11, 1, CALLS + 1, False)
    a.add(events.PassStarted, 375 * MS, 5, 3)
    a.add(events.GroupExecuted, 376 * MS, 5, 3, 1000, (), ((12, 1),))
    b.add(events.GroupExecuted, 378 * MS, 5, 3, 1000, (12,), ())
    a.add(events.PassFinished, 380 * MS, 5, 3, False)
    a.add(events.WaitBegun, 351 * MS, 1, CALLS + 1)
    for worker, native_id, frame in ((a, 7, "waits_here"), (b, 7, "runs_here")):
        worker.rows.append(
            (
                tag_of(events.StackDumped),
                360 * MS,
                native_id,
                "main",
                f"  File 'x.py', line 1, in {frame}\n",
            )
        )
    a.rows.append((tag_of(events.StackDumped), 390 * MS, 7, "main", "later"))
    a.add(events.WaitEnded, 371 * MS, 1, CALLS + 1, False)
    a.add(events.PassStarted, 385 * MS, 6, 99_999)  # a pass that times out
    a.add(events.WaitBegun, 385 * MS, 0, 99_999)
    a.add(events.WaitEnded, 395 * MS, 0, 99_999, True)


def open_browser(directory: str) -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for argument in (
        "--force-prefers-reduced-motion",
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
    ):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={directory}")
    options.add_argument("--window-size=1400,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(DRIVER))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A browser that shows the page, which it has loaded once."""
    directory = tmp_path_factory.mktemp("report")
    record(directory)
    page = directory / "report.html"
    page.write_bytes(render(Job(directory)))
    profile = tempfile.mkdtemp(prefix="chromium-", dir=os.environ.get("TMPDIR"))
    driver = open_browser(profile)
    try:
        driver.page = page.as_uri()
        driver.get(driver.page)
        until(driver, lambda: driver.execute_script("return document.body.dataset.ready") == "all")
        yield driver
    finally:
        driver.quit()
        shutil.rmtree(profile, ignore_errors=True)


def until(driver: Any, condition: Callable[[], Any]) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, 30, poll_frequency=0.05).until(lambda _: condition())


def find(driver: Any, selector: str) -> Any:
    return driver.find_element("css selector", selector)


def shown(driver: Any) -> int:
    return int(find(driver, "#canvas").get_attribute("data-shown"))


def span(driver: Any) -> float:
    canvas = find(driver, "#canvas")
    return float(canvas.get_attribute("data-to")) - float(canvas.get_attribute("data-from"))


def search(driver: Any, text: str) -> None:
    box = find(driver, "#search")
    box.clear()
    box.send_keys(text)


@pytest.fixture(autouse=True)
def everything_in_view(browser: Any) -> None:
    browser.execute_script(
        "for (const i of ['search', 'slower', 'kind', 'worker']) document.getElementById(i).value = '';"
    )
    browser.execute_script("document.getElementById('search').dispatchEvent(new Event('input'));")
    find(browser, "#fit").click()
    until(browser, lambda: shown(browser) == 2 * CALLS + 2)


def test_the_page_opens_without_errors_and_without_a_network(browser: Any) -> None:
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []
    requests = set()
    for entry in browser.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent" and event["params"]["documentURL"] == browser.page:
            requests.add(event["params"]["request"]["url"].partition(",")[0])
    assert all(url == browser.page or url.startswith(("data:", "blob:")) for url in requests)
    assert browser.page in requests
    cards = find(browser, "#overview").text
    assert f"{2 * CALLS + 2:,}" in cards
    assert len(browser.find_elements("css selector", ".chart .main-svg")) >= 4


def test_zoom_by_button_and_by_key(browser: Any) -> None:
    whole = span(browser)
    find(browser, "#zoom-in").click()
    until(browser, lambda: span(browser) == pytest.approx(whole / 2))
    assert shown(browser) < 2 * CALLS
    canvas = find(browser, "#canvas")
    for _ in range(4):
        canvas.send_keys("+")
    until(browser, lambda: span(browser) == pytest.approx(whole / 32))
    before = float(canvas.get_attribute("data-from"))
    canvas.send_keys("\ue014")  # the right arrow
    until(browser, lambda: float(canvas.get_attribute("data-from")) > before)
    canvas.send_keys("0")
    until(browser, lambda: span(browser) == whole)


def test_the_wheel_zooms_where_the_pointer_is(browser: Any) -> None:
    from selenium.webdriver import ActionChains

    whole, canvas = span(browser), find(browser, "#canvas")
    canvas.send_keys("0")
    origin = ActionChains(browser).move_to_element(canvas).click()
    origin.perform()
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    ActionChains(browser).scroll_from_origin(ScrollOrigin.from_element(canvas), 0, -200).perform()
    until(browser, lambda: span(browser) < whole / 1.5)


def test_search_and_filters_choose_messages(browser: Any) -> None:
    search(browser, "onerror")
    until(browser, lambda: shown(browser) == 2)
    search(browser, "")
    until(browser, lambda: shown(browser) == 2 * CALLS + 2)
    find(browser, "#slower").send_keys("10")
    until(browser, lambda: shown(browser) == 2)
    find(browser, "#slower").clear()
    find(browser, "#kind option:nth-child(3)").click()
    until(browser, lambda: shown(browser) == CALLS + 1)
    search(browser, "nothing has this name")
    until(browser, lambda: shown(browser) == 0)


def test_a_click_on_a_message_shows_its_fields_and_its_pair(browser: Any) -> None:
    from selenium.webdriver import ActionChains

    canvas = find(browser, "#canvas")

    def is_drawn(nothing: bool = False) -> bool:
        """Whether the frame that follows a selection, after the text of the details, has been drawn."""
        return (canvas.get_attribute("data-selected") == "-1") is nothing

    canvas.send_keys("\ue00c")  # Escape
    search(browser, "onerror")
    until(browser, lambda: shown(browser) == 2 and is_drawn(nothing=True))
    find(browser, "#next").click()
    details = find(browser, "#details")
    until(browser, lambda: "CALL" in details.text and is_drawn())
    assert EVIL in details.text, "names are text, not HTML"
    x, y = (float(canvas.get_attribute(f"data-selected-{axis}")) for axis in "xy")
    canvas.send_keys("\ue00c")  # Escape
    until(browser, lambda: "No message selected" in details.text and is_drawn(nothing=True))
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    size = canvas.size
    ActionChains(browser).move_to_element_with_offset(
        canvas, round(x - size["width"] / 2), round(y - size["height"] / 2)
    ).click().perform()
    until(browser, lambda: "CALL" in details.text and is_drawn())
    first = canvas.get_attribute("data-selected")
    find(browser, "#pair").click()
    until(browser, lambda: "RESULT" in details.text)
    find(browser, "#pair").click()
    until(browser, lambda: canvas.get_attribute("data-selected") == first)
    assert "20" in details.text, "it ran for 20 ms"
    assert "in waits_here" in details.text
    assert "in runs_here" in details.text
    assert "later" not in details.text, "a stack of a later time"


def test_a_wait_shows_where_its_request_is_and_its_stack(browser: Any) -> None:
    rows = browser.find_elements("css selector", "#wait-table tbody tr")
    (stuck,) = (row for row in rows if "a backward pass" in row.text)
    assert "no request of it is under way" in stuck.text
    stuck.find_element("css selector", "button").click()
    details = find(browser, "#details")
    until(browser, lambda: "no reply; no request of it" in details.text)
    assert "later" in details.text


def test_messages_in_view_are_listed_for_those_who_see_no_canvas(browser: Any) -> None:
    search(browser, "onerror")
    until(browser, lambda: shown(browser) == 2)
    find(browser, "#listing summary").click()
    until(browser, lambda: len(browser.find_elements("css selector", "#messages tbody tr")) == 2)
    # In one step: the list may be renewed between finding the button and clicking it.
    browser.execute_script("document.querySelector('#messages tbody tr:nth-child(2) button').click()")
    until(browser, lambda: "RESULT" in find(browser, "#details").text)


def test_a_finding_leads_to_its_message(browser: Any) -> None:
    whole = span(browser)
    slow = next(f for f in browser.find_elements("css selector", "#finding-list li") if "onerror" in f.text)
    slow.find_element("css selector", "button").click()
    until(browser, lambda: span(browser) < whole / 2)
    assert EVIL in find(browser, "#details").text


def test_light_and_dark_and_a_narrow_window(browser: Any) -> None:
    colors = set()
    for _ in range(2):
        find(browser, "#theme").click()
        colors.add(browser.execute_script("return getComputedStyle(document.body).color"))
    assert len(colors) == 2
    browser.set_window_size(500, 900)
    try:
        until(browser, lambda: int(find(browser, "#stage").size["width"]) < 500)
        wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
        until(browser, lambda: browser.execute_script(wide) <= 0)
    finally:
        browser.set_window_size(1400, 1000)
    assert [entry for entry in browser.get_log("browser") if entry["level"] != "INFO"] == []


@contextmanager
def report_of(directory: Path, browser: Any) -> Iterator[None]:
    """Show the report of the logs in ``directory``, and then the common one again."""
    page = directory / "report.html"
    page.write_bytes(render(Job(directory)))
    try:
        show(browser, page.as_uri())
        yield
    finally:
        show(browser, browser.page)


def show(browser: Any, page: str) -> None:
    browser.get(page)
    until(browser, lambda: browser.execute_script("return document.body.dataset.ready") == "all")


def test_a_request_that_never_ends_reaches_the_end_and_an_empty_part_says_so(
    browser: Any, tmp_path: Path
) -> None:
    a, b = workers(tmp_path, 2)
    served_call(a, b, 1, MS, MS)
    a.message(True, 10 * MS, CALL, 1, 2, 1)
    b.message(False, 11 * MS, CALL, 0, 2, 1)
    b.add(events.RequestStarted, 12 * MS, 0, 2)
    a.add(events.RendezvousStep, 900 * MS, 1, "later", 0, 0)
    for each in (a, b):
        each.write()
    with report_of(tmp_path, browser):
        bars = "return T.hits.filter((h) => !h.line && h.row >= 0 && isUnfinished(h.row)).map((h) => h.w)"
        (wide,) = browser.execute_script(bars)
        assert wide > 0.9 * browser.execute_script("return T.width - T.gutter")
        assert not find(browser, "#context").is_displayed()
        search(browser, "nothing has this name")
        until(browser, lambda: "Nothing matches." in find(browser, "#latency-chart").text)


def test_names_make_no_links_and_workers_that_were_started_again_have_one_row(
    browser: Any, tmp_path: Path
) -> None:
    link = '<a href="https://example.invalid/">x</a>'
    for incarnation, calls in ((0, 3), (5000, 4)):
        a, b = (Writer(tmp_path, rank, clock="boot", incarnation=(incarnation + rank)) for rank in (1, 2))
        a.knows(b)
        b.knows(a)
        for each in (a, b):
            each.rows.append((tag_of(events.NameDeclared), 0, 1, f"{incarnation}{link}"))
        a.rows[0] = (*a.rows[0][:4], f"w1{link}", *a.rows[0][5:])
        for i in range(calls):
            served_call(a, b, i + 1, (incarnation + 10 * i + 1) * MS, MS)
        for each in (a, b):
            each.write()
    with report_of(tmp_path, browser):
        assert browser.find_elements("css selector", ".chart a") == []
        legend = browser.find_elements("css selector", "#latency-chart .legendtext")
        assert {f"…{link[-32:]}"} == {each.text for each in legend}
        rows = "return [...document.querySelectorAll('#traffic-chart .ytick text')].map((e) => e.textContent)"
        assert {f"w1{link}", "w2"} == set(browser.execute_script(rows))
        cells = browser.find_elements("css selector", "#traffic-chart .heatmap-label")
        assert [cell.text for cell in cells] == ["7", "7"]


def test_a_page_of_hundreds_of_workers_opens(browser: Any, tmp_path: Path) -> None:
    found = [Writer(tmp_path, rank, clock="boot") for rank in range(400)]
    found[0].knows(found[1])
    found[1].knows(found[0])
    served_call(found[0], found[1], 1, MS, MS)
    for each in found:
        each.write()
    with report_of(tmp_path, browser):
        pass  # it is ready
