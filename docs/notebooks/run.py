"""Execute the notebook sources, and write each ``NAME.md`` with its outputs to ``NAME.ipynb``.

    python docs/notebooks/run.py                      execute every notebook
    python docs/notebooks/run.py tour                 execute one notebook
    python docs/notebooks/run.py tour --out DIR    write to a different directory

The site shows the stored outputs, and tests/test_notebooks.py verifies them by executing the sources. If a cell raises
an error or writes to standard error, the command fails and doesn't overwrite the existing file.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import re
import sys
import tempfile
from pathlib import Path

DIRECTORY = Path(__file__).parent
ROOT = DIRECTORY.parents[1]
NAMES = sorted(path.stem for path in DIRECTORY.glob("*.md") if path.stem != "index")
SECONDS = 600  # time limit for one cell
# TensorFlow writes these lines to standard error when it is imported, and no setting turns them off.
NOTICES = re.compile(r"^(WARNING: All log messages before absl|I0000 ).*\n?", re.MULTILINE)


def execute(name: str) -> str:
    """Execute a notebook with a new kernel in an empty directory, and return it with its outputs as JSON.

    Raises:
        nbclient.exceptions.CellExecutionError: If a cell raises an error.
        ValueError: If a cell writes to standard error.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(DIRECTORY / f"{name}.md")
    with tempfile.TemporaryDirectory() as directory:
        resources = {"metadata": {"path": directory}}
        options = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, kernel_name="python3", resources=resources, **options).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # By default, the ID is random and would change in every run.
        outputs = cell.get("outputs", [])
        for output in outputs:
            if output.get("name") == "stderr" and (text := NOTICES.sub("", output.text)):
                raise ValueError(f"cell {number} of {name} writes to standard error: {text}")
            output.pop("metadata", None)
            if output.output_type != "stream":
                output["metadata"] = {}
                if picture := output.data.get("image/png"):
                    output.data["image/png"] = smaller(picture)
        if outputs:
            cell.outputs = [output for output in outputs if output.get("name") != "stderr"]
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def smaller(picture: str) -> str:
    """Return a base64 PNG with a palette of 64 colors, which reduces its size by two thirds."""
    from PIL import Image

    found = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(found, "PNG", optimize=True)
    return base64.b64encode(found.getvalue()).decode()


def main() -> None:
    """Execute the notebooks that the command line specifies."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(NAMES)} (default: all)")
    parser.add_argument(
        "--out", type=Path, default=DIRECTORY, help="directory to write to (default: next to the sources)"
    )
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"NAME must be one of {', '.join(NAMES)}: got {', '.join(unknown)}")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}  # The kernels inherit these variables.
    for name in options.names or NAMES:
        (options.out / f"{name}.ipynb").write_text(execute(name), "utf-8")
        print(name)


if __name__ == "__main__":
    sys.exit(main())
