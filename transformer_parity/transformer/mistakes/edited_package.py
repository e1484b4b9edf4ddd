"""A copy of a package with edited source, imported from memory: the one way to plant a mistake."""

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

from transformer_parity.transformer.mistakes.mistake import Edit


@cache
def edited_package(package: str, edits: tuple[Edit, ...]) -> ModuleType:
    """Return a copy of a package with some edits, under a name of its own; without edits, the package itself.

    Only the edited modules and those that import them are copied. All others are those of the original, and so is what
    they hold: a model of which no module is copied stays compiled. Equal arguments give the same copy, which is kept
    until the process ends.

    Args:
        package: The name of one of the four packages.
        edits: Module, text that occurs there once, and the text in its place; applied in this order.

    Raises:
        ImportError: The source of the package is not found.
        ValueError: A text does not occur once: it is not there, or an edit before has changed it.
    """
    original = importlib.import_module(package)
    if not edits:
        return original
    texts = dict(_sources(package))
    for module, old, new in edits:
        text = texts.get(module, "")
        if (found := text.count(old)) != 1:
            raise ValueError(f"{package}.{module} must hold {old!r} once: found {found} times")
        texts[module] = text.replace(old, new)
    copied = {module for module, _, _ in edits} | {"__init__"}
    while more := {module for module in texts if module not in copied and _imports(package, module) & copied}:
        copied |= more
    name = f"{package}_edited_{next(_PACKAGES)}"
    # Imports of copied modules become relative, so that the same text in another copy is not compiled again.
    modules = "|".join(sorted(copied))
    absolute = re.compile(rf"\b{package}(?=\.(?:{modules})\b)")
    whole = re.compile(rf"\bfrom {package}(?= import (?:{modules})$)", re.MULTILINE)
    for module in copied:
        fullname = name if module == "__init__" else f"{name}.{module}"
        _IMPORTER.sources[fullname] = f"{package}/{module}.py", absolute.sub("", whole.sub("from .", texts[module]))
    edited = importlib.import_module(name)
    for module in texts.keys() - copied:  # also shared modules are attributes of the package
        setattr(edited, module, importlib.import_module(f"{package}.{module}"))
    return edited


@cache
def _sources(package: str) -> Mapping[str, str]:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ImportError(f"the source of {package} is not found")
    return {file.stem: file.read_text("utf-8") for file in Path(spec.origin).parent.glob("*.py")}


@cache
def _imports(package: str, module: str) -> frozenset[str]:
    """Return which modules of its package a module imports, at the top, in functions or for type checkers."""
    found = re.findall(rf"^\s*from {package}(?:\.(\w+) import| import (\w+)$)", _sources(package)[module], re.MULTILINE)
    return frozenset(name for names in found for name in names if name)


@cache
def _compiled(file: str, text: str) -> CodeType:
    """Return the code of a text, under a file name that no other text has: by it, linecache finds the source."""
    return compile(text, f"edited/{next(_FILES)}/{file}", "exec", dont_inherit=True)


class _Importer(MetaPathFinder, ExecutionLoader):
    """Imports modules from memory, and hands their source to tracebacks, ``inspect`` and so to TensorFlow's AutoGraph.

    Attributes:
        sources: The file and the text of each module, by its full name.
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
