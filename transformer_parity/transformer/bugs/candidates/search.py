"""Bugs that serve only as candidates for the diagnosis: errors in searches and in decoder caches."""

from __future__ import annotations

from itertools import product

from transformer_parity.transformer.bugs.bug import Bug, Edits, changed, together
from transformer_parity.transformer.bugs.search import PENALIZED, planned, ruled

POSITION, IS_OVER = "cache.positions[n]", "is_over = finished[:, -1] >= attainable"
SELF_MASK = "self_mask = cache.self_mask[..., :end] & causal_mask(end)[cache.length :]"
TOTALS = "totals = self.alive[:, :, None] +"
MOST = "best, index = self.top(totals.reshape(batch, -1), 2 * beam_size)  # [B, 2K]"
LEFT = "alive, rank = self.top(np.where(~ends, best, -inf), beam_size)  # [B, K]"
FOUND = "ids, scores = state.best()\n"
IN_STEP = "sentence = np.arange(batch)[:, None]\n"
NEXT = "    log_probabilities = log_softmax(logits)\n"
LIKELIEST = "log_probabilities.argmax(-1)"
POOL = "return self.finished_ids, self.finished"
UNFINISHED_POOL = """\
none = self.finished == -inf
        size = none.shape[1]
        return np.where(none[:, :, None], self.ids[:, :size], self.finished_ids), self.finished"""
RESULT = "return search_result(ids, scores, plan.pad_id, plan.num_hypotheses)"
# Expressions that expand a tensor from one row per sentence [B] to one row per hypothesis [R]. The correct expression
# keeps the rows of each sentence adjacent.
RIGHT, TILED, FIRST = "x.repeat(copies, 0)", "np.tile(x, (copies, 1, 1, 1))", "x[:1].repeat(copies * len(x), 0)"
RIGHT_ROWS, TILED_ROWS = "{x}.repeat(beam_size, 0)", "np.concatenate([{x}] * beam_size)"
KEPT_IN_PLACE = """\
        over = (self.ids == plan.eos_id).any(2)
        stays = np.where(np.arange(vocabulary) == plan.pad_id, 0.0, -inf)
        going = _next_log_probabilities(logits, self.ids, n, plan).reshape(batch, beam_size, vocabulary)
        totals = self.alive[:, :, None] + np.where(over[:, :, None], stays, going)
        lengths = np.where(over, (self.ids != plan.pad_id).sum(2), n)[:, :, None]
        ranked, index = self.top((totals / {compared}).reshape(batch, -1), beam_size)
        best = np.take_along_axis(totals.reshape(batch, -1), index, 1)
        parent, token = index // vocabulary, index % vocabulary
        ids = self.ids[sentence, parent]
        ids[:, :, n - 1] = token
        ended = (ids == plan.eos_id).any(2)
        is_over = {stop} | (plan.limits == n)
        lengths = (ids != plan.pad_id).sum(2)
        found, rank = self.top(best / {final}, pool_size)
        now = is_over & (self.alive != -inf).any(1)
        state = self._replace(
            tokens=token,
            ids=ids,
            alive=np.where(is_over[:, None], -inf, best),
            finished=np.where(now[:, None], found, self.finished),
            finished_ids=np.where(now[:, None, None], ids[sentence, rank], self.finished_ids),
        )
        return state, (sentence * beam_size + parent).reshape(-1)
"""


def in_search(old: str, new: str) -> Edits:
    """Return an edit to the reference's ``search`` module, which implements the steps of greedy and beam search."""
    return changed("search", numpy=(old, new))


def with_result(line: str) -> Edits:
    """Return an edit that inserts a line at the end of a search. The line modifies the returned IDs, ``ids``."""
    return changed("search_loop", numpy=(FOUND, f"{FOUND}    {line}\n"))


def seen(where: str) -> Edits:
    """Return an edit after which the self-attention of cached steps sees only keys that satisfy the condition."""
    return changed("decoder", numpy=(SELF_MASK, f"{SELF_MASK} & ({where})"))


def at_position(position: str) -> Edits:
    """Return an edit that replaces the position of the decoded token in cached steps."""
    vectors = f"self.target_position.vectors({position}.max() + 1)[{position}].astype(cache.positions.dtype)"
    return changed("transformer", numpy=(POSITION, vectors))


