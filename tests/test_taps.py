"""In every backend, the model continues with the value that a tap returns."""

import re
from pathlib import Path

import numpy as np
import pytest
from conftest import PACKAGES
from test_backward import assert_gradient

import reference_numpy as ref
from transformer_parity.engine.tensors import relative_error
from transformer_parity.transformer.cases.case import tiny
from transformer_parity.transformer.cases.inputs import hard_weights, padded_ids


@pytest.mark.extended("taps", "tf")
def test_every_tap_can_be_replaced(port):
    config = tiny(num_encoder_layers=1, num_decoder_layers=1)
    weights = hard_weights(config)
    rng = np.random.default_rng(0)
    ids = padded_ids(rng, 37, config.pad_id, [5, 3], 5), padded_ids(rng, 37, config.pad_id, [4, 2], 4)
    reference = ref.Transformer.from_weights(config, weights, "float64")
    model = port.package.Transformer.from_weights(config, weights, "float64")
    plain = ref.Recorder()
    logits = reference(*ids, tap=plain)
    for name, value in plain.items():
        other = rng.normal(size=value.shape)
        expected = reference(*ids, tap=ref.Recorder("none", replace={name: other}))
        actual = model(*ids, tap=ref.Recorder("none", replace={name: port.from_numpy(other)}))
        assert relative_error(port.to_numpy(actual), expected) < 1e-12, name
        # The only values that don't affect the logits are masked scores and the keys and values of padding.
        assert relative_error(logits, expected) > 1e-6, name


@pytest.mark.extended("taps", "jax", "tf")
def test_recording_taps_does_not_change_the_logits(backend):
    config = tiny()
    model = backend.package.Transformer.from_weights(config, hard_weights(config), "float64")
    ids = [[5, 6, 7]], [[1, 8]]
    seen, some = ref.Recorder(), ref.Recorder("decoder.layers.*.output", "**.weights")
    logits = [backend.to_numpy(model(*ids, tap=tap)) for tap in (seen, some)]
    assert np.array_equal(*logits)
    assert {name: tuple(value.shape) for name, value in seen.items()} == ref.tap_shapes(config, 1, 3, 2)
    layers = [f"decoder.layers.{i}.output" for i in range(2)]
    assert list(some) == [name for name in seen if name.endswith(".weights") or name in layers]
    assert len(some) == 2 + 3 * 2


def test_missing_tap_error_lists_the_stored_values():
    seen = ref.Recorder("**.weights")
    with pytest.raises(KeyError, match=r"^'layers.0.wieghts is not one of the 0 recorded taps'$"):
        seen["layers.0.wieghts"]
    for name in ("layers.0.weights", "layers.1.weights", "layers.0.scores"):
        seen(name, 1.0)
    message = "layers.0.wieghts is not one of the 2 recorded taps: layers.0.weights, layers.1.weights"
    with pytest.raises(KeyError, match=f"^'{message}'$"):
        seen["layers.0.wieghts"]
    assert seen.get("layers.0.scores") is None


def test_layers_do_not_bind_tap_prefixes():
    """Calls of sub-modules contain the tap prefix, because a separate variable would repeat the sub-module's name."""
    root = Path(ref.__file__).parent.parent
    layers = [path for package in PACKAGES.values() for path in (root / package).glob("*.py")]
    assert len(layers) > 40
    assert [path for path in layers if re.search(r"(?<!=)= within\(", path.read_text(encoding="utf-8"))] == []


class Auxiliary(ref.Recorder):
    """Records every decoder layer's output and replaces the logits with the sum of these outputs."""

    def __call__(self, name, value):
        value = super().__call__(name, value)
        return sum(self.values()) if name == "logits" else value


def test_loss_on_every_decoder_layer_has_the_expected_gradient(port):
    """The gradient reaches the embedding and matches finite differences of the reference."""
    config = tiny(num_encoder_layers=1, activation="gelu")
    weights = {name: array.astype("float64") for name, array in hard_weights(config).items()}
    rng = np.random.default_rng(0)
    ids = padded_ids(rng, 37, config.pad_id, [5, 3], 5), padded_ids(rng, 37, config.pad_id, [4, 2], 4)

    def loss(displacement):
        moved = {**weights, "source_embedding.table": weights["source_embedding.table"] + displacement}
        model = ref.Transformer.from_weights(config, moved, "float64")
        return np.square(model(*ids, tap=Auxiliary("decoder.layers.*.output"))).sum()

    model = port.package.Transformer.from_weights(config, weights, "float64")
    tap = Auxiliary("decoder.layers.*.output")
    found = port.gradients(model, *ids, tap=tap)
    assert list(tap) == ["decoder.layers.0.output", "decoder.layers.1.output"]
    assert_gradient(loss, next(gradient for gradient in found if gradient.shape == (37, config.d_model)))
