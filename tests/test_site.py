"""The elements of the site's pages: code side by side, facts, colors, and numbers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from imports import ROOT
from sphinx.errors import ExtensionError

import reference_numpy as ref
from transformer_parity.apps.checkpoints.importer import export_checkpoint, load
from transformer_parity.cli.main import main
from transformer_parity.engine import style
from transformer_parity.transformer.ports.source_marks import compare, tokens

DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS / "_ext"), str(DOCS / "examples")]

import catalog  # noqa: E402  a module of the site
import compute  # noqa: E402
import example_numbers  # noqa: E402
import facts  # noqa: E402
import panes  # noqa: E402
import results  # noqa: E402

SIZES = {"source_vocab_size": 9, "target_vocab_size": 9, "d_model": 16, "d_ff": 16, "d_k": 2, "d_v": 2}
CSS = (DOCS / "_static" / "site.css").read_text("utf-8")


# --- Page elements ---


def text(html: str) -> str:
    """Return the visible text of HTML."""
    return (
        re.sub(r"<[^>]+>", "", html)
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&#x27;", "'")
        .replace("&quot;", '"')
        .replace("&amp;", "&")
    )


def marked(code: str, reference: str) -> tuple[list[str], list[str]]:
    """Return the marked parts of a piece of code and of its reference."""
    codes = {"port": code, "reference": reference}
    marks = compare(codes, "reference")
    spans = {name: [codes[name][start:stop] for start, stop in marks[name].spans] for name in codes}
    return spans["port"], spans["reference"]


def test_differing_tokens_are_marked():
    reference = "def f(x):\n    y = abs(x)\n    return np.exp(y)  # why\n"
    code = "def f(x):\n    return torch.exp(x, 1)  # why\n"
    assert marked(code, reference) == (["torch", "x, 1"], ["y = abs(x)", "np", "y"])
    marks = compare({"port": code, "reference": reference}, "reference")
    assert marks["port"][1:] == (4, 8, len(tokens(code)))
    assert marks["reference"][1:] == (8, 0, len(tokens(reference)))
    assert panes.note(marks["port"]) == "15 tokens, 4 added, 8 missing"
    assert panes.note(marks["reference"], is_base=True) == "19 tokens, 8 not in all ports"
    assert marked(code, code) == ([], [])


def test_tokens_missing_from_any_port_are_marked_in_the_reference():
    marks = compare({"one": "f(b, c)", "reference": "f(a, b, c)", "two": "f(a, b)"}, "reference")
    assert marks["reference"].spans == [(2, 4), (6, 9)]
    assert panes.note(marks["reference"], is_base=True) == "8 tokens, 4 not in all ports"
    assert compare({"reference": "f(a)"}, "reference")["reference"].spans == []


def test_comments_annotations_and_the_name_of_the_method_are_not_compared():
    code = 'def forward(self, x: Float[Tensor, "ä"], n: int) -> Tensor:  # why\n    y: Tensor = self.call(x)\n'
    assert marked(code, "def __call__(self, x, n):\n    # not\n    y = self.__call__(x)\n") == ([], [])
    assert marked("def f(x, n: int = 1): pass", "def f(x): pass") == ([", n: int = 1"], [])


def test_methods_are_compared_by_name():
    reference = "class A:\n    def f(self): return 1\n    def g(self): return 2\n"
    code = "class A:\n    def g(self): return 2\n    def more(self): return 1\n    def f(self): return 1\n"
    assert marked(code, reference) == (["def more(self): return 1"], [])


def test_code_moved_within_a_function_is_not_marked():
    reference = 'a = tap("a", a)\nb = softmax(a, mask)\nb = tap("b", b)\n'
    assert marked('a = tap("a", a)\nb = tap("b", softmax(a, mask))\n', reference) == ([], ["b =", "b"])


def test_marks_cover_whole_lines_when_possible():
    assert marked("f(\n    a,\n    *b,\n    c,\n)", "f(\n    a,\n    c,\n)") == (["*b,"], [])


def test_marks_on_several_lines_do_not_join():
    assert marked("a = (\n    1,\n    2,\n)\n", "a = ()\n")[0] == ["1,", "2,"]


@pytest.mark.parametrize(
    "code", ["x = 1 < 2 and '&'\n\ny = [\n    f'{x}',\n]", 'def f():\n    """A\n\n    b"""\n    return 1']
)
def test_highlighting_keeps_every_character(code):
    html = panes.highlighted(code, [(0, 5), (8, len(code))])
    assert text(html) == code + "\n"
    assert text("".join(re.findall(r"<mark>(.*?)</mark>", html, re.DOTALL))).replace("\n", "") == (
        code[:5] + code[8:]
    ).replace("\n", "")
    assert all(line.count("<mark>") == line.count("</mark>") for line in html.split("\n"))


def test_panes_show_the_code_of_the_packages():
    found = panes.pieces("MultiHeadAttention.forward")
    assert list(found) == list(panes.PACKAGES)
    html = panes.panes("MultiHeadAttention.forward", found, 0)
    for backend, piece in found.items():
        assert f'id="panes-0-{backend}"' in html
        assert piece.code in text(html)
    assert panes.note(compare({"a": "a + 1", "b": "a + 1"}, "b")["a"]) == "3 tokens, the same"


def test_missing_name_fails_the_build():
    with pytest.raises(ExtensionError, match=r"no 'transformer_backward' in transformer_torch, transformer_jax"):
        panes.pieces("transformer_backward")
    assert panes.pieces("transformer_backward", ["numpy"])


def test_tool_directives_are_removed_from_shown_code():
    assert panes.to_readers("x = 1  # type: ignore[index]") == "x = 1"
    assert panes.to_readers("x = 1  # type: ignore[index]  # a reason") == "x = 1  # a reason"
    assert panes.to_readers("import a as A  # noqa: N812  a reason\ny") == "import a as A  # a reason\ny"
    assert not any("type: ignore" in piece.code for piece in panes.pieces("LayerNorm").values())


def test_missing_facts_fail_the_build():
    with pytest.raises(ExtensionError, match="no example 'nothing'"):
        example_numbers.example("nothing")
    with pytest.raises(ExtensionError, match="no tap 'nothing': it has query, key"):
        example_numbers.values("attention", "nothing")
    with pytest.raises(ExtensionError, match="unknown parts nothing: choose from"):
        catalog.chosen("attention, nothing")
    with pytest.raises(ExtensionError, match="no bug in mask matches 'gone'"):
        catalog.chosen("mask", "gone")
    with pytest.raises(ExtensionError, match=r"there is no benchmarks/intel/nothing-small.json"):
        list(results.speed("nothing"))
    assert catalog.comment("x = 1\n# one\n# two\ny = 2  # three\n", "one two") == "one two"
    assert catalog.comment("x = 1\n# one\n# two\ny = 2  # three\n", "thr") == "three"
    assert catalog.comment("x = 1\n", "one") is None


def test_bug_entry_shows_whole_lines():
    source = "def f():\n    a = g(1,\n          2)\n    return a"
    assert catalog.whole_lines(source, "2)", "3)") == ("2)", "3)")
    assert catalog.whole_lines(source, "g(1,\n          2", "h(") == ("a = g(1,\n      2)", "a = h()")
    assert catalog.whole_lines(source, " a", " b")[0] == "a = g(1,"
    for bug in catalog.chosen("attention, decoding"):
        for backend in bug.edits:
            assert catalog.edit(backend, bug).count("<del>") == len(bug.edits[backend])


# Reports about conventions. A port only has to declare its conventions, so they aren't bugs in the catalog.
CONVENTIONS = {
    "a different epsilon in the norms",
    "a different activation, or different embeddings tied",
    "label smoothing over different classes",
    "a different stopping rule for beam search",
}


def test_bug_entry_links_to_its_reports():
    known = {bug.name for bugs in catalog.catalog.parts().values() for bug in bugs}
    assert set(catalog.reports()) - known == CONVENTIONS
    (twice,) = catalog.chosen("norm", "normalized twice")
    assert ">k2-fsa/snowfall#184</a>, <a " in catalog.entry(twice)


def test_every_field_of_the_config_is_described():
    for cls in facts.DATACLASSES.values():
        for row in list(facts.field_table(cls))[2:]:
            assert row.split("|")[3].strip(), row
    (row,) = (row for row in facts.field_table(facts.DATACLASSES["TransformerConfig"]) if "`final_norm`" in row)
    assert "| `True`: annotated, torch, " in row
    assert "paper_base" not in row


def test_names_are_shown_with_symbols():
    rows = list(facts.name_tables())
    assert "| `encoder.layers.0.self_attention.query_proj.kernel` | [d_model, H·d_k] |" in rows
    assert "| `decoder.layers.0.cross_attention.weights` | [B, H, T, S] |" in rows
    # A relative position bias has one row for all sentences.
    assert not any(re.search(r"\[.*\d", row) for row in rows if "relative_bias.output" not in row)


def test_exit_code_table_covers_the_commands():
    rows = "\n".join(facts.exit_codes())
    assert "`transformer_bench/options.py` | 0 " in rows
    for command in ("check", "golden", "selftest", "train_options", "translate"):
        assert f"`cli/{command}.py` | 0 " in rows


# --- Colors ---


def palette(theme: str) -> dict[str, str]:
    """Return the variables that site.css defines for a theme."""
    blocks = re.findall(r"^html(?:\[data-theme=\"(\w+)\"\])? \{(.*?)^\}", CSS, re.MULTILINE | re.DOTALL)
    return dict(
        pair for kind, block in blocks if kind in ("", theme) for pair in re.findall(r"--(\w[\w-]*): ([^;]+);", block)
    )


def luminance(color: str) -> float:
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_contrast_matches_the_wcag_definition():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_palette_has_sufficient_contrast(theme):
    colors = palette(theme)
    assert {backend: colors[backend] for backend in style.BACKENDS} == style.BACKENDS
    for on, below in (("on-mark", "mark"), ("note", "pane"), ("good", "pane"), ("bad", "pane")):
        assert contrast(colors[on], colors[below]) >= 4.5, (on, below)
    for mark in ("mark-edge", *style.BACKENDS):  # colors of elements without text
        assert contrast(colors[mark], colors["pane"]) >= 3, mark


def test_backend_colors_are_defined_only_in_the_style():
    """No other file specifies a backend's color, and figures use only the style's colors."""
    assert {name: style.PAGE[name][0] for name in style.BACKENDS} == style.BACKENDS
    assert all(contrast(color, "#ffffff") >= 3 for color in style.BACKENDS.values())
    color = re.compile(r"#[0-9a-f]{6}\b|#[0-9a-f]{3}\b|tab:\w+", re.IGNORECASE)
    # The steps of the error scale, white on the darkest step, and paper. The variables that repeat the site's style are
    # checked above.
    scale = re.compile(r"--(?:s\d|t7|page): #\w+;")
    files = [
        *(path for kind in ("py", "html", "css", "js") for path in (ROOT / "transformer_parity").rglob(f"*.{kind}")),
        *(DOCS / "_ext").glob("*.py"),
        *(DOCS / "_templates").glob("*.html"),
        DOCS / "_static" / "site.js",
        DOCS / "paper" / "model.html",
    ]
    found = {path.name: color.findall(scale.sub("", path.read_text("utf-8"))) for path in files}
    assert {name for name, colors in found.items() if colors} == {"style.py"}
    drawn = re.compile(r"\bcolou?rs?=[\"']([^\"']+)[\"']")
    plain = {name for path in files for name in drawn.findall(path.read_text("utf-8"))}
    assert plain <= {"black", "white", "default"}


def test_katex_files_have_the_same_version():
    directory = DOCS / "_static" / "katex"
    css = (directory / "katex.min.css").read_text("utf-8")
    assert f'version:"{re.search(r"content:.([0-9.]+)", css)[1]}"' in (directory / "katex.min.js").read_text("utf-8")
    assert {f"fonts/{path.name}" for path in directory.glob("fonts/*")} == set(re.findall(r"fonts/[\w-]+\.woff2", css))


# --- Numbers ---


@pytest.mark.parametrize("name", compute.EXAMPLES)
def test_packages_agree_on_the_values_of_an_example(name):
    report = json.loads((DOCS / "examples" / f"{name}.json").read_text("utf-8"))
    assert list(report["values"]) == list(panes.PACKAGES)
    assert max(example_numbers.furthest_apart(name, list(report["values"]["numpy"])).values()) <= 1e-12


@pytest.mark.extended("examples", "jax", "tf")
def test_examples_computed_again_match_the_stored_values(backend):
    for name in compute.EXAMPLES:
        kept = example_numbers.example(name)["values"][backend.name]
        again = compute.compute(name, backend.name)
        assert list(again) == list(kept)
        for tap, value in again.items():
            np.testing.assert_allclose(value, kept[tap], rtol=0, atol=1e-12, err_msg=f"{name} {tap}")


def test_greedy_search_misses_the_better_sentence():
    found = example_numbers.example("search")["values"]["numpy"]
    assert found["beam.ids"][0][0][:4] == [7, 4, 7, 2]
    assert found["greedy.ids"] == [[7, 8, 7, 2]]
    assert found["beam.scores"][0][0] * ((5 + 4) / 6) ** 0.6 > found["greedy.scores"][0]


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning")
@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
@pytest.mark.extended("site")
def test_code_of_the_guides_runs(tmp_path, monkeypatch, ports):
    requested = {port.name for port in ports} | {"numpy"}
    monkeypatch.chdir(tmp_path)
    config = ref.TransformerConfig.preset("marian", **SIZES)
    ref.save_weights("marian.safetensors", config, ref.init_weights(config, seed=0))
    export_checkpoint(load("marian.safetensors"), "hf", "opus-mt-en-de")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["init-pair", "--framework", "numpy"]) == main(["pair", "my_pair.py", "--out", "truth"]) == 0
    pages = [DOCS / "quickstart.md", DOCS / "reference" / "port-api.md", *sorted((DOCS / "how-to").glob("*.md"))]
    for page in pages:
        namespace: dict[str, object] = {}
        for code in re.findall(r"^```python\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            package = re.search(r"import transformer_(torch|jax|tf)", code)
            if package is None or package[1] in requested:
                exec(compile(code, str(page), "exec"), namespace)


def check_port(directory, *options: str) -> tuple[int, str]:
    """Run `parity check` in a directory, and return its exit code and output."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}"}
    command = [sys.executable, "-m", "transformer_parity", "check", *options]
    ran = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, 1), ran.stderr
    return ran.returncode, ran.stdout


