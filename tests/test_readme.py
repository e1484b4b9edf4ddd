"""The README and all pages are correct: code runs, commands parse, links work, and figures match measurements."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import reference_numpy as ref
from transformer_parity.apps.checkpoints import importer
from transformer_parity.apps.checkpoints.formats import huggingface_families
from transformer_parity.cli.main import COMMANDS, make_parser
from transformer_parity.transformer.ports.source_code import READING_ORDER
from transformer_parity.transformer.ports.source_marks import compare
from transformer_spec.presets import IMPLEMENTATIONS, TABLE_3

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "_ext"))

import facts  # noqa: E402  a module of the site
import panes  # noqa: E402
import results  # noqa: E402
import speeds  # noqa: E402

README = (ROOT / "README.md").read_text("utf-8")
QUICKSTART = DOCS / "quickstart.md"
INSTALL = DOCS / "how-to" / "install.md"
CHECK_MY_PORT = DOCS / "how-to" / "check-my-port.md"
PAGES = [ROOT / "README.md", *sorted(path for path in DOCS.rglob("*.md") if "api" not in path.parts)]
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = ("text", "toml")  # output and the table of names; unknown directives (in braces) make the site build fail


def blocks(language: str, text: str = README) -> list[str]:
    return [code for kind, code in BLOCK.findall(text) if kind == language]


def commands(page: Path) -> list[str]:
    """Return every call of ``parity`` in the code blocks of a page."""
    found = []
    for language, code in BLOCK.findall(page.read_text("utf-8")):
        if language in ("", "bash", "console"):
            for line in code.splitlines():
                call = re.sub(r"^\$ ", "", line)
                found += re.findall(r"(?:^|\| |/|=1 )parity (.+)", call)
    return found


# --- Code ---


def test_the_code_runs_in_order(tmp_path, monkeypatch, ports):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ref.TransformerConfig, "preset", lambda name, **sizes: ref.TransformerConfig(**sizes, **small(name))
    )
    namespace: dict[str, object] = {}
    numpy, torch = blocks("python")
    exec(compile(numpy, "README.md", "exec"), namespace)
    assert namespace["logits"].shape == (1, 3, 8000)
    (choice,) = re.findall(r"^import (\w+)  # or (\w+), (\w+)$", torch, re.MULTILINE)
    assert choice == tuple(panes.PACKAGES[backend] for backend in ("torch", "jax", "tf"))
    assert {port.name for port in ports} <= {"torch", "jax", "tf"}
    for port in ports:
        namespace["logits"] = None
        exec(compile(torch.replace("transformer_torch", panes.PACKAGES[port.name]), "README.md", "exec"), namespace)
        assert namespace["logits"].shape == (1, 3, 8000)


@pytest.mark.parametrize("page", [QUICKSTART, CHECK_MY_PORT], ids=lambda page: page.stem)
def test_ports_in_the_guides_return_logits(page):
    (code,) = (code for code in blocks("python", page.read_text("utf-8")) if "class MyPort(Port)" in code)
    namespace: dict[str, object] = {}
    exec(compile(code, page.name, "exec"), namespace)
    config = ref.TransformerConfig(source_vocab_size=9, target_vocab_size=9, **small("paper_base"))
    port = namespace["MyPort"]()
    port.load(config, ref.init_weights(config, seed=0), "float64")
    assert port.forward([[5, 6]], [[1, 7, 8]], ref.no_tap).shape == (1, 3, 9)


def small(name: str) -> dict[str, int]:
    """Return smaller sizes for the README's base-sized model. Its conventions don't change."""
    assert name == "paper_base"
    return {"d_model": 32, "num_heads": 2, "d_ff": 64, "num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_code_block_is_executed_or_parsed_or_listed(page):
    """Python in the README runs above, in golden-vectors.md in test_golden, and in the guides in test_site."""
    run = page == PAGES[0] or page.parent.name == "how-to"
    run |= page.name in ("quickstart.md", "port-api.md", "golden-vectors.md")
    for language, code in BLOCK.findall(page.read_text("utf-8")):
        if language == "python":
            assert run, code
        elif not language.startswith("{"):
            assert language in ("", "bash", "console", *SHOWN), (language, code)
        if language == "toml":
            assert tomllib.loads(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_documented_command_parses(page):
    for call in commands(page):
        arguments = shlex.split(re.sub(r"\s[>|] .*", "", call), comments=True)
        assert arguments[0] in COMMANDS, call
        try:
            options = make_parser(arguments[0]).parse_args(arguments)
        except SystemExit as end:
            pytest.fail(f"parity {call}: exit code {end.code}")
        assert "run" in options, call


def test_invalid_documented_command_is_detected(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```console\n$ parity check --no-such-option\n```\n\n```\nx | parity translate --beam 4 > y\n```\n")
    assert commands(page) == ["check --no-such-option", "translate --beam 4 > y"]
    with pytest.raises(pytest.fail.Exception, match="no-such-option: exit code 3"):
        test_every_documented_command_parses(page)


def test_commands_page_lists_every_command():
    page = (DOCS / "reference" / "commands.md").read_text("utf-8")
    assert {call.split()[0] for call in re.findall(r"^\| `parity (.+?)`", page, re.MULTILINE)} == set(COMMANDS)
    for call in re.findall(r"^\| `parity (.+?)`", page, re.MULTILINE):
        make_parser(call.split()[0]).parse_args(call.split())


def test_ci_runs_the_two_blocks_of_setup_commands():
    first, second = blocks("bash")
    assert first.splitlines()[-1] == ".venv/bin/parity check"
    assert second.splitlines()[-1] == ".venv/bin/pytest"
    assert README.index("## Development") < README.index("```bash")
    script = (ROOT / ".ci" / "run").read_text()
    function = re.search(r"^block\(\).*$", script, re.MULTILINE)
    for n, expected in enumerate((first, second), start=1):
        printed = subprocess.run(
            ["bash", "-c", f"{function[0]}\nblock {n}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert printed == expected


@pytest.mark.parametrize(
    ("day", "installed", "expected"),
    [
        (0, ("3.13.0", "3.13.11", "3.13.2", "3.14.1"), "3.13.11 constraints-3.13.txt"),
        (0, ("3.12.1",), "none constraints.txt"),
        (1, ("3.13.0",), "none constraints.txt"),
        (2, ("3.13.0",), "none constraints.txt"),
        (3, ("3.13.0",), "3.13.0 constraints-3.13.txt"),
    ],
)
def test_ci_uses_python_3_13_every_third_day(tmp_path, day, installed, expected):
    for version in installed:
        (tmp_path / "versions" / version / "bin").mkdir(parents=True)
    script = (ROOT / ".ci" / "run").read_text()
    selection = re.search(r"^python=.*?^fi$", script, re.MULTILINE | re.DOTALL)[0]
    code = f"day={day}\n{selection}\n[[ $PATH =~ versions/([0-9.]+)/bin ]] && echo ${{BASH_REMATCH[1]}} || echo none"
    environment = {"PATH": "/usr/bin:/bin", "PYENV_ROOT": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", f"{code}\necho $constraints"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert " ".join(done.stdout.split()) == expected
    assert "command=${command//constraints.txt/$constraints}" in script


@pytest.mark.parametrize(
    ("day", "constraints", "extended"),
    [(1, "constraints.txt", True), (2, "constraints.txt", False), (6, "constraints-3.13.txt", True)],
)
def test_ci_never_forces_other_kernels_with_python_3_13(day, constraints, extended):
    script = (ROOT / ".ci" / "run").read_text()
    condition = re.search(r"^if (\(\(day % 2\)\).*); then\n    parts=193$", script, re.MULTILINE)[1]
    done = subprocess.run(["bash", "-euc", f"day={day} constraints={constraints}\nif {condition}; then exit 5; fi"])
    assert done.returncode == (5 if extended else 0)


# --- Figures ---


def test_readme_stays_within_the_line_limit():
    assert README.count("\n") <= 120
    assert "@@" not in README


def test_readme_sections_are_in_the_expected_order():
    """The README explains the problem, shows a picture, checks a port, and shows the output, in this order."""
    order = (
        "A Transformer with a bug usually still trains.",
        "](docs/explore.png)\n*`parity explore` on one sentence.",
        "$ parity translate",
        "$ parity check --port my_port:MyPort",
        "```text\nAGREE  1 port",
        "<- introduced here\n",
        "## Use the four packages",
        "## Load a published checkpoint",
        "## Documentation",
        "## Development",
    )
    assert [README.index(text) for text in order] == sorted(README.index(text) for text in order)


def test_picture_and_its_port_name_the_same_tap():
    code = (DOCS / "examples" / "unscaled_port.py").read_text("utf-8")
    (tap,) = re.findall(r'if name == "(.+?)"', code)
    assert f"`{tap}`" in README
    assert f"`{tap}`" in (DOCS / "index.md").read_text("utf-8")


def test_reports_in_the_readme_and_the_quick_start_are_kept_outputs():
    """The port in the quick start is the site's broken port, so both contain the same report."""
    kept = (DOCS / "examples" / "broken_port.txt").read_text("utf-8").splitlines()
    for page in (README, QUICKSTART.read_text("utf-8")):
        (report,) = (text for text in blocks("text", page) if "DIAGNOSIS" in text)
        for line in report.splitlines():
            start, dots, _ = line.partition("...")
            assert any(one.startswith(start) if dots else one == line for one in kept), line
    ports = {
        "broken_port.py": (DOCS / "examples" / "broken_port.py").read_text("utf-8"),
        "quickstart.md": next(code for code in blocks("python", QUICKSTART.read_text("utf-8"))),
    }
    bodies = {}
    for name, code in ports.items():
        tree = ast.parse(code)
        for node in ast.walk(tree):  # without docstrings; the syntax tree doesn't include comments
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
                node.body = node.body[1:]
        bodies[name] = ast.unparse(tree)
    assert bodies["broken_port.py"] == bodies["quickstart.md"]


