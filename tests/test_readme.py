"""The README is true: its code runs, its links lead somewhere, its two commands are what CI runs."""

import re
import subprocess
from pathlib import Path

import reference_numpy as ref
from reference_numpy.presets import IMPLEMENTATIONS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_code_runs_in_order(tmp_path, monkeypatch, ports):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ref.TransformerConfig, "preset", lambda name, **sizes: ref.TransformerConfig(**sizes, **small(name))
    )
    requested = {port.name for port in ports}
    namespace: dict[str, object] = {}
    ran = set()
    for code in blocks("python"):
        package = re.search(r"import transformer_(\w+)", code)
        if package is None or package[1] in requested:
            exec(compile(code, "README.md", "exec"), namespace)
            assert "logits" not in code or namespace["logits"].shape == (1, 3, 8000)
            ran.add(package[1] if package else "numpy")
    assert ran == requested | {"numpy"}


def small(name: str) -> dict[str, int]:
    """The README's model is base-sized; its conventions are kept, not its size."""
    assert name == "paper_base"
    return {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_encoder_layers": 1, "num_decoder_layers": 1}


def test_no_placeholder_is_left():
    assert "@@" not in README


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 40
    for link in links:
        assert (ROOT / link).exists(), link


def test_every_preset_that_is_not_a_row_of_table_3_is_named():
    for preset in IMPLEMENTATIONS:
        assert f"`{preset}`" in README


def test_every_habit_of_a_framework_is_listed_with_its_test():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "native.md").read_text("utf-8")))
    there = set()
    for path in (ROOT / "tests").glob("test_native*.py"):
        tests = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        there |= {name for name in tests if path.stem != "test_native" or re.match(r"test_(torch|jax|tf)_", name)}
    assert named == there


def test_ci_runs_the_two_commands_of_the_first_screen():
    first, second = blocks("bash")
    assert first.splitlines()[-1] == ".venv/bin/parity check"
    assert second.splitlines()[-1] == ".venv/bin/pytest"
    assert README.index("```bash") < 600
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^block\(\).*$", script, re.MULTILINE)
    for n, expected in enumerate((first, second), start=1):
        printed = subprocess.run(
            ["bash", "-c", f"{function[0]}\nblock {n}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert printed == expected
