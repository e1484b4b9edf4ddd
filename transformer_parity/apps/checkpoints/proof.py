"""Verify an imported checkpoint by comparing its logits across backends and with Hugging Face transformers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
from numpy import ndarray

from reference_numpy.embedding import sinusoidal_encoding
from reference_numpy.masks import target_padding_mask
from transformer_parity.apps.checkpoints.imported import Imported
from transformer_parity.engine.findings import SKIPPED
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.engine.verdict import decide
from transformer_parity.transformer.ports.package import PackagePort
from transformer_parity.transformer.ports.protocol import MissingFrameworkError, Placement
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_spec.config import TransformerConfig
from transformer_spec.files import load_weights

DTYPES = ("float64", "float32")
SENTENCES, SOURCE, TARGET = 2, 7, 5
FAR = 40  # length in tokens of the inputs of T5 models, in which nearby tokens have separate relative positions
SEARCHED, LONGEST = 4, 20  # number of sentences to translate, and maximum length of a translation in tokens
# Tolerance for comparisons in which transformers uses its own float32 position tables. In a large model, rounding the
# angles of these tables to float32 causes an error of 3.6e-7.
OWN_TABLES = 1e-6
# Tolerance for comparisons in which transformers computes the mean squares in T5's norms in float32. The error is 2e-7
# in a model with 24 layers per stack and random weights.
OWN_NORMS = 1e-5
Say = Callable[[str], None]


@dataclass(frozen=True)
class Agreement:
    """The result of one comparison with the float64 reference.

    Attributes:
        name: Name of the backend or library that was compared.
        dtype: Dtype of the computation.
        error: Relative L2 error with respect to the float64 reference, or None if the comparison was skipped.
        allowed: Tolerance, which is the largest error at which the backend or library still agrees with the reference.
        why: Reason for skipping the comparison, or description of the compared values.
    """

    name: str
    dtype: str
    error: float | None
    allowed: float
    why: str = ""

    @property
    def verdict(self) -> str:
        """The verdict on this comparison, using the same terms as ``parity check``."""
        return SKIPPED if self.error is None else decide(self.error, self.allowed, self.dtype)


def inputs_of(config: TransformerConfig, sentences: int = SENTENCES) -> dict[str, ndarray]:
    """Return random source and target IDs for a comparison. In the last row, both the source and target are padded."""
    rng = np.random.default_rng(5)
    found = {}
    for side, length, size in (
        ("source", SOURCE, config.source_vocab_size),
        ("target", TARGET, config.target_vocab_size),
    ):
        length = FAR if config.position_encoding == "relative" else min(length, config.max_positions or length)
        ids = rng.integers(0, size - 1, (sentences, length))
        ids += ids >= config.pad_id  # skip the padding ID
        ids[-1, length - length // 3 :] = config.pad_id
        found[f"{side}_ids"] = ids
    found["target_ids"][:, 0] = config.bos_id
    return found


def prove(path: Path, backends: Iterable[str], say: Say = lambda text: None) -> list[Agreement]:
    """Compare the logits that multiple backends compute from one weight file, in float64 and float32.

    Args:
        path: Weight file to load.
        backends: Names from ``PORTS``. A backend is skipped if its framework is not installed.
        say: Function that is called with a progress message before each computation.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the file is damaged.
    """
    config, weights = load_weights(path)
    inputs = inputs_of(config)

    def logits(port: PackagePort, dtype: str) -> ndarray:
        say(f"logits in {dtype}: {port.name}")
        gc.collect()  # free the previous model, which may be part of a reference cycle
        return port.load(config, weights, Placement(dtype)).run("", inputs, taps=False).output

    truth = logits(DEFINITION, "float64")
    baseline = relative_error(logits(DEFINITION, "float32"), truth)
    found = []
    for backend in backends:
        for dtype in DTYPES:
            allowed = tolerance("logits", dtype, baseline)
            try:
                PORTS[backend].check_installed()
            except MissingFrameworkError as error:
                found.append(Agreement(backend, dtype, None, allowed, str(error)))
                break
            found.append(Agreement(backend, dtype, relative_error(logits(PORTS[backend], dtype), truth), allowed))
    return found


def check_against_transformers(path: Path, imported: Imported, say: Say = lambda text: None) -> list[Agreement]:
    """Compare a model's logits and translations with the transformers library in float64.

    Args:
        path: Imported directory. The transformers library loads the model from this directory without network access.
        imported: Model that was imported from the directory.
        say: Function that is called with a progress message before each computation.

    Returns:
        One entry per comparison of logits, and one entry for the translations. In the entry for the translations, the
        error is the fraction of translations that differ. For models with sinusoidal positional encodings, the logits
        are compared twice, once with transformers' own position tables and once with exact tables, because transformers
        rounds its tables to float32. The logits of T5 models are also compared twice, once with transformers' own norms
        and once with exact norms, because transformers computes the mean squares in float32. If the library is not
        installed or does not support this format, the only entry is a skipped comparison.
    """
    name = "transformers"
    if missing := [module for module in ("torch", name) if find_spec(module) is None]:
        return [Agreement(name, "float64", None, 0.0, f"not installed: {', '.join(missing)}")]
    if imported.origin.format != "hf":
        return [Agreement(name, "float64", None, 0.0, "transformers does not support this format")]
    import torch
    from transformers import AutoModelForSeq2SeqLM

    config, title = imported.config, f"{name} {version(name)}"
    inputs = inputs_of(config)
    say(f"logits in float64: {title}")
    truth = DEFINITION.load(config, imported.weights, Placement("float64")).run("", inputs, taps=False).output
    model = AutoModelForSeq2SeqLM.from_pretrained(path, dtype=torch.float64, local_files_only=True).eval()
    real = target_padding_mask(inputs["target_ids"], config.pad_id)
    results = []

    def compare(logits: ndarray, allowed: float, what: str) -> None:
        error = relative_error(logits[real], truth[real])
        results.append(Agreement(title, "float64", error, allowed, what))

    what, strict = "logits", tolerance("logits", "float64", 0.0)
    if config.position_encoding == "sinusoidal":
        own = _logits(model, inputs, config)
        # The rounding error is larger than OWN_TABLES if the file stores float16 position tables.
        rounding = _replace_positions(model, config)
        compare(own, max(OWN_TABLES, rounding), "logits, using its own rounded position tables")
        what = "logits, using exact position tables"
    elif config.layer_norm_kind == "rms":
        compare(_logits(model, inputs, config), OWN_NORMS, "logits, using its own float32 norms")
        _replace_norms(model)
        what = "logits, using exact norms"
    compare(_logits(model, inputs, config), strict, what)
    say(f"translations in float64: {title}")
    ours, theirs = _translations(model, imported)
    same = sum(one == other for one, other in zip(ours, theirs, strict=True))
    search = f"{same} of {len(ours)} translations of at most {LONGEST} tokens are identical"
    return [*results, Agreement(title, "float64", 1.0 - same / len(ours), 0.0, search)]


def _logits(model: Any, inputs: dict[str, ndarray], config: TransformerConfig) -> ndarray:
    """Return the logits of a transformers model."""
    import torch

    source, target = (torch.tensor(inputs[f"{side}_ids"]) for side in ("source", "target"))
    seen, real = source != config.pad_id, torch.tensor(target_padding_mask(inputs["target_ids"], config.pad_id))
    with torch.no_grad():
        if model.config.model_type != "fsmt":
            masks = {"attention_mask": seen, "decoder_attention_mask": real}
            return model(input_ids=source, decoder_input_ids=target, **masks).logits.numpy()
        # Call the encoder and the decoder separately, because FSMTModel creates a float32 mask and fills it with the
        # smallest float64 value, which float32 cannot represent.
        memory = model.model.encoder(source, attention_mask=seen).last_hidden_state
        future = torch.full((target.shape[1],) * 2, -torch.inf, dtype=torch.float64).triu(1)
        return model.model.decoder(target, memory, seen, ~real, future).last_hidden_state.numpy()


def _replace_positions(model: Any, config: TransformerConfig) -> float:
    """Replace the rounded sinusoidal position tables of a transformers model with exact tables.

    Returns:
        The largest absolute rounding error among the rows that the comparison uses.
    """
    import torch

    worst, rows = 0.0, SOURCE + config.position_offset
    for stack in (model.model.encoder, model.model.decoder):
        module = stack.embed_positions
        name = "weights" if hasattr(module, "weights") else "weight"
        old = getattr(module, name)
        exact = sinusoidal_encoding(len(old), config.d_model, config.position_layout, config.position_timescale)
        if config.position_offset:
            exact[config.pad_id] = 0.0
        worst = max(worst, float(np.abs(old.detach().numpy() - exact)[:rows].max()))
        old.data = torch.tensor(exact)
    return worst


def _replace_norms(model: Any) -> None:
    """Make T5's norms compute the mean squares in the dtype of the weights. By default, they use float32."""
    import torch

    def forward(norm: Any, x: Any) -> Any:
        return norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(forward, module)


