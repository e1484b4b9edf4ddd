"""Options and argument types that multiple commands share."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformer_parity.engine.system.errors import UsageError
from transformer_parity.engine.system.machine import DISTRIBUTION
from transformer_parity.transformer.ports.protocol import MissingFrameworkError
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.parallel_plan import Plan
from transformer_spec.search import Search
from transformer_spec.search_rules import SEARCH_PRESETS, SearchRules

if TYPE_CHECKING:  # this import loads all checkpoint readers, which most commands don't need
    from transformer_parity.apps.translate.trained import Trained


class OneOrMore(argparse.Action):
    """An argparse action that parses a comma-separated list of names, and stores them in the order of ``known``.

    If the option is repeated, the names are added to the names from earlier uses of the option.
    """

    def __init__(self, known: Iterable[str], **options: Any) -> None:
        super().__init__(**options)
        self.known = list(known)

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Parse the names, and add them to the names from earlier uses of the option."""
        chosen = [name.strip() for name in values.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in self.known]:
            raise argparse.ArgumentError(self, f"unknown {', '.join(unknown)}; choose from {', '.join(self.known)}")
        if not chosen:
            raise argparse.ArgumentError(self, f"choose at least one of {', '.join(self.known)}")
        if (before := getattr(namespace, self.dest)) is not self.default:
            chosen += before
        setattr(namespace, self.dest, [name for name in self.known if name in chosen])


def one_or_more(known: Iterable[str]) -> Any:
    """Return the argparse action ``OneOrMore`` for these names."""
    return partial(OneOrMore, known)


def sentence(text: str) -> str:
    """Return a sentence unchanged, for use as an argparse type.

    Python represents invalid UTF-8 in command-line arguments as lone surrogates, which this function rejects.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"must be UTF-8: got {text!r}") from error
    return text


def parallel_plan(text: str) -> Plan:
    """Parse a parallelism plan, such as ``data=2``, for argparse."""
    try:
        return Plan.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_backends(parser: argparse.ArgumentParser, default: list[str] | None, otherwise: str = "") -> None:
    """Add the option that selects backends.

    Args:
        parser: The parser of the command.
        default: The default selection; None if the command determines it at run time.
        otherwise: A description of the default; required if no ``default`` is given.
    """
    usual = otherwise or ("all" if default == list(PORTS) else ",".join(default or ()))
    parser.add_argument(
        "--backend",
        "--backends",
        dest="backends",
        action=one_or_more(PORTS),
        default=default,
        metavar="NAME[,NAME]",
        help=f"use these backends, given as a comma-separated list of {', '.join(PORTS)} (default: {usual})",
    )


def add_ports(parser: argparse.ArgumentParser) -> None:
    """Add the option that specifies the user's ports."""
    parser.add_argument(
        "--port",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="run your port, specified as an importable class or as the name of a registered plugin; can be repeated "
        "(`parity init-port` writes a template)",
    )


FALLBACK = ("torch", "jax", "tf", "numpy")  # the first installed backend is used if the user doesn't specify one
FALLBACK_HELP = f"the first of {', '.join(FALLBACK)} that is installed"
NUMPY_ALONE = (
    "These commands require only NumPy:",
    '  parity translate --text "Freitag, 3. Mai 2024"   translate a date with the included model',
    '  parity explore "Freitag, 3. Mai 2024"            write an HTML page with every intermediate value of that '
    "translation",
    "  parity source MultiHeadAttention                 compare the same class in all four packages",
)


def installed_backend(command: str) -> str:
    """Return the backend to use if the user doesn't specify one, and print a note if only NumPy is available."""
    name = next(name for name in FALLBACK if PORTS[name].missing() is None)
    if name == FALLBACK[-1]:
        print(f"{command}: no framework is installed, so the slower backend {name} is used", file=sys.stderr)
    return name


def check_installed(backends: Sequence[str], least: int = 1) -> None:
    """Raise an error if a backend is not installed.

    Args:
        backends: The backends to run.
        least: The minimum number of backends that the command requires.

    Raises:
        MissingFrameworkError: If a backend is not installed. The message contains the install command and suggests
            installed backends, or commands that require only NumPy.
    """
    modules = {name: module for name in backends if (module := PORTS[name].missing()) is not None}
    if not modules:
        return
    *most, last = modules.values()
    extras = ",".join(("cli", *modules))
    message = f"{', '.join(most)}{',' * (len(most) > 1)} and {last} are" if most else f"{last} is"
    message += f" not installed; run pip install '{DISTRIBUTION}[{extras}]'"
    others = [name for name in backends if name not in modules]
    if len(others) < least:  # too few of the requested backends are installed
        installed = [name for name in FALLBACK if PORTS[name].missing() is None]
        others = installed[:least] if installed[0] != FALLBACK[-1] else []
    if len(others) >= least:
        raise MissingFrameworkError(f"{message}, or specify --backends {','.join(others)}")
    raise MissingFrameworkError(message, *NUMPY_ALONE)