def without_backward(code: str) -> str:
    """Return code without its backward functions and methods, which only the reference defines."""
    lines = code.splitlines()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.FunctionDef) and "backward" in node.name:
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    return "\n".join(lines)


def test_readme_states_the_share_of_identical_tokens():
    different = total = 0
    for module in READING_ORDER:
        codes = {backend: without_backward(piece.code) for backend, piece in panes.pieces(module).items()}
        marks = compare(codes, "numpy")["numpy"]
        different, total = different + marks.different, total + marks.total
    same = f"{100 * (1 - different / total):.0f}% of the tokens in the NumPy forward pass are identical"
    assert same in " ".join(README.split())


def test_install_table_matches_the_last_full_check():
    table = "\n".join(results.closest())
    assert table in INSTALL.read_text("utf-8"), f"docs/how-to/install.md should have:\n{table}"


@pytest.mark.parametrize("task", ["forward", "train", "decode"])
def test_fastest_port_is_faster_than_the_other_implementations(task):
    rows = [row for row in speeds.compared(task) if "/ fastest port |" in row]
    assert len(rows) == 3 * len(results.MACHINES)
    assert "\n".join(rows).count("the fastest |") == 2 * len(results.MACHINES)
    assert not re.search(r"\| 0\.\d", "\n".join(rows))


