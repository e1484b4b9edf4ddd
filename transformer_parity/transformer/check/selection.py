"""The scope of a run: the ports, dtypes, stages, and cases to compare, and everything that the run excludes."""

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
from transformer_parity.transformer.cases.searches import search_cases
from transformer_parity.transformer.cases.standard import gradient_case, preset_case, standard_cases
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
    """The comparisons that the user requested from ``parity check``.

    Attributes:
        backends: Backends to compare, excluding the reference.
        ports: The user's ports, as ``module:class`` or as names of entry points.
        dtypes: Requested dtypes; None for all dtypes.
        stages: Requested stages; None for all stages that have cases.
        device: ``cpu`` or ``gpu``.
        precision: ``highest`` or ``fast``.
        presets: Requested presets. If empty, the standard cases run.
        weights: The user's weight file, which replaces the standard cases; None to use the standard cases.
        text: The user's two line-aligned text files; if empty, the text that ships with the package.
        sentences: Number of sentence pairs to compare; 0 to compare none.

    Raises:
        ValueError: If two options conflict or if an option would be ignored.
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
            raise ValueError(
                "specify at least one backend or port to compare with the NumPy reference, for example with "
                "--backends torch or --port module:class"
            )
        about_text = bool(self.text or self.weights)
        if self.sentences == 0 and about_text:
            raise ValueError("--text and --weights require at least one sentence; remove --sentences 0")
        if ACTIVATIONS not in self.chosen_stages and about_text:
            raise ValueError(f"--text and --weights require --stage {ACTIVATIONS}")
        if self.presets and self.stages and STEPS in self.stages:
            raise ValueError("--preset does not support optimizer steps; remove --preset, or remove steps from --stage")
        if self.weights and self.presets:
            raise ValueError(
                "--weights and --preset conflict, because a weight file contains a config; remove one of these options"
            )
        if not self.backends and (self.presets or about_text):
            raise ValueError(
                "--preset, --weights, and --text apply only to backends, because a port defines its own cases; remove "
                "these options, or add --backends"
            )
        if self.sentences < 0:
            raise ValueError(f"--sentences must be at least 0: got {self.sentences}")

    @property
    def chosen_stages(self) -> Sequence[str]:
        """The requested stages, or all stages if none were requested."""
        return tuple(STAGES) if self.stages is None else self.stages

    @property
    def setting(self) -> Placements:
        """Dtypes, device, and precision of the run."""
        return Placements(ALL_DTYPES if self.dtypes is None else self.dtypes, self.device, self.precision)

    def cases(self) -> list[Case]:
        """Return the cases for the backends. The cases for user ports come from ``for_ports.port_cases``.

        Raises:
            OSError: If a file can't be read.
            ValueError: If a file has invalid contents.
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
        """Return the comparisons that the run must make for one port.

        Args:
            port: Name of the port.
            cases: Cases of the port.
            offered: Dtypes that the port supports.
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
        """Return a description of each kind of comparison that this run omits.

        A description usually names the option that excludes or adds the comparison.

        Args:
            cases: The cases of all ports.
        """
        return [*self._left_out(), *self._without_a_case(list(cases))]

    def _left_out(self) -> Iterator[str]:
        if self.backends:
            yield from (f"{name} (not in --backends)" for name in PORTS if name not in self.backends)
        dtypes = self.setting.dtypes
        if unnamed := [dtype for dtype in ALL_DTYPES if dtype not in dtypes]:
            yield f"{' and '.join(unnamed)} (not in --dtype)"
        if COMPILED_IN_FULL not in dtypes and self.backends:
            yield f"programs with all XLA optimizations (compiled only in {COMPILED_IN_FULL})"
        if self.weights:
            yield "the packages' standard cases (excluded by --weights)"
        elif self.presets and self.backends:
            yield "the other cases and optimizer steps (excluded by --preset)"
        if unnamed := [name for name in STAGES if name not in self.chosen_stages]:
            yield f"{', '.join(unnamed)} (not in --stage)"
        if self.ports:
            yield "sentences, fully masked rows, single components (not available for user ports)"
        if not self.sentences and self.backends:
            yield "sentences (excluded by --sentences 0)"
        if self.backends:
            yield "multiple devices (use `parity check-distributed`)"
        other = "cpu" if self.device == "gpu" else "gpu"
        yield f"{other} (use --device {other})"

    def _without_a_case(self, cases: Sequence[Case]) -> Iterator[str]:
        """Yield one line for each requested dtype in which some stages have no cases."""
        known = {(case.stage, dtype) for case in cases for dtype in case.dtypes}
        present = dict.fromkeys(case.stage for case in cases)
        for dtype in self.setting.dtypes:
            if absent := [stage for stage in present if (stage, dtype) not in known]:
                yield f"{', '.join(absent)} in {dtype} (no such cases exist)"


def _preset_cases(name: str) -> list[Case]:
    return [preset_case(name, thorough=True), gradient_case(name), *search_cases(name)]
