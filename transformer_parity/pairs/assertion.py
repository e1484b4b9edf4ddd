"""``assert_parity``: the comparison of two implementations as an assertion, for example in a test."""

from __future__ import annotations

import inspect
import io
import os
import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformer_parity.pairs.contract.implementation import Implementation
from transformer_parity.pairs.contract.source import Source
from transformer_parity.pairs.run.messages import Import

if TYPE_CHECKING:
    from transformer_parity.pairs.result import PairResult

WIDTH = 120  # width of the report in characters


def assert_parity(
    original: Implementation, port: Implementation, *, names: Mapping[str, Any] | None = None, **settings: Any
) -> PairResult:
    """Compare two implementations, and raise an error that contains the report unless they agree.

    Use it in a test: ``assert_parity(Original(), Port())``. Both classes must be defined at the top level of a module,
    because each of them runs in a separate process.

    Args:
        original: The implementation that you trust.
        port: The other implementation.
        names: The port's name of each of the original's taps, for taps with different names or axes. None to use the
            dict ``names`` of the original's module, if it exists.
        settings: Fields of ``Settings``, such as ``dtypes=("float32",)`` or ``seeds=1``.

    Returns:
        The result, which contains every error and tolerance.

    Raises:
        AssertionError: If the verdict isn't AGREE.
        TypeError: If one of the arguments is not an instance of ``Implementation``.
        ValueError: If a class can't be imported in a different process, or if a setting is invalid.
    """
    # The processes that `--isolate` starts import this module, but their environments may lack rich and psutil.
    from rich.console import Console

    from transformer_parity.pairs.check import compare_pair
    from transformer_parity.pairs.report import print_result
    from transformer_parity.pairs.result import Settings

    imported = _import(original)
    if names is None:
        imported = replace(imported, names=replace(imported.source, attribute="names"))
    result = compare_pair(imported, _import(port), Settings(**settings), names)
    if result.verdict.exit_code:
        console = Console(file=io.StringIO(), width=WIDTH, highlight=False, markup=False, emoji=False)
        print_result(console, result)
        raise AssertionError(f"\n{console.file.getvalue()}")  # type: ignore[attr-defined]
    return result


def _import(instance: Implementation) -> Import:
    kind = type(instance)
    if not isinstance(instance, Implementation):
        raise TypeError(f"assert_parity compares two instances of Implementation: got {instance!r}")
    if "<locals>" in kind.__qualname__:
        raise ValueError(f"{kind.__qualname__} must be defined at the top level of a module, not inside a function")
    file = os.path.abspath(inspect.getfile(kind))
    name = kind.__module__
    if name == "__main__":
        name = os.path.basename(file).removesuffix(".py")
    directory = os.path.dirname(file)
    for _ in name.split(".")[1:]:
        directory = os.path.dirname(directory)
    return Import(Source(directory, name, kind.__qualname__), pickle.dumps(vars(instance)))