def described(backends: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return the versions, devices, and switches of the given backends."""
    return {name: PORTS[name].import_package().describe() for name in backends}


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options that configure the search."""
    parser.add_argument(
        "--beam",
        type=positive,
        metavar="K",
        help="use beam search with K beams; the paper uses 4 (default: the beam size stored in the weight file, "
        "otherwise greedy search)",
    )
    parser.add_argument(
        "--search",
        type=field,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="set a field of Search or SearchRules, such as max_length=90; can be repeated. For beam search, "
        "length_penalty=0 disables the length penalty. "
        f"rules={'|'.join(SEARCH_PRESETS)} uses the search rules of the given program, including the length penalty "
        "and the length limits; all other --search options override these rules (default: the settings stored in the "
        "weight file, otherwise length_penalty=0.6 and at most 50 tokens more than the source, as in the paper)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the device and the precision of matrix multiplications."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="run on this device (default: cpu)")
    parser.add_argument(
        "--precision",
        choices=("highest", "fast"),
        default="highest",
        help="set the precision of float32 matrix multiplications: highest uses full float32, and fast uses TF32 on a "
        "GPU (default: highest)",
    )


def add_languages(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the source and target languages."""
    languages = parser.add_argument_group("languages (only if the vocabulary supports more than one)")
    languages.add_argument(
        "--from", dest="source_language", metavar="CODE", help="set the language of the source, such as eng_Latn"
    )
    languages.add_argument(
        "--to", dest="target_language", metavar="CODE", help="set the language of the translation, such as deu_Latn"
    )


def directed(trained: Trained, options: argparse.Namespace) -> Trained:
    """Return a copy of the model that translates between the languages that the options select.

    Raises:
        UsageError: If a language is missing or unknown, or if the vocabulary has no languages to choose from.
    """
    try:
        return trained.between(options.source_language, options.target_language)
    except ValueError as error:
        raise UsageError(f"--from and --to: {error}") from error


SEARCH_FIELDS = {entry.name for entry in dataclasses.fields(Search)} - {"beam_size", "num_hypotheses"}
RULES_FIELDS = {entry.name for entry in dataclasses.fields(SearchRules)}


def search_options(options: argparse.Namespace, usual: Search, nbest: int | None = None) -> Search:
    """Return the search settings selected by the options.

    Args:
        options: The parsed command line, including the options of ``add_search``.
        usual: The default settings, which the options override.
        nbest: The number of hypotheses to return; None for one.

    Raises:
        TypeError: If a field has the wrong type.
        UsageError: If options conflict with each other, or if a field doesn't exist.
        ValueError: If the value of a field is invalid.
    """
    fields = dict(options.search)
    if unknown := [name for name in fields if name not in SEARCH_FIELDS | RULES_FIELDS]:
        known = ", ".join(sorted(SEARCH_FIELDS | RULES_FIELDS))
        raise UsageError(f"unknown --search field {unknown[0]}; choose from {known}")
    search, rules = usual, usual.rules
    if "rules" in fields:
        search = replace(Search.preset(fields.pop("rules")), start_id=usual.start_id)
        rules = replace(search.rules, forced_ids=rules.forced_ids, banned_ids=rules.banned_ids)
    rules = replace(rules, **{name: value for name, value in fields.items() if name in RULES_FIELDS})
    fields = {name: value for name, value in fields.items() if name in SEARCH_FIELDS}
    beam_size = usual.beam_size if options.beam is None else options.beam
    if nbest is not None and nbest > (beam_size or 1):
        raise UsageError(f"--nbest {nbest} requires a beam of at least that size; add --beam {max(nbest, 4)}")
    if beam_size is None and "length_penalty" in fields:
        raise UsageError("--search length_penalty requires beam search; add --beam 4")
    return replace(search, **fields, beam_size=beam_size, num_hypotheses=nbest or 1, rules=rules)


def field(text: str) -> tuple[str, Any]:
    """Parse ``FIELD=VALUE`` for argparse; the value is parsed as JSON if possible, otherwise kept as a string."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, such as num_heads=8: got {text!r}")
    try:
        return name, json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return name, value


def positive(text: str) -> int:
    """Parse a positive integer for argparse."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return value
