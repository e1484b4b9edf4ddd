"""A port with one known mistake in it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from numpy import ndarray

from reference_numpy.config import TransformerConfig
from reference_numpy.search_plan import OnStep, SearchResult
from reference_numpy.training_config import Gradients, TrainingConfig
from transformer_parity.mistakes.mistake import Mistake, Weights
from transformer_parity.ports import jax
from transformer_parity.ports.package import PackagePort
from transformer_parity.ports.protocol import LoadedPort, Placement, Port, Result, SearchOptions
from transformer_parity.ports.registry import PORTS


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

    def load(self, config: TransformerConfig, weights: Weights, placement: Placement) -> MistakenModel:
        """Build a model from weights that may have been mixed up."""
        config, weights = config.replace(**self.mistake.config), self.mistake.convert(weights)
        return MistakenModel(self.port.load(config, weights, placement), self.mistake.convert)

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
    compiled = dict(jax._JITTED)
    jax._JITTED.clear()  # what JAX compiled before knows nothing of the mistake
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield MistakenPort(backend, PackagePort(backend, package, original.needs, original.loaded), mistake)
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        jax._JITTED.clear()
        jax._JITTED.update(compiled)


@dataclass(frozen=True)
class Retrained:
    """A port whose model is ours, and whose training has a mistake in it."""

    name: str
    package: Any
    config: Mapping[str, Any]  # what it assumes instead

    def load(self, config: TransformerConfig, weights: Mapping[str, Any], placement: Placement) -> LoadedPort:
        """Build our model, perhaps for another config than the one given, to be trained with the mistake."""
        model = self.package.Transformer.from_weights(config.replace(**self.config), weights, *placement)
        return PORTS[self.name].loaded(self.package, model, placement.dtype)

    def import_package(self) -> Any:
        """Return our package, but for its training."""
        return self.package


@contextmanager
def retrained(mistake: Mistake, backend: str) -> Iterator[Retrained]:
    """Yield a port with a mistake in a copy of its training, or in its config; the model is not loaded once more.

    Many mistakes are in NumPy's backward pass too, which is another module: that takes ``planted``.
    """
    package = PORTS[backend].import_package()
    original = importlib.import_module(f"{package.__name__}.training")
    text = inspect.getsource(original)
    for module, old, new in mistake.edits[backend]:
        if module != "training":
            raise ValueError(f"only the training of {package.__name__} is copied: {module} needs planted()")
        if (found := text.count(old)) != 1:
            raise ValueError(f"{package.__name__}.{module} must hold {old!r} once: found {found} times")
        text = text.replace(old, new)
    mistaken = ModuleType("mistaken_training")
    sys.modules[mistaken.__name__] = mistaken  # where dataclasses look for their module
    try:
        exec(compile(text, inspect.getfile(original), "exec"), vars(mistaken))
        names = {name: getattr(mistaken, name) for name in ("Trainer", "cross_entropy", "gradients")}
        yield Retrained(backend, SimpleNamespace(**{**vars(package), **names}), mistake.config)
    finally:
        del sys.modules[mistaken.__name__]
