"""A port of your own: the few methods that it takes to be compared. NumPy goes in, NumPy comes out."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import numpy as np
from numpy import ndarray

from transformer_parity.engine.outputs import MissingAbilityError
from transformer_parity.engine.processes import provenance
from transformer_parity.engine.system.errors import printable
from transformer_parity.transformer.ports.protocol import Placement, Result
from transformer_spec.config import TransformerConfig
from transformer_spec.names import tap_shapes
from transformer_spec.parallel_plan import Plan
from transformer_spec.search import OnStep, Search, SearchResult
from transformer_spec.search_rules import SearchRules
from transformer_spec.taps import Recorder, Tap, matches, no_tap
from transformer_spec.training_config import Gradients, StepResult, TrainingConfig

GROUP = "transformer_parity.ports"  # of entry points


class Port:
    """What a model of yours has to offer to be compared. Subclass it; only ``load`` and ``forward`` are needed.

    Whatever else you leave out is skipped and counted. In inference, dropout is off. ``parity init-port`` writes a
    subclass that runs, to start from.

    Ids are int64 arrays in C order, which must not be changed. Sentences have at least one token and are padded with
    ``config.pad_id`` at the end; a batch may be one sentence, and have up to ``config.max_positions`` tokens. Batches
    of any shape follow one another, several models are loaded at once, and no result may depend on earlier calls,
    except on the weights that ``train_step`` has changed.

    Attributes:
        name: What tables call it; the name of the class if empty.
        preset: The published conventions that it follows, one of ``transformer_spec.config.PRESETS``.
        overrides: Fields of ``TransformerConfig`` in which it differs from the preset, conventions and sizes.
        dtypes: Those it computes in. Without float64, a wrong convention cannot be told from rounding.
        taps: Which intermediate values ``forward`` shows: names as in ``parity info --names``; one star stands for one
            part of a name, two stand for any number of parts.
        left_out: Cases that it is not made for, by name, and why; they are counted as skipped, and so are the cases
            whose names continue with a slash.
        one_process: Whether one process has all devices, as in JAX and under TensorFlow's MirroredStrategy: then only
            that of rank 0 is asked to train.
    """

    name = ""
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    dtypes: tuple[str, ...] = ("float64", "float32")
    taps: tuple[str, ...] = ()
    left_out: Mapping[str, str] = {}
    one_process = False

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model, in inference mode, and give it a copy of the weights.

        Args:
            config: Sizes and conventions.
            weights: One float32 array per canonical name; ``kernel`` is [in, out].
            dtype: Of parameters and computation, one of ``dtypes``.
        """
        raise NotImplementedError

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] of source [B, S] and target ids [B, T].

        Show intermediate values with ``tap(name, array)``, and go on with what it returns: then a block that differs
        can be run again on the right input. Without ``taps``, ignore it.
        """
        raise NotImplementedError

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return every parameter by its canonical name, as it was loaded or as training has left it."""
        raise NotImplementedError

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Return the label-smoothed loss per target token that is no padding, and its gradient, without dropout.

        ``Gradients(loss, parameters)`` by canonical name, or ``Gradients(loss, parameters, taps)`` with the gradient
        at every tap that you show. A tied table has one gradient. Labels are padded with ``config.pad_id``: a sentence
        may have none, but not all sentences of a batch.
        """
        raise NotImplementedError

    def start_training(self, settings: TrainingConfig) -> None:
        """Make an Adam optimizer; ``settings.learning_rate(step, d_model)`` is the rate of step 1, 2, ...

        A second call makes a new optimizer, which starts at step 1 with the present weights.

        Where ``settings.clip_norm`` is no None, the whole gradient is scaled down to that norm: a port without clipping
        leaves the case ``steps/port_clipped`` out. ``settings.accumulation_steps`` asks for slices of a batch, and for
        the step of the whole batch: a port may take it at once. It divides the number of sentences.
        """
        raise NotImplementedError

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one step, without dropout, and return the loss before it.

        Batches may differ in their number of sentences. Between two steps, the other methods may be called: they
        compute with the present weights, and the next step is as it would have been without them.
        """
        raise NotImplementedError

    def distribute(self, plan: Plan) -> None:
        """Train this model with other processes from now on: on the devices of ``plan``, by default ``data=2``.

        From here on, ``gradients``, ``train_step`` and ``export_weights`` are called in all processes together. Each
        process reads only its rows of the batch that it is given, in any order; the other rows may differ between
        processes, except those that differ only in ``tensor``. It returns what the whole batch gives: the loss per
        target token of all processes, the gradient as your engine has reduced it, before clipping, and whole
        parameters.

        The environment is that of torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT. Ranks are numbered
        along ``data``, then ``fsdp``, then ``tensor``. A process may call ``load`` and ``distribute`` again, for
        another run. Raise a ValueError for a plan that you do not have.
        """
        raise NotImplementedError

    def parameters_per_device(self) -> Sequence[int]:
        """Return how many numbers of parameters each device of this process holds, after ``distribute``.

        Only a plan with ``fsdp`` or ``tensor``, and a port with ``one_process``, need it. For PyTorch's ``fully_shard``
        it is ``[sum(p.to_local().numel() for p in model.parameters())]``.
        """
        raise NotImplementedError

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis of each sentence [B, <= max_length], from behind the start symbol.

        ``max_length`` holds for every sentence; more padding behind the hypotheses is accepted.
        With a ``beam_size`` of 1, greedily; otherwise by log-probability over ``((5 + length) / 6)**length_penalty``.
        A hypothesis ends with ``config.eos_id``, which belongs to it, or at ``max_length`` tokens; padding follows.
        Of the continuations of a step, an end symbol counts only among the ``beam_size`` likeliest, and the likeliest
        ``beam_size`` others go on. Hypotheses that are cut off at ``max_length`` compete with those that ended. The
        search of a sentence stops as soon as none of its unfinished hypotheses can beat its best finished one, even
        if all further tokens up to ``max_length`` had probability 1. Of equally likely continuations, the better
        hypothesis comes first, and then the lower token ID.
        Exclude padding after the log-softmax: it keeps its probability, so that the others don't sum to one.
        """
        raise NotImplementedError


class PluginPort:
    """A ``Port`` class as the comparison sees it."""

    def __init__(self, reference: str) -> None:
        self.reference = reference  # module:class, or the name of an entry point
        self.kind = find(reference)
        self.name = printable(self.kind.name or self.kind.__name__)
        for needed in ("load", "forward"):
            if getattr(self.kind, needed) is getattr(Port, needed):
                raise ValueError(f"port {reference!r} must have {needed}(): see `parity init-port`")
        self.left_out = self.kind.left_out

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPlugin:
        """Build a model that holds a copy of the weights; where it runs and how precisely is the port's business."""
        if placement.dtype not in self.kind.dtypes:
            raise MissingAbilityError(f"{self.name} computes in {', '.join(self.kind.dtypes)}")
        port = self.kind()
        port.load(config, {name: np.array(array, np.float32) for name, array in weights.items()}, placement.dtype)
        _check_reference(self.reference)  # the port may have changed sys.path
        return LoadedPlugin(port, config)

    def describe(self) -> dict[str, str]:
        """Return where it and its modules of our names come from, and the versions of what it imported."""
        versions: dict[str, str] = {
            name: str(getattr(sys.modules[name], "__version__", "unknown"))
            for name in ("torch", "jax", "flax", "tensorflow", "keras", "numpy")
            if name in sys.modules
        }
        port = f"{self.kind.__module__}:{self.kind.__qualname__}"
        return {"port": port, **versions, **provenance.files_elsewhere()}