def timed(**seconds):
    """Return a race as ``speeds.race`` does, with a peak of 1 second."""
    ratio = lambda a, b: {"median": a / b, "low": a / b, "high": a / b}  # noqa: E731
    return {
        "peak": {"seconds": 1.0, "rate": 2e11, "bandwidth": 1e10},
        "implementations": {name: {"median_seconds": own} for name, own in seconds.items()},
        "ratios": {a: {b: ratio(seconds[a], seconds[b]) for b in seconds if b != a} for a in seconds},
    }


def aims_of(monkeypatch, **seconds):
    monkeypatch.setattr(speeds, "race", lambda name, machine: timed(**seconds))
    return {aim.what: aim for aim in speeds.aims("amd")}


def test_fraction_of_peak_is_the_peak_time_divided_by_the_time():
    assert speeds.fraction_of_peak(timed(torch=1.25), "torch") == 0.8
    assert speeds.fraction_of_peak(timed(torch=1.25), "jax") is None
    assert speeds.fraction_of_peak({**timed(torch=1.25), "peak": None}, "torch") is None
    assert speeds.percent(0.8) == "80%"


def test_performance_target_depends_on_the_fraction_of_peak_of_the_peer(monkeypatch):
    slow = aims_of(monkeypatch, torch=1.7, **{"torch.nn": 2.0, "marian": 9.0})
    aim = slow["torch / best PyTorch alternative, forward (which reaches 50% of the peak)"]
    assert aim[1:] == ("0.60", "0.85 (0.85 to 0.85), torch / torch.nn", False)
    assert slow["torch / best PyTorch alternative, train (which reaches 50% of the peak)"].is_met
    fast = aims_of(monkeypatch, torch=0.9, **{"torch.nn": 1.0, "marian": 0.99})
    assert fast["torch / best PyTorch alternative, forward (which reaches 101% of the peak)"][1:] == (
        "0.97",
        "0.91 (0.91 to 0.91), torch / marian",
        True,
    )


