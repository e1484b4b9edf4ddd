"""Messages between the process that compares two implementations and the processes that run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformer_parity.engine.tensors import Tensors
from transformer_parity.pairs.contract.implementation import Arrays
from transformer_parity.pairs.contract.source import Source


@dataclass(frozen=True)
class Import:
    """Import the class of an implementation. The answer is a ``Declaration``.

    Attributes:
        source: The class.
        instance: The pickled attributes of an instance; empty to call the class without arguments for each model.
        names: The map of tap names to import, if any.
        needs_names: Whether it is an error if the module has no such map.
    """

    source: Source
    instance: bytes = b""
    names: Source | None = None
    needs_names: bool = False


@dataclass(frozen=True)
class Declaration:
    """What a class declares.

    Attributes:
        dtypes: The dtypes in which the model can run.
        methods: The names of the methods that the class defines.
        fixed_weights: Patterns for the names of weights that must not be changed.
        code: The places of the functions that load and run the model, to find out whether two classes share them.
        versions: The versions of the frameworks that the module imports.
        names: The map of tap names.
    """

    dtypes: Sequence[str]
    methods: frozenset[str]
    fixed_weights: Sequence[str]
    code: Sequence[str]
    versions: Mapping[str, str]
    names: Mapping[str, Any]


@dataclass(frozen=True)
class Load:
    """Create a model from weights. The answer is a ``Ran`` without tensors.

    Attributes:
        key: The key of the model in later messages. A model with this key is replaced.
        weights: The weights, in the dtype.
        dtype: The dtype of the model.
    """

    key: str
    weights: Arrays
    dtype: str


@dataclass(frozen=True)
class Call:
    """Call a method of a model, or of a new instance if the key is empty. The answer is a ``Ran``.

    Attributes:
        key: The key of the model.
        method: The name of the method.
        arguments: The arguments of the method.
        given: The arrays that replace the values of taps, keyed by the names of this implementation.
    """

    key: str
    method: str
    arguments: Sequence[Any] = ()
    given: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Ran:
    """The result of a call.

    Attributes:
        outputs: The arrays that the method returned.
        taps: The computed values of all taps, in the order of computation.
        captured: The names of the taps that ``capture`` found.
        modified: The names of the arguments that the method modified.
        versions: In the answer to ``Load``, the versions of the frameworks, which ``load`` may have imported.
    """

    outputs: Tensors = field(default_factory=dict)
    taps: Tensors = field(default_factory=dict)
    captured: frozenset[str] = frozenset()
    modified: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Raised:
    """A method raised an exception.

    Attributes:
        why: The message of the exception, and the lines of the user's code that led to it.
    """

    why: str


LOGITS = "logits"  # name under which ``Ran.outputs`` contains the logits of a decoding step
