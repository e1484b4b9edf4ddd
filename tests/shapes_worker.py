"""Run one package with runtime checks of every annotation. ``test_shapes`` starts this script in a separate process.

Each package requires its own process, because beartype caches unions by their text, and the classes of both torch and
TensorFlow are called ``Tensor``. Prints one line per problem, and nothing if there is no problem.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import typing

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import jaxtyping

BACKENDS = {"numpy": "reference_numpy", "torch": "transformer_torch", "jax": "transformer_jax", "tf": "transformer_tf"}
FRAMEWORKS = {"numpy": "numpy", "torch": "torch", "jax": "flax.nnx", "tf": "keras"}
T5 = {"preset": "t5_v1_1"}
CONVENTIONS = (
    {},
    {"norm_order": "pre", "final_norm": True, "layer_norm_kind": "annotated", "activation": "gelu"},
    {"position_layout": "split", "activation": "gelu_tanh", "tie_embeddings": "none", "output_bias": True},
    {"position_encoding": "learned", "activation": "swish"},
    T5,
)


def checked_import(name: str):
    """Import a package with every annotation checked on each call."""
    importlib.import_module(FRAMEWORKS[name])  # imported before the hook, so that only our annotations are checked
    # At run time, the packages normally drop the shapes. Here, the checker needs them.
    sys.modules["transformer_spec.shapes"] = jaxtyping
    typing.Self = typing.Any  # beartype supports Self only if the whole class is decorated, not in individual methods
    with jaxtyping.install_import_hook(["transformer_spec", BACKENDS[name]], "beartype.beartype"):
        package = importlib.import_module(BACKENDS[name])
    if name == "tf":  # Keras reads the signature of a constructor, which the checker changes
        for cls in definitions(package, inspect.isclass):
            if "__init__" in vars(cls):
                cls.__init__ = inspect.unwrap(cls.__init__)
    return package


def definitions(package, kind):
    """Yield the classes or functions that the modules of a package define."""
    for module in list(sys.modules.values()):
        if module.__name__.startswith(f"{package.__name__}."):
            for value in vars(module).values():
                if kind(value) and value.__module__ == module.__name__:
                    yield value


def annotated(package):
    """Yield the name and code object of every function and method whose annotations include a shape."""
    functions = [*definitions(package, inspect.isfunction)]
    for cls in definitions(package, inspect.isclass):
        functions += [value for value in vars(cls).values() if inspect.isfunction(value)]
    for function in map(inspect.unwrap, functions):
        if any(str(note).startswith(("Bool[", "Float[", "Int[")) for note in function.__annotations__.values()):
            yield f"{function.__module__}.{function.__qualname__}", function.__code__


def run(backend, build, record):
    """Call every component of a package with every convention, with and without taps."""
    import numpy as np

    from transformer_spec import SearchRules, TrainingConfig

    package, array = backend.package, backend.from_numpy
    source, target = np.array([[5, 6, 7, 36], [8, 9, 0, 0]]), np.array([[1, 3, 4], [1, 5, 0]])
    written_out = [{**overrides, "fast": False} for overrides in CONVENTIONS] if backend.name == "numpy" else []
    for overrides in [*CONVENTIONS, *written_out]:
        model = build(**overrides)
        masks = array(source != 0), array(target != 0)
        for options in ({}, {"tap": record()}):
            model(array(source), array(target), **options)
        memory = model.encode(array(source), masks[0])
        model.decode(array(target), memory, array(source), masks[1], masks[0])
        train = {"numpy": {"rng": np.random.default_rng(0)}, "tf": {"training": True}}.get(backend.name, {})
        if not train:
            model.train()
        model(array(source), array(target), **train)
        if backend.name == "numpy" or overrides in (CONVENTIONS[0], T5):
            package.gradients(model, source, target, target)
            if backend.name == "tf":  # in a graph, lengths are tensors, which don't match int
                sys.modules["tensorflow"].config.run_functions_eagerly(True)
            trainer = package.Trainer(model, TrainingConfig())
            trainer.train_step(source, target, target)
            trainer.evaluate(source, target, target)
            package.greedy_search(model, source, max_length=3)
            for rules in (SearchRules(), SearchRules(pool="first")):
                package.beam_search(model, source, 3, max_length=3, rules=rules)
            package.sample(model, source, 2, max_length=3, prefix_ids=[[3], [4]])
            package.score(model, source, target)
            cache = model.init_cache(array(source), 4, beam_size=2)
            for target_ids in (np.array([1, 1, 1, 1]), np.array([3, 4, 0, 5]), np.array([[3, 4]] * 4)):
                _, cache = model.decode_step(array(target_ids), cache)
                cache.reorder(array(np.array([1, 1, 2, 3])))
        package.set_weights(model, model.export_weights())
    package.beam_search(build(fast=False), source, 3, max_length=3)
    floats = [array(np.ones(shape, np.float32)) for shape in ((2, 3, 5, 11), (2, 3, 7, 11), (2, 3, 7, 13))]
    long = array(np.ones((2, 3, 300, 11), np.float32))  # fast attention processes the queries in blocks
    for attend in (package.scaled_dot_product_attention, build().encoder.layers[0].self_attention.attend):
        attend(*floats)
        attend(*floats, array(np.ones((1, 1, 5, 1), bool)), tap=record())
        attend(long, *floats[1:])
    if backend.name == "torch":  # code that no call above uses: a layer for tensor parallelism, and zero positions
        dropout = package.layers.OwnDropout(0.5, axis=1, parts=2, part=1)
        dropout.rows = 3
        dropout(floats[0])
        build(**T5).target_position.vectors(4)  # the other packages call this method in a search
    if backend.name == "tf":  # Keras calls these methods in functional models and in fit
        model = build()
        package.Encoder.from_weights(model.config, model.export_weights()).compute_mask(array(source))
        package.CrossEntropy(model.config)(array(target), model(array(source), array(target)))
    if backend.name == "numpy":  # functions that no other component calls
        from transformer_spec.search_padding import pad_search

        plan = package.Search(max_length=9).plan(model.config, source != 0)
        pad_search(source, source != 0, plan, None, lambda length: 16)


def misfits(backend, model):
    """Yield calls whose arguments don't match the annotations, at least one per module."""
    import numpy as np

    def floats(*shape):
        return backend.from_numpy(np.ones(shape, np.float32))

    package, ids = backend.package, backend.from_numpy(np.ones((2, 3), np.int32))
    layer = model.decoder.layers[0]
    yield package.padding_mask, floats(2, 3), 0
    yield package.target_padding_mask, backend.from_numpy(np.ones(3, np.int32)), 0
    yield package.split_heads, floats(2, 3), 3
    yield package.merge_heads, floats(2, 3, 24)
    yield package.scaled_dot_product_attention, floats(3, 5, 11), floats(3, 7, 11), floats(3, 7, 13)
    yield package.scaled_dot_product_attention, *[floats(2, 3, 5, 8)] * 3, floats(2, 3, 5, 5)
    yield model.source_embedding, floats(2, 3)
    yield model.source_position, floats(3, 24)
    yield model.output_proj, floats(3, 24)
    yield layer.feed_forward, floats(3, 24)
    yield layer.cross_attention, floats(2, 3, 24), floats(2, 4, 23)
    yield layer.self_attention_norm, ids
    yield model.encoder.layers[0], floats(3, 24)
    yield model.encoder, floats(2, 3, 24), floats(2, 1, 1, 3)
    yield layer, floats(2, 3, 24), floats(1, 4, 24)
    yield model.decoder, floats(2, 3, 24), floats(2, 4, 23)
    yield model.call if backend.name == "tf" else model, floats(2, 3), ids  # Keras's __call__ isn't checked
    yield model.encode, floats(2, 3)
    cache = model.init_cache(ids, 2)
    yield model.decode_step, floats(2), cache
    yield model.decoder.step, floats(3, 24), cache
    yield cache.past[0].append, floats(2, 3, 24), floats(2, 3, 24)


