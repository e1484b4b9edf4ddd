"""The base class for users' ports, and the code that loads and runs ports."""

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

GROUP = "transformer_parity.ports"  # entry point group in which installed packages register their ports


class Port:
    """Base class for ports. A port wraps your model, so that ``parity`` can compare the model with the reference.

    Only ``load`` and ``forward`` are required. If you don't define one of the other methods, ``parity`` skips the
    comparisons that require this method and reports the number of skipped comparisons. ``parity init-port`` writes a
    working subclass as a starting point.

    IDs are C-contiguous int64 arrays. Don't modify them. Each sequence has at least one token and is padded at the end
    with ``config.pad_id``. A batch contains one or more sequences of up to ``config.max_positions`` tokens. ``parity``
    passes batches of different shapes to the same model and keeps multiple models loaded. Results must not depend on
    earlier calls, except for the weight updates that ``train_step`` performs.

    Attributes:
        name: Display name in reports. If empty, the class name is used.
        preset: The name of the preset that the model follows. A preset is a set of published conventions. The names are
            the keys of ``transformer_spec.config.PRESETS``.
        overrides: The values of the ``TransformerConfig`` fields in which the model differs from the preset. The fields
            define conventions (such as ``norm_order``) and sizes (such as ``d_model``).
        dtypes: The dtypes that the model supports. Without float64, the check can't distinguish a bug from a rounding
            error.
        taps: Patterns for the taps (named intermediate values) that ``forward`` reports. ``parity info --names`` lists
            the names. Dots separate the parts of a name. ``*`` matches one part of a name, and ``**`` matches any
            number of parts.
        left_out: Cases that the model doesn't support, as a mapping from case name to reason. An entry for ``name``
            also applies to all cases whose names start with ``name/``. The report lists these cases as skipped.
        one_process: True if a single process controls all devices, as in JAX and with TensorFlow's
            ``MirroredStrategy``. In that case, only the process with rank 0 trains.
    """

    name = ""
    preset = "paper_base"
    overrides: Mapping[str, Any] = {}
    dtypes: tuple[str, ...] = ("float64", "float32")
    taps: tuple[str, ...] = ()
    left_out: Mapping[str, str] = {}
    one_process = False

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], dtype: str) -> None:
        """Build the model in inference mode and load a copy of the weights.

        Args:
            config: Sizes and conventions of the model.
            weights: One float32 array per canonical name. Kernels have shape [in, out].
            dtype: Dtype of the parameters and the computation, one of ``dtypes``.
        """
        raise NotImplementedError

    def forward(self, source_ids: ndarray, target_ids: ndarray, tap: Tap) -> ndarray:
        """Return the logits [B, T, V] for source IDs [B, S] and target IDs [B, T], without dropout.

        Report each intermediate value with ``value = tap(name, value)``, and use the return value in the rest of the
        forward pass. ``parity`` can then rerun an individual block on the reference's input. If ``taps`` is empty,
        ignore the ``tap`` argument.
        """
        raise NotImplementedError

    def export_weights(self) -> Mapping[str, ndarray]:
        """Return all current parameters, including any updates from training, keyed by canonical name."""
        raise NotImplementedError

    def gradients(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> Gradients:
        """Compute, without dropout, the label-smoothed loss per non-padding target token and the gradients of the loss.

        Return ``Gradients(loss, parameters)``, with one gradient per canonical name. To also return the gradients at
        the taps that you report, return ``Gradients(loss, parameters, taps)``, with one gradient per reported tap. A
        tied embedding matrix has only one gradient. Labels are padded with ``config.pad_id``. Some rows of the labels
        may contain only padding, but every batch contains at least one label that isn't padding.
        """
        raise NotImplementedError

    def start_training(self, settings: TrainingConfig) -> None:
        """Create an Adam optimizer whose learning rate at each step is ``settings.learning_rate(step, d_model)``.

        The first step is step 1. Calling this method a second time creates a new optimizer, which starts at step 1
        with the current weights.

        If ``settings.clip_norm`` is not None, scale the full gradient down to that norm. If your model doesn't support
        clipping, add the case ``steps/port_clipped`` to ``left_out``. ``settings.accumulation_steps`` is the number of
        micro-batches, and the number of sequences in each batch is a multiple of it. The results must match the results
        of a step on the full batch, so you may also process the full batch at once.
        """
        raise NotImplementedError

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> float:
        """Take one training step without dropout, and return the loss before the update.

        The number of sequences may differ between batches. ``parity`` may call the other methods between two steps.
        These methods must use the current weights and must not affect the next step.
        """
        raise NotImplementedError

    def distribute(self, plan: Plan) -> None:
        """Distribute the training of this model over the devices of ``plan``.

        The default plan is ``data=2``. After this call, all processes call ``gradients``, ``train_step``, and
        ``export_weights`` together. Every process receives a full batch but must read only the rows of its shard. You
        may assign the rows to shards in any order. Processes that differ only in their ``tensor`` index receive the
        same batch. All other processes may receive different values in the rows outside their shard. Each process
        returns the results for the full batch: the loss per target token over all processes, the reduced gradient
        before clipping, and the unsharded parameters.

        The environment contains the same variables as with torchrun: RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, and
        MASTER_PORT. Ranks are numbered in row-major order over the axes ``data``, ``fsdp``, and ``tensor``. A process
        may call ``load`` and ``distribute`` more than once. Raise a ValueError if your port doesn't support the plan.
        """
        raise NotImplementedError

    def parameters_per_device(self) -> Sequence[int]:
        """Return the number of parameter elements that each device of this process stores after ``distribute``.

        This method is required only if the plan contains ``fsdp`` or ``tensor``, or if the port sets ``one_process``.
        With PyTorch's ``fully_shard``, return ``[sum(p.to_local().numel() for p in model.parameters())]``.
        """
        raise NotImplementedError

    def generate(self, source_ids: ndarray, max_length: int, beam_size: int, length_penalty: float) -> ndarray:
        """Return the best hypothesis [B, <= max_length] for each sequence, without the BOS token.

        A hypothesis ends with ``config.eos_id``, which is included, or after ``max_length`` tokens. The same
        ``max_length`` applies to every sequence. Pad shorter hypotheses with ``config.pad_id``; additional padding is
        accepted.

        If ``beam_size`` is 1, search greedily. Otherwise, score hypotheses by their log-probability divided by
        ``((5 + length) / 6)**length_penalty``, and follow these rules:

        - At each step, a hypothesis finishes only if its EOS continuation is among the ``beam_size`` most likely
          continuations. The beam keeps the ``beam_size`` most likely continuations without EOS.
        - Hypotheses that are truncated at ``max_length`` compete with finished hypotheses.
        - The search for a sequence stops when no unfinished hypothesis could beat the best finished hypothesis, even if
          all further tokens up to ``max_length`` had probability 1.
        - If continuations are equally likely, prefer the continuation of the better hypothesis, then the lower token
          ID.
        - Never generate the padding token. Exclude this token after the log-softmax, without renormalizing the
          probabilities of the other tokens.
        """
        raise NotImplementedError


class PluginPort:
    """Adapter from a user's ``Port`` class to the ``AnyPort`` protocol."""

    def __init__(self, reference: str) -> None:
        self.reference = reference  # "module:class", or the name of an entry point
        self.kind = find(reference)
        self.name = printable(self.kind.name or self.kind.__name__)
        for needed in ("load", "forward"):
            if getattr(self.kind, needed) is getattr(Port, needed):
                raise ValueError(f"port {reference!r} must define {needed}(); run `parity init-port` for a template")
        self.left_out = self.kind.left_out

    def load(self, config: TransformerConfig, weights: Mapping[str, ndarray], placement: Placement) -> LoadedPlugin:
        """Build a model with a copy of the weights. The port itself chooses the device and the precision."""
        if placement.dtype not in self.kind.dtypes:
            raise MissingAbilityError(f"{self.name} supports only {', '.join(self.kind.dtypes)}")
        port = self.kind()
        port.load(config, {name: np.array(array, np.float32) for name, array in weights.items()}, placement.dtype)
        _check_reference(self.reference)  # load() may have changed sys.path
        return LoadedPlugin(port, config)

    def describe(self) -> dict[str, str]:
        """Return the port's import path, the framework versions, and the files that shadow this project's modules."""
        versions: dict[str, str] = {
            name: str(getattr(sys.modules[name], "__version__", "unknown"))
            for name in ("torch", "jax", "flax", "tensorflow", "keras", "numpy")
            if name in sys.modules
        }
        port = f"{self.kind.__module__}:{self.kind.__qualname__}"
        return {"port": port, **versions, **provenance.files_elsewhere()}


@dataclass(frozen=True)
class LoadedPlugin:
    """A user's port with loaded weights."""

    port: Port
    config: TransformerConfig

    def export(self) -> dict[str, ndarray]:
        """Return all parameters, keyed by canonical name."""
        return _arrays(self.ability("export_weights")())

    def run(
        self, block: str, inputs: Mapping[str, ndarray], *, taps: bool, given: Mapping[str, ndarray] | None = None
    ) -> Result:
        """Run the full model. User ports can't run individual blocks and don't accept explicit masks."""
        if block or not inputs.keys() <= {"source_ids", "target_ids"}:
            raise MissingAbilityError("user ports run only the full model, with masks derived from the IDs")
        names = tap_shapes(self.config, 1, 1, 1)
        shown = _Shown({name: self.shows(name) for name in names}, given)
        logits = self.ability("forward")(inputs["source_ids"], inputs["target_ids"], shown if taps else no_tap)
        return Result(_array(logits), dict(shown))

    def shows(self, tap: str) -> bool:
        """Return True if the port declares the tap."""
        return any(matches(pattern, tap) for pattern in self.port.taps)

    def gradients(self, inputs: Mapping[str, ndarray]) -> Gradients:
        """Return the loss for a batch and the gradients of the loss."""
        found = self.ability("gradients")(inputs["source_ids"], inputs["target_ids"], inputs["labels"])
        return Gradients(float(found.loss), _arrays(found.parameters), _arrays(found.taps))

    def decode_stepwise(self, source_ids: ndarray, target_ids: ndarray) -> Result:
        """Raise a MissingAbilityError, because user ports don't expose a cache."""
        raise MissingAbilityError("user ports do not expose a cache")

    def search(self, source_ids: ndarray, options: Search, on_step: OnStep | None = None) -> SearchResult:
        """Return the best hypothesis for each sequence, without scores, because ``generate`` returns none."""
        if options.start_id is not None or options.min_length > 1 or options.rules != SearchRules():
            raise MissingAbilityError("user ports support only the paper's search rules")
        beam_size = options.beam_size or 1
        limit = options.limit(source_ids.shape[1], self.config)
        ids = _array(self.ability("generate")(source_ids, limit, beam_size, options.length_penalty))
        return SearchResult(ids[:, None], None)  # type: ignore[arg-type]  # ports return no scores

    def trainer(self, settings: TrainingConfig) -> _PluginTrainer:
        """Start training, and return a trainer for this model."""
        self.ability("train_step")
        self.ability("start_training")(settings)
        return _PluginTrainer(self.port)

    def ability(self, name: str) -> Callable[..., Any]:
        """Return a method of the port.

        Raises:
            MissingAbilityError: If the port doesn't define the method.
        """
        if getattr(type(self.port), name) is getattr(Port, name):
            raise MissingAbilityError(f"the port does not define {name}()")
        return getattr(self.port, name)


@dataclass(frozen=True)
class _PluginTrainer:
    port: Port

    def train_step(self, source_ids: ndarray, target_ids: ndarray, labels: ndarray) -> StepResult:
        return StepResult(float(self.port.train_step(source_ids, target_ids, labels)), None, None)

    def export_state(self) -> None:
        """Return None, because ports don't export Adam's moments. A bug in the moments also changes the weights."""


class _Shown(Recorder):
    """The tap that is passed to a port. It stores copies of the values at declared taps and rejects unknown names."""

    def __init__(self, promised: Mapping[str, bool], given: Mapping[str, ndarray] | None) -> None:
        super().__init__(replace=given, keep_computed=True)
        self.promised = promised

    def __call__(self, name: str, value: Any) -> ndarray:
        if name not in self.promised:
            raise ValueError(f"unknown tap {name!r}; run `parity info --names` to list all taps")
        if not self.promised[name]:
            return value
        seen = super().__call__(name, _array(value))
        return np.array(seen, value.dtype)  # a copy, because the port may modify the value in place


def find(reference: str) -> type[Port]:
    """Import the port class for ``module:class`` or for the name of an entry point.

    Raises:
        ValueError: If the module, class, or entry point doesn't exist, or if the class is not a port.
    """
    module, colon, name = reference.partition(":")
    if not colon:
        registered = {entry.name: entry for entry in entry_points(group=GROUP)}
        if reference not in registered:
            known = f"registered ports: {', '.join(sorted(registered))}" if registered else "no ports are registered"
            raise ValueError(
                f"a port must be module:class or the name of an entry point in the group {GROUP}: "
                f"got {reference!r}; {known}"
            )
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
    """Raise a ValueError if the port would import a different reference from the one that ``parity`` uses."""
    if why := provenance.other_reference():
        raise ValueError(f"port {port!r} cannot be compared: {why}")


def _origin(module: str) -> str:
    """Return a phrase that names a module's file, because a different module may have the same name."""
    imported = sys.modules.get(module)
    if imported is None:
        return ""
    place = getattr(imported, "__file__", None) or ", ".join(getattr(imported, "__path__", ["no file"]))
    return f"; {module!r} was imported from {place}"


def _hint(module: str, name: str) -> str:
    """If ``module`` is a path, return a hint that suggests a module name. Otherwise, return an empty string."""
    path = module.removesuffix(".py")
    parts = [part for part in re.split(r"[/\\]", path) if part not in ("", ".")]
    if path == module and len(parts) == 1:
        return ""
    if not all(part.isidentifier() for part in parts) or os.path.isabs(module):
        directory, file = os.path.split(path)
        return f"; use a module name{f' and run in {directory}' if directory else ''}: {file}:{name}"
    return f"; use a module name, with dots and without .py: {'.'.join(parts)}:{name}"


def _array(value: Any) -> ndarray:
    """Return a copy of an array as a plain ``ndarray``, because a subclass could override its shape or comparisons."""
    if not isinstance(value, np.ndarray):
        kind = f"{type(value).__module__}.{type(value).__name__}"
        hint = "; convert a torch tensor with .detach().cpu().numpy(), and call .float() first if it is bfloat16"
        raise TypeError(f"a port must return NumPy arrays: got {kind}{hint if kind.startswith('torch.') else ''}")
    return np.array(value, subok=False)


def _arrays(values: Mapping[str, Any]) -> dict[str, ndarray]:
    return {name: _array(value) for name, value in values.items()}
