"""The implementations that ``parity bench`` times. Each implementation runs in a separate process."""

# ruff: noqa: D102  methods are documented in TimedImplementation

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy import ndarray

import reference_numpy as ref
from transformer_bench.peers import PEERS, Peer
from transformer_bench.peers.marian import marian_model
from transformer_bench.rounds import TimedImplementation
from transformer_bench.workload import SEED, DecodeWork, ForwardWork, TrainWork, Work
from transformer_parity.engine.system.environment import prepare_environment
from transformer_parity.transformer.distributed.environments import environments, number_of_processes
from transformer_parity.transformer.distributed.jax_process import prepare_jax_process
from transformer_parity.transformer.ports.package import allow_dtype
from transformer_parity.transformer.ports.protocol import Decoded, MissingFrameworkError
from transformer_parity.transformer.ports.registry import PORTS
from transformer_spec.parallel_plan import Plan
from transformer_spec.search import SearchResult


@dataclass
class Package(TimedImplementation):
    """One of the four packages of this project, called as a user would call the package."""

    form: ClassVar[str] = ""  # the name of a mode in tables, such as "compiled"; empty for the default mode
    backend: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.backend} {self.form}".rstrip()

    def check_installed(self) -> None:
        PORTS[self.backend].check_installed()

    def prepare(self) -> dict[str, str]:
        self.package = PORTS[self.backend].import_package()
        return self.package.describe()

    def load(self, work: Work, weights: Path) -> None:
        allow_dtype(self.package, work.weights_dtype)
        model = self.package.load_transformer(weights, work.weights_dtype, work.device, "highest")  # disables TF32
        self._run = self.ready(model, work)

    def ready(self, model: Any, work: Any) -> Callable[[], Any]:
        """Return the function to time."""
        raise NotImplementedError


class ForwardPackage(Package):
    """Compute logits, using a compiled function in JAX and TensorFlow."""

    def ready(self, model: Any, work: ForwardWork) -> Callable[[], Any]:
        return partial(compiled(self.backend, model), work.source_ids, work.target_ids)

    def result(self, found: Any) -> ndarray:
        """Return the logits [B, T, V] in float32."""
        return np.asarray(found.float().cpu() if self.backend == "torch" else found, np.float32)


class ForwardCompiled(ForwardPackage):
    """Compute logits in PyTorch, using torch.compile."""

    form = "compiled"

    def ready(self, model: Any, work: ForwardWork) -> Callable[[], Any]:
        import torch

        ids = map(torch.from_numpy, (work.source_ids, work.target_ids))  # compiled models require tensors
        return partial(compiled(self.backend, torch.compile(model)), *ids)


class TrainPackage(Package):
    """Run training steps on the same batch."""

    mesh: Any = None  # the device mesh; None for one device
    options: ClassVar[Mapping[str, Any]] = {}  # additional options of the trainer in this mode

    def ready(self, model: Any, work: TrainWork) -> Callable[[], Any]:
        trainer = self.package.Trainer(model, work.settings, SEED, mesh=self.mesh, **self.options)
        batch = work.source_ids, work.target_ids, work.labels
        return lambda: (trainer.step + 1, float(trainer.train_step(*batch).loss))


class TrainCompiled(TrainPackage):
    """Run compiled training steps: torch.compile for PyTorch's forward and backward pass, XLA for TensorFlow's step."""

    form = "compiled"
    options: ClassVar[Mapping[str, Any]] = {"compile": True}


@dataclass
class TrainOnDevices(TrainPackage):
    """Run training steps on the devices of a parallelism plan.

    On CPUs, each device is a separate process so that its memory can be measured. NumPy simulates all devices in one
    process.
    """

    plan: Plan
    device: str

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.backend} {self.plan}"

    @property
    def processes(self) -> int:  # type: ignore[override]
        has_own = self.device == "cpu" and self.backend != "numpy"
        return number_of_processes(self.backend, self.plan, self.plan.devices if has_own else None)

    def environments(self) -> AbstractContextManager[Sequence[Mapping[str, str]]]:
        return environments(self.backend, self.plan.devices, self.processes)

    def prepare(self) -> dict[str, str]:
        self.package = PORTS[self.backend].import_package()
        if self.backend == "jax":
            prepare_jax_process()
        self.mesh = self.package.make_mesh(self.plan, self.device)
        return self.package.describe()

    def load(self, work: Work, weights: Path) -> None:
        with getattr(self.mesh, "scope", nullcontext)():  # TensorFlow replicates variables when it creates them
            super().load(work, weights)


class DecodePackage(Package):
    """Run a search."""

    def ready(self, model: Any, work: DecodeWork) -> Callable[[], Any]:
        return partial(work.search.run, self.package, model, work.source_ids)

    def show(self) -> Decoded:
        return Decoded.by(self._run)


def compiled(name: str, model: Any) -> Callable[[Any, Any], Any]:
    """Return a function that calls the model the way users call it, and waits for the logits."""
    if name == "torch":
        import torch

        def run(source_ids: ndarray, target_ids: ndarray) -> Any:
            with torch.inference_mode():
                logits = model(source_ids, target_ids)
            if logits.is_cuda:
                torch.cuda.synchronize()
            return logits

        return run
    if name == "jax":
        import jax
        from flax import nnx

        graph, state = nnx.split(model)  # split once, because splitting takes as long as a small forward pass
        forward = jax.jit(lambda state, source_ids, target_ids: nnx.merge(graph, state)(source_ids, target_ids))
        return lambda source_ids, target_ids: forward(state, source_ids, target_ids).block_until_ready()
    if name == "tf":
        import tensorflow as tf

        call = tf.function(lambda source_ids, target_ids: model(source_ids, target_ids), jit_compile=True)

        def run_tf(source_ids: ndarray, target_ids: ndarray) -> Any:
            with tf.device(model.device):
                logits = call(tf.constant(source_ids), tf.constant(target_ids))
            tf.test.experimental.sync_devices()
            return logits

        return run_tf
    return model


