"""`parity source`: corresponding code from the four packages, side by side."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import FRAMEWORKS, parsed
from command_runs import _pipe as _pipe  # a fixture of every test
from conftest import parity
from rich.text import Text

from transformer_parity.cli import source
from transformer_parity.transformer.ports import source_code, source_marks
from transformer_parity.transformer.ports.registry import PORTS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [port.package for port in PORTS.values()]
POINTERS = re.compile(r"#[ ^]*\^[ ^]*\n")  # comment lines below the lines that differ


def printed_pieces(out):
    """Return the code that `parity source` printed for each package, by location and note."""
    blocks = re.split(r"\n# (?=\w+/\w+\.py:|not in )", out)[1:]
    return {title: code for title, _, code in (block.partition("\n") for block in blocks) if ".py:" in title}


def pieces(out):
    """Return the code that `parity source` printed, by location."""
    return {
        title.partition("  ")[0]: "".join(line for line in code.splitlines(keepends=True) if not POINTERS.match(line))
        for title, code in printed_pieces(out).items()
    }


@pytest.mark.parametrize(
    ("name", "first", "inside"),
    [
        ("scaled_dot_product_attention", "def scaled_dot_product_attention(", 'tap("scores"'),
        ("MultiHeadAttention", "class MultiHeadAttention", "self.query_proj = Linear("),
        ("MultiHeadAttention.forward", "def ", 'tap("output"'),
        ("Transformer.from_weights", "@classmethod", "set_weights(model, weights)"),
        ("attention", "from __future__", "def merge_heads("),
        ("ACTIVATIONS", "ACTIVATIONS: ", '"relu": '),
    ],
)
def test_source_prints_the_code_of_all_packages(capsys, name, first, inside):
    out = parity(capsys, "source", name)[1]
    assert [place.partition("/")[0] for place in pieces(out)] == PACKAGES
    for place, text in pieces(out).items():
        file, _, line = place.partition(":")
        assert text.startswith(first), place
        assert inside in text, place
        assert (ROOT / file).read_text().splitlines()[int(line) - 1].strip() == text.splitlines()[0] or line == "1"


def test_source_handles_names_that_differ_between_packages(capsys):
    printed = [parity(capsys, "source", f"EncoderLayer.{name}")[1] for name in ("forward", "__call__", "call")]
    assert len({text.partition("\n\n")[2] for text in printed}) == 1
    both = pieces(parity(capsys, "source", "Transformer.call", "--backends", "tf")[1])
    assert [text.count("def ") for text in both.values()] == [1]
    inherited = pieces(parity(capsys, "source", "Part.forward", "--backends", "torch")[1])
    assert [text.strip() for text in inherited.values()] == [
        "class Part(nn.Module): ...  # inherits its forward method"
    ]
    for name, method in (("Encoder", "encode"), ("Decoder", "decode")):  # as in ``forward = encode``
        assert all(f"def {method}(" in text for text in pieces(parity(capsys, "source", f"{name}.forward")[1]).values())
    lacking = parity(capsys, "source", "transformer_backward")[1]
    assert lacking.endswith("\n# not in transformer_torch, transformer_jax, transformer_tf\n")


def test_backends_option_may_be_repeated(capsys):
    alone, together = (
        parity(capsys, "source", "Linear", *options)[1]
        for options in (["--backends", "tf", "--backend", "jax,tf"], ["--backends", "jax,tf"])
    )
    assert alone == together
    assert [*pieces(alone)] == [*pieces(together)]
    assert len(pieces(alone)) == 2


def test_source_imports_no_framework():
    unwanted = {*FRAMEWORKS, *PACKAGES[1:], "matplotlib"}
    script = "import sys; from transformer_parity.__main__ import main; main(['source', 'Linear']);"
    script += f"print({unwanted} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert len(pieces(done.stdout)) == 4
    assert done.stdout.endswith("\nset()\n")


def test_source_hides_or_keeps_docstrings(capsys, tmp_path):
    summary = (
        "Return a weighted average of the values for each query. The weights depend on the similarity of query and key."
    )
    hidden = parity(capsys, "source", "scaled_dot_product_attention")[1]
    assert " ".join(hidden.partition("\n\n")[0].replace("# ", "").split()).endswith(summary)
    assert '"""' not in hidden
    kept = parity(capsys, "source", "scaled_dot_product_attention", "--docstrings")[1]
    assert kept.count(f'"""{summary}') == 4
    assert summary not in kept.partition("\n\n")[0]
    (tmp_path / "module.py").write_text('def f():\n    """Say."""\n\n    # why\n    return 1\n')
    assert source_code.Module(tmp_path / "module.py").find("f", False).code == "def f():\n    # why\n    return 1"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_extracted_definition_matches_its_file(package):
    for module in parsed(package).modules.values():
        for name, node in module.definitions.items():
            assert ast.dump(ast.parse(module.find(name, docstrings=True).code)) == ast.dump(ast.Module([node], []))
        forwards = [f"{name}.forward" for name in module.public if module.find(f"{name}.forward", docstrings=False)]
        for name in [*module.dotted_names(), *forwards]:
            for part in ast.walk(ast.parse(module.find(name, docstrings=False).code)):
                if isinstance(part, source_code.DOCUMENTED) and len(part.body) > 1:
                    assert ast.get_docstring(part) is None, name
        whole = ast.parse(module.cut([module.tree], docstrings=False).code)
        assert [type(node) for node in whole.body] == [type(node) for node in module.tree.body[1:]]


