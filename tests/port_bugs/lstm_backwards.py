"""A tagger whose Keras LSTM reads sentences backwards; the ONNX graph returned its states in the opposite order.

Source: onnx/keras-onnx#523: ``go_backwards`` returns the last token first, but a reverse ONNX LSTM returns the first
token first, so that the converted graph must reverse the result.
"""

from __future__ import annotations

import keras
import numpy as np
import onnxruntime
from onnx import numpy_helper, parser

from transformer_parity.pair import Implementation

SOURCE = "onnx/keras-onnx#523"
VERIFIED = True
KIND = "bug"
NAME = ""
BLOCKS = ()
STAGE = "forward"

VOCABULARY, DIM, HIDDEN = 19, 5, 7


class Original(Implementation):
    def init_weights(self, seed):
        rng = np.random.default_rng(seed)
        shapes = {
            "embedding/embeddings": (VOCABULARY, DIM),
            "lstm/lstm_cell/kernel": (DIM, 4 * HIDDEN),
            "lstm/lstm_cell/recurrent_kernel": (HIDDEN, 4 * HIDDEN),
            "lstm/lstm_cell/bias": (4 * HIDDEN,),
            "dense/kernel": (HIDDEN, 1),
            "dense/bias": (1,),
        }
        weights = {name: rng.normal(0, 0.5, shape).astype(np.float32) for name, shape in shapes.items()}
        weights["dense/bias"][:] = 0
        return weights

    def inputs(self, seed):
        tokens = np.random.default_rng(seed).integers(1, VOCABULARY, (3, 9))
        tokens[np.arange(9) >= np.array([9, 5, 7])[:, None]] = 0
        return {"tokens": tokens}

    def load(self, weights, dtype):
        self.embedding = keras.layers.Embedding(VOCABULARY, DIM, dtype=dtype)
        self.lstm = keras.layers.LSTM(HIDDEN, go_backwards=True, return_sequences=True, dtype=dtype)
        self.dense = keras.layers.Dense(1, activation="sigmoid", dtype=dtype)
        for layer, shape in ((self.embedding, (None, 9)), (self.lstm, (None, 9, DIM)), (self.dense, (None, 9, HIDDEN))):
            layer.build(shape)
        self.embedding.set_weights([weights["embedding/embeddings"]])
        self.lstm.set_weights([weights[f"lstm/lstm_cell/{name}"] for name in ("kernel", "recurrent_kernel", "bias")])
        self.dense.set_weights([weights["dense/kernel"], weights["dense/bias"]])

    def forward(self, inputs, tap):
        x = tap("embedding", self.embedding(inputs["tokens"]))
        x = tap("lstm", self.lstm(x))
        return {"tags": keras.ops.convert_to_numpy(tap("dense", self.dense(x)))}


class Port(Implementation):
    dtypes = ("float32",)

    behind_lstm = "hidden = Transpose<perm = [1, 0, 2]>(states)"

    def load(self, weights, dtype):
        def iofc(name):
            i, f, c, o = np.split(weights[f"lstm/lstm_cell/{name}"], 4, -1)
            return np.concatenate([i, o, f, c], -1).T[None]

        graph = f"""<ir_version: 10, opset_import: ["": 17]>
            tagger (int64[batch, length] tokens) => (float[batch, length, 1] tags) {{
                embedded = Gather(table, tokens)
                time_major = Transpose<perm = [1, 0, 2]>(embedded)
                y = LSTM<hidden_size = {HIDDEN}, direction = "reverse">(time_major, W, R, B)
                states = Squeeze(y, one)
                {self.behind_lstm}
                product = MatMul(hidden, kernel)
                scores = Add(product, bias)
                tags = Sigmoid(scores)
            }}"""
        constants = {
            "table": weights["embedding/embeddings"],
            "W": iofc("kernel"),
            "R": iofc("recurrent_kernel"),
            "B": np.concatenate([iofc("bias"), 0 * iofc("bias")], -1),
            "kernel": weights["dense/kernel"],
            "bias": weights["dense/bias"],
            "one": np.array([1]),
        }
        model = parser.parse_model(graph)
        constants = {name: np.ascontiguousarray(value) for name, value in constants.items()}
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])

    def forward(self, inputs, tap):
        return {"tags": self.session.run(["tags"], {"tokens": inputs["tokens"]})[0]}


class Fixed(Port):
    behind_lstm = """
        first = Constant<value_ints = [0]>()
        last = Constant<value_ints = [-1]>()
        end = Constant<value_ints = [-1000]>()
        backwards = Slice(states, last, end, first, last)
        hidden = Transpose<perm = [1, 0, 2]>(backwards)"""