@dataclass
class Other(TimedImplementation):
    """An implementation outside this project that runs the same workload."""

    peer: Peer

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.peer.name

    def check_installed(self) -> None:
        for module in self.peer.modules:
            if importlib.util.find_spec(module) is None:
                package = module.replace("_", "-")
                raise MissingFrameworkError(
                    f"--peers requires {package}, which is not installed: pip install {package}, or remove --peers"
                )

    def prepare(self) -> dict[str, str]:
        prepare_environment()
        return self.peer.prepare()

    def load(self, work: Work, weights: Path) -> None:
        if work.device != "cpu":
            raise ValueError("peers run only on the CPU")
        config, arrays = ref.load_weights(weights)
        self.peer.build(config, arrays, work.dtype, work.settings if isinstance(work, TrainWork) else None)
        self._run = self.ready(work)

    def ready(self, work: Any) -> Callable[[], Any]:
        """Return the function to time."""
        raise NotImplementedError


class ForwardOther(Other):
    """Compute logits."""

    def ready(self, work: ForwardWork) -> Callable[[], Any]:
        return partial(self.peer.forward, work.source_ids, work.target_ids)

    def result(self, found: Any) -> ndarray:
        """Return the logits [B, T, V] in float32."""
        return np.asarray(self.peer.to_numpy(found), np.float32)


class TrainOther(Other):
    """Run training steps on the same batch."""

    def ready(self, work: TrainWork) -> Callable[[], Any]:
        self._steps = 0
        return partial(self.peer.train_step, work.source_ids, work.target_ids, work.labels)

    def result(self, found: float) -> tuple[int, float]:
        """Return the number of the step and its loss."""
        self._steps += 1
        return self._steps, found


class DecodeOther(Other):
    """Run greedy search."""

    def ready(self, work: DecodeWork) -> Callable[[], Any]:
        return partial(self.peer.greedy, work.source_ids, work.target)


@dataclass
class DecodeMarian(Other):
    """Run greedy or beam search, using Hugging Face's ``generate`` method."""

    def load(self, work: DecodeWork, weights: Path) -> None:  # type: ignore[override]
        import torch
        from transformers import GenerationConfig

        config, arrays = ref.load_weights(weights)
        settings = GenerationConfig(
            max_new_tokens=work.target,
            num_beams=work.beam_size or 1,
            length_penalty=work.search.length_penalty,
            early_stopping="never"
            if work.beam_size
            else False,  # like this project's packages, stop as soon as the result is certain
            decoder_start_token_id=config.bos_id,
            pad_token_id=config.pad_id,
            eos_token_id=config.eos_id,
            return_dict_in_generate=True,
            output_scores=work.beam_size is not None,  # required to get the scores of hypotheses
        )
        self._run = partial(
            marian_model(config, arrays, work.dtype).generate,
            input_ids=torch.from_numpy(work.source_ids),
            attention_mask=torch.from_numpy((work.source_ids != config.pad_id).astype(np.int64)),
            generation_config=settings,
        )
        self._scores: dict[bytes, ndarray] = {}  # scores of greedy searches, keyed by the generated tokens

    def result(self, found: Any) -> SearchResult:
        """Return tokens and scores.

        ``generate`` doesn't return scores for greedy search. Therefore, this method runs the search a second time to
        get the logits, and computes the scores from them.
        """
        ids = found.sequences[:, 1:]  # excludes BOS
        if found.get("sequences_scores") is not None:
            return SearchResult(ids[:, None].numpy(), found.sequences_scores[:, None].numpy())
        key = ids.numpy().tobytes()
        if key not in self._scores:
            again = self._run(output_logits=True)  # type: ignore[call-arg]
            if not again.sequences[:, 1:].equal(ids):
                raise RuntimeError("the second run generated different tokens than the first run")
            steps = zip(again.logits, ids.T, strict=True)
            chosen = [logits.log_softmax(-1).gather(1, tokens[:, None]) for logits, tokens in steps]  # [B, 1] each
            self._scores[key] = sum(chosen).numpy()
        return SearchResult(ids[:, None].numpy(), self._scores[key])


OURS: dict[str, dict[str, TimedImplementation]] = {
    "forward": {name: ForwardPackage(name) for name in PORTS},
    "train": {name: TrainPackage(name) for name in PORTS},
    "decode": {name: DecodePackage(name) for name in PORTS},
}
# Additional modes of the packages, timed only with ``--peers``. TensorFlow's forward pass always uses XLA. Searches
# have no compiled mode, because torch.compile would recompile them for each length.
FORMS: dict[str, dict[str, TimedImplementation]] = {
    "forward": {"torch": ForwardCompiled("torch")},
    "train": {name: TrainCompiled(name) for name in ("torch", "tf")},
    "decode": {},
}
OTHERS: dict[str, dict[str, TimedImplementation]] = {
    "forward": {name: ForwardOther(peer) for name, peer in PEERS.items()},
    "train": {name: TrainOther(peer) for name, peer in PEERS.items()},
    "decode": {
        "marian": DecodeMarian(PEERS["marian"]),
        # torch.nn is excluded because it has no cache and would recompute the prefix at each position.
        **{name: DecodeOther(PEERS[name]) for name in ("flax nnx", "keras hub", "keras hub XLA")},
    },
}


def others(work: Work) -> list[TimedImplementation]:
    """Return the peers that support the given workload. Only Marian supports beam search."""
    if isinstance(work, DecodeWork) and work.beam_size is not None:
        return [OTHERS["decode"]["marian"]]
    return list(OTHERS[work.task].values())
