"""Create the figure in the README: a screenshot of the page that ``parity explore`` writes, taken with Chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

DIRECTORY = Path(__file__).parent
ASKED = ("--port", "unscaled_port:MyPort", "--backends", "torch,jax,tf", "--dtype", "float64", "Freitag, 3. Mai 2024")
SIZE = {"width": 1280, "height": 760}


def main() -> None:
    """Create the page in a temporary directory, and write a screenshot of the page to ``docs/explore.png``."""
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        page, picture = Path(directory) / "page.html", Path(directory) / "page.png"
        environment = {**os.environ, "PYTHONPATH": f"{DIRECTORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        command = [sys.executable, "-m", "transformer_parity", "explore", *ASKED, "--out", str(page)]
        if subprocess.run(command, env=environment, check=False).returncode != 1:
            raise SystemExit("the port should have diverged")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        shown = browser.new_page(viewport=SIZE)
        shown.goto(page.as_uri())
        shown.screenshot(path=picture)
        browser.close()
        # With MAXCOVERAGE, the reduced palette also contains the colors of small dots.
        few_colors = Image.open(picture).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
        few_colors.save(DIRECTORY.parent / "explore.png", optimize=True)


if __name__ == "__main__":
    main()
