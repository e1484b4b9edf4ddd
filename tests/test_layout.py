"""Import rules: the spec imports no backend, backends import the spec, and the checker's engine imports neither.

The tests read the source instead of running it, so they also find imports inside functions.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from imports import (
    BACKENDS,
    BASE,
    BENCH,
    PARITY,
    PROGRAM,
    ROOT,
    SPEC,
    TYPE_CHECKING,
    circle,
    imports,
    module_name,
    packages_of,
)

FRAMEWORKS = {
    "reference_numpy": set(),
    "transformer_torch": {"torch"},
    "transformer_jax": {"jax", "flax"},
    "transformer_tf": {"tensorflow", "keras"},
}
OPTIONAL = {"orbax"}  # only for directories of sharded checkpoints
ENGINE = f"{PARITY}/engine"
# Templates in transformer_parity import a framework only to show users how. They are copied, not imported.
TEMPLATES = (f"{PARITY}/transformer/ports/templates/", f"{PARITY}/pairs/templates/")


def outside(package: str, *, types: bool = False, root: Path = ROOT) -> dict[str, set[str]]:
    """Return the packages that each file of a package imports, except that package and the standard library."""
    found = packages_of(root / package, types=types, root=root)
    return {name: packages - set(sys.stdlib_module_names) - {package.split("/")[0]} for name, packages in found.items()}


def importers(of: set[str], package: str, *, root: Path = ROOT) -> dict[str, set[str]]:
    """Return the files of a package that import any of the given packages, including imports for type hints."""
    found = outside(package, types=True, root=root)
    return {name: packages & of for name, packages in found.items() if packages & of}


def test_spec_imports_no_backend():
    assert set().union(*outside(SPEC).values()) == BASE
    assert importers({*PROGRAM} - {SPEC}, SPEC) == {}


@pytest.mark.parametrize("package", BACKENDS)
def test_backend_imports_only_the_spec_and_its_framework(package):
    found = set().union(*outside(package).values())
    assert {SPEC} | FRAMEWORKS[package] <= found <= {SPEC} | BASE | FRAMEWORKS[package] | OPTIONAL


@pytest.mark.parametrize("package", BACKENDS)
def test_backends_do_not_import_each_other(package):
    assert importers({*PROGRAM} - {SPEC, package}, package) == {}


def test_only_the_benchmarks_import_the_checker():
    for package in PROGRAM:
        assert bool(importers({PARITY}, package)) == (package == BENCH), package
    assert importers({BENCH}, PARITY) == {}  # cli/main.py refers to the module of `parity bench` by name


def test_engine_imports_neither_the_spec_nor_a_backend():
    assert importers({SPEC, BENCH, *BACKENDS}, ENGINE) == {}
    rooms = tuple(f"{PARITY}.{name}" for name in ("transformer", "apps", "cli"))
    graph = imports(ROOT / PARITY, types=True)
    engine = {name: others for name, others in graph.items() if name.startswith(f"{PARITY}.engine.")}
    assert len(engine) > 10
    assert [(name, other) for name, others in engine.items() for other in others if other.startswith(rooms)] == []


def test_checker_modules_do_not_import_ports():
    """Commands import ports by name on demand. The next test verifies this by importing the modules."""
    found = importers({*BACKENDS} - {"reference_numpy"}, PARITY)
    assert {name for name in found if not name.startswith(TEMPLATES)} == set()


PORTS = tuple(f"{PARITY}/transformer/ports/{name}.py" for name in ("torch", "onednn", "jax", "tensorflow"))


def test_checker_imports_backends_only_on_demand():
    """Importing every module except the ports' own must not load any framework."""
    paths = [path for path in (ROOT / PARITY).rglob("*.py") if path.name != "__main__.py"]
    files = {path.relative_to(ROOT).as_posix(): module_name(path, ROOT) for path in paths}
    modules = [name for path, name in files.items() if not path.startswith(TEMPLATES) and path not in PORTS]
    assert len(modules) > 150
    loaded = {*FRAMEWORKS, *set().union(*FRAMEWORKS.values())} - {"reference_numpy"}
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    code += f"print(*{loaded} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout) == (0, "\n"), done.stderr


def test_every_backend_exports_the_names_of_the_spec(backend):
    import transformer_spec

    for name in transformer_spec.__all__:
        assert getattr(backend.package, name) is getattr(transformer_spec, name), name
    assert set(transformer_spec.__all__) < set(backend.package.__all__)


@pytest.mark.parametrize("package", [SPEC, *BACKENDS, BENCH])
def test_packages_have_no_circular_imports(package):
    assert circle(ROOT / package, types=package != SPEC) == []


def test_imports_within_a_package_are_found():
    for package in BACKENDS:
        graph = imports(ROOT / package, types=True)
        assert graph[f"{package}.transformer"] >= {f"{package}.decoder", f"{package}.masks"}


# --- Tests of these tests ---

WAYS = {  # ways in which b.py can import a.py, which imports b.py
    "absolute": "from house.room.a import A",
    "the module": "from house.room import a",
    "its dotted name": "import house.room.a as a",
    "relative": "from .a import A",
    "relative, the module": "from . import a",
    "relative, from above": "from ..room.a import A",
    "inside a function": "def b():\n    from house.room.a import A",
    "inside a method, under a condition": "class B:\n    def b(self):\n        if self:\n            from . import a",
    "through the package's own exports": "from house.room import A",
    "in an else branch of TYPE_CHECKING": "if TYPE_CHECKING:\n    import os\nelse:\n    from house.room.a import A",
}


def house(directory: Path, b: str) -> Path:
    """Write a package with two modules, the first of which imports the second."""
    files = {"__init__": "", "room/__init__": "from house.room.a import A", "room/a": "from house.room.b import B"}
    (directory / "house/room").mkdir(parents=True)
    for name, text in (files | {"room/b": b}).items():
        (directory / f"house/{name}.py").write_text(text)
    return directory / "house"


@pytest.mark.parametrize("way", WAYS)
def test_import_cycle_is_detected(tmp_path, way):
    found = circle(house(tmp_path, WAYS[way]), types=False)
    assert found[0] == found[-1]
    assert {"house.room.a", "house.room.b"} <= set(found)


@pytest.mark.parametrize("b", ["", "import os\nfrom house import other", "from elsewhere.room.a import A"])
def test_acyclic_imports_are_not_reported(tmp_path, b):
    assert circle(house(tmp_path, b), types=True) == []


@pytest.mark.parametrize("guard", TYPE_CHECKING)
def test_type_checking_imports_count_only_if_requested(tmp_path, guard):
    package = house(tmp_path, f"if {guard}:\n    from house.room.a import A")
    assert circle(package, types=False) == []
    assert circle(package, types=True) != []


OTHER = "import transformer_torch.layers"


@pytest.mark.parametrize("text", [OTHER, f"def f():\n    {OTHER}", f"if TYPE_CHECKING:\n    {OTHER}"])
def test_importing_another_package_is_detected(tmp_path, text):
    house(tmp_path, text)
    assert importers({"transformer_torch"}, "house", root=tmp_path) == {"house/room/b.py": {"transformer_torch"}}
    assert importers({"transformer_jax"}, "house", root=tmp_path) == {}