# The options used in the guides: every case in the activations stage, in float64.
QUICK = ("--stage", "activations", "--dtype", "float64")


@pytest.mark.extended("site")
def test_broken_port_is_diagnosed_as_shown(tmp_path):
    shutil.copy(DOCS / "examples" / "broken_port.py", tmp_path)
    code, printed = check_port(tmp_path, "--port", "broken_port:MyPort", *QUICK)
    assert code == 1, printed
    shown = re.compile(r"^reran each block of the port.*?^DIAGNOSIS .*?$", re.MULTILINE | re.DOTALL)
    kept = (DOCS / "examples" / "broken_port.txt").read_text("utf-8")
    found, expected = (shown.search(text)[0] for text in (printed, kept))
    rounding = re.compile(r"\(error \de-1[56], ")  # the size of this error depends on the processor
    assert rounding.search(found)
    assert rounding.sub("(error", found) == rounding.sub("(error", expected)


@pytest.mark.extended("site")
def test_fixed_port_of_the_quick_start_agrees_as_shown(tmp_path):
    page = (DOCS / "quickstart.md").read_text("utf-8")
    code = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    (tmp_path / "broken_port.py").write_text(re.sub(r".*  # the bug\n", "", code))
    assert (tmp_path / "broken_port.py").read_text() != code
    ended, printed = check_port(tmp_path, "--port", "broken_port:MyPort", *QUICK)
    assert ended == 0, printed
    assert verdict(printed) == verdict(page)


@pytest.mark.extended("site")
def test_new_port_agrees_as_shown_in_the_readme(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["init-port", "--framework", "other"]) == 0
    ended, printed = check_port(tmp_path, "--port", "my_port:MyPort")
    assert ended == 0, printed
    assert verdict(printed) == verdict((ROOT / "README.md").read_text("utf-8"))


def verdict(text: str) -> str:
    """Return the verdict, ports, cases, and comparisons in a report. The rest of the line depends on the machine."""
    (found,) = re.findall(r"^AGREE .*? comparisons", text, re.MULTILINE)
    return found
