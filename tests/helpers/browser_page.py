"""The page in a real Chromium, on the server of the file that takes it: opened, asked, waited for."""

from __future__ import annotations

import pytest

LAPTOP, PHONE = {"width": 1366, "height": 768}, {"width": 390, "height": 844}
TEXT = "Once upon a time, there was a little girl named Lily. One day, Lily went to the"


@pytest.fixture
def opened(browser, server):
    """A function: address after #, size and scheme → the page; `before` gets it while it is empty.

    At the end: no errors, nothing fetched elsewhere.
    """
    contexts, errors, requests, expected = [], [], [], []

    def open_page(state="", size=LAPTOP, scheme="light", *, refused=None, before=lambda page: None):
        expected.append(refused)
        context = browser.new_context(viewport=size, color_scheme=scheme)
        context.set_default_timeout(240_000)  # a loaded machine may pause anything
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: (errors.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: requests.append(request.url))
        before(page)
        page.goto(server.url + (f"#{state}" if state else ""))
        return page

    yield open_page
    for context in contexts:
        context.close()
    # A refused question is logged by the browser itself; a test that asks one says so.
    statuses = [f"status of {refused}" for refused in expected if refused]
    assert [error for error in errors if not any(status in error for status in statuses)] == []
    assert [url for url in requests if not url.startswith(server.url)] == []


def wait_read(page, text=TEXT, lens="mat"):
    """Wait until the grid shows this reading."""
    page.wait_for_function(
        "([text, lens]) => new URLSearchParams(location.hash.slice(1)).get('text') === text"
        " && document.querySelector(`figure[data-lens=${lens}] td[aria-selected]`)"
        " && !document.body.classList.contains('waiting')",
        arg=[text, lens],
    )


def ask(page, text=TEXT, lens="mat"):
    page.fill("#text", text)
    page.press("#text", "Enter")
    wait_read(page, text, lens)


def reading(server, text=TEXT, lens="mat", **more):
    body = {"model": "tiny-gpt2", "text": text, "lenses": [lens]} | more
    status, answer = server.patiently("/api/lens", body)
    assert status == 200, answer
    return answer["lenses"][lens]


def cell(page, level, column, lens="mat"):
    return page.locator(f'figure[data-lens={lens}] td[data-at="{level},{column}"]')
