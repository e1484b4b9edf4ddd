"""Inject bugs by editing a copy of a package's source and importing the copy from memory."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from itertools import count
from pathlib import Path
from types import CodeType, ModuleType

from transformer_parity.transformer.bugs.bug import Edit


@cache
def edited_package(package: str, edits: tuple[Edit, ...]) -> ModuleType:
    """Return a copy of a package with the given edits, under a new name. Without edits, return the package itself.

    The copy contains only the edited modules and the modules that import them, directly or indirectly. It shares all
    other modules, including their compiled functions, with the original package. Calls with the same arguments return
    the same copy, which remains in memory until the process ends.

    Args:
        package: Name of one of the four packages.
        edits: Edits in the order in which to apply them. Each edit consists of the name of a module, a string that
            occurs exactly once in the source code of the module, and the string that replaces it.

    Raises:
        ImportError: If the source of the package can't be found.
        ValueError: If the string to replace doesn't occur exactly once in the module, for example because an earlier
            edit has changed it.
    """
    original = importlib.import_module(package)
    if not edits:
        return original
    texts = dict(_sources(package))
    for module, old, new in edits:
        text = texts.get(module, "")
        if (found := text.count(old)) != 1:
            raise ValueError(f"{package}.{module} must contain {old!r} once: found {found} times")
        texts[module] = text.replace(old, new)
    copied = {module for module, _, _ in edits} | {"__init__"}
    while more := {module for module in texts if module not in copied and _imports(package, module) & copied}:
        copied |= more
    name = f"{package}_edited_{next(_PACKAGES)}"
    # Make imports of copied modules relative, so that their source code doesn't contain the name of the copy. Copies
    # with the same source code then share the compiled code.
    modules = "|".join(sorted(copied))
    absolute = re.compile(rf"\b{package}(?=\.(?:{modules})\b)")
    whole = re.compile(rf"\bfrom {package}(?= import (?:{modules})$)", re.MULTILINE)
    for module in copied:
        fullname = name if module == "__init__" else f"{name}.{module}"
        _IMPORTER.sources[fullname] = f"{package}/{module}.py", absolute.sub("", whole.sub("from .", texts[module]))
    edited = importlib.import_module(name)
    for module in texts.keys() - copied:  # set the modules that were not copied as attributes of the copy
        setattr(edited, module, importlib.import_module(f"{package}.{module}"))
    return edited


@cache
def _sources(package: str) -> Mapping[str, str]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"could not find the source of {package}")
    return {file.stem: file.read_text("utf-8") for file in Path(spec.origin).parent.glob("*.py")}


@cache
def _imports(package: str, module: str) -> frozenset[str]:
    """Return the modules that a module imports from its own package, including imports inside functions."""
    found = re.findall(rf"^\s*from {package}(?:\.(\w+) import| import (\w+)$)", _sources(package)[module], re.MULTILINE)
    return frozenset(name for names in found for name in names if name)


@cache
def _compiled(file: str, text: str) -> CodeType:
    """Compile source code under a unique file name, so that ``linecache`` can find the source of each edited module."""
    return compile(text, f"edited/{next(_FILES)}/{file}", "exec", dont_inherit=True)


class _Importer(MetaPathFinder, ExecutionLoader):
    """Importer for modules that exist only in memory.

    It provides their source code to tracebacks, ``inspect``, and TensorFlow's AutoGraph.

    Attributes:
        sources: Maps the full name of each module to its file name and source code.
    """

    def __init__(self) -> None:
        self.sources: dict[str, tuple[str, str]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec_from_loader(fullname, self) if fullname in self.sources else None

    def is_package(self, fullname: str) -> bool:
        return "." not in fullname

    def get_source(self, fullname: str) -> str:
        return self.sources[fullname][1]

    def get_code(self, fullname: str) -> CodeType:
        return _compiled(*self.sources[fullname])

    def get_filename(self, fullname: str) -> str:
        return self.get_code(fullname).co_filename


_PACKAGES, _FILES = count(), count()
_IMPORTER = _Importer()
sys.meta_path.append(_IMPORTER)
