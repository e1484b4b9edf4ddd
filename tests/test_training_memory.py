"""Precision, memory use, and compilation of a training step affect results at most by rounding."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import pytest
from conftest import random_weights
from training_runs import (
    BATCH,
    BATCHES,
    CONFIG,
    HANDOVER,
    NAME,
    RIGHT,
    SCHEDULE,
    TRAINERS,
    WEIGHTS,
    assert_near,
    at_the_start,
    everything,
    losses_of,
    model_of,
    take_steps,
    zero_state,
)
from training_runs import _quick_compilation as _quick_compilation  # a fixture of every test

import reference_numpy as ref


# --- Mixed precision ---
@pytest.mark.extended("training", "jax")
def test_mixed_precision_trains_accurately_with_float32_weights(port):
    trainer = at_the_start(port, "mixed")
    exact = ref.gradients(ref.Transformer.from_weights(CONFIG, WEIGHTS), *BATCH).loss
    losses = losses_of(trainer, [BATCH] * 30)
    assert 1e-5 < abs(losses[0] / exact - 1) < 0.03  # bfloat16, with its eight bits, is used and accurate enough
    assert np.isfinite(losses).all()
    assert losses[-1] < 0.8 * losses[0]
    found = everything(trainer)
    assert {array.dtype.name for name, array in found.items() if " " in name} == {"float32"}
    low_bits = found[f"weight {NAME}"].view(np.uint32) & 0xFFFF
    assert low_bits.any()  # no weight was ever rounded to bfloat16
    twin = port.package.Transformer.from_weights(CONFIG, trainer.model.export_weights())
    logits = port.to_numpy(trainer.model(*BATCH[:2]))
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits, port.to_numpy(twin(*BATCH[:2])))
    total, _ = trainer.evaluate(*BATCH)
    expected, _ = ref.cross_entropy(logits, RIGHT, CONFIG.replace(label_smoothing=0.0))
    assert port.to_numpy(total).dtype == np.float32
    assert_near(float(total), float(expected), 1e-6)


# --- Activation checkpointing ---
@pytest.mark.extended("training", "jax", "tf")
def test_activation_checkpointing_changes_no_result(backend):
    """Losses, norms, weights, and moments match after three steps, so recomputation must use the same dropout masks."""
    found = {}
    for kind in ("everything kept", "checkpointed"):
        trainer = at_the_start(backend, kind)
        results = take_steps(trainer, BATCHES[:3])
        found[kind] = everything(trainer)
        found[kind] |= {
            what: np.array([float(getattr(result, what)) for result in results]) for what in ("loss", "gradient_norm")
        }
    kept, checkpointed = found.values()
    assert list(kept) == list(checkpointed)
    for name, expected in kept.items():
        assert_near(checkpointed[name], expected, 1e-12, name)
    stacks = trainer.model.encoder, trainer.model.decoder
    assert not any(getattr(stack, "activation_checkpointing", False) for stack in stacks)  # enabled only during a step


@pytest.mark.only("torch")
def test_torch_checkpointing_stores_less_memory(port):
    """Only a layer's inputs are kept after its forward pass."""
    import torch

    def kept_bytes(kind):
        sizes = []

        def keep(tensor):
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            at_the_start(port, kind).train_step(*BATCH)
        return sum(sizes)

    assert kept_bytes("checkpointed") < 0.5 * kept_bytes("everything kept")


@pytest.mark.only("jax")
@pytest.mark.extended("training", "jax")
def test_jax_checkpointing_uses_less_memory(port):
    """XLA reports the temporary memory of a step, excluding its inputs and outputs."""
    import jax

    training, compilation = port.package.training, port.package.compilation
    config = CONFIG.replace(num_encoder_layers=2, num_decoder_layers=2)
    batch = [np.tile(ids, (1, 8)) for ids in BATCH]

    def room(settings):
        model = port.package.Transformer.from_weights(config, random_weights(config))
        trainer = port.package.Trainer(model, settings)
        numbers = {"random_bits": np.zeros(2, np.uint32), "learning_rate": 1.0, "corrections": (1.0, 1.0)}
        inputs = compilation.parameters_of(model), trainer.optimizer, training._take(model, *batch), numbers
        step = trainer._compiled_step.lower(*inputs)
        return step.compile().memory_analysis().temp_size_in_bytes

    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)  # optimizations could undo checkpointing
    try:
        kept, checkpointed = (room(ref.TrainingConfig(activation_checkpointing=again)) for again in (False, True))
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    assert checkpointed < 0.7 * kept


@pytest.mark.only("jax")
def test_new_jax_moments_reuse_the_old_buffers(port):
    """Each moment reuses its own buffer. If they were swapped, XLA would have to copy one of them."""
    trainer = at_the_start(port)

    def places():
        moments = trainer.optimizer.first_moment, trainer.optimizer.second_moment
        return [{name: array.unsafe_buffer_pointer() for name, array in moment.items()} for moment in moments]

    trainer.train_step(*BATCH)
    before = places()
    trainer.train_step(*BATCH)
    assert places() == before