@dataclass(frozen=True)
class LoadedPlugin:
    """A port that holds weights."""

    port: Port
    config: TransformerConfig

    def export(self) -> dict[str, ndarray]:
        """Return every parameter by its canonical name."""
        return _arrays(self.ability("export_weights")())

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run the whole model: a part of it alone, or with other masks, is not asked of a port."""
        if block or not inputs.keys() <= {"source_ids", "target_ids"}:
            raise MissingAbilityError("only the whole model is run, with masks derived from the ids")
        names = tap_shapes(self.config, 1, 1, 1)
        shown = _Shown({name: self.shows(name) for name in names}, given)
        logits = self.ability("forward")(inputs["source_ids"], inputs["target_ids"], shown if taps else no_tap)
        return Result(_array(logits), dict(shown))

    def shows(self, tap: str) -> bool:
        """Whether the port promises to show a tap."""
        return any(matches(pattern, tap) for pattern in self.port.taps)

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss of a batch and its gradients."""
        found = self.ability("gradients")(inputs["source_ids"], inputs["target_ids"], inputs["labels"])
        return Gradients(float(found.loss), _arrays(found.parameters), _arrays(found.taps))

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> Result:
        """Say that a cache is not asked of a port."""
        raise MissingAbilityError("a cache is not asked of a port")

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypothesis of each sentence; its score is not asked of a port."""
        if options.start_id is not None or options.min_length > 1 or options.rules != SearchRules():
            raise MissingAbilityError("a search by other rules than the paper's is not asked of a port")
        beam_size = options.beam_size or 1
        limit = options.limit(source_ids.shape[1], self.config)
        ids = _array(self.ability("generate")(source_ids, limit, beam_size, options.length_penalty))
        return SearchResult(ids[:, None], None)  # type: ignore[arg-type]  # None: not asked for

    def trainer(self, settings: TrainingConfig) -> _PluginTrainer:
        """Return what trains this model."""
        self.ability("train_step")
        self.ability("start_training")(settings)
        return _PluginTrainer(self.port)

    def ability(self, name: str) -> Callable[..., Any]:
        """Return a method of the port.

        Raises:
            MissingAbilityError: It has none.
        """
        if getattr(type(self.port), name) is getattr(Port, name):
            raise MissingAbilityError(f"it has no {name}()")
        return getattr(self.port, name)


@dataclass(frozen=True)
class _PluginTrainer:
    port: Port

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> StepResult:
        return StepResult(float(self.port.train_step(source_ids, target_ids, labels)), None, None)

    def export_state(self) -> None:
        """Moments are not asked of a port: they show in the weights."""


class _Shown(Recorder):
    """The tap that a port is given: it keeps copies of what was promised, and refuses unknown names."""

    def __init__(self, promised: Mapping[str, bool], given: Mapping[str, ndarray] | None) -> None:
        super().__init__(replace=given, keep_computed=True)
        self.promised = promised

    def __call__(self, name: str, value: Any) -> ndarray:
        if name not in self.promised:
            raise ValueError(f"there is no tap {name!r}: see `parity info --names`")
        if not self.promised[name]:
            return value
        seen = super().__call__(name, _array(value))
        return np.array(seen, value.dtype)  # what a port goes on with it may change, what was seen stays


def find(reference: str) -> type[Port]:
    """Return the class that ``module:class``, or the name of an entry point, stands for.

    Raises:
        ValueError: There is no such module, class or entry point, or it is no port.
    """
    module, colon, name = reference.partition(":")
    if not colon:
        registered = {entry.name: entry for entry in entry_points(group=GROUP)}
        if reference not in registered:
            known = f"registered are {', '.join(sorted(registered))}" if registered else "none is registered"
            raise ValueError(f"a port must be module:class, or registered as {GROUP}: got {reference!r}; {known}")
        provenance.import_port(registered[reference].module)
        kind = registered[reference].load()
    else:
        if os.path.basename(module) != module or module.startswith("."):
            raise ValueError(f"port {reference!r} cannot be imported: {module!r} is a path{_hint(module, name)}")
        provenance.import_port(module)
        if why := provenance.old_bytecode(module):
            raise ValueError(f"port {reference!r} cannot be compared: {why}")
        try:
            imported = importlib.import_module(module)
        except (ImportError, AttributeError) as error:
            found = f"{error}{_origin(module.partition('.')[0])}{_hint(module, name)}"
            raise ValueError(f"port {reference!r} cannot be imported: {found}") from error
        if not hasattr(imported, name):
            found = f"module {module!r} has no {name!r}{_origin(module)}"
            raise ValueError(f"port {reference!r} cannot be imported: {found}")
        kind = getattr(imported, name)
    _check_reference(reference)
    if not (isinstance(kind, type) and issubclass(kind, Port)):
        raise ValueError(f"port {reference!r} must be a subclass of transformer_parity.plugin.Port: got {kind!r}")
    return kind


def _check_reference(port: str) -> None:
    """Raise a ValueError if the port finds a different reference from the one that it is compared with."""
    if why := provenance.other_reference():
        raise ValueError(f"port {port!r} cannot be compared: {why}")


def _origin(module: str) -> str:
    """Return from which file a module was imported; empty if it was not. Another of the same name may stand before."""
    imported = sys.modules.get(module)
    if imported is None:
        return ""
    place = getattr(imported, "__file__", None) or ", ".join(getattr(imported, "__path__", ["no file"]))
    return f"; {module!r} was imported from {place}"


def _hint(module: str, name: str) -> str:
    """Return how to write a path as a module; empty where no path was given."""
    path = module.removesuffix(".py")
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".")]
    if path == module and len(parts) == 1:
        return ""
    if not all(part.isidentifier() for part in parts) or os.path.isabs(module):
        folder, file = os.path.split(path)
        return f"; name a module{f', run in {folder}' if folder else ''}: {file}:{name}"
    return f"; name a module, with dots and without .py: {'.'.join(parts)}:{name}"


def _array(value: Any) -> ndarray:
    """Return a copy of an array, of no subclass: another class can answer for its shape and its comparisons."""
    if not isinstance(value, np.ndarray):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        hint = "; a torch tensor becomes one by .detach().cpu().numpy(), in bfloat16 after .float()"
        raise TypeError(f"a port must return NumPy arrays: got {kind}{hint if kind.startswith('torch.') else ''}")
    return np.array(value, subok=False)


def _arrays(values: Mapping[str, Any]) -> dict[str, ndarray]:
    return {name: _array(value) for name, value in values.items()}
