"""A super-resolution network for RGB images, exported to ONNX, whose upscaling mixed up the channels.

Source: onnx/onnx#2163: ``DepthToSpace`` got the mode CRD, which is the order of PyTorch's pixel shuffle; the default,
DCR, is not.
"""

from __future__ import annotations

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import nn

from transformer_parity.pair import Implementation

SOURCE = "onnx/onnx#2163"
VERIFIED = True
KIND = "bug"
NAME = "transposed"
BLOCKS = ()
STAGE = "forward"

SCALE = 2
SHAPES = {"conv1": (7, 3, 5, 5), "conv2": (6, 7, 3, 3), "conv3": (3 * SCALE**2, 6, 3, 3)}


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        weights = {f"{n}.weight": rng.normal(0, np.prod(s[1:]) ** -0.5, s) for n, s in SHAPES.items()}
        weights |= {f"{name}.bias": np.zeros(shape[0]) for name, shape in SHAPES.items()}
        return {name: value.astype(np.float32) for name, value in weights.items()}

    def inputs(self, seed):
        return {"image": np.random.default_rng(seed).random((2, 3, 5, 7)).astype(np.float32)}

    def load(self, weights, dtype):
        self.model = nn.ModuleDict({n: nn.Conv2d(s[1], s[0], s[2], padding="same") for n, s in SHAPES.items()})
        self.model.to(getattr(torch, dtype))
        self.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})

    @torch.no_grad()
    def forward(self, inputs, tap):
        x = torch.from_numpy(inputs["image"])
        for name in ("conv1", "conv2"):
            x = tap(name, self.model[name](x).relu())
        x = tap("conv3", self.model["conv3"](x))
        return {"upscaled": tap("pixel_shuffle", nn.functional.pixel_shuffle(x, SCALE)).numpy()}


class Port(Implementation):
    dtypes = ("float32",)
    mode = "DCR"

    def load(self, weights, dtype):
        nodes, x = [], "image"
        for name, shape in SHAPES.items():
            parameters, margin = [f"{name}.weight", f"{name}.bias"], shape[-1] // 2
            nodes.append(helper.make_node("Conv", [x, *parameters], [name], pads=[margin] * 4))
            x = name
            if name != "conv3":
                x = f"{name}/Relu"
                nodes.append(helper.make_node("Relu", [name], [x]))
        nodes.append(helper.make_node("DepthToSpace", [x], ["upscaled"], blocksize=SCALE, mode=self.mode))
        image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, "height", "width"])
        upscaled = helper.make_tensor_value_info("upscaled", TensorProto.FLOAT, None)
        initializers = [numpy_helper.from_array(value, name) for name, value in weights.items()]
        graph = helper.make_graph(nodes, "super_resolution", [image], [upscaled], initializers)
        model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 17)])
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def forward(self, inputs, tap):
        return {"upscaled": self.session.run(["upscaled"], {"image": inputs["image"]})[0]}


class Fixed(Port):
    mode = "CRD"