def test_our_fastest_mode_is_compared_with_the_fastest_alternative(monkeypatch):
    times = {"torch": 1.7, "torch compiled": 1.2, "torch.nn": 2.0, "torch.nn compiled": 1.5, "jax": 1.3, "tf": 1.6}
    aim = aims_of(monkeypatch, **times)["torch / best PyTorch alternative, train (which reaches 67% of the peak)"]
    assert aim[1:] == ("0.92", "0.80 (0.80 to 0.80), torch compiled / torch.nn compiled", True)
    found = timed(**times)
    assert speeds.best_form(found, "torch") == "torch compiled"
    assert speeds.against_fastest(found)["torch"] is None
    assert speeds.against_fastest(found)["jax"]["median"] == pytest.approx(1.3 / 1.2)
    assert speeds.against_fastest(timed(torch=1.7, jax=1.3, tf=1.6))["torch"]["median"] == pytest.approx(1.7 / 1.3)
    assert speeds.said(speeds.against_peer(timed(jax=1.0, **{"flax nnx": 2.0}), "jax"), "jax") == "0.50 (0.50 to 0.50)"


def test_package_is_compared_with_peers_in_the_race_with_both_modes(monkeypatch):
    races = {"train-base": timed(tf=2.0, **{"keras hub": 1.0})}
    races["train-base-tf"] = timed(**{"tf": 9.0, "tf compiled": 8.0, "keras hub": 4.0})
    monkeypatch.setattr(speeds, "race", lambda name, machine: races.get(name, timed()))
    aims = {machine: {aim.what: aim.found for aim in speeds.aims(machine)} for machine in ("amd", "intel")}
    assert aims["amd"]["tf / best KerasHub mode, train"] == "2.00 (2.00 to 2.00), tf compiled / keras hub"
    assert aims["intel"]["tf / best KerasHub mode, train"] == "2.00 (2.00 to 2.00), tf / keras hub"  # not measured


def test_performance_targets_apply_to_each_port_and_the_best_one(monkeypatch):
    for torch, jax, tf, is_met in ((1.0, 1.1, 1.1, True), (1.1, 1.1, 1.1, False), (1.0, 1.1, 1.3, False)):
        found = aims_of(monkeypatch, torch=torch, jax=jax, tf=tf)
        assert found["percentage of the peak, forward"].is_met is is_met
    assert aims_of(monkeypatch, torch=1.0)["percentage of the peak, forward"].is_met is None
    assert aims_of(monkeypatch, torch=1.0)["jax / Flax NNX, forward"][1:] == ("0.80", "", None)


def test_conformance_table_names_the_port_closest_to_the_tolerance():
    summary = results.read(results.RESULTS / "conformance.json")["summary"]
    summary = [one for one in summary if one["backend"] in results.PORTS]  # the table omits the reference
    rows = {row.split(" | ")[0].strip("| "): row for row in list(results.conformance("float32"))[2:]}
    assert rows["weights"].endswith("| exact | exact | exact |  |")
    for component, row in rows.items():
        found = [one for one in summary if (one["dtype"], one["component"]) == ("float32", component) and one["error"]]
        largest = max((one["ratio"] for one in found), default=None)
        closest = [f"| {results.TITLES[one['backend']]}: `{one['case']}` " for one in found if one["ratio"] == largest]
        assert not found or any(where in row for where in closest)


def test_every_tolerance_is_listed():
    rows = list(results.tolerances())[2:]
    listed = {float(number) for row in rows for number in re.findall(r"\d[\d.]*(?:e-\d+)?", row)}
    policy = tomllib.loads(results.TOLERANCES.read_text("utf-8"))
    sections = [policy[name] for name in ("float64", "float32", "bfloat16")]
    sections += [policy[name][dtype] for name in ("gradients", "decode", "steps") for dtype in ("float64", "float32")]
    assert {value for section in sections for name, value in section.items() if name != "floor_in_eps"} <= listed
    assert "plus four eps" in " ".join((DOCS / "results" / "conformance.md").read_text("utf-8").split())
    assert {section["floor_in_eps"] for section in sections if "floor_in_eps" in section} == {4.0}


# --- Tables and links ---


def test_links_point_to_existing_files():
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", README)
    assert len(links) > 20
    for link in links:
        assert (ROOT / link).exists(), link


