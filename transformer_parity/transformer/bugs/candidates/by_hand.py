"""Bugs that serve only as candidates for the diagnosis: errors in handwritten backward passes and in losses.

The frameworks derive the backward pass automatically, so bugs in a backward pass can't be injected into our ports. The
bugs in ``BLOCKS`` edit the functions of individual blocks, so the diagnosis can also try them in only some blocks. The
bugs in ``PATHS`` and ``LOSSES`` affect the backward pass of the full model.
"""

from __future__ import annotations

from transformer_parity.transformer.bugs.bug import Bug, Edits, changed, together

OF_X = "n, dn = centered / sigma, dy * scale"
MEAN, VARIANCE = " - dn.mean(axis=-1, keepdims=True)", " - n * slope * (n * dn).mean(axis=-1, keepdims=True)"
DX = f"dx = (dn{MEAN}{VARIANCE}) / sigma"
OF_NORM = "return dx, (dy * n).sum(axis=rows), dy.sum(axis=rows)"
OF_LINEAR = "return dy @ kernel.T, rows.T @ drows, drows.sum(axis=0)"
OF_SOFTMAX = "return weights * (dweights - (weights * dweights).sum(axis=-1, keepdims=True))"
OF_RELU = "return dy * (x > 0.0)"
OF_SCORES = "return dscores @ key / scale, dscores.mT @ query / scale, dvalue"
OF_TABLE = "np.add.at(dtable, ids, self.multiplier * dvectors)"
OF_PROJECTION = (
    '        if self.bias is not None:\n            tap("bias", dbias)\n        return dx\n\n\nclass LayerNorm'
)
# Maps a description of an incorrect average to two expressions by which a bug divides gradients. The first expression
# is for the gradients of layer norms, and the second expression is for the gradients of projections.
AVERAGES = {
    "over the positions of all sentences": ("(dy.size // dy.shape[-1])", "len(rows)"),
    "over the sentences": ("len(dy)", "len(x)"),
}


def of_function(old: str, new: str) -> Edits:
    """Return an edit that replaces ``old`` with ``new`` in the reference's ``functional`` module."""
    return changed("functional", numpy=(old, new))


def of_kernels(divisor: str, what: str) -> Edits:
    """Return an edit that divides the gradients of all projections by the expression ``divisor``.

    ``what`` determines whether the edit divides the kernels' gradients, the biases' gradients, or both.
    """
    kernel, bias = (f" / {divisor}" if name in what else "" for name in ("kernels", "biases"))
    return of_function(OF_LINEAR, f"return dy @ kernel.T, rows.T @ drows{kernel}, drows.sum(axis=0){bias}")


def of_norms(divisor: str, what: str) -> Edits:
    """Return an edit that divides the gradients of all layer norms by the expression ``divisor``.

    ``what`` determines whether the edit divides the scales' gradients, the biases' gradients, or both.
    """
    scale, bias = (f" / {divisor}" if name in what else "" for name in ("scales", "biases"))
    return of_function(OF_NORM, f"return dx, (dy * n).sum(axis=rows){scale}, dy.sum(axis=rows){bias}")


def bugs(entries: dict[str, Edits]) -> list[Bug]:
    """Return a list with one bug per entry of ``entries``, which maps the name of each bug to its edits."""
    return [Bug(name, "", edits) for name, edits in entries.items()]


BLOCKS = bugs(
    {
        "a backward pass of the norm without the variance term": of_function(DX, DX.replace(VARIANCE, "")),
        "a backward pass of the norm without the mean term": of_function(DX, DX.replace(MEAN, "")),
        "a backward pass of the norm with constant mean and variance": of_function(DX, "dx = dn / sigma"),
        "a backward pass of the norm that isn't multiplied by scale": of_function(OF_X, OF_X.replace(" * scale", "")),
        "a backward pass of the norm that is multiplied by scale twice": of_function(OF_X, f"{OF_X}**2"),
        "a backward pass of the norm that isn't divided by the standard deviation": of_function(
            DX, DX.replace(" / sigma", "")
        ),
        "gradients of the norms' scales from values that aren't normalized": of_function(
            OF_NORM, OF_NORM.replace("dy * n", "dy * x")
        ),
        **{
            f"gradients of the norms' {what} averaged {words}": of_norms(divisor, what)
            for words, (divisor, _) in AVERAGES.items()
            for what in ("scales", "biases", "scales and biases")
        },
        "a backward pass of the softmax without the sum over the keys": of_function(
            OF_SOFTMAX, "return weights * dweights"
        ),
        "a backward pass of the softmax with only the diagonal of its Jacobian": of_function(
            OF_SOFTMAX, "return weights * (1.0 - weights) * dweights"
        ),
        "a backward pass of the softmax with a sum over the queries": of_function(
            OF_SOFTMAX, OF_SOFTMAX.replace("axis=-1", "axis=-2")
        ),
        "a ReLU that passes its gradient through everywhere": of_function(OF_RELU, "return dy"),
        "a ReLU that passes only positive gradients": of_function(OF_RELU, f"{OF_RELU} * (dy > 0.0)"),
        **{
            f"gradients of {words} that aren't divided by sqrt(d_k)": changed("attention", numpy=(OF_SCORES, new))
            for words, new in {
                "the queries": OF_SCORES.replace("key / scale", "key"),
                "the keys": OF_SCORES.replace("query / scale", "query"),
                "queries and keys": OF_SCORES.replace(" / scale", ""),
            }.items()
        },
        **{
            f"gradients of {words} that are divided by sqrt(d_k) twice": changed("attention", numpy=(OF_SCORES, new))
            for words, new in {
                "the queries": OF_SCORES.replace("key / scale", "key / scale**2"),
                "the keys": OF_SCORES.replace("query / scale", "query / scale**2"),
                "queries and keys": OF_SCORES.replace("scale", "scale**2"),
            }.items()
        },
        "no gradient through the input of a projection": changed(
            "layers", numpy=(OF_PROJECTION, OF_PROJECTION.replace("return dx", "return 0.0 * dx"))
        ),
    }
)

