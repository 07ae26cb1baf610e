"""Take the README's picture of the page: python docs/make_page_picture.py [--model smollm2] (needs Chromium).

It starts `layerjump serve`, opens a state by its address, and waits until the grid is drawn.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).parent / "page.png"
TEXT = "The capital of France is the city of"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default=TEXT)
    parser.add_argument("--state", default="open=why", help="more of the address, e.g. with=identity&colour=kl")
    parser.add_argument("--size", default="1366x768")
    parser.add_argument("--scheme", default="light", choices=["light", "dark"])
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    options = parser.parse_args()
    width, height = map(int, options.size.split("x"))
    command = [sys.executable, "-m", "layerjump", "serve", options.model, "--port=0", "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = re.search(r"http://\S+", server.stdout.readline())
        assert address, "the server did not start"
        with sync_playwright() as play:
            program = os.environ.get("CHROMIUM") or shutil.which("chromium")
            browser = play.chromium.launch(executable_path=program, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=options.scheme)
            page.goto(f"{address[0]}#{options.state}&{urlencode({'text': options.text})}")
            page.wait_for_selector("#reading:not([hidden]) td, #trouble:not([hidden])", timeout=600_000)
            if page.is_hidden("#trouble"):
                if "open=why" in options.state:
                    page.wait_for_selector("#why .why", timeout=600_000)
                page.locator("td[aria-selected]").first.focus()
            page.screenshot(path=options.output)
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    print(f"wrote {options.output} ({options.output.stat().st_size / 1e3:.0f} kB)")


if __name__ == "__main__":
    main()
