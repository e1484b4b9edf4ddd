"""Captures of ONNX models: tensors in the order of the nodes, and computed values of replaced tensors."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from test_pair_capture import Replay, X, torch_model

from transformer_parity.pair import capture

pytestmark = pytest.mark.needs(importlib.util.find_spec("onnxruntime"), "onnxruntime")


def onnx_model():
    from onnx import TensorProto, helper, numpy_helper

    nodes = [
        helper.make_node("Constant", [], ["two"], value=numpy_helper.from_array(np.float32(2))),
        helper.make_node("Neg", ["weight"], ["negated"]),
        helper.make_node("Mul", ["negated", "two"], ["kernel"]),
        helper.make_node("MatMul", ["x", "kernel"], ["/layers.0/MatMul_output_0"]),
        helper.make_node("Greater", ["/layers.0/MatMul_output_0", "two"], ["is_large"]),
        helper.make_node("Where", ["is_large", "/layers.0/MatMul_output_0", "x"], ["chosen"]),
        helper.make_node("Shape", ["chosen"], ["shape"]),
        helper.make_node("SequenceConstruct", ["chosen", "x"], ["sequence"]),
        helper.make_node("SequenceAt", ["sequence", "zero"], ["hidden"]),
        helper.make_node("Reshape", ["hidden", "shape"], ["reshaped"]),
        helper.make_node("Mul", ["reshaped", "two"], ["y"]),
    ]
    weights = {"weight": np.random.default_rng(0).normal(size=(3, 3)).astype("float32"), "zero": np.int64(0)}
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 5, 3])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 5, 3]) for name in ("y", "hidden")],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), weights["weight"]


TENSORS = ["/layers.0/MatMul_output_0", "chosen", "shape", "hidden", "reshaped"]


def test_tensors_are_shown_in_order(tmp_path):
    import onnx

    model, weight = onnx_model()
    onnx.save(model, tmp_path / "model.onnx")
    for source in (model, tmp_path / "model.onnx", str(tmp_path / "model.onnx")):
        seen = Replay()
        outputs = capture.onnx(source, {"x": X}, seen)
        assert [*seen] == TENSORS
        np.testing.assert_allclose(seen[TENSORS[0]], X @ (-2 * weight), rtol=1e-4, atol=1e-5)
        assert np.array_equal(outputs["y"], 2 * seen["chosen"])
        assert [*outputs] == ["y", "hidden"]
    assert len(model.graph.output) == 2


@pytest.mark.parametrize("is_known", [True, False])
def test_tensors_are_replaced_while_computed_values_are_shown(monkeypatch, is_known):
    import onnxruntime

    model, weight = onnx_model()
    sessions, session = [], onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **kw: sessions.append(1) or session(*args, **kw))
    replay = Replay({TENSORS[0]: np.full((2, 5, 3), 3.0), "hidden": np.full((2, 5, 3), 7.0)})
    outputs = capture.onnx(model, {"x": X}, replay if is_known else lambda name, value: replay(name, value))
    np.testing.assert_allclose(replay[TENSORS[0]], X @ (-2 * weight), rtol=1e-4, atol=1e-5)
    assert np.unique(replay["chosen"]) == np.unique(replay["hidden"]) == 3
    assert np.unique(replay["reshaped"]) == np.unique(outputs["hidden"]) == 7
    assert np.unique(outputs["y"]) == 14
    assert outputs["y"].dtype == "float32"
    assert len(sessions) == (2 if is_known else 3)


def test_models_without_replacements_use_one_session(monkeypatch):
    import onnxruntime

    sessions, session = [], onnxruntime.InferenceSession
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda *args, **kw: sessions.append(1) or session(*args, **kw))
    capture.onnx(onnx_model()[0], {"x": X}, Replay({"other": X}))
    assert len(sessions) == 1


@pytest.mark.only("torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_models_exported_by_torch_are_shown(tmp_path):
    import torch

    model = torch_model()[0]
    model.forward = lambda x: model.last(model.blocks[0](model.first(x))[0])
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (torch.tensor(X),), path, input_names=["x"], dynamo=False)
    seen, expected = Replay(), Replay()
    (output,) = capture.onnx(path, {"x": X}, seen).values()
    with capture.torch(model, expected):
        model(torch.tensor(X))
    np.testing.assert_allclose(output, expected["last"], atol=1e-5)
    added = next(value for name, value in seen.items() if name.startswith("/blocks.0/Add"))
    np.testing.assert_allclose(added, expected["blocks.0.0"], atol=1e-5)
