"""Planting known mistakes: in a copy of a package, in its config, or in its weights.

A mistake is an edit of a package's source; or a config that the port assumes though nobody asked for it; or weights
that its converter mixes up on the way in and again on the way out, so that they come back as they were given. Planted
in a port, it shows whether the comparison finds it; planted in the reference, it is a hypothesis about a port that
differs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from numpy import ndarray

from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.training_config import Gradients, TrainingConfig
from transformer_parity import ports
from transformer_parity.compare import DIVERGES
from transformer_parity.decoding import SearchOptions
from transformer_parity.ports import PORTS, LoadedPort, PackagePort, Port, Result

ALL = ("torch", "jax", "tf")  # where mistakes are planted to be found
FOUR = ("numpy", *ALL)
Edit = tuple[str, str, str]  # module, what stands there once, what the mistake makes of it
Edits = Mapping[str, list[Edit]]  # by port
Weights = Mapping[str, ndarray]


@dataclass(frozen=True)
class Mistake:
    """One mistake, or an equivalent way to write the same; and what the comparison must say of it."""

    name: str
    at: str  # the first tap that must fail; empty where none may, and the announcement is all
    edits: Edits = field(default_factory=lambda: {port: [] for port in FOUR}, repr=False)
    case: str = "full/padded"
    dtype: str = "float64"
    verdict: str = DIVERGES
    path: str = "taps"  # fast: the taps agree
    announced: str = ""  # what is said before any tap: taps of other names or order, weights that do not come back
    detail: str = ""  # what is said of the first tap
    own_numbers: tuple[str, ...] = ()  # ports in which it computes what no other does, so that it cannot be named
    unseen: tuple[str, ...] = ()  # dtypes, or other cases, in which the very same mistake raises no alarm
    config: Mapping[str, Any] = field(default_factory=dict)  # what the port assumes instead
    convert: Callable[[Weights], Weights] = field(default=dict, repr=False)  # its own inverse


def instead(module: str, old: str | Mapping[str, str], new: str | None = None, **by_port: str) -> Edits:
    """Return one edit per port: of the same line in all of them, or of each port's own."""
    texts = by_port if new is None else dict.fromkeys(old if isinstance(old, Mapping) else FOUR, new)
    return {port: [(module, old if isinstance(old, str) else old[port], text)] for port, text in texts.items()}


def together(*changes: Edits) -> Edits:
    """Return several edits as one mistake."""
    common = [port for port in changes[0] if all(port in change for change in changes)]
    return {port: [edit for change in changes for edit in change[port]] for port in common}


def swapped(first: str, second: str) -> Callable[[Weights], Weights]:
    """Return a converter that takes two weights of one shape for each other."""
    return lambda weights: {**weights, first: weights[second], second: weights[first]}


def transposed(name: str) -> Callable[[Weights], Weights]:
    """Return a converter that transposes a square matrix once too often."""
    return lambda weights: {**weights, name: weights[name].T}


@dataclass(frozen=True)
class MistakenModel:
    """A model that may have been given its weights in the wrong places, and gives them back from there."""

    loaded: LoadedPort
    convert: Callable[[Weights], Weights]

    def export(self) -> dict[str, ndarray]:
        """Return the weights from where they were put."""
        return dict(self.convert(self.loaded.export()))

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run one block."""
        return self.loaded.run(block, inputs, taps=taps, given=given)

    def shows(self, tap: str) -> bool:
        """Whether a tap is shown."""
        return self.loaded.shows(tap)

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return loss and gradients."""
        return self.loaded.gradients(inputs)

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> ndarray:
        """Return the logits, decoded one position after another."""
        return self.loaded.decode_stepwise(source_ids, target_ids)

    def search(self, source_ids: ndarray, options: SearchOptions, on_step: OnStep | None = None) -> SearchResult:
        """Search."""
        return self.loaded.search(source_ids, options, on_step)

    def trainer(self, settings: TrainingConfig, seed: int = 0) -> Any:
        """Return what trains the model."""
        return self.loaded.trainer(settings, seed)


@dataclass(frozen=True)
class MistakenPort:
    """A port with one mistake in it."""

    name: str
    port: PackagePort
    mistake: Mistake

    def load(
        self, config: TransformerConfig, weights: Weights, dtype: str, device: str, precision: str
    ) -> MistakenModel:
        """Build a model from weights that may have been mixed up."""
        config, weights = config.replace(**self.mistake.config), self.mistake.convert(weights)
        return MistakenModel(self.port.load(config, weights, dtype, device, precision), self.mistake.convert)

    def import_package(self) -> Any:
        """Import the package with the mistake in it."""
        return self.port.import_package()


@contextmanager
def planted(mistake: Mistake, backend: str, folder: Path) -> Iterator[Port]:
    """Yield a port whose package is a copy of one of ours, with the mistake in it."""
    original = PORTS[backend]
    package = f"mistaken_{backend}"
    spec = find_spec(original.package)
    if spec is None or spec.origin is None:
        raise ImportError(f"the source of {original.package} is not there")
    files = Path(spec.origin).parent.glob("*.py")
    texts = {file.stem: file.read_text("utf-8") for file in files}
    for module, old, new in mistake.edits[backend]:
        if (found := texts[module].count(old)) != 1:
            raise ValueError(f"{original.package}.{module} must hold {old!r} once: found {found} times")
        texts[module] = texts[module].replace(old, new)
    (folder / package).mkdir()
    for module, text in texts.items():
        (folder / package / f"{module}.py").write_text(text.replace(original.package, package), "utf-8")
    compiled = dict(ports._JITTED)
    ports._JITTED.clear()  # what JAX compiled before knows nothing of the mistake
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield MistakenPort(backend, PackagePort(backend, package, original.needs, original.loaded), mistake)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        ports._JITTED.clear()
        ports._JITTED.update(compiled)