def read_by_rows(memory: str, mask: str) -> Edits:
    """Return edits that change which encoder memory and which source mask each hypothesis of a beam uses.

    Args:
        memory: Expression that expands a cached key or value ``x`` to the rows of the beam.
        mask: Expression that expands the cross-attention mask ``x`` to the rows of the beam.
    """
    lines = f"""{SELF_MASK}
        copies = len(x) // len(cache.cross_mask)
        memories = [type(one)(*({memory} for x in one)) for one in cache.memory]
        cross_mask = next({mask} for x in [cache.cross_mask])"""
    edits = ((SELF_MASK, lines), ("cache.memory, pasts,", "memories, pasts,"), ("cache.cross_mask,", "cross_mask,"))
    return together(*(changed("decoder", numpy=edit) for edit in edits))


def read_without_cache(memory: str, mask: str) -> Edits:
    """Return edits that make a search decode without a cache.

    They also change which encoder memory and which source mask each hypothesis of a beam uses.

    Args:
        memory: Expression that expands the encoder memory ``{x}`` to the rows of the beam.
        mask: Expression that expands the source mask ``{x}`` to the rows of the beam.
    """
    edits = (
        ("decoder = model if use_cache else _Uncached(model)", "decoder = _Uncached(model)"),
        ("source_mask.repeat(beam_size, 0)", f"{mask.format(x='source_mask')}"),
        (".encode(source_ids, source_mask).repeat(beam_size, 0)", ".encode(source_ids, source_mask)"),
        ("# [R, S, d_model]\n", f"\n        self.memory = {memory.format(x='self.memory')}\n"),
    )
    return together(*(changed("search_loop", numpy=edit) for edit in edits))


def kept_in_place(stop: str, final: str, compared: str = "1.0") -> Edits:
    """Return an edit to beam search after which finished hypotheses remain in the beam and occupy some of its rows.

    Args:
        stop: Condition under which the search of a sentence ends. It may use ``ended`` [B, K], which is True for
            finished hypotheses.
        final: Expression for the length penalty at the end of the search. The search divides the log-probabilities by
            this penalty before it selects the best hypothesis.
        compared: Expression for the length penalty in each step. The step divides the log-probabilities by this penalty
            before it selects the hypotheses to keep.
    """
    return in_search(IN_STEP, IN_STEP + KEPT_IN_PLACE.format(stop=stop, final=final, compared=compared))


# Allow a search to return no hypothesis for a sentence. The reference would raise an error.
MAY_BE_EMPTY = changed(
    "search_loop", numpy=(RESULT, "return SearchResult(*(x[:, : plan.num_hypotheses] for x in (ids, scores)))")
)
ONE_IS_ENOUGH = together(
    MAY_BE_EMPTY,
    in_search("return self.unfinished.any()", "return self.unfinished.all()"),
    in_search("return (self.alive != -inf).any()", "return (self.alive != -inf).any(1).all()"),
)
STOPS = {"ended.all(1)": "", "ended[:, 0]": ", until the best one is finished"}
SCORE = "plan.penalties[lengths]"