def main(name: str) -> None:
    """Run a package, and report functions that were not called and mismatched arguments that were accepted."""
    if name == "jax":  # only shapes are checked, so optimization would be a waste of time
        os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    package = checked_import(name)
    from conftest import Backend, random_weights, tiny_config

    import transformer_spec
    from transformer_spec import DropoutRates, Recorder

    def build(fast=True, **overrides):
        rates = DropoutRates(attention=0.5, feed_forward=0.5)
        one_size = {"num_encoder_layers": 1, "num_decoder_layers": 1, "d_k": 5, "d_v": 7}
        config = tiny_config(dropout=rates, **one_size, **overrides)
        options = {"rngs": 0} if name == "jax" else {}
        return package.Transformer.from_weights(config, random_weights(config), fast=fast, **options)

    backend, called = Backend(name, package), set()
    sys.setprofile(lambda frame, event, argument: called.add(frame.f_code) if event == "call" else None)
    run(backend, build, Recorder)
    sys.setprofile(None)
    for searched in (package, transformer_spec) if name == "numpy" else (package,):
        for path, code in annotated(searched):
            if code not in called:
                print(f"never called: {path}")
    for function, *arguments in misfits(backend, build(fast=False)):
        try:
            function(*arguments)
        except Exception as error:  # Keras wraps exceptions that are raised inside a call
            if f"checking the parameters of {function.__module__}." not in str(error):
                print(f"refused elsewhere: {function} {error!r}")
        else:
            print(f"accepted: {function}")
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
