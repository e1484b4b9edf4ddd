"""The four packages correspond to each other: same files, names, order, parameters, shapes, and defaults.

Types and docstrings may differ between frameworks. The tests compare syntax trees and tokens without importing any
framework. One table lists each difference from the reference with its reason. An unused row makes a test fail.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = "reference_numpy"
PORTS = ("transformer_torch", "transformer_jax", "transformer_tf")
CALLS = ("__call__", "forward", "call")  # the method for the forward pass in Python and NNX, in torch, and in Keras

STATE = "modules store their training mode and random state; in NumPy, the caller passes a generator"
SHIPPED = "the framework provides this feature"
DERIVED = "the framework computes gradients with automatic differentiation"
KERAS = "Keras requires this interface"
DEVICE = "PyTorch creates a tensor on the device that the caller specifies"
COMPILED = "JAX always compiles a step, and NumPy never does"
MASKS = "Keras passes `mask` [batch, length] implicitly, and calls a mask of the scores `attention_mask`"
LOSSES = "Keras passes labels to a loss as floats, and its losses are classes"
MODES = "Keras passes the training mode from the outermost call to all inner layers"

# Each row contains the ports that differ, the file or definition, the difference, and the reason. A star is a wildcard.
# A row must match a difference in each of its ports.
ALLOWED = [
    ("torch jax tf", "", "lacks module functional", SHIPPED),
    ("torch jax tf", "", "lacks module backward*", DERIVED),
    ("torch jax tf", "*", "lacks definition *backward", DERIVED),
    ("torch jax tf", "fast*", "*", "each framework requires different optimizations"),
    ("torch jax tf", "__init__", "lacks definition exports.transformer_backward", DERIVED),
    (
        "torch jax tf",
        "search*",
        "lacks parameter use_cache",
        "only the reference decodes without a cache, to verify that caching changes nothing",
    ),
    (
        "torch jax tf",
        "search*",
        "adds parameter as_numpy",
        "a search can return the framework's own arrays, which stay on the device",
    ),
    ("torch jax tf", "*.__call__", "lacks parameter rng", STATE),
    ("torch jax tf", "transformer.*code", "lacks parameter rng", STATE),
    ("jax", "*.__init__", "adds parameter rngs", "NNX samples initial values in the constructor"),
    ("tf", "*.__init__", "adds parameter **kwargs", KERAS),
    ("tf", "transformer.Transformer.__call__", "adds parameter training", MODES),
    ("tf", "part", "adds definition Part.__call__", KERAS),
    ("tf", "part", "adds definition Part.__init_subclass__", "Keras models usually have a different signature"),
    ("tf", "part", "adds definition Part.load_own_variables", KERAS),
    ("tf", "transformer.*code", "adds parameter training", MODES),
    ("tf", "attention.MultiHeadAttention.__call__", "adds parameter training", MODES),
    ("tf", "encoder.EncoderStack.__call__", "adds parameter training", MODES),
    ("tf", "decoder.DecoderStack.__call__", "adds parameter training", MODES),
    ("tf", "*.__init__", "parameter dtype: *", "None selects Keras' global dtype policy"),
    ("tf", "attention.MultiHeadAttention.__call__", "* parameter *mask", MASKS),
    ("tf", "encoder.Encoder*.__call__", "*mask*", MASKS),
    ("tf", "transformer", "adds definition Encoder.compute_mask", MASKS),
    ("tf", "training", "adds definition CrossEntropy*", LOSSES),
    ("tf", "training.cross_entropy", "*", LOSSES),
    ("tf", "__init__", "adds definition exports.CrossEntropy", LOSSES),
    ("torch jax tf", "layers", "lacks definition RMSNorm.__call__", SHIPPED),
    ("jax", "*.make_*", "adds parameter rngs", "the random state is explicit in JAX"),
    ("tf", "*.make_*", "adds parameter **kwargs", KERAS),
    ("tf", "*.make_*", "parameter dtype: *", "None selects Keras' global dtype policy"),
    ("tf", "layers", "adds definition RMSNorm.gamma", "Keras uses different variable names"),
    ("tf", "layers", "lacks definition Linear.__init__", SHIPPED),
    ("tf", "layers.Linear", "*", SHIPPED),
    ("tf", "weights", "adds definition keras_path", "Keras uses different variable names"),
    ("tf", "weights", "adds definition check_variables", "Keras can replace variables, which a trace does not notice"),
    ("tf", "runtime", "adds definition to_policy", "Keras uses dtype policies in addition to dtypes"),
    ("torch", "*", "adds definition *.extra_repr", "PyTorch calls this method to print a module"),
    ("torch jax tf", "part", "lacks definition Part.__repr__", "the framework already prints its modules"),
    ("torch jax tf", "runtime", "lacks definition check_rng", STATE),
    ("torch", "masks.causal_mask", "adds parameter device", DEVICE),
    ("torch", "runtime.to_*", "adds parameter device", DEVICE),
    ("torch jax", "part", "adds definition Part.device", "the device is derived from the parameters"),
    ("torch jax tf", "runtime", "adds definition to_device", "NumPy has no devices"),
    (
        "jax tf",
        "runtime",
        "adds definition quick_compilation",
        "compiling with all of XLA's optimizations takes longer than a check",
    ),
    (
        "jax",
        "runtime",
        "adds definition compiler_options",
        "code that compiles a model can check for quick_compilation",
    ),
    ("tf", "runtime", "adds definition compiles_quickly", "code that compiles a model can check for quick_compilation"),
    (
        "jax tf",
        "",
        "adds module compilation",
        "compiled functions are cached per model structure (JAX) or per model (TensorFlow)",
    ),
    (
        "jax tf",
        "search",
        "adds definition FastGreedy",
        "argmax over the whole vocabulary is slower than the maximum of each block",
    ),
    (
        "jax tf",
        "runtime",
        "adds definition as_placed",
        "the device of a computation depends on the context, not only on its arguments",
    ),
    (
        "tf",
        "runtime",
        "adds definition placed",
        "trainers and searches create additional tensors on the model's device",
    ),
    ("torch", "runtime", "adds definition dtype_name", "torch.dtype has no attribute for its name"),
    ("torch jax tf", "layers", "lacks definition Dropout.*", SHIPPED),
    ("torch jax tf", "layers", "lacks definition Linear.__call__", SHIPPED),
    ("torch jax", "layers", "order: Dropout for Linear", "names that are re-exported from the framework come first"),
    ("torch jax tf", "layers", "adds definition masked_softmax", "the reference defines it in functional.py"),
    ("torch", "layers", "lacks definition Linear.__init__", "a function returns a torch.nn layer"),
    ("torch", "layers.Linear", "*", "a function returns a torch.nn layer"),
    ("torch", "layers", "adds definition initialize", "PyTorch's layer has different initial values"),
    (
        "torch",
        "embedding",
        "lacks definition OutputProjection.__*",
        "a function returns a torch.nn layer if the embeddings are untied",
    ),
    ("torch", "embedding.OutputProjection", "*", "a function returns a torch.nn layer if the embeddings are untied"),
    (
        "torch",
        "embedding",
        "adds definition TiedProjection*",
        "tools for linear layers must not change a tied embedding matrix",
    ),
    ("torch", "*", "adds definition *.reset_parameters", "PyTorch initializes parameters in this method"),
    ("torch", "embedding", "adds definition TokenEmbedding.embed_scale", "peft looks up the multiplier by this name"),
    ("torch", "training", "adds definition Trainer.model", "the optimizer contains the parameters of only one model"),
    ("torch", "part", "adds definition Part.target_embedding", "a tied embedding matrix is registered only once"),
    ("torch", "part", "adds definition Part.dtype", "PyTorch models usually have this attribute"),
    ("torch", "part.Part.__init__", "adds parameter device", "every PyTorch layer has this parameter"),
    ("torch", "runtime", "adds definition to_dtype", "dtypes are torch.dtype objects or names"),
    ("torch", "weights", "adds definition check_complete", "adapters can add parameters without a canonical name"),
    ("torch", "weights", "adds definition check_tie", "a user can replace the embedding of a tied projection"),
    ("torch", "transformer", "adds definition transformer_of", "PyTorch tools wrap a model in another module"),
    (
        "jax tf",
        "decoder",
        "adds definition DecoderCache.length",
        "in NumPy and PyTorch, the length is a field, which all layers share",
    ),
    (
        "torch",
        "attention.KeyValueCache.__init__",
        "adds parameter length",
        "all layers share the length of DecoderCache",
    ),
    ("jax", "layers", "lacks definition Linear.__init__", "a function returns a Flax layer"),
    ("jax", "layers.Linear", "*", "a function returns a Flax layer"),
    (
        "jax",
        "embedding",
        "lacks definition OutputProjection.__*",
        "a function returns a Flax layer if the embeddings are untied",
    ),
    ("jax", "embedding.OutputProjection", "*", "a function returns a Flax layer if the embeddings are untied"),
    (
        "jax",
        "embedding",
        "adds definition TiedProjection*",
        "the tied output uses the embedding matrix instead of a linear layer",
    ),
    ("jax", "part.Part.from_*", "adds parameter rngs", "the random state of dropout is explicit in JAX"),
    ("torch", "transformer", "lacks definition check_model", "transformer_of makes this check"),
    ("tf", "transformer", "lacks definition check_model", "check_variables makes this check"),
    ("jax", "runtime", "adds definition as_array", "the values of a traced array can't be read"),
    ("jax", "weights", "adds definition parameter_of", "Flax names an embedding matrix differently"),
    ("jax", "weights", "adds definition check_layers", "adapters can replace layers"),
    ("jax", "weights", "adds definition one_dtype", "the parameters of an nnx.Module can be cast one by one"),
    ("jax", "weights", "adds definition check_loaded", "loading skips the initialization, also of a subclass's layers"),
    ("jax", "runtime", "adds definition check_float64", "JAX replaces float64 with float32 unless x64 is on"),
    ("jax", "runtime", "adds definition to_dtype", "dtypes are JAX dtypes or names"),
    ("jax", "runtime", "adds definition to_rows", "the values of a traced array can't be read"),
    ("jax", "runtime", "adds definition to_rngs", "the random state is explicit in JAX"),
    ("jax", "runtime", "adds definition to_numpy", "an array can be sharded over multiple processes"),
    ("tf", "layers", "adds definition gelu*", "TensorFlow's GELU is inaccurate for large negative inputs"),
    ("tf", "", "adds module block", KERAS),
    ("torch tf", "training.Trainer.__init__", "adds parameter compile", COMPILED),
    (
        "jax tf",
        "attention",
        "lacks definition KeyValueCache.__init__",
        "the cache is a dataclass, which both frameworks can flatten",
    ),
    ("tf", "attention", "adds definition Nested*", "TensorFlow flattens a dataclass with these methods"),
    ("jax tf", "parallel", "adds definition check_same", "multiple processes could receive different arguments"),
    (
        "torch tf",
        "parallel",
        "lacks definition divide",
        "each process computes only its own shard; NumPy computes all shards",
    ),
    ("jax", "parallel.divide", "*", "each process computes only its own shard; NumPy computes all shards"),
    *(
        (
            "jax",
            "parallel",
            f"adds definition {name}",
            "pure functions receive and return arrays that are placed on a mesh",
        )
        for name in ("shardings", "place", "constrain")
    ),
    (
        "tf",
        "training.Trainer._gradient",
        "adds parameter random_bits",
        "dropout receives random bits instead of a generator",
    ),
    *(
        (
            "tf",
            "parallel",
            f"adds definition {name}",
            "a distribution strategy traces the step and runs it on each device",
        )
        for name in ("check_copies", "spread_rows", "random_bits", "summed", "first_alone")
    ),
    (
        "tf",
        "layers",
        "adds definition own_rows",
        "Keras' dropout samples its own masks, so a context selects the rows of a shard",
    ),
    ("tf", "layers.Dropout.__call__", "*", KERAS),
    ("tf", "optimizer.global_norm", "*", SHIPPED),
    ("tf", "optimizer", "adds definition Adam.start", "frozen parameters have no moments"),
    ("tf", "training", "adds definition Trainer.start", "frozen parameters have no moments"),
    (
        "tf",
        "training",
        "adds definition Trainer.__reduce__",
        "a copied optimizer would update variables of a different model",
    ),
    (
        "torch",
        "optimizer.Adam.update",
        "*",
        "PyTorch's optimizers read the gradients from the parameters and count the steps",
    ),
    ("torch", "optimizer", "adds definition Adam.moments", "frozen parameters have no moments"),
    ("jax", "optimizer", "lacks definition Adam.__init__", "the optimizer is a dataclass, which JAX can flatten"),
    ("jax", "optimizer.Adam*", "*", "pure functions return the new weights and moments"),
    ("jax", "optimizer", "adds definition Arrays", "a type alias for the arguments and results of the pure functions"),
    ("tf", "runtime", "adds definition placed", "the other frameworks compute on the device of their arrays"),
    ("tf", "weights", "adds definition variables", "Keras variables have a flag for whether they are trainable"),
    ("jax", "weights", "lacks definition parameters", "check_layers makes the same checks"),
    ("torch jax tf", "weights", "lacks definition layers", "the framework lists the layers of a model"),
    ("torch jax tf", "weights", "lacks definition check_writable", "only NumPy arrays can be read-only"),
    ("torch jax tf", "optimizer", "lacks definition Adam.check", "only NumPy arrays can be read-only"),
    ("torch", "weights", "adds definition computed_with", "PyTorch can compute a weight from other parameters"),
    (
        "torch",
        "layers",
        "adds definition inference",
        "PyTorch modules store their training mode, which must be restored",
    ),
    ("torch jax tf", "", "adds module parallel_checkpoint", "a sharded directory uses the framework's own format"),
    (
        "torch",
        "",
        "adds module onednn",
        "PyTorch can use two matmul libraries, one of which takes twice as long on some processors",
    ),
    ("torch", "weights", "adds definition torch_path", "PyTorch uses different parameter names"),
    ("torch", "weights", "adds definition is_divided", "a parameter can be sharded over multiple processes"),
    ("torch", "weights", "adds definition gathered", "a parameter can be sharded over multiple processes"),
    ("torch", "weights", "adds definition local_part", "a parameter can be sharded over multiple processes"),
    ("torch", "optimizer", "adds definition by_mesh", "a fused kernel accepts tensors of only one mesh"),
    (
        "torch",
        "parallel",
        "adds definition BatchShard*",
        "each process computes only its own shard; NumPy computes all shards",
    ),
    (
        "torch",
        "layers",
        "adds definition *OwnDropout*",
        "PyTorch's dropout samples masks only for the rows that it receives",
    ),
    ("torch", "weights", "adds definition copy_*", "only PyTorch transposes weights, moments and gradients"),
]


def read(package: str) -> dict[str, str]:
    """Return the text of every module in a package."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / package).glob("*.py"))}


