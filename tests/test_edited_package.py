"""Bugs are injected into copies of the packages in memory, without affecting the original or other copies."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from pathlib import Path

import distributed_ports
import numpy as np
import pytest
import tiers
from misbehaviour import MISBEHAVIOUR

from transformer_parity.transformer.bugs import distributed, optimizer, precision
from transformer_parity.transformer.bugs.bug import FOUR, Bug, instead
from transformer_parity.transformer.bugs.catalog import (
    BACKWARD_BLOCKS,
    BACKWARD_PATHS,
    CANDIDATES,
    EVERYWHERE,
    LOSSES,
    SEARCH_CANDIDATES,
    STEP_VARIANTS,
    parts,
)
from transformer_parity.transformer.bugs.edited_package import edited_package
from transformer_parity.transformer.bugs.structure import STALE
from transformer_parity.transformer.cases.standard import standard_cases
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.selftest.buggy_ports import injected

CASES = {case.name: case for case in standard_cases()}
CATALOG = [bug for part in parts().values() for bug in part]
CANDIDATES_ANYWHERE = [
    *EVERYWHERE,
    *CANDIDATES,
    *BACKWARD_BLOCKS,
    *BACKWARD_PATHS,
    *LOSSES,
    *STEP_VARIANTS,
    *SEARCH_CANDIDATES,
]
EVERY = [*CATALOG, *CANDIDATES_ANYWHERE, STALE, *precision.CONTROLS, *optimizer.CONTROLS]
UNSCALED = Bug("unscaled", "", instead("attention", "math.sqrt(d_k)", "1.0"))
SQUARED = Bug("squared", "", instead("attention", "math.sqrt(d_k)", "d_k"))
IN_TRAINING = Bug("training", "", instead("training", "self.settings = settings\n", "self.settings = None\n"))
PACKAGES = [pytest.param(port, id=name, marks=pytest.mark.only(name)) for name, port in PORTS.items()]


def of(bug, name):
    return tuple(bug.edits[name])


def output(port, dtype="float64", taps=False, case="full/padded"):
    case = CASES[case]
    loaded = port.load(case.config, case.load_weights(), Placement(dtype))
    return loaded.run(case.block, case.inputs, taps=taps).output


@pytest.mark.parametrize("name", FOUR)
def test_edited_text_occurs_exactly_once(name):
    directory = Path(__file__).parent.parent / PORTS[name].package
    sources = {file.stem: file.read_text("utf-8") for file in directory.glob("*.py")}
    seen = 0
    others = distributed.BUGS if name == "numpy" else [*MISBEHAVIOUR, *distributed_ports.BUGS[name]]
    for bug in [*EVERY, *others]:
        texts = dict(sources)
        for module, old, new in bug.edits.get(name, ()):
            assert texts[module].count(old) == 1, (bug.name, module, old)
            texts[module] = texts[module].replace(old, new)
            assert texts[module] != sources[module], bug.name
            seen += 1
        for module in texts.keys() & {module for module, _, _ in bug.edits.get(name, ())}:
            compile(texts[module], module, "exec")
    assert seen > 100


@pytest.mark.parametrize("old", ["no such line", "import"])
def test_edit_without_a_unique_match_is_rejected(old):
    with pytest.raises(ValueError, match=rf"reference_numpy\.attention must contain '{old}' once: found \d+ times"):
        edited_package("reference_numpy", (("attention", old, ""),))
    with pytest.raises(ValueError, match=r"reference_numpy\.nowhere must contain 'x' once: found 0 times"):
        edited_package("reference_numpy", (("nowhere", "x", ""),))


@pytest.mark.parametrize("ours", PACKAGES)
def test_only_modules_that_import_an_edited_module_are_copied(ours):
    original = ours.import_package()
    assert edited_package(ours.package, ()) is original
    trained = edited_package(ours.package, of(IN_TRAINING, ours.name))
    assert trained.Trainer is not original.Trainer
    assert trained.Transformer is original.Transformer  # so compiled functions of the model can be reused
    assert trained.weights is original.weights
    unscaled = edited_package(ours.package, of(UNSCALED, ours.name))
    copied = {"attention", "encoder", "decoder", "transformer", "search"}
    shared = {"masks", "layers", "feed_forward", "embedding", "runtime"}
    for module in copied | shared:
        same = getattr(unscaled, module) is getattr(original, module)
        assert same == (module in shared), module
    assert unscaled.transformer.Encoder is unscaled.Encoder is not original.Encoder
    assert edited_package(ours.package, of(UNSCALED, ours.name)) is unscaled


@pytest.mark.only("numpy")
def test_module_imported_as_a_whole_is_copied():
    """``from reference_numpy import fast`` binds the module itself rather than names in it."""
    package = edited_package(
        "reference_numpy", (("fast", "    values = np.where(np.isnan(values), inf, values)\n", ""),)
    )
    assert package.search.fast is package.fast is not importlib.import_module("reference_numpy.fast")


@pytest.mark.parametrize("ours", PACKAGES)
@pytest.mark.extended("edited packages", "tf")
def test_injected_bugs_are_isolated_from_the_original_and_each_other(ours):
    taps, path = ours.name == "torch", list(sys.path)  # PyTorch's fused kernel applies its own scale
    before = output(ours, taps=taps)
    one, other = injected(UNSCALED, ours.name), injected(SQUARED, ours.name)
    wrong, also_wrong = output(one, taps=taps), output(other, taps=taps)
    assert np.array_equal(output(ours, taps=taps), before)
    assert np.array_equal(output(one, taps=taps), wrong)
    assert np.array_equal(output(injected(UNSCALED, ours.name), taps=taps), wrong)
    for a, b in ((wrong, before), (also_wrong, before), (wrong, also_wrong)):
        assert np.abs(a - b).max() > 1e-3
    truth = output(injected(UNSCALED, "numpy"))
    np.testing.assert_allclose(wrong, truth, rtol=1e-9, atol=1e-9)
    assert sys.path == path


@pytest.mark.parametrize("ours", PACKAGES)
def test_edited_source_is_used_by_inspect_and_tracebacks(ours):
    for bug, scale in ((UNSCALED, "/ 1.0"), (SQUARED, "/ d_k")):
        package = edited_package(ours.package, of(bug, ours.name))
        source = inspect.getsource(package.scaled_dot_product_attention)
        assert "math.sqrt(d_k)" not in source
        assert scale in source
        assert inspect.getsource(package.Encoder).startswith("class Encoder")
        with pytest.raises(AttributeError) as caught:
            package.scaled_dot_product_attention(None, None, None)
        frame = traceback.extract_tb(caught.value.__traceback__)[1]
        assert frame.filename.endswith(f"/{ours.package}/attention.py")
        assert frame.line in source


# This condition depends on values, so only AutoGraph can convert it to a graph operation, and it reads the source.
CONDITION = """    d_k = query.shape[-1]
    if tf.reduce_sum(tf.abs(query)) > 0.0:
        key = key * {}
    else:
        key = key * 0.0
