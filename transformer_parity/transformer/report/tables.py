"""Parts of tables that are specific to the Transformer: titles for dtypes, and the block errors on real sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from transformer_parity.engine.findings import Finding
from transformer_parity.engine.outputs import OUTPUT, TAPS
from transformer_parity.engine.report.tables import cell, print_table
from transformer_parity.engine.report.tree import block_of
from transformer_parity.engine.tolerances import POLICY
from transformer_parity.transformer.cases.case import SENTENCES

_FLOAT32 = POLICY["float32"]
_GRADIENTS, _STEPS = POLICY["gradients"]["float64"], POLICY["steps"]
TITLES = {
    "float64": f"float64 (checks the math). Tolerances: {POLICY['float64']['tap']:.0e} for taps, "
    f"{POLICY['decode']['float64']['score']:.0e} for search scores, {_GRADIENTS['loss']:.0e} for the loss, "
    f"{_GRADIENTS['whole']:.0e} for all gradients together and {_GRADIENTS['tensor']:.0e} for each, "
    f"{_STEPS['float64']['loss']:.0e} after twenty optimizer steps.",
    "float32": f"float32 (checks the precision). Tolerance: {_FLOAT32['ratio']:.0f} times the reference's own float32 "
    f"error, plus {_FLOAT32['floor_in_eps']:.0f} eps. After five optimizer steps: {_STEPS['float32']['loss']:.0e} for "
    f"the loss, {_STEPS['float32']['tensor']:.0e} for tensors.",
    "bfloat16": f"bfloat16 (only a smoke test, which doesn't detect all bugs). Tolerance: "
    f"{POLICY['bfloat16']['tap']:.0e} for most taps.",
}


def print_depth(console: Console, findings: Sequence[Finding], backends: Sequence[str]) -> None:
    """Print the errors on real sentences block by block, which shows how the error grows through the model."""
    taps = [finding for finding in findings if finding.component == SENTENCES and finding.path == TAPS]
    taps = [finding for finding in taps if finding.dtype != "bfloat16" and finding.tap != OUTPUT]
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in taps:
        groups.setdefault((block_of(finding.tap), finding.dtype, finding.backend), []).append(finding)
    columns = [(dtype, backend) for dtype in dict.fromkeys(finding.dtype for finding in taps) for backend in backends]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("block", no_wrap=True)
    for dtype, backend in columns:
        table.add_column(f"{backend}\n{dtype}", justify="right", no_wrap=True)
    for block in dict.fromkeys(block for block, _, _ in groups):
        table.add_row(Text(block), *(cell(groups.get((block, *column), []), percentage=False) for column in columns))
    if taps:
        print_table(console, "Real sentences, block by block: the error closest to its tolerance.", table)
