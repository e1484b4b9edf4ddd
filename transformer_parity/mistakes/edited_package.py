"""A package with some edits of its source, imported from memory."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from functools import cache
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from transformer_parity.mistakes.mistake import Edit


@cache
def variant(edits: tuple[Edit, ...]) -> ModuleType:
    """Return the reference, or a copy of it with some edits: only what depends on an edited module is copied.

    Raises:
        ValueError: A text that is to be replaced does not stand there once: another edit has changed it.
    """
    original = importlib.import_module("reference_numpy")
    if not edits:
        return original
    texts = dict(_sources())
    for module, old, new in edits:
        if (found := texts[module].count(old)) != 1:
            raise ValueError(f"reference_numpy.{module} must hold {old!r} once: found {found} times")
        texts[module] = texts[module].replace(old, new)
    changed = {module for module, _, _ in edits} | {"__init__"}
    while more := {module for module in texts if module not in changed and _imports(module) & changed}:
        changed |= more
    package = f"hypothetical_reference_{len(_FINDER.packages)}"
    pattern = re.compile(rf"\breference_numpy(?=\.(?:{'|'.join(sorted(changed))})\b)")
    # Imports of copied modules become relative: a text need not be compiled again for another package.
    _FINDER.packages[package] = {module: pattern.sub("", texts[module]) for module in changed}
    variant = importlib.import_module(package)
    for module in texts.keys() - changed:  # to be found there, as in the original
        setattr(variant, module, importlib.import_module(f"reference_numpy.{module}"))
    return variant


@cache
def _sources() -> Mapping[str, str]:
    spec = find_spec("reference_numpy")
    if spec is None or spec.origin is None:
        raise ImportError("the source of reference_numpy is not there")
    return {file.stem: file.read_text("utf-8") for file in Path(spec.origin).parent.glob("*.py")}


@cache
def _imports(module: str) -> frozenset[str]:
    return frozenset(re.findall(r"^from reference_numpy\.(\w+) import", _sources()[module], re.MULTILINE))


@cache
def _compiled(text: str, module: str) -> CodeType:
    return compile(text, f"<reference_numpy.{module} with a mistake>", "exec")


class _Finder(MetaPathFinder, Loader):
    """Imports packages from memory."""

    def __init__(self) -> None:
        self.packages: dict[str, dict[str, str]] = {}

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package, _, module = fullname.partition(".")
        if package not in self.packages or (module and module not in self.packages[package]):
            return None
        return spec_from_loader(fullname, self, is_package=not module)

    def exec_module(self, module: ModuleType) -> None:
        package, _, name = module.__name__.partition(".")
        exec(_compiled(self.packages[package][name or "__init__"], name or "__init__"), vars(module))


_FINDER = _Finder()
sys.meta_path.append(_FINDER)
