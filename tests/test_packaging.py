"""Installation and packaging: the base install and its extras, the pins, the wheel, and the source distribution."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from itertools import chain
from pathlib import Path

import pytest
from imports import BASE, PROGRAM, ROOT
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import transformer_spec
from transformer_parity.cli.main import main
from transformer_parity.engine.system.machine import LIBRARIES

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]

# --- Installs ---


@pytest.mark.parametrize("name", PROGRAM)
def test_package_has_a_version_public_names_and_types(name):
    """All packages share the version that `parity --version` prints, and their public names exist and are unique."""
    package = importlib.import_module(name)
    assert package.__version__ == transformer_spec.__version__
    assert "__version__" in package.__all__
    assert len(package.__all__) == len(set(package.__all__))
    assert all(hasattr(package, public) for public in package.__all__)
    assert (Path(package.__file__).parent / "py.typed").is_file()


def test_parity_prints_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"parity {transformer_spec.__version__}\n"


def distributions(requirements: list[str]) -> set[str]:
    return {canonicalize_name(Requirement(text).name) for text in requirements}


def test_extras_contain_the_documented_requirements():
    extras = PROJECT["optional-dependencies"]
    assert distributions(PROJECT["dependencies"]) == set(map(canonicalize_name, BASE))
    assert distributions(extras["cli"]) == set(LIBRARIES)
    assert set(Requirement(*extras["all"]).extras) == {"cli", "import", "torch", "jax", "tf"}
    assert "transformer-parity[all,docs]" in extras["dev"]


BARE = f"""
import sys
from importlib.machinery import PathFinder

class Hidden(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {LIBRARIES} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hidden
"""
NEEDS = "requires packages that are not installed (jinja2, matplotlib, psutil, rich, sacrebleu, sentencepiece): "
NEEDS += "pip install 'transformer-parity[cli]'\n"


def bare(code: str, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which the command-line libraries can't be imported."""
    command = [sys.executable, "-c", BARE + code, *arguments]
    path = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **path}, check=False)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["check", "--backends", "torch"]])
def test_command_line_without_its_libraries_explains_what_to_install(arguments):
    done = bare("import runpy; runpy.run_module('transformer_parity', run_name='__main__')", *arguments)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", f"parity: error: the parity command {NEEDS}")


