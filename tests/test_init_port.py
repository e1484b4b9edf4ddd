"""`parity init-port`: in every framework, the template that it writes runs and agrees without changes."""

from __future__ import annotations

import ast
import sys

import pytest

from transformer_parity.cli.init_port import FRAMEWORKS
from transformer_parity.cli.main import main
from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.transformer.cases.case import ACTIVATIONS, in_stages
from transformer_parity.transformer.cases.for_ports import port_cases, port_config
from transformer_parity.transformer.compare.comparator import compare
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.ports.user import PluginPort, Port

NOT_ASKED = {  # reasons for skipping values that user ports never report
    "20 norms of the gradient are not reported",
    "366 moments are not reported",
    "122 moments are not reported",
    "user ports do not expose a cache",
    "scores are not reported",
}
IN_EVERY_FRAMEWORK = [
    pytest.param(name, marks=pytest.mark.only(name if name in PORTS else "numpy")) for name in FRAMEWORKS
]


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """Change to an empty directory, and afterwards unload the modules imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.extended("all cases of port templates", "jax", "tf")
@pytest.mark.parametrize("framework", IN_EVERY_FRAMEWORK)
def test_template_agrees_in_every_case(framework, directory, capsys):
    assert run_skeleton(framework, capsys, port_cases) == NOT_ASKED


@pytest.mark.extended("port templates", "jax", "tf")
@pytest.mark.parametrize("framework", [pytest.param(name, marks=pytest.mark.only(name)) for name in ("jax", "tf")])
def test_template_agrees_in_one_case_of_each_component(framework, directory, capsys):
    run_skeleton(framework, capsys, lambda config: [*{case.component: case for case in port_cases(config)}.values()])


def run_skeleton(framework, capsys, choose):
    """Write a template, compare it on the chosen cases, and return the reasons for skipped comparisons."""
    module = f"{framework}_model"
    assert main(["init-port", "--framework", framework, "--out", f"{module}.py"]) == 0
    printed = capsys.readouterr().out
    assert f"  parity check --port {module}:MyPort\n  pytest --parity-port={module}:MyPort\n" in printed
    assert f"  parity check --port {module}:MyPort --stage activations\n" in printed
    port = PluginPort(f"{module}:MyPort")
    cases = choose(port_config(port))
    findings = list(compare(cases, port, Placements(("float64",))))
    skipped = [finding for finding in findings if finding.verdict == SKIPPED]
    assert [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)] == []
    assert {finding.case for finding in findings if finding.verdict == AGREES} == {case.name for case in cases}
    return {finding.detail for finding in skipped}


@pytest.mark.parametrize("framework", IN_EVERY_FRAMEWORK)
def test_template_with_only_load_and_forward_agrees_in_the_forward_pass(framework, directory):
    """The template says to delete all other methods first and to check only the activations."""
    assert main(["init-port", "--framework", framework, "--out", f"{framework}_short.py"]) == 0
    file = directory / f"{framework}_short.py"
    tree = ast.parse(file.read_text())
    (port,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    methods = vars(Port).keys() - {"load", "forward"}
    port.body = [node for node in port.body if not isinstance(node, ast.FunctionDef) or node.name not in methods]
    for node in port.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "taps":
            node.value = ast.Tuple([], ast.Load())
    file.write_text(ast.unparse(tree))
    port = PluginPort(f"{framework}_short:MyPort")
    assert port.kind.taps == ()
    cases = [case for case in port_cases(port_config(port)) if case.name in ("full/padded", "full/other_weights")]
    findings = list(compare(in_stages(cases, {ACTIVATIONS}), port, Placements(("float64",))))
    assert [finding for finding in findings if finding.verdict not in (AGREES, SKIPPED)] == []
    assert {finding.case for finding in findings if finding.verdict == AGREES} == {case.name for case in cases}
    assert "the port does not define export_weights()" in {finding.detail for finding in findings}


def test_template_contains_every_method(directory):
    for framework in FRAMEWORKS:
        assert main(["init-port", "--framework", framework, "--out", f"{framework}_all.py"]) == 0
        text = (directory / f"{framework}_all.py").read_text()
        for name in vars(Port):
            if not name.startswith("_") and name != "name":
                assert f"    def {name}(" in text or f"    {name}" in text, (framework, name)
        assert "my_port" not in text


@pytest.mark.parametrize("name", ["torch", "numpy", "jax", "json", "types", "rich", "transformer_jax", "ml_dtypes"])
def test_output_name_that_shadows_a_module_is_rejected(name, directory, capsys):
    assert main(["init-port", "--framework", "other", "--out", f"{name}.py"]) == 3
    assert f"would hide the module {name} from all code that imports this module" in capsys.readouterr().err
    assert list(directory.iterdir()) == []


def test_existing_port_file_is_not_overwritten(directory, capsys):
    (directory / "my_port.py").write_text("mine")
    assert main(["init-port", "--framework", "other"]) == 3
    assert (
        "my_port.py already exists; choose a different name with --out, or delete the file" in capsys.readouterr().err
    )
    assert (directory / "my_port.py").read_text() == "mine"
    (directory / "my_port.py").unlink()
    assert main(["init-port", "--framework", "other"]) == 0
    assert "class MyPort(Port)" in (directory / "my_port.py").read_text()


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (
            "my-port.py",
            "--out must be a .py file whose name is a valid module name, such as my_port.py: got my-port.py",
        ),
        ("port", "--out must be a .py file whose name is a valid module name, such as my_port.py: got port"),
        ("absent/port.py", "port.py: No such file or directory"),
    ],
)
def test_invalid_output_path_is_rejected(out, message, directory, capsys):
    assert main(["init-port", "--framework", "other", "--out", out]) == 3
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(directory.iterdir()) == []


def test_printed_instructions_change_to_the_output_directory(directory, capsys):
    (directory / "ports").mkdir()
    assert main(["init-port", "--framework", "torch", "--out", "ports/mine.py"]) == 0
    assert "  cd ports\n  parity check --port mine:MyPort\n" in capsys.readouterr().out
