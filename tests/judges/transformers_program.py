"""Run the Flax or TensorFlow class of a model, in an environment with transformers 4.57.

This program imports only third-party packages. ``tests/judges/transformers.py`` starts it with ``python -P``:

    python -P transformers_program.py FRAMEWORK DTYPE DIRECTORY...

Each directory contains a model in Hugging Face's format and ``inputs.json`` with these entries: ``source_ids`` and
``target_ids`` for the logits, ``sentences`` for the searches, and ``flax`` and ``tf``, which map names of searches to
settings of ``generate``. ``original`` specifies whether Flax also runs the searches without
``only_first_candidates_end``. All IDs are lists of equal length, padded on the right. The program writes
``FRAMEWORK-DTYPE.json``. In float64, it computes only logits, because Flax's ``generate`` fails with 64-bit types.
"""

from __future__ import annotations

import inspect
import json
import sys
import textwrap
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from pathlib import Path

import numpy as np
import transformers
from transformers import GenerationConfig

FRAMEWORK, DTYPE = sys.argv[1:3]
transformers.logging.set_verbosity_error()


class Flax:
    """A Flax model.

    Args:
        directory: Directory with the model.
    """

    packages = ("transformers", "flax", "jax", "numpy")

    def __init__(self, directory: str) -> None:
        import jax

        self.jax = jax
        self.model = transformers.FlaxAutoModelForSeq2SeqLM.from_pretrained(directory, dtype=getattr(jax.numpy, DTYPE))
        self.params = jax.tree.map(lambda array: array.astype(DTYPE), self.model.params)

    def logits(self, **inputs):
        """Return the logits."""
        return self.model(**inputs, params=self.params).logits

    def generate(self, settings):
        """Return a function that returns the IDs and score of a sentence's translation, given its IDs and mask."""

        @self.jax.jit
        def run(ids, mask, params):
            found = self.model.generate(ids, settings, attention_mask=mask, params=params)
            return found.sequences, getattr(found, "scores", np.full(1, np.nan))

        return lambda ids, mask: run(ids, mask, self.params)


class TensorFlow:
    """A TensorFlow model with Keras 2.

    Args:
        directory: Directory with the model.
    """

    packages = ("transformers", "tensorflow", "tf-keras", "numpy")

    def __init__(self, directory: str) -> None:
        import tensorflow as tf
        import tf_keras
        from safetensors.numpy import load_file
        from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model

        self.tf = tf
        tf_keras.backend.set_floatx(DTYPE)
        config = transformers.AutoConfig.from_pretrained(directory)
        self.model = transformers.TFAutoModelForSeq2SeqLM.from_config(config)
        self.model.build_in_name_scope()
        # from_pretrained stops because safe_open objects aren't iterable, but passes the same arguments.
        load_pytorch_state_dict_in_tf2_model(
            self.model,
            load_file(f"{directory}/model.safetensors"),
            tf_inputs=False,
            allow_missing_keys=True,
            tf_to_pt_weight_rename=getattr(self.model, "tf_to_pt_weight_rename", None),
        )

    def logits(self, **inputs):
        """Return the logits."""
        return self.model(**inputs, training=False).logits

    def generate(self, settings):
        """Return a function that returns the IDs and score of a sentence's translation, given its IDs and mask."""

        @self.tf.function(jit_compile=True)
        def run(ids, mask):
            found = self.model.generate(ids, settings, attention_mask=mask)
            return found.sequences, getattr(found, "sequences_scores", np.full(1, np.nan))

        return run


def judge(directory: Path) -> dict:
    """Return the logits and translations of the model in a directory."""
    given = json.loads((directory / "inputs.json").read_text("utf-8"))
    model = {"flax": Flax, "tf": TensorFlow}[FRAMEWORK](str(directory))
    source_ids, target_ids, sentences = (
        np.array(given[name], np.int32) for name in ("source_ids", "target_ids", "sentences")
    )
    pad_id = model.model.config.pad_token_id
    target_mask = target_ids != pad_id
    target_mask[:, 0] = True  # The start token can be the padding token.
    logits = model.logits(
        input_ids=source_ids,
        attention_mask=(source_ids != pad_id).astype(np.int32),
        decoder_input_ids=target_ids,
        decoder_attention_mask=target_mask.astype(np.int32),
    )
    found = {"logits": np.asarray(logits).tolist(), "versions": {name: version(name) for name in model.packages}}
    if DTYPE == "float32":

        def translate(settings):
            run = model.generate(GenerationConfig(return_dict_in_generate=True, output_scores=True, **settings))
            results = [run(ids[None], (ids[None] != pad_id).astype(np.int32)) for ids in sentences]
            ids = [np.asarray(ids)[0, 1:].tolist() for ids, _ in results]
            return {"ids": ids, "scores": [float(np.asarray(scores)[0]) for _, scores in results]}

        searches = given[FRAMEWORK]
        if FRAMEWORK == "flax" and given["original"]:
            found["original"] = {name: translate(settings) for name, settings in searches.items()}
        with only_first_candidates_end() if FRAMEWORK == "flax" else nullcontext():
            found["searches"] = {name: translate(settings) for name, settings in searches.items()}
    return found


@contextmanager
def only_first_candidates_end():
    """Change Flax's beam search so that hypotheses can end only among the ``num_beams`` best candidates of a step.

    The PyTorch and TensorFlow classes have this condition. In Flax, the ``2 * num_beams`` best candidates can end.
    """
    from transformers.generation import flax_utils

    mixin, line = flax_utils.FlaxGenerationMixin, "did_topk_just_finished * np.array(-1.0e7)\n"
    original, source = mixin._beam_search, textwrap.dedent(inspect.getsource(mixin._beam_search))
    if source.count(line) != 1:
        raise RuntimeError(f"expected one line with {line!r} in _beam_search; install transformers 4.57")
    added = " " * 8 + "did_topk_just_finished &= jnp.arange(beams_to_keep) < num_beams\n"
    found = {}
    exec(source.replace(line, line + added), vars(flax_utils), found)
    mixin._beam_search = found["_beam_search"]
    try:
        yield
    finally:
        mixin._beam_search = original


if __name__ == "__main__":
    for path in map(Path, sys.argv[3:]):
        (path / f"{FRAMEWORK}-{DTYPE}.json").write_text(json.dumps(judge(path)), "utf-8")
        print(path, FRAMEWORK, DTYPE, flush=True)
