"""Write docs/cli.md from the commands' own help: python docs/make_cli.py (a test checks that it is up to date)."""

import html
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "cli.md"


def page() -> str:
    """The command line's help as Markdown."""
    command = [sys.executable, "-m", "typer", "layerjump.cli.main", "utils", "docs"]
    made = subprocess.run(
        [*command, "--name", "layerjump", "--title", "Command line"],
        capture_output=True,
        text=True,
        check=True,
        encoding="utf-8",
    ).stdout
    examples = re.sub(r"<span style=\"font-weight: bold\">(.*?)</span> *", r"- `\1` ", made)
    return "\n".join(line.rstrip() for line in html.unescape(examples).splitlines()) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8", newline="\n")
