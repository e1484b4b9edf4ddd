"""Options and types of options that several commands share."""

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

if TYPE_CHECKING:  # it reads checkpoints of every program, of which most commands need none
    from transformer_parity.apps.translate.trained import Trained


class OneOrMore(argparse.Action):
    """Takes known names with commas between them, in the order in which they are known; given again, it adds some."""

    def __init__(self, known: Iterable[str], **options: Any) -> None:
        super().__init__(**options)
        self.known = list(known)

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        """Add names to those of the same option before."""
        chosen = [name.strip() for name in values.split(",") if name.strip()]
        if unknown := [name for name in chosen if name not in self.known]:
            raise argparse.ArgumentError(self, f"unknown {', '.join(unknown)}: choose from {', '.join(self.known)}")
        if not chosen:
            raise argparse.ArgumentError(self, f"choose at least one of {', '.join(self.known)}")
        if (before := getattr(namespace, self.dest)) is not self.default:
            chosen += before
        setattr(namespace, self.dest, [name for name in self.known if name in chosen])


def one_or_more(known: Iterable[str]) -> Any:
    """Return an argparse action: see ``OneOrMore``."""
    return partial(OneOrMore, known)


def sentence(text: str) -> str:
    """Return a sentence, for argparse, which gets bytes that aren't UTF-8 as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"must be UTF-8: got {text!r}") from error
    return text


def parallel_plan(text: str) -> Plan:
    """Return a plan of several devices, for argparse."""
    try:
        return Plan.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_backends(parser: argparse.ArgumentParser, default: list[str] | None, otherwise: str = "") -> None:
    """Add the option that chooses backends; ``otherwise`` describes what no choice means, where there is no default."""
    usual = otherwise or ("all" if default == list(PORTS) else ",".join(default or ()))
    parser.add_argument(
        "--backend",
        "--backends",
        dest="backends",
        action=one_or_more(PORTS),
        default=default,
        metavar="NAME[,NAME]",
        help=f"which packages, of {', '.join(PORTS)} (default: {usual})",
    )


def add_ports(parser: argparse.ArgumentParser) -> None:
    """Add the option that names ports of one's own."""
    parser.add_argument(
        "--port",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="a port of yours (see `parity init-port`), or the name under which one is registered; may be repeated",
    )


FALLBACK = ("torch", "jax", "tf", "numpy")  # which computes where none is named: the first that is installed
FALLBACK_HELP = f"the first of {', '.join(FALLBACK)} that is installed"
NUMPY_ALONE = (
    "What runs now, with NumPy alone:",
    '  parity translate --text "Freitag, 3. Mai 2024"   the model that ships reads a date',
    '  parity explore "Freitag, 3. Mai 2024"            every value that leads to its answer, as a page for a browser',
    "  parity source MultiHeadAttention                 the same class in the four packages",
)


def installed_backend(command: str) -> str:
    """Return the backend that computes where none is named, and note it if it is the slow one."""
    name = next(name for name in FALLBACK if PORTS[name].missing() is None)
    if name == FALLBACK[-1]:
        print(f"{command}: no framework is installed: {name} is used, which is slower", file=sys.stderr)
    return name


def check_installed(backends: Sequence[str], least: int = 1) -> None:
    """Refuse backends that are not installed, and name what can be run instead.

    Args:
        backends: Those that are to run.
        least: How many the command needs.

    Raises:
        MissingFrameworkError: Some are not installed; the message has the install line.
    """
    modules = {name: module for name in backends if (module := PORTS[name].missing()) is not None}
    if not modules:
        return
    *most, last = modules.values()
    extras = ",".join(("cli", *modules))
    message = f"{', '.join(most)} and {last} are" if most else f"{last} is"
    message += f" not installed: pip install '{DISTRIBUTION}[{extras}]'"
    others = [name for name in backends if name not in modules]
    if len(others) < least:  # of those that were asked for
        installed = [name for name in FALLBACK if PORTS[name].missing() is None]
        others = installed[:least] if installed[0] != FALLBACK[-1] else []
    if len(others) >= least:
        raise MissingFrameworkError(f"{message}, or choose from what is installed: --backends {','.join(others)}")
    raise MissingFrameworkError(message, *NUMPY_ALONE)