def _translations(model: Any, imported: Imported) -> tuple[list[list[int]], list[list[int]]]:
    """Translate random token IDs with this project and with transformers, and return both lists of translations."""
    import torch

    config, search = imported.config, imported.search
    ids = inputs_of(config, SEARCHED)["source_ids"]
    longest = min(LONGEST, config.max_positions or LONGEST)
    options = replace(search, max_length=longest, min_length=min(search.min_length, longest))
    found = PORTS["torch"].load(config, imported.weights, Placement("float64")).search(ids, options)
    settings = model.generation_config
    settings.max_length, settings.max_new_tokens = None, longest
    # Prevent transformers from generating padding, because this project's searches never generate padding.
    settings.bad_words_ids = [*(settings.bad_words_ids or []), [config.pad_id]]
    # With a cache, transformers 5.23 raises an IndexError if a T5 decoder has more layers than the encoder.
    settings.use_cache = config.num_decoder_layers <= config.num_encoder_layers
    with torch.no_grad():
        theirs = model.generate(input_ids=torch.tensor(ids), attention_mask=torch.tensor(ids != config.pad_id))
    return [_ended(row, config) for row in found.ids.tolist()], [_ended(row, config) for row in theirs[:, 1:].tolist()]


def _ended(ids: list[int], config: TransformerConfig) -> list[int]:
    """Return the IDs before the EOS token."""
    return ids[: ids.index(config.eos_id)] if config.eos_id in ids else ids
