"""Find the class of an implementation by the name that the user typed, such as ``my_pair.py:Original``."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

from transformer_parity.engine.processes import provenance


class MissingNameError(ValueError):
    """A module doesn't define a name."""


@dataclass(frozen=True)
class Source:
    """The place of a Python object.

    Attributes:
        directory: The directory that Python searches first.
        module: The name of the module.
        attribute: The name of the object in the module.
    """

    directory: str
    module: str
    attribute: str

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"

    @classmethod
    def parse(cls, text: str, attribute: str) -> Source:
        """Return the source that a text describes.

        Args:
            text: ``my_pair.py``, ``my_pair``, ``package.module``, or one of them followed by ``:`` and a name.
            attribute: The name to use if the text doesn't contain a name.

        Raises:
            ValueError: If the text names a file that doesn't exist or that isn't a Python module.
        """
        place, _, name = text.partition(":")
        directory, module = os.getcwd(), place
        if place.endswith(".py") or os.sep in place:
            path = os.path.abspath(place if place.endswith(".py") else f"{place}.py")
            directory, module = os.path.dirname(path), os.path.basename(path)[:-3]
            if not os.path.isfile(path):
                raise ValueError(f"there is no file {place}")
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"{text!r} must be a Python file or module, optionally followed by :NAME")
        return cls(directory, module, name or attribute)

    def load(self) -> Any:
        """Import the module and return the object.

        Raises:
            ValueError: If the module or the object doesn't exist.
        """
        if self.directory not in sys.path[:1]:
            sys.path.insert(0, self.directory)
        provenance.import_port(self.module)
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise ValueError(f"{self} cannot be imported: {error}") from error
        if why := provenance.old_bytecode(self.module):
            raise ValueError(f"{self} cannot be compared: {why}")
        found: Any = module
        for part in self.attribute.split("."):
            if not hasattr(found, part):
                raise MissingNameError(f"{self.module} has no {part!r}; it was imported from {module.__file__}")
            found = getattr(found, part)
        return found