@cache
def describe(text: str) -> dict[str, dict]:
    """Return everything that is compared in a module, by path and in order."""
    tree = ast.parse(text)
    comments = shape_comments(text)
    found: dict[str, dict] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = describe_function(node, comments)
        elif isinstance(node, ast.ClassDef):
            found[node.name] = {}
            methods = [child for child in node.body if isinstance(child, ast.FunctionDef)]
            has_call = any(method.name == "__call__" for method in methods)
            for method in methods:
                name = "__call__" if method.name in CALLS and not has_call else method.name
                found[f"{node.name}.{name}"] = describe_function(method, comments)
        elif isinstance(node, ast.Assign) and node.targets[0].id == "__all__":
            found |= {f"exports.{name}": {} for name in ast.literal_eval(node.value)}
        elif isinstance(node, ast.Assign) and not node.targets[0].id.isupper():
            found[node.targets[0].id] = {}  # for example, Dropout = nn.Dropout
    return found


def describe_function(node: ast.FunctionDef, comments: dict[int, str]) -> dict:
    """Return the parameters (shapes and defaults), the result's shape, and the shape comments of a function."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = dict(zip(reversed(positional), reversed(arguments.defaults), strict=False))
    defaults |= dict(zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True))
    parameters = {}
    for argument in (*positional, *arguments.kwonlyargs):
        default = f" = {ast.unparse(defaults[argument])}" if defaults.get(argument) else ""
        keyword = "keyword " if argument in arguments.kwonlyargs else ""
        parameters[argument.arg] = keyword + shape(argument.annotation) + default
    for star, argument in (("*", arguments.vararg), ("**", arguments.kwarg)):
        if argument:
            parameters[star + argument.arg] = shape(argument.annotation)
    return {
        "parameters": parameters,
        "result": shape(node.returns),
        "shapes": [comments[line] for line in range(node.lineno, node.end_lineno + 1) if line in comments],
    }


def shape(annotation: ast.expr | None) -> str:
    """Return the shapes in an annotation, such as ``B H L d_k`` for ``Float[Tensor, "B H L d_k"]``."""
    nodes = ast.walk(annotation) if annotation else ()
    return ", ".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def shape_comments(text: str) -> dict[int, str]:
    """Return the trailing comments that specify a shape, such as [B, H, L, d_k], by line."""
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and (match := re.match(r"# (\[[^]]+\])", token.string)):
            found[token.start[0]] = match[1]
    return found


def differences(reference: dict[str, str], port: dict[str, str]):
    """Yield the location and kind of each difference between a port and the reference, given their texts by module."""
    yield from compare_names("", "module", list(reference), list(port))
    for module in reference.keys() & port.keys():
        ours, theirs = (describe(side[module]) for side in (reference, port))
        yield from compare_names(module, "definition", public(ours), public(theirs))
        for path in ours.keys() & theirs.keys():
            place = f"{module}.{path}".rstrip(".")
            yield from compare(place, ours[path], theirs[path])


def public(paths):
    return [path for path in paths if path and not re.search(r"(^|\.)_[^_]", path)]


def compare_names(place: str, kind: str, ours: list[str], theirs: list[str]):
    """Yield names that are missing on one side, and the first common name with a different position."""
    yield from ((place, f"lacks {kind} {name}") for name in ours if name not in theirs)
    yield from ((place, f"adds {kind} {name}") for name in theirs if name not in ours)
    common = zip([name for name in ours if name in theirs], [name for name in theirs if name in ours], strict=True)
    yield from [(place, f"order: {second} for {first}") for first, second in common if first != second][:1]


def compare(place: str, ours: dict, theirs: dict):
    """Yield the differences between a definition and its counterpart."""
    mine, other = ours.get("parameters", {}), theirs.get("parameters", {})
    yield from compare_names(place, "parameter", list(mine), list(other))
    for name in mine.keys() & other.keys():
        if mine[name] != other[name]:
            yield place, f"parameter {name}: {other[name]} for {mine[name]}"
    for aspect in ("result", "shapes"):
        if ours.get(aspect) != theirs.get(aspect):
            yield place, f"{aspect}: {theirs.get(aspect)} for {ours.get(aspect)}"


def allowed(port: str, place: str, what: str) -> list[int]:
    """Return the indices of the table rows that allow a difference."""
    name = port.removeprefix("transformer_")
    return [
        row
        for row, (ports, where, how, _) in enumerate(ALLOWED)
        if name in ports.split() and fnmatchcase(place, where) and fnmatchcase(what, how)
    ]


@pytest.mark.parametrize("package", PORTS)
def test_port_differs_only_as_allowed(package):
    found = differences(read(REFERENCE), read(package))
    assert [f"{place}: {what}" for place, what in found if not allowed(package, place, what)] == []


def test_every_allowance_is_used():
    needed = {(row, port) for row, (ports, *_) in enumerate(ALLOWED) for port in ports.split()}
    for port in PORTS:
        for place, what in differences(read(REFERENCE), read(port)):
            needed -= {(row, port.removeprefix("transformer_")) for row in allowed(port, place, what)}
    assert [(port, *ALLOWED[row][1:3]) for row, port in sorted(needed)] == []


CHANGES = {
    "shape comment": ("attention", "# [B, H, L, M]\n    if", "# [B, H, M, L]\n    if", "shapes"),
    "shape in a signature": ("attention", '"B H M d_v"', '"B H M d_k"', "parameter value"),
    "shape of a result": ("masks", '"T T"', '"L L"', "result"),
    "name of a parameter": ("embedding", "layout: str =", "order: str =", "lacks parameter layout"),
    "default": ("embedding", 'timescale: str = "m"', 'timescale: str = "m_minus_1"', "parameter timescale"),
    "order of parameters": ("masks", "ids: Int", "pad_id: int, ids: Int", "order"),
    "keyword-only": ("masks", "(length: int", "(*, length: int", "parameter length"),
    "name of a function": ("attention", "def merge_heads", "def join_heads", "lacks definition merge_heads"),
    "order of functions": ("attention", "def split_heads", "def merge_heads(x): ...\ndef split_heads", "order"),
    "additional function": ("masks", "def causal_mask", "def window_mask(): ...\ndef causal_mask", "adds definition"),
    "missing export": ("__init__", '    "Decoder",\n', "", "lacks definition exports.Decoder"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("package", PORTS)
def test_change_in_a_single_port_is_detected(package, change):
    module, old, new, seen = CHANGES[change]
    changed = read(package)
    assert old in changed[module]
    changed[module] = changed[module].replace(old, new, 1)
    found = [
        what
        for place, what in {*differences(read(REFERENCE), changed)} - {*differences(read(REFERENCE), read(package))}
        if place.startswith(module) and not allowed(package, place, what)
    ]
    assert any(what.startswith(seen) for what in found), found


def test_missing_and_additional_modules_are_detected():
    reference, port = read(REFERENCE), read(PORTS[0])
    port["cache"] = port.pop("masks")
    assert {("", "lacks module masks"), ("", "adds module cache")} <= set(differences(reference, port))