def described(backends: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return versions, devices and switches of backends that have been used."""
    return {name: PORTS[name].import_package().describe() for name in backends}


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose how to search."""
    parser.add_argument(
        "--beam",
        type=positive,
        metavar="K",
        help="beam search, keeping K hypotheses; the paper has 4 (default: as in the weight file, or else greedy)",
    )
    parser.add_argument(
        "--search",
        type=field,
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any other setting of the search, such as max_length=90, or length_penalty=1 with a beam (0: none). "
        f"rules={'|'.join(SEARCH_PRESETS)} searches as that program does, with its own penalty and lengths; any field "
        "of Search and of SearchRules may follow. May be repeated (default: as in the weight file, or else as in the "
        "paper: length_penalty=0.6, and at most source length + 50 tokens)",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose where to compute, and how exactly."""
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu", help="where to compute (default: cpu)")
    parser.add_argument(
        "--precision",
        choices=("highest", "fast"),
        default="highest",
        help="float32 matrix products: highest in full float32, fast in TF32 on a GPU (default: highest)",
    )


def add_languages(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a direction."""
    languages = parser.add_argument_group("languages, where the vocabulary of the weights has several")
    languages.add_argument("--from", dest="source_language", metavar="CODE", help="of the text, such as eng_Latn")
    languages.add_argument("--to", dest="target_language", metavar="CODE", help="of the translation, such as deu_Latn")


def directed(trained: Trained, options: argparse.Namespace) -> Trained:
    """Return a model for the direction that was asked for.

    Raises:
        UsageError: A language is missing or not known, or there are none to choose from.
    """
    try:
        return trained.between(options.source_language, options.target_language)
    except ValueError as error:
        raise UsageError(f"--from and --to: {error}") from error


SEARCH_FIELDS = {entry.name for entry in dataclasses.fields(Search)} - {"beam_size", "num_hypotheses"}
RULES_FIELDS = {entry.name for entry in dataclasses.fields(SearchRules)}


def search_options(options: argparse.Namespace, usual: Search, nbest: int | None = None) -> Search:
    """Return the search that was asked for.

    Args:
        options: Those of ``add_search``.
        usual: The search if they are silent.
        nbest: How many hypotheses, if that was asked for.

    Raises:
        TypeError: A field has the wrong type.
        UsageError: The options contradict each other, or name no field.
        ValueError: A field makes no sense.
    """
    fields = dict(options.search)
    if unknown := [name for name in fields if name not in SEARCH_FIELDS | RULES_FIELDS]:
        known = ", ".join(sorted(SEARCH_FIELDS | RULES_FIELDS))
        raise UsageError(f"--search must name a field of {known}: got {unknown[0]}")
    search, rules = usual, usual.rules
    if "rules" in fields:
        search = replace(Search.preset(fields.pop("rules")), start_id=usual.start_id)
        rules = replace(search.rules, forced_ids=rules.forced_ids, banned_ids=rules.banned_ids)
    rules = replace(rules, **{name: value for name, value in fields.items() if name in RULES_FIELDS})
    fields = {name: value for name, value in fields.items() if name in SEARCH_FIELDS}
    beam_size = usual.beam_size if options.beam is None else options.beam
    if nbest is not None and nbest > (beam_size or 1):
        raise UsageError(f"--nbest {nbest} needs a beam that is as wide: add --beam {max(nbest, 4)}")
    if beam_size is None and "length_penalty" in fields:
        raise UsageError("--search length_penalty is about beam search: add --beam 4")
    return replace(search, **fields, beam_size=beam_size, num_hypotheses=nbest or 1, rules=rules)


def field(text: str) -> tuple[str, Any]:
    """Return an argparse value: the name of a field, and its value in JSON or as a word."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"must be FIELD=VALUE, such as num_heads=8: got {text!r}")
    try:
        return name, json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        return name, value


def positive(text: str) -> int:
    """Return an argparse value: an integer above zero."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return value