RESIDUAL = "return dtotal + sublayer_backward(x, dropout(dtotal), sublayer_trace)"
# Maps the description of some sub-layers to an expression that is True only for these sub-layers.
SUBLAYERS = {
    "cross-attention": 'name == "cross_attention"',
    "self-attention": 'name == "self_attention"',
    "feed-forward networks": 'name == "feed_forward"',
    "the decoder's self-attention": 'name == "self_attention" and "decoder" in trace.path',
    "the encoder's feed-forward networks": 'name == "feed_forward" and "encoder" in trace.path',
    "the decoder's feed-forward networks": 'name == "feed_forward" and "decoder" in trace.path',
    "all sub-layers": "True",
}
ATTENTIONS = {
    "cross-attention": '"cross" in trace.path',
    "self-attention": '"self" in trace.path',
    "the encoder's self-attention": '"encoder" in trace.path',
    "the decoder's self-attention": '"decoder" in trace.path and "self" in trace.path',
    "all attention": "True",
}
# Maps each input of attention to the code that computes the gradient of this input, and to a format string for code
# that scales this gradient.
INPUTS = {
    "queries": ("dquery = attention.query_proj.backward(", "dquery = {0} * attention.query_proj.backward("),
    "keys": ("dmemory = attention.key_proj.backward(", "dmemory = {0} * attention.key_proj.backward("),
    "values": ("dmemory + attention.value_proj.backward(", "dmemory + {0} * attention.value_proj.backward("),
}


def of_pass(*changes: tuple[str, str]) -> Edits:
    """Return edits to the reference's ``backward`` module, which contains the backward pass of the model."""
    return together(*(changed("backward", numpy=change) for change in changes))


def stopped(condition: str, *inputs: str) -> Edits:
    """Return edits that stop the gradient at the given inputs of all attention blocks that satisfy the condition."""
    return of_pass(*((INPUTS[name][0], INPUTS[name][1].format(f"(not ({condition}))")) for name in inputs))


PATHS = bugs(
    {
        **{
            f"no gradient through the residual connections around {words}": of_pass(
                (RESIDUAL, RESIDUAL.replace("dtotal +", f"(not ({condition})) * dtotal +"))
            )
            for words, condition in SUBLAYERS.items()
        },
        **{
            f"no gradient through {words}, only through the residual connections": of_pass(
                (RESIDUAL, RESIDUAL.replace("+ sub", f"+ (not ({condition})) * sub"))
            )
            for words, condition in SUBLAYERS.items()
        },
        **{
            f"no gradient through the {' and '.join(inputs)} of {words}": stopped(condition, *inputs)
            for inputs in (("keys",), ("values",), ("keys", "values"), ("queries",))
            for words, condition in ATTENTIONS.items()
        },
        "a gradient of the memory from the first decoder layer only": of_pass(
            ("dmemory = dmemory + from_layer", "dmemory = from_layer")
        ),
        "a gradient of the memory from the last decoder layer only": of_pass(
            ("dmemory = dmemory + from_layer", "dmemory = dmemory if dmemory.any() else from_layer")
        ),
        "no gradient through the source embedding": of_pass(
            ("source_ids, dsource, dsource_table", "source_ids, 0.0 * dsource, dsource_table")
        ),
        "no gradient through the target embedding": of_pass(
            ("target_ids, dtarget, dtarget_table", "target_ids, 0.0 * dtarget, dtarget_table")
        ),
        **{
            f"gradients of {what} averaged {words}": of_kernels(divisor, what)
            for words, (_, divisor) in AVERAGES.items()
            for what in ("kernels", "projections' biases", "kernels and projections' biases")
        },
        "gradients of repeated tokens that overwrite each other": changed(
            "embedding", numpy=(OF_TABLE, "dtable[ids] += self.multiplier * dvectors")
        ),
        "gradients of tokens that overwrite each other and the output projection's": changed(
            "embedding", numpy=(OF_TABLE, "dtable[ids] = self.multiplier * dvectors")
        ),
        "embedding scaled twice in the backward pass": changed(
            "embedding", numpy=(OF_TABLE, OF_TABLE.replace("self.multiplier", "self.multiplier**2"))
        ),
    }
)