@pytest.mark.only("tf")
def test_tf_recomputes_activations_when_checkpointing(port):
    """The runtime decides which tensors are kept, so this test only checks that the graph has more matmuls."""

    def products(kind):
        trainer = at_the_start(port, kind)
        trainer.train_step(*BATCH)
        (step,) = trainer._traced.values()
        graph = step.get_concrete_function().graph.as_graph_def()
        nodes = [node for function in graph.library.function for node in function.node_def]
        return sum("MatMul" in node.op for node in [*graph.node, *nodes])

    assert products("checkpointed") > 1.2 * products("everything kept")


# --- Compilation ---
@pytest.mark.only("jax")
def test_jax_compiles_a_step_once(port, caplog):
    """A different step, learning rate, or seed, and loaded weights or moments don't trigger a recompilation."""
    import jax

    trainer = at_the_start(port)
    trainer.train_step(*BATCH)
    trainer.evaluate(*BATCH)
    with caplog.at_level(logging.DEBUG, "jax"), jax.log_compiles():
        jax.jit(lambda x: x + 1)(np.ones(5)).block_until_ready()
        assert "Compiling" in caplog.text  # shows that compilations are logged
        caplog.clear()
        for state in (zero_state(step=1000, seed=7), zero_state(step=10_000, seed=8)):
            trainer.load_state(state)
            take_steps(trainer, BATCHES)
            trainer.evaluate(*BATCH)
    assert "Compiling" not in caplog.text


@pytest.mark.only("tf")
def test_tf_traces_a_step_once(port, monkeypatch):
    """A different step, learning rate, seed, or batch shape doesn't trigger retracing."""
    trainer, traced = at_the_start(port), []
    trainer.train_step(*BATCH)
    trainer.evaluate(*BATCH)
    cross_entropy = port.package.training.cross_entropy

    def traced_cross_entropy(*args):
        traced.append(args)
        return cross_entropy(*args)

    monkeypatch.setattr(port.package.training, "cross_entropy", traced_cross_entropy)
    for state in (zero_state(step=1000, seed=7), zero_state(step=10_000, seed=8)):
        trainer.load_state(state)
        for batch in (*BATCHES, [array[:3, :3] for array in BATCH]):
            trainer.train_step(*batch)
            trainer.evaluate(*batch)
    assert traced == []
    port.package.gradients(trainer.model, *BATCH)
    assert len(traced) == 1  # shows that calls are recorded


@pytest.mark.only("torch")
def test_compiled_torch_training_has_the_same_losses(port, monkeypatch):
    """The losses are the same if the user's choice of compiler traces the complete forward and backward pass."""
    import torch

    expected = losses_of(at_the_start(port), HANDOVER[:3])
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", fullgraph=True))
    model = model_of(port, "float64")
    trainer = port.package.Trainer(model, ref.TrainingConfig(**SCHEDULE), compile=True)
    assert_near(losses_of(trainer, HANDOVER[:3]), expected, 1e-12)
    torch.compiler.reset()


def compiled_by_xla(port, kind):
    model = port.package.Transformer.from_weights(CONFIG.replace(dropout=TRAINERS[kind][1]), WEIGHTS, dtype="float64")
    return port.package.Trainer(model, ref.TrainingConfig(**SCHEDULE, **TRAINERS[kind][2]), compile=True)


@pytest.mark.only("tf")
@pytest.mark.parametrize(
    "kind", [pytest.param("plain", marks=pytest.mark.extended("training")), "four micro-batches, clipped"]
)
def test_xla_compiled_training_has_the_same_losses(port, kind):
    trainer = compiled_by_xla(port, kind)
    assert_near(losses_of(trainer, BATCHES[:3]), losses_of(at_the_start(port, kind), BATCHES[:3]), 1e-12)
    (step,) = trainer._traced.values()
    assert step.function_spec.jit_compile
    found, expected = trainer.gradient(*BATCH), at_the_start(port, kind)
    port.package.set_weights(expected.model, trainer.model.export_weights())
    expected = expected.gradient(*BATCH)
    assert_near(found.loss, expected.loss, 1e-12)
    trainer.evaluate(*BATCH)
    _, gradient, evaluation = trainer._traced.values()
    assert gradient.function_spec.jit_compile
    assert not evaluation.function_spec.jit_compile  # evaluation has too many batch shapes


@pytest.mark.only("tf")
@pytest.mark.extended("training")
def test_xla_dropout_is_identical_in_recomputed_layers(port):
    kept, again = (losses_of(compiled_by_xla(port, kind), BATCHES[:2]) for kind in ("everything kept", "checkpointed"))
    assert_near(kept, again, 1e-12)
