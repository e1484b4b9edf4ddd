"""What a run compares: which ports, in which dtypes and stages, on which cases, and what that leaves out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import reference_numpy as ref
from transformer_parity.engine.tolerances import ALL_DTYPES
from transformer_parity.engine.verdict import Coverage
from transformer_parity.transformer.cases.case import ACTIVATIONS, SENTENCES, STEPS, Case, in_stages
from transformer_parity.transformer.cases.dependence import why_nothing_shows
from transformer_parity.transformer.cases.standard import gradient_case, preset_case, search_cases, standard_cases
from transformer_parity.transformer.ports.package import COMPILED_IN_FULL
from transformer_parity.transformer.ports.protocol import Placements
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.pairs import read_pairs
from transformer_parity.transformer.sentences.subwords import SPECIAL, VOCAB_SIZE, Subwords
from transformer_parity.transformer.sentences.vocabulary import batch, pick
from transformer_parity.transformer.stages.registry import STAGES
from transformer_spec.config import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What ``parity check`` was asked to compare.

    Attributes:
        backends: Packages, without the reference.
        ports: Ports of the user's own: ``module:class``, or the names of entry points.
        dtypes: Those that were named; None is all of them.
        stages: Those that were named; None is all that there are cases for.
        device: ``cpu`` or ``gpu``.
        precision: ``highest`` or ``fast``.
        presets: Those that were named; none is the standard cases.
        weights: A weight file of the user's own, in place of the standard cases.
        text: Two line-aligned files of the user's own; none is the shipped text.
        sentences: How many pairs of the text; 0 leaves it out.

    Raises:
        ValueError: One option would be ignored beside another.
    """

    backends: Sequence[str]
    ports: Sequence[str] = ()
    dtypes: Sequence[str] | None = None
    stages: Sequence[str] | None = None
    device: str = "cpu"
    precision: str = "highest"
    presets: Sequence[str] = ()
    weights: Path | None = None
    text: Sequence[Path] = ()
    sentences: int = 16

    def __post_init__(self) -> None:
        if not self.backends and not self.ports:
            raise ValueError("numpy is the reference: name at least one port to compare with it")
        about_text = bool(self.text or self.weights)
        if self.sentences == 0 and about_text:
            raise ValueError("--text and --weights are about the sentences, which --sentences 0 leaves out")
        if ACTIVATIONS not in self.chosen_stages and about_text:
            raise ValueError(f"sentences are compared by --stage {ACTIVATIONS}")
        if self.presets and self.stages and STEPS in self.stages:
            raise ValueError("optimizer steps are compared on models of their own: leave out --preset")
        if self.weights and self.presets:
            raise ValueError("--weights brings its own config: leave out --preset")
        if not self.backends and (self.presets or about_text):
            raise ValueError("a port defines its own cases: leave out --preset, --weights and --text")
        if self.sentences < 0:
            raise ValueError(f"--sentences must be at least 0: got {self.sentences}")

    @property
    def chosen_stages(self) -> Sequence[str]:
        """The stages that were named, or all."""
        return tuple(STAGES) if self.stages is None else self.stages

    @property
    def setting(self) -> Placements:
        """How the ports are run."""
        return Placements(ALL_DTYPES if self.dtypes is None else self.dtypes, self.device, self.precision)

    def cases(self) -> list[Case]:
        """Return the cases of the packages; ports of the user's own have theirs from ``for_ports.port_cases``.

        Raises:
            OSError: A file cannot be read.
            ValueError: A file is not what it should be.
        """
        if not self.backends:
            return []
        cases: list[Case] = []
        if self.weights is None:
            cases = list(chain.from_iterable(map(_preset_cases, self.presets))) if self.presets else standard_cases()
        if self.sentences and ACTIVATIONS in self.chosen_stages:
            cases += self._sentence_cases()
        return in_stages(cases, self.chosen_stages)

    def _sentence_cases(self) -> list[Case]:
        pairs = read_pairs(*self.text)
        lines = [line for pair in pairs for line in pair]
        if self.weights is not None:
            config, weights = ref.load_weights(self.weights)
            if why := why_nothing_shows(config, weights):
                raise ValueError(f"{self.weights}: {why}")
            smaller = min(config.source_vocab_size, config.target_vocab_size)
            subwords = Subwords.train(lines, min(smaller - SPECIAL, VOCAB_SIZE))
            configs = {self.weights.name: config}
        else:
            subwords = Subwords.train(lines)
            sizes = dict.fromkeys(("source_vocab_size", "target_vocab_size"), subwords.size + SPECIAL)
            configs = {name: TransformerConfig.preset(name, **sizes) for name in self.presets or ["paper_base"]}
        chosen = pick(pairs, self.sentences)
        inputs = {name: batch(chosen, subwords.numbered(config), config) for name, config in configs.items()}
        return [
            Case(f"{SENTENCES}/{name}", SENTENCES, config, "", inputs[name], self.weights)
            for name, config in configs.items()
        ]

    def asked(self, port: str, cases: Sequence[Case], offered: Sequence[str] = ALL_DTYPES) -> Coverage:
        """Return what has to be compared of a port.

        Args:
            port: Its name.
            cases: Its cases.
            offered: The dtypes that it computes in.
        """
        dtypes = [dtype for dtype in self.setting.dtypes if dtype in offered or dtype in (self.dtypes or ())]
        held = {(case.stage, dtype) for case in cases for dtype in case.dtypes}
        present = {case.stage for case in cases}
        stages = self.stages or [name for name in STAGES if name in present]
        planned = Counter((case.stage, dtype) for case in cases for dtype in dtypes if dtype in case.dtypes)
        pairs = self.stages is not None and self.dtypes is not None
        elsewhere = {
            name: [dtype for dtype in ALL_DTYPES if dtype in offered and (name, dtype) in held] for name in stages
        }
        return Coverage(port, tuple(stages), tuple(self.dtypes or ()), pairs, planned, elsewhere)

    def not_tested(self, cases: Iterable[Case]) -> list[str]:
        """Return what this run leaves out, and how to ask for it; ``cases`` are those of all ports."""
        return [*self._left_out(), *self._without_a_case(list(cases))]

    def _left_out(self) -> Iterator[str]:
        if self.backends:
            yield from (f"{name} (left out of --backends)" for name in PORTS if name not in self.backends)
        dtypes = self.setting.dtypes
        if unnamed := [dtype for dtype in ALL_DTYPES if dtype not in dtypes]:
            yield f"{' and '.join(unnamed)} (left out of --dtype)"
        if COMPILED_IN_FULL not in dtypes and self.backends:
            yield f"what XLA makes of a program for users (compiled in full in {COMPILED_IN_FULL})"
        if self.weights:
            yield "the packages' standard cases (left out by --weights)"
        elif self.presets and self.backends:
            yield "the other cases, and optimizer steps (left out by --preset)"
        if unnamed := [name for name in STAGES if name not in self.chosen_stages]:
            yield f"{', '.join(unnamed)} (left out of --stage)"
        if self.ports:
            yield "sentences, fully masked rows and parts of the model alone in ports of yours (the packages have them)"
        if not self.sentences and self.backends:
            yield "sentences (left out by --sentences 0)"
        if self.backends:
            yield "several devices (`parity check-distributed` compares them)"
        other = "cpu" if self.device == "gpu" else "gpu"
        yield f"{other} (ask for it with --device {other})"

    def _without_a_case(self, cases: Sequence[Case]) -> Iterator[str]:
        """Yield the stages that have no case in a dtype that was asked for."""
        known = {(case.stage, dtype) for case in cases for dtype in case.dtypes}
        present = dict.fromkeys(case.stage for case in cases)
        for dtype in self.setting.dtypes:
            if absent := [stage for stage in present if (stage, dtype) not in known]:
                yield f"{', '.join(absent)} in {dtype} (there is no such case)"


def _preset_cases(name: str) -> list[Case]:
    return [preset_case(name, thorough=True), gradient_case(name), *search_cases(name)]