LOSS = "(smoothing / classes * spread if smoothing else 0.0)  # [B, T]\n"
COUNTED = "counted = labels != config.pad_id\n    return"
OF_LOSS = "counted = (labels != config.pad_id)[..., None]"
NUMBER = "np.asarray(counted.sum()"
# Edit to the gradient of the loss, for target probabilities that don't add up to 1.
ANY_SUM = ("masked_softmax(logits) - target", "masked_softmax(logits) * target.sum(-1, keepdims=True) - target")
ENTROPY = """\
    if smoothing:
        is_uniform = config.label_smoothing_kind == "uniform"
        share = smoothing / classes
        right_share = 1.0 - smoothing + (share if is_uniform else 0.0)
        losses = losses + right_share * np.log(right_share) + (classes - is_uniform) * share * np.log(share)
"""
# Labels that a loss ignores. Each condition on ``labels`` [B, T] selects the labels that the loss includes.
OMITTED = {
    "EOS": "(labels != config.eos_id)",
    "the first label": "(np.arange(labels.shape[1]) > 0)",
    "the last position": "(np.arange(labels.shape[1]) < labels.shape[1] - 1)",
}
LABELS = "    check_logits(logits.shape, labels.shape, config.target_vocab_size)\n"
OTHERS = 'others = {"uniform": 0'


def of_loss(*changes: tuple[str, str]) -> Edits:
    """Return edits to the loss and its backward pass."""
    return together(*(changed("training", numpy=change) for change in changes))


def omitted(condition: str, is_in_number: bool) -> Edits:
    """Return edits that make the loss include only the labels that satisfy the condition.

    If ``is_in_number`` is True, the number of tokens by which the loss is divided also includes the ignored labels.
    """
    usual = "np.asarray((labels != config.pad_id).sum()" if is_in_number else NUMBER
    return of_loss(
        (COUNTED, COUNTED.replace("pad_id\n", f"pad_id) & {condition}\n").replace("= labels", "= (labels")),
        (OF_LOSS, f"counted = ((labels != config.pad_id) & {condition})[..., None]"),
        (NUMBER, usual),
    )


def other_labels(new: str) -> Edits:
    """Return edits that replace the labels with an expression, in the loss and in its backward pass."""
    return of_loss((LABELS, f"{LABELS}    labels = {new}\n"), (OTHERS, f"labels = {new}\n    {OTHERS}"))


LOSSES = bugs(
    {
        "a loss in bits": of_loss(
            (LOSS, f"{LOSS}    losses = losses / np.log(2.0)\n"),
            ("masked_softmax(logits) - target, 0.0)", "(masked_softmax(logits) - target) / np.log(2.0), 0.0)"),
        ),
        "Kullback-Leibler divergence as the loss, which subtracts the entropy of the smoothed labels": of_loss(
            (LOSS, f"{LOSS}{ENTROPY}")
        ),
        **{
            f"a loss without {words}{number}": omitted(condition, is_in_number)
            for words, condition in OMITTED.items()
            for is_in_number, number in ((False, ""), (True, ", but counted in the number of tokens"))
        },
        "a loss that includes padding, divided by the correct number of tokens": of_loss(
            ("np.where(counted, losses, 0.0)", "losses"), ("target, 0.0)", "target, masked_softmax(logits) - target)")
        ),
        "averaged per sentence, counting sentences without labels": of_loss(
            (
                f"np.where(counted, losses, 0.0).sum()), {NUMBER}",
                "(np.where(counted, losses, 0.0).sum(1) / np.maximum(counted.sum(1), 1)).sum()),"
                " np.asarray(len(labels)",
            ),
            (
                "masked_softmax(logits) - target, 0.0)",
                "masked_softmax(logits) - target, 0.0) / np.maximum(counted.sum(1, keepdims=True), 1)",
            ),
        ),
        "full weight of the correct label in addition to the smoothing": of_loss(
            ("losses = -(1.0 - smoothing) * right", "losses = -right"),
            ("right = 1.0 - smoothing", "right = 1.0"),
            ANY_SUM,
        ),
        "smoothing of the wrong labels divided by the total number of labels": of_loss(
            ("smoothing / classes * spread", "smoothing / config.target_vocab_size * spread"),
            ("smoothing / (config.target_vocab_size - others)", "smoothing / config.target_vocab_size"),
            ANY_SUM,
        ),
        "labels shifted by one more position": other_labels("np.roll(labels, -1, 1)"),
        "labels shifted by one more position, padded at the end": other_labels(
            "np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=config.pad_id)"
        ),
    }
)