SEARCHES = [
    Bug(name, "", edits)
    for name, edits in {
        "memory tiled for the beam, so hypotheses attend to other sentences": read_by_rows(TILED, RIGHT),
        "source mask tiled for the beam, so hypotheses use masks of other sentences": read_by_rows(RIGHT, TILED),
        "memory and source mask tiled for the beam, so hypotheses attend to other sentences": read_by_rows(
            TILED, TILED
        ),
        **{
            f"{what} tiled for the beam, in a search without a cache": read_without_cache(memory, mask)
            for what, memory, mask in (
                ("memory", TILED_ROWS, RIGHT_ROWS),
                ("source mask", RIGHT_ROWS, TILED_ROWS),
                ("memory and source mask", TILED_ROWS, TILED_ROWS),
            )
        },
        "memory of the first sentence used in every cached step": read_by_rows(FIRST, RIGHT),
        "source mask of the first sentence used in every cached step": read_by_rows(RIGHT, FIRST),
        "positions of cached steps one too high": at_position("(n + 1)"),
        "positions of cached steps one too high, starting at the second step": at_position("(n + (n > 0))"),
        "tokens do not attend to themselves in cached steps, starting at the second step": seen(
            "(np.arange(cache.length + 1) < cache.length) | (cache.length == 0)"
        ),
        "stops for all sentences when one is finished": ONE_IS_ENOUGH,
        "stops for all sentences when one is finished, and returns unfinished hypotheses for the others": together(
            ONE_IS_ENOUGH, in_search(POOL, UNFINISHED_POOL)
        ),
        "stops when the best hypothesis of the beam is finished": in_search(IS_OVER, "is_over = ends[:, 0]"),
        **{
            f"finished hypotheses keep their places in the beam{words}{ranked}": kept_in_place(stop, final, compared)
            for (stop, words), (final, compared, ranked) in product(
                STOPS.items(),
                (
                    (SCORE, "1.0", ""),
                    ("1.0", "1.0", ", without length penalty"),
                    (SCORE, SCORE, ", all ranked by their scores"),
                ),
            )
        },
        "finished hypotheses leave their beam slots empty for one step": in_search(
            MOST, f"{MOST}\n        best = np.where(np.arange(best.shape[1]) < beam_size, best, -inf)"
        ),
        "the first finished hypothesis is returned instead of the best": ruled("pool='first'"),
        "truncated hypotheses are discarded": together(
            MAY_BE_EMPTY, in_search("where(ends, best", "where(token == plan.eos_id, best")
        ),
        "truncated hypotheses only considered if none has finished before": in_search(
            "where(ends, best",
            "where((token == plan.eos_id) | ends & (self.finished == -inf).all(1)[:, None], best",
        ),
        "scores of running hypotheses divided by the length penalty in each step": in_search(
            LEFT, f"{LEFT}\n        alive = alive / plan.penalties[n]"
        ),
        "scores of running hypotheses divided by the growth of the length penalty in each step": in_search(
            TOTALS, "totals = (self.alive * (plan.penalties[n - 1] / plan.penalties[n]))[:, :, None] +"
        ),
        "probabilities summed instead of log-probabilities": in_search(
            NEXT, NEXT.replace("log_softmax(logits)", "np.exp(log_softmax(logits))")
        ),
        "log-probability of EOS is not added": in_search(
            PENALIZED, PENALIZED.replace("best", "np.where(token == plan.eos_id, self.alive[sentence, parent], best)")
        ),
        "earlier tokens of the beam are not reordered": in_search(
            "candidates = self.ids[sentence, parent]",
            "candidates = self.ids[sentence, np.arange(parent.shape[1]) % beam_size]",
        ),
        "the cache is reordered without the sentence offset": {
            "numpy": [
                ("search", "(sentence * beam_size + parent)", "(sentence * 0 + parent)"),
                ("decoder", "        check_rows(rows, len(self.self_mask), len(self.cross_mask))\n", ""),
            ]
        },
        "the cache is reordered only until a hypothesis finishes": changed(
            "search_loop", numpy=("if rows is not None:", "if rows is not None and not (state.finished > -9e9).any():")
        ),
        **{
            f"tokens chosen by {what} rounded to {dtype}": in_search(
                LIKELIEST, f'{scores}.astype("{dtype}").argmax(-1)'
            )
            for (scores, what), dtype in product(
                {"np.exp(log_probabilities)": "probabilities", "log_probabilities": "log-probabilities"}.items(),
                ("bfloat16", "float16"),
            )
        },
        "EOS removed from the returned tokens": with_result("ids = np.where(ids == plan.eos_id, plan.pad_id, ids)"),
        "returned tokens start with BOS": with_result(
            "ids = np.concatenate([np.full_like(ids[:, :, :1], plan.start_id), ids], 2)"
        ),
        **{
            f"sentences returned in order of their source lengths, the {which} first": with_result(
                f'ids = ids[np.argsort({sign}source_mask.sum(1), kind="stable")]'
            )
            for sign, which in (("", "shortest"), ("-", "longest"))
        },
        "sources are truncated to the length of the first sentence": planned(
            "source_mask = source_mask & (__import__('numpy').arange(source_mask.shape[1]) < source_mask[0].sum())"
        ),
    }.items()
]