"""


@pytest.mark.only("tf")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_tensorflow_compiles_the_edited_source_of_each_copy(jit_compile):
    import tensorflow as tf

    rng = np.random.default_rng(0)
    inputs = [tf.constant(rng.normal(size=(2, 3, 5, 4))) for _ in range(3)]
    right = importlib.import_module("transformer_tf").scaled_dot_product_attention
    factors = (2.0, 3.0, 4.0)  # the edits have the same length and change the same lines
    edits = [("attention", "    d_k = query.shape[-1]\n", CONDITION.format(factor)) for factor in factors]
    copies = [edited_package("transformer_tf", (edit,)) for edit in edits]
    for factor, attention in zip(factors, (copy.scaled_dot_product_attention for copy in copies), strict=True):
        compiled = tf.function(attention, jit_compile=jit_compile)
        query, key, value = inputs
        np.testing.assert_allclose(compiled(query, key, value), right(query, key * factor, value), rtol=1e-12)
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError):
            tf.function(attention, autograph=False)(query, key, value)


@pytest.mark.only("tf")
@pytest.mark.parametrize(
    ("dtype", "most"),
    [
        ("float32", 1e-5),
        pytest.param("float64", 1e-13, marks=pytest.mark.extended("edited packages")),
    ],  # the measured errors are 3.5e-6 and 2e-14
)
def test_tensorflow_compiles_each_copy_of_a_model_separately(dtype, most):
    """XLA compiles the float32 model."""
    found = [output(injected(bug, "tf"), dtype) for bug in (UNSCALED, SQUARED)]
    for actual, bug in zip(found, (UNSCALED, SQUARED), strict=True):
        truth = output(injected(bug, "numpy"))
        np.testing.assert_allclose(actual, truth, rtol=0.0, atol=most)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.only("tf")
def test_copy_is_saved_under_a_separate_name():
    import keras

    original = importlib.import_module("transformer_tf").Transformer
    for bug in (UNSCALED, SQUARED):
        package = edited_package("transformer_tf", of(bug, "tf"))
        name = keras.saving.get_registered_name(package.Transformer)
        assert name == f"{package.__name__}>Transformer"
        assert keras.saving.get_registered_object(name) is package.Transformer
    assert keras.saving.get_registered_name(original) == "transformer_tf>Transformer"
    assert keras.saving.get_registered_object("transformer_tf>Transformer") is original


@pytest.mark.only("torch")
def test_torch_compiles_each_copy_separately():
    import torch

    rng = np.random.default_rng(0)
    query, key, value = (torch.tensor(rng.normal(size=(2, 3, 5, 4))) for _ in range(3))
    for bug, scale in ((UNSCALED, 1.0), (SQUARED, 0.25)):
        attention = edited_package("transformer_torch", of(bug, "torch")).scaled_dot_product_attention
        compiled = torch.compile(attention, backend="eager", fullgraph=True)
        expected = (query @ key.mT * scale).softmax(-1) @ value
        shown = {}

        def tap(name, array, shown=shown):
            shown[name] = array
            return array

        torch.testing.assert_close(compiled(query, key, value, tap=tap), expected)
        torch.testing.assert_close(shown["scores"], query @ key.mT * scale)


@pytest.mark.only("jax")
@pytest.mark.parametrize("case", tiers.first_alone(["full/padded", "attention/padding"], "edited packages"))
@pytest.mark.parametrize("taps", tiers.first_alone([False, True], "edited packages"))
def test_injected_bug_is_not_masked_by_the_jax_compilation_cache(case, taps):
    """All models in a package share compiled functions, but different packages must not share them."""
    right = output(PORTS["jax"], taps=taps, case=case)
    for bug in (UNSCALED, SQUARED):
        wrong = output(injected(bug, "jax"), taps=taps, case=case)
        np.testing.assert_allclose(wrong, output(injected(bug, "numpy"), case=case), rtol=1e-9, atol=1e-9)
        assert np.abs(wrong - right).max() > 1e-3
    assert np.array_equal(output(PORTS["jax"], taps=taps, case=case), right)