def on_terminal(capsys, monkeypatch, width, *arguments):
    """Return the output of `parity source` on a terminal with the given width, without colors and styles."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    return re.sub(r"\x1b\[[0-9;]*m", "", parity(capsys, "source", *arguments)[1])


@pytest.mark.parametrize(("width", "columns"), [(60, 1), (119, 1), (120, 2), (130, 2), (200, 2), (240, 4)])
def test_source_columns_depend_on_terminal_width(capsys, monkeypatch, width, columns):
    out = on_terminal(capsys, monkeypatch, width, "split_heads")
    assert max(map(len, out.splitlines())) == width
    titles = [[package for package in PACKAGES if f"{package}/attention.py:" in line] for line in out.splitlines()]
    assert [row for row in titles if row] == [PACKAGES[i : i + columns] for i in range(0, 4, columns)]


def test_source_comments_point_at_differing_tokens(capsys):
    """If the output is piped, it's valid Python, with comments that point at the tokens that differ."""
    name = "MultiHeadAttention.forward"
    codes = {package: parsed(package).find(name).code for package in PACKAGES}
    for place, printed in printed_pieces(parity(capsys, "source", name)[1]).items():
        package = place.partition("/")[0]
        code, marks = codes[package], source_marks.compare(codes, "reference_numpy")[package]
        lines = printed.splitlines(keepends=True)
        pointers = [line if POINTERS.match(line) else "" for line in lines]
        assert "".join(line for line in lines if line not in pointers).strip("\n") == code
        found = [
            below[match.start() : match.end()]
            for below, pointer in zip(lines, pointers[1:], strict=False)
            for match in re.finditer(r"\^+", pointer)
        ]
        assert found == [code[start:stop] for start, stop in marks.spans]
        assert found
        ast.parse(printed)
        counts = [f"{marks.different} added", f"{marks.missing} missing"]
        if package == "reference_numpy":
            counts = [f"{marks.different} not in all ports"]
        assert place.endswith(f"{marks.total} tokens, {', '.join(counts)}")


def test_source_compares_with_the_reference_even_if_it_is_not_printed(capsys):
    both = [parity(capsys, "source", "LayerNorm", "--backends", names)[1] for names in ("numpy,tf", "tf")]
    assert both[0].partition("# transformer_tf")[2] == both[1].partition("# transformer_tf")[2]
    lacking = printed_pieces(parity(capsys, "source", "Configured", "--backends", "torch,tf")[1])
    assert [place.partition("  ")[2] for place in lacking] == ["base of the comparison"]