def test_missing_library_is_named_in_the_error():
    one = BARE.replace(str(LIBRARIES), "('psutil',)")
    code = "from transformer_parity.engine.system.machine import needs; print(needs())"
    done = subprocess.run([sys.executable, "-c", one + code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "requires packages that are not installed (psutil): pip install 'transformer-parity[cli]'\n"


PYTEST = "import pytest; sys.exit(pytest.main(sys.argv[1:]))"


def test_pytest_runs_without_the_command_line_libraries(tmp_path):
    (tmp_path / "test_own.py").write_text("def test_own(): pass")
    done = bare(PYTEST, "-q", "-p", "no:cacheprovider", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "1 passed" in done.stdout
    done = bare(PYTEST, "--parity-port=mine:Mine", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (pytest.ExitCode.USAGE_ERROR, f"ERROR: --parity-port {NEEDS}\n")


def test_port_can_be_defined_without_the_command_line_libraries():
    assert bare("from transformer_parity.plugin import Port").stderr == ""


# --- The pins ---

LOADER = SourceFileLoader("newest", str(ROOT / ".ci" / "newest"))
newest = module_from_spec(spec_from_loader("newest", LOADER))
LOADER.exec_module(newest)
TESTED = ("3.11", "3.13")  # Python versions with a constraints file
PYTHON = "3.11" if sys.version_info < (3, 12) else "3.13"  # the file for the packages that are installed here
LINUX = {**default_environment(), "os_name": "posix", "sys_platform": "linux", "platform_system": "Linux"}
LINUX |= {"platform_machine": "x86_64"}


def pinned(python: str) -> dict[str, str]:
    return newest.parse((ROOT / newest.constraints_file(python)).read_text("utf-8"))


def environment(python: str) -> dict[str, str]:
    return {**LINUX, "python_version": python, "python_full_version": f"{python}.0"}


def brought_along(requirements: list[str], extra: str, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Add all transitive dependencies that are installed, with their extras, for this Python on Linux."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if name.startswith(newest.GPU) or (marker and not marker.evaluate({**environment(PYTHON), "extra": extra})):
            continue
        for asked in {("", name), *((further, name) for further in requirement.extras)} - found:
            found.add(asked)
            brought_along(*required(*asked), found)
    return found


def required(extra: str, name: str) -> tuple[list[str], str]:
    """Return a distribution's requirements and the extra for their markers. Ours are read from pyproject.toml."""
    if name == PROJECT["name"]:
        return PROJECT["optional-dependencies"].get(extra, PROJECT["dependencies"]), ""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # required only on other systems
        return importlib.metadata.requires(name) or [], extra
    return [], ""


def test_all_transitive_dependencies_are_pinned():
    needed = {name for _, name in brought_along(["transformer-parity[dev]"], "", set())} - {PROJECT["name"]}
    assert {"numpy", "jaxlib", "markupsafe", "setuptools"} <= needed
    assert needed - pinned(PYTHON).keys() == set()


@pytest.mark.parametrize("python", TESTED)
def test_constraints_file_has_the_form_that_the_script_writes(python):
    text = (ROOT / newest.constraints_file(python)).read_text("utf-8")
    versions = pinned(python)
    header, _, rest = text.partition("absl-py==")
    expected = re.escape(newest.HEADER).replace(r"\{minor\}", re.escape(python))
    expected = expected.replace(r"\{python\}", rf"{re.escape(python)}\.\d+").replace(r"\{system\}", r"Linux \w+")
    assert re.fullmatch(expected, header)
    assert f"absl-py=={rest}" == "".join(f"{name}=={version}\n" for name, version in sorted(versions.items()))
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in versions.values())
    assert versions == newest.pins([{"name": name, "version": version} for name, version in versions.items()])


@pytest.mark.parametrize("python", TESTED)
def test_pinned_versions_satisfy_pyproject(python):
    """Every requirement of the base installation and of all extras is pinned to a version that it allows."""
    versions = pinned(python)
    assert SpecifierSet(PROJECT["requires-python"]).contains(python)
    requirements = [*PROJECT["dependencies"], *chain(*PROJECT["optional-dependencies"].values())]
    checked = 0
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate(environment(python))
        if applies and requirement.name != PROJECT["name"]:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement
            checked += 1
    assert checked > 40


def test_names_and_versions_are_normalized_and_own_and_gpu_packages_are_not_pinned():
    names = ("Jinja2", "torch", "ml_dtypes", "pip", "transformer-parity", "nvidia-cublas", "cuda-toolkit", "triton")
    listed = [{"name": name, "version": "2.13.0+cpu"} for name in names]
    assert newest.pins(listed) == dict.fromkeys(("jinja2", "ml-dtypes", "torch"), "2.13.0")


def test_install_page_lists_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [Requirement(one) for one in [*project["dependencies"], *extras["torch"], *extras["jax"], *extras["tf"]]]
    lowest = {one.name: str(one.specifier).removeprefix(">=") for one in listed}
    titles = ("NumPy", "PyTorch", "JAX", "Flax", "TensorFlow", "Keras")
    names = {title: title.lower().removeprefix("py") for title in titles}
    rows = [[title, lowest[name], *(pinned(python)[name] for python in TESTED)] for title, name in names.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    assert table in (ROOT / "docs" / "how-to" / "install.md").read_text("utf-8"), table


def test_newest_runs_the_commands_of_the_readme_without_constraints():
    readme = (ROOT / "README.md").read_text("utf-8")
    commands = newest.commands(readme)
    assert [command.replace("-c constraints.txt ", "") for command in commands] == commands
    assert commands[0] == "python3 -m venv .venv"
    assert commands[2] == ".venv/bin/parity check"
    assert commands[-1] == ".venv/bin/pytest"
    assert all(command in readme.replace("-c constraints.txt ", "") for command in commands)


def test_newest_runs_later_commands_unless_an_installation_fails(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(newest, "ENVIRONMENT", tmp_path)
    assert newest.run_all(["python3 -c 'print(1)'", "true install", "true"], sys.executable)
    assert (tmp_path / "1.log").read_text() == "1\n"
    capsys.readouterr()
    assert not newest.run_all(["echo broken && exit 3", "true"], sys.executable)
    assert re.search(r"FAILED \(exit code 3\)\n\s+broken\n.*\n  true .*passed\n$", capsys.readouterr().out, re.DOTALL)
    assert not newest.run_all(["false install", "true"], sys.executable)
    assert capsys.readouterr().out.endswith("  The remaining commands require this installation.\n")


def test_newest_lists_packages_that_were_updated_added_or_removed(capsys):
    newest.print_differences({"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "d": "1"}, ROOT / "constraints.txt")
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "3 of 3 versions differ from constraints.txt:"
    assert [line.split() for line in lines[3:]] == [
        ["package", "pinned", "newest"],
        ["b", "1", "2"],
        ["c", "1", "-"],
        ["d", "-", "1"],
    ]


def test_newest_rejects_a_missing_interpreter(capsys):
    with pytest.raises(SystemExit):
        newest.main(["--python", "no-such-python"])
    assert "--python must be an installed Python interpreter: got no-such-python" in capsys.readouterr().err


# --- Distributions ---

DIRECTORIES = (*PROGRAM, "tests", "docs", "benchmarks", ".ci")
FILES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml", "setup.py")
FILES += ("constraints.txt", "constraints-3.13.txt")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


def contents(root: Path, directories: tuple[str, ...]) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for directory in directories
        for path in (root / directory).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The unpacked source distribution and the unpacked wheel that is built from it."""
    directory = tmp_path_factory.mktemp("built")
    tree = directory / "tree"
    for name in DIRECTORIES:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in (*FILES, "MANIFEST.in"):
        shutil.copy(ROOT / name, tree)

    def build(kind: str, where: Path) -> None:
        subprocess.run([sys.executable, "-c", BUILD, kind, directory], cwd=where, capture_output=True, check=True)

    build("build_sdist", tree)
    with tarfile.open(*directory.glob("*.tar.gz")) as archive:
        archive.extractall(directory, filter="data")
    (source,) = (path for path in directory.glob("transformer_parity-*") if path.is_dir())
    build("build_wheel", source)
    with zipfile.ZipFile(*directory.glob("*.whl")) as archive:
        archive.extractall(directory / "wheel")
    return source, directory / "wheel"


def test_source_distribution_contains_all_files(built):
    source, _ = built
    assert contents(source, DIRECTORIES) == contents(ROOT, DIRECTORIES)
    assert all((source / name).read_bytes() == (ROOT / name).read_bytes() for name in FILES)
    assert os.access(source / ".ci" / "run", os.X_OK) == os.access(ROOT / ".ci" / "run", os.X_OK)


def test_wheel_contains_exactly_the_packages(built):
    _, wheel = built
    assert contents(wheel, PROGRAM) == contents(ROOT, PROGRAM)
    (info,) = {path.name for path in wheel.iterdir()} - set(PROGRAM)
    assert info.endswith(".dist-info")


def test_package_description_has_no_relative_links(built):
    _, wheel = built
    (metadata,) = wheel.glob("*/METADATA")
    found = importlib.metadata.Distribution.at(metadata.parent).metadata
    text = found.get_payload()
    assert found["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# transformer-parity\n")
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    assert "What AGREE means (docs/agreement.md)" in text
    assert "[Bring your own port" not in text


def test_tests_in_the_source_distribution_pass(built):
    """Run some of the tests that read files outside the packages."""
    source, _ = built
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--backends", "numpy"]
    command += ["tests/test_readme.py", "-k", "not the_code_runs"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
