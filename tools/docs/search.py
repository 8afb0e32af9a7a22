"""Searches the built site for what users type, in headless Chromium: part of ``make docs-check``.

A try is answered if one of its pages is among the first three results. The words were written down before
anyone had searched for them, so they are not those of the pages.

    python -m tools.docs.search               # the tries
    python -m tools.docs.search slow worker   # the first results for some words
"""

from __future__ import annotations

import sys
from typing import Any
from urllib.parse import urlsplit

from tools.docs.site import SITE
from tools.docs.visit import chromium, show

TRIES = {
    "--trace": "tracing reference/command-line",
    "grad is None": "autograd troubleshooting",
    "slow worker": "tracing troubleshooting",
    "backward hangs": "tutorials/hang troubleshooting",
    "connection refused": "hosts troubleshooting",
    "address already in use": "hosts settings troubleshooting",
    "cannot pickle lambda": "rpc troubleshooting",
    "remote traceback": "rpc reference/errors troubleshooting",
    "call timed out": "howto/timeouts troubleshooting",
    "rpc_sync": "reference/calls",
    "learning rate optimizer remote parameters": "autograd reference/optimizers",
    "cuda device_maps": "gpus",
    "docker": "howto/containers",
    "slurm": "clusters",
    "encryption": "security",
    "save and resume": "howto/checkpoints tutorials/elastic",
    "worker died": "groups reliability troubleshooting",
    "memory leak rref": "concepts/references troubleshooting",
    "MASTER_ADDR": "hosts settings porting/index",
    "/dev/shm full": "shared-memory troubleshooting",
}
"""What is typed, and the pages that answer it."""
GOAL = 18
_RESULTS = """const done = arguments[arguments.length - 1], words = arguments[0]
const wait = (look, next) => { const found = look(); found ? next(found) : setTimeout(wait, 20, look, next) }
const root = () => [...document.querySelectorAll("*")].find(each => each.shadowRoot?.querySelector("input"))
const part = selector => root()?.shadowRoot.querySelector(selector)
document.querySelector(".md-search__button").click()
wait(() => part("dialog[open] input"), input => {
    input.value = words
    input.dispatchEvent(new Event("input", {bubbles: true}))
    wait(() => / result/.test(part("[role=status]")?.innerText), () =>
        done([...root().shadowRoot.querySelectorAll("a[role=option]")].slice(0, 10).map(each => each.href)))
})"""


def results(driver: Any, words: str) -> list[str]:
    """The first results for ``words``, each a page without its suffix, and an anchor."""
    driver.get((SITE / "index.html").as_uri())
    found = [urlsplit(each) for each in driver.execute_async_script(_RESULTS, words)]
    return [f"{each.path.removeprefix(f'{SITE}/').removesuffix('.html')}#{each.fragment}" for each in found]


def main() -> int:
    words = " ".join(sys.argv[1:])
    with chromium() as driver:
        show(driver, "desktop", "light")
        if words:
            print("\n".join(results(driver, words)))
            return 0
        answered = 0
        for words, pages in TRIES.items():
            first = results(driver, words)[:3]
            if any(each.partition("#")[0] in pages.split() for each in first):
                answered += 1
            else:
                print(f"{words}: expected one of {pages}; found {', '.join(first) or 'nothing'}")
    print(f"{answered} of {len(TRIES)} searches are answered by one of the first three results")
    return 0 if answered >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