def test_source_prints_docstrings_unchanged(capsys):
    for place, printed in printed_pieces(parity(capsys, "source", "LayerNorm", "--docstrings")[1]).items():
        package = place.partition("/")[0]
        assert ast.dump(ast.parse(printed)) == ast.dump(ast.parse(parsed(package).find("LayerNorm", True).code))


@pytest.mark.parametrize("width", [60, 100, 240])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "LayerNorm"])
def test_marks_are_kept_in_folded_lines(width, name):
    """Every token that differs is highlighted, and its line is marked in the margin, even without colors."""
    found = {package: parsed(package).find(name) for package in PACKAGES}
    marks = source_marks.compare({package: piece.code for package, piece in found.items()}, "reference_numpy")
    for package, piece in found.items():
        shown = source.Shown(piece, marks[package], "")
        lines = source._highlight(shown, width - source.FRAME).split("\n", allow_blank=True)
        highlighted = ""
        for line in lines:
            spans = [span for span in line.spans if span.style == source.MARKED]
            assert line.plain.startswith(source.MARK) == bool(spans)
            highlighted += "".join(line.plain[span.start : span.end] for span in spans)
        marked = "".join(piece.code[start:stop] for start, stop in shown.spans)
        assert "".join(highlighted.split()) == "".join(marked.split())
        assert max(map(len, lines)) <= width - source.FRAME + source.MARGIN


def test_source_marks_without_colors(capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    out = on_terminal(capsys, monkeypatch, 120, "LayerNorm", "--backends", "numpy,torch")
    marked = [line for line in out.splitlines() if "│ > " in line]
    assert marked
    for half in (slice(60), slice(60, None)):  # including the reference
        assert any("│ > " in line[half] for line in marked)
    assert re.search(r" tokens, \d+ added, \d+ missing ", out)
    assert "columns require" not in out
    narrow = on_terminal(capsys, monkeypatch, 120, "LayerNorm")
    assert narrow.endswith("4 columns require a width of 240 characters; this terminal has 120\n")


def test_source_has_colors_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[94" in parity(capsys, "source", "split_heads")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[94" not in parity(capsys, "source", "split_heads")[1]
    assert "\x1b[7m" in parity(capsys, "source", "split_heads")[1]  # reverse video isn't a color


@pytest.mark.parametrize("width", [8, 20, 56])
def test_folded_lines_keep_all_text(width):
    for line in (ROOT / "transformer_torch" / "attention.py").read_text().splitlines():
        parts = [part.plain for part in source._fold(Text(line), width)]
        assert "".join("".join(parts).split()) == "".join(line.split())
        assert max(map(len, parts)) <= width


@pytest.mark.parametrize(
    ("name", "meant"),
    [("MultiheadAttention", "MultiHeadAttention"), ("encode", "Encoder.encode"), ("atention", "attention")],
)
def test_source_suggests_names(capsys, name, meant):
    code, _, err = parity(capsys, "source", name)
    error, _, names = err.partition("\n")
    assert code == 3
    assert error.startswith(f"parity source: error: none of the packages defines '{name}'; did you mean ")
    assert meant in error.partition("mean ")[2].rstrip("?").split(" or ")
    assert names == "Run `parity source` without a name to list all names\n"


def test_source_lists_all_names_if_no_suggestion_exists(capsys):
    code, _, err = parity(capsys, "source", "zzzzzz")
    error, _, names = err.partition("\n")
    assert (code, error) == (3, "parity source: error: none of the packages defines 'zzzzzz'")
    assert names == parity(capsys, "source")[1]
    assert "attention:     scaled_dot_product_attention," in names
    assert " transformer_backward*" in names
