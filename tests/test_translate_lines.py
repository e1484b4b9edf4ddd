"""All translators return the same tokens in `transformer_bench.translate_lines`, which prints text and JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys

LINES = "transformer_bench.translate_lines"


def test_every_translator_returns_the_same_tokens(tmp_path):
    text, file = tmp_path / "text", tmp_path / "found.json"
    text.write_text("a dog runs\n\na man in a red coat walks by\n" * 30)
    options = ["--config", "tiny", "--lines", "70", "--tokens", "4", "--threads", "1", "--translators", "numpy,torch"]
    run = subprocess.run(
        [sys.executable, "-m", LINES, text, *options, "--json", file], check=True, capture_output=True, text=True
    )
    rows = [re.sub(r"[\d.,]+", "N", row, count=2).split() for row in run.stdout.splitlines()[1:]]
    assert rows == [[name, "N", "N", "70", "of", "70"] for name in ("numpy", "torch")]
    report = json.loads(file.read_text())
    assert (report["config"], report["lines"], report["beam"]) == ("tiny", 70, None)
    assert "processor" in report["machine"]
    assert [one["name"] for one in report["translators"]] == ["numpy", "torch"]
    assert all(one["same_tokens"] == 70 and one["sentences_per_second"] > 0.0 for one in report["translators"])
