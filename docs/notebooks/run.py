"""Execute the notebooks, and write each with its outputs: ``NAME.md`` becomes ``NAME.ipynb``.

    python docs/notebooks/run.py                      every notebook
    python docs/notebooks/run.py tour                 only this one
    python docs/notebooks/run.py tour --out FOLDER    into another folder

The site shows the stored outputs; tests/test_notebooks.py executes the sources again and compares. A cell that raises,
or that writes to standard error, fails the command, and the old file stays.
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

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NAMES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
SECONDS = 600  # of one cell
# What TensorFlow writes to standard error when it is imported, under every setting.
NOTICES = re.compile(r"^(WARNING: All log messages before absl|I0000 ).*\n?", re.MULTILINE)


def execute(name: str) -> str:
    """Return a notebook with its outputs as JSON, executed by a new kernel in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell raises.
        ValueError: A cell writes to standard error.
    """
    import jupytext
    import nbformat
    from nbclient import NotebookClient

    notebook = jupytext.read(FOLDER / f"{name}.md")
    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        options = {"timeout": SECONDS, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, kernel_name="python3", resources=resources, **options).execute()
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # drawn at random otherwise
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
    """Return a PNG in base64 with a palette of 64 colours, in a third of the bytes."""
    from PIL import Image

    found = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(found, "PNG", optimize=True)
    return base64.b64encode(found.getvalue()).decode()


def main() -> None:
    """Execute what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (default: all)")
    parser.add_argument("--out", type=Path, default=FOLDER, help="a folder (default: beside the sources)")
    options = parser.parse_args()
    if unknown := sorted(set(options.names) - set(NAMES)):
        parser.error(f"a NAME must be one of {', '.join(NAMES)}: got {', '.join(unknown)}")
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}  # which the kernels inherit
    for name in options.names or NAMES:
        (options.out / f"{name}.ipynb").write_text(execute(name), "utf-8")
        print(name)


if __name__ == "__main__":
    sys.exit(main())
