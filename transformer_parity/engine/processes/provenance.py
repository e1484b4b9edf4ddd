"""Provenance: determine which files a port consists of, and reject a reference that differs from the checker's.

- Python finds a port's files as it would without this checker: first in the current directory, then in ``PYTHONPATH``.
  This includes the model packages of this project, which a user may have copied and edited.
- A port is compiled from its source. Python identifies cached bytecode only by the size and time of the source file, so
  the bytecode may belong to an earlier version of the source. Installed packages still use cached bytecode, because
  importing a framework would take twice as long without it.
- The checker and the reference are loaded from the directory that contains this package. A process can't load two
  packages with the same name, so a directory with a different reference is rejected.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

from transformer_parity.engine.processes.start import OURS, ROOT

CHECKER = "transformer_parity"
FILE_OF = "file of "
REFERENCE = ("transformer_spec", "reference_numpy")
# Packages that use cached bytecode, even if they are imported from a source checkout.
FRAMEWORKS = ("torch", "jax", "jaxlib", "flax", "tensorflow", "keras", "numpy")
STANDARD_LIBRARY = os.path.dirname(os.__file__)
INSTALLERS = ("site-packages", "dist-packages")


class FromSource(SourceFileLoader):
    """A loader that compiles a module from its source and ignores cached bytecode."""

    def path_stats(self, path: str) -> NoReturn:
        """Raise an error instead of returning the size and the modification time of the source file.

        Without these values, Python neither reads nor writes cached bytecode for this file.
        """
        raise OSError(f"the bytecode of {path} is not cached")


class PortImporter:
    """An import finder that finds the files of ports and loads them from their source.

    Attributes:
        modules: The modules that define ports.
        first: Directories to search for packages of this project before ``sys.path``.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.first: Sequence[str] = ()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module, which contains the module's file and loader."""
        top = name.partition(".")[0]
        if top == CHECKER or top in REFERENCE:
            return None
        if name in OURS:
            spec = _found(name, [*self.first, *sys.path])
        else:
            others = sys.meta_path[sys.meta_path.index(self) + 1 :]
            if name in self.modules:  # pytest caches modules in which it rewrites assertions, so its finder is skipped
                others = [finder for finder in others if not type(finder).__module__.startswith("_pytest.")]
            spec = _asked(others, name, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader and not self._is_cached(spec, top):
            spec.loader = FromSource(spec.loader.name, spec.loader.path)
        return spec

    def _is_cached(self, spec: ModuleSpec, top: str) -> bool:
        if any(module.partition(".")[0] == top for module in self.modules):
            return False
        is_package = spec.submodule_search_locations is not None
        place = str(spec.origin).rsplit(os.sep, spec.name.count(".") + 1 + is_package)[0]
        return top in FRAMEWORKS or _is_installed(place, os.getcwd())


_IMPORTER = PortImporter()


def import_port(module: str) -> None:
    """Prepare the import of a user's port. The current directory is searched first, as with ``python -m``.

    Args:
        module: The module that defines the port.
    """
    current = os.getcwd()
    if current not in sys.path or (not _IMPORTER.modules and sys.path[0] != current):
        sys.path.insert(0, current)
    _IMPORTER.modules.add(module)
    _insert()


def import_packages() -> None:
    """Allow imports from the current directory, but only of this project's packages."""
    _IMPORTER.first = [os.getcwd()]
    _insert()


def _insert() -> None:
    if _IMPORTER not in sys.meta_path:
        sys.meta_path.insert(0, _IMPORTER)


def old_bytecode(module: str) -> str:
    """Return an error message if a module was imported from outdated bytecode before ``import_port`` was called.

    If the bytecode matches the source, return an empty string.
    """
    spec = getattr(sys.modules.get(module), "__spec__", None)
    if spec is None or spec.origin is None or type(spec.loader) is not SourceFileLoader:
        return ""
    if spec.loader.get_code(module) == FromSource(module, spec.origin).get_code(module):
        return ""
    return f"{spec.origin} was imported from cached bytecode of an earlier version; delete {spec.cached}"


def other_reference(first: Sequence[str] = ()) -> str:
    """Return an error message if Python would import a reference that doesn't belong to this checker.

    If it belongs to this checker, return an empty string.

    Args:
        first: Directories that Python searches before ``sys.path``.
    """
    for name in REFERENCE:
        ours = os.path.join(ROOT, name)
        loaded = _place(getattr(sys.modules.get(name), "__spec__", None))
        if loaded and not _is_same(loaded, ours):
            return _refusal(name, loaded, ours)
        found = _place(_found(name, [*first, *sys.path]))
        if found and not _is_same(found, ours) and _sources(found) != _sources(ours):
            return _refusal(name, found, ours)
    return ""


def files_elsewhere() -> dict[str, str]:
    """Return the files of loaded modules that share a name with a module of this project but have a different location.

    The keys are ``file of <module>``, as in a port's environment.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in OURS and file and not os.path.realpath(file).startswith(ROOT + os.sep):
            found[f"{FILE_OF}{name}"] = str(file)
    return found


def described_elsewhere(environment: Mapping[str, str]) -> list[str]:
    """Return a line for each package or module that ``files_elsewhere`` has recorded in an environment.

    For a package, only its top-level module gets a line.
    """
    files = {name.removeprefix(FILE_OF): file for name, file in environment.items() if name.startswith(FILE_OF)}
    return [
        f"{name} was loaded from {file} instead of the installed {name.partition('.')[0]}"
        for name, file in files.items()
        if name.rpartition(".")[0] not in files
    ]


def _refusal(name: str, place: str, ours: str) -> str:
    return (
        f"{place} is a different {name} from {ours}, which is the reference; "
        f"rename or remove {place}, or remove its directory from PYTHONPATH"
    )


def _found(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the location of a top-level module, ignoring the finders of this checker and of pytest."""
    return _asked(sys.meta_path[sys.meta_path.index(PathFinder) :], name, path, None)


def _asked(finders: Sequence[Any], name: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
    specs = (finder.find_spec(name, path, target) for finder in finders if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _place(spec: ModuleSpec | None) -> str:
    """Return the directory of a package or the file of a module, or an empty string if there is no file."""
    if spec is None or not spec.has_location or spec.origin is None:
        return ""
    return spec.origin if spec.submodule_search_locations is None else os.path.dirname(spec.origin)


def _is_same(place: str, ours: str) -> bool:
    return os.path.exists(place) and os.path.samefile(place, ours)


def _sources(place: str) -> Mapping[str, bytes]:
    """Return the source of each module in a directory, keyed by relative path."""
    return dict(_read(place)) if os.path.isdir(place) else {}


def _read(place: str) -> Iterator[tuple[str, bytes]]:
    for directory, _, files in os.walk(place):
        for name in files:
            if name.endswith(".py"):
                path = os.path.join(directory, name)
                with open(path, "rb") as file:
                    yield os.path.relpath(path, place), file.read()


@cache
def _is_installed(place: str, current: str) -> bool:
    """Return whether an installer such as pip wrote the files in a directory, including the bytecode."""
    if place == STANDARD_LIBRARY or os.path.basename(place) in INSTALLERS:
        return True
    return place != current and os.path.isdir(place) and any(name.endswith(".dist-info") for name in os.listdir(place))