def test_module_table_lists_every_module():
    rows = list(facts.modules())[2:]
    assert [row.split("|")[1].strip() for row in rows[:6]] == [
        *("3.1, left half of Figure 1", "3.1, right half of Figure 1", "3.2", "3.2.3", "3.3", "3.4 and 3.5")
    ]
    shared = {re.search(r"\[(\w+)\]", row)[1] for row in rows}
    others = set(re.findall(r"^\| (\w+) \| \[(\w+)\]", "\n".join(facts.other_modules()), re.MULTILINE))
    for backend, package in facts.PACKAGES.items():
        there = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
        assert there == shared | {module for title, module in others if title == facts.TITLES[backend]}
    assert ("NumPy", "backward") in others
    spec = {re.search(r"\[(\w+)\]", row)[1] for row in list(facts.spec_modules())[2:]}
    assert {"config", "names", "files"} <= spec
    assert spec == {path.stem for path in (ROOT / "transformer_spec").glob("*.py")} - {"__init__"}


def test_every_preset_is_listed():
    listed = re.findall(r"`([\w.]+)`", "\n".join(facts.presets()))
    assert listed == [*TABLE_3, *IMPLEMENTATIONS] == list(ref.PRESETS)


def test_format_table_lists_every_format():
    page = (DOCS / "reference" / "checkpoint-formats.md").read_text("utf-8")
    rows = re.findall(r"^\| (.+?) \| `(\w+)` \| yes \| (.+?) \|", page, re.MULTILINE)
    assert {name for _, name, _ in rows} == set(importer.FORMATS)
    written = {name for _, name, how in rows if how.startswith(f"`--format {name}`")}
    assert written == set(importer.EXPORTS)
    assert all(how == "no" for _, name, how in rows if name not in written)
    assert all(family in rows[0][0] for family in huggingface_families.FAMILIES)
    refused = page[page.index("| model | reason |") : page.index("In some published checkpoints")].lower()
    plain = re.sub(r"[^a-z0-9]", "", refused)
    for name in huggingface_families.OUT_OF_SCOPE:
        title = re.sub(r"[^a-z0-9]", "", SAID.get(name, name))
        assert title in plain, name


SAID = {  # names on that page, by model family
    "speech_to_text": "speech2text",
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), "seamlessm4t"),
    **dict.fromkeys(
        ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"), "models that combine two other models"
    ),
}


def test_documented_names_file_is_accepted(tmp_path):
    from transformer_parity.apps.checkpoints.formats.torch_nn import ASKED, ASKED_OF_SINUSOIDS, OWN
    from transformer_parity.apps.checkpoints.options import ReadOptions
    from transformer_parity.apps.checkpoints.state_dict import read_names

    page = (DOCS / "how-to" / "checkpoints.md").read_text("utf-8")
    (tmp_path / "names.toml").write_text(re.search(r"```toml\n(.*?)```", page, re.DOTALL)[1])
    given = read_names(ReadOptions(names=tmp_path / "names.toml"))
    assert set(given.config) == {*ASKED, *ASKED_OF_SINUSOIDS}
    assert set(given.names) <= set(OWN)
    ref.TransformerConfig(source_vocab_size=9, target_vocab_size=9, d_model=16, **given.config)


def test_every_framework_test_is_listed_in_the_docs():
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "native" / "tests.md").read_text("utf-8")))
    tests, of_one_framework = set(), set()
    for path in (ROOT / "tests").glob("test_native*.py"):
        names = re.findall(r"^def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        tests.update(names)
        if path.stem != "test_native":
            of_one_framework.update(names)
        else:  # contains tests of all packages
            of_one_framework.update(name for name in names if re.match(r"test_(torch|jax|tf)_", name))
    assert of_one_framework <= named <= tests, (of_one_framework - named, named - tests)


def test_every_feature_of_a_framework_has_tests():
    tests = (DOCS / "native" / "tests.md").read_text("utf-8")
    for page in ("torch", "jax", "keras", "numpy"):
        title, _, text = (DOCS / "native" / f"{page}.md").read_text("utf-8").partition("\n")
        listed = text.partition("\n## Limitations\n")[0]
        tested = tests.partition(f"\n#{title}\n")[2].partition("\n## ")[0]
        features, rows = (re.findall(r"^\| (?!Feature )(.+?) \| ", part, re.MULTILINE) for part in (listed, tested))
        assert features == rows != []
