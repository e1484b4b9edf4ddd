"""Print the blocks of a model as a tree, and mark the blocks that introduce a difference."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from transformer_parity.engine.localization import FINE, INHERITED, INTRODUCED, Blame, Mark

LINES = 25
STYLES = {FINE: "green", INHERITED: "dim", INTRODUCED: "bold red"}
TITLES = {"at": "gradients at the taps, starting from the logits", "of": "gradients of the parameters"}
WAYS = {
    "port": "reran each block of the port on the reference's inputs",
    "reference": "reran each block of the reference on the port's inputs",
    "nothing": "the port reports no taps, so no block could be rerun, and every difference may be inherited",
}


@dataclass
class Node:
    """A part of a model. A leaf has a mark, and other nodes have parts."""

    name: str
    mark: Mark | None = None
    parts: list[Node] = field(default_factory=list)

    def marks(self) -> Iterator[Mark]:
        """Yield the marks of all leaves below this node, in the order of computation."""
        if self.mark is not None:
            yield self.mark
        for part in self.parts:
            yield from part.marks()

    @property
    def verdict(self) -> str:
        """``introduced`` if any leaf introduces a difference; otherwise ``inherited`` if any leaf inherits one."""
        verdicts = {mark.verdict for mark in self.marks()}
        return next(verdict for verdict in (INTRODUCED, INHERITED, FINE) if verdict in verdicts)


def nodes(marks: Iterable[Mark]) -> list[Node]:
    """Return the parts of a model as nested nodes, such as ``encoder.layers.0``, ``self_attention``, ``scores``.

    For the backward pass, the first part contains the gradients at taps, and the second part contains the parameter
    gradients.
    """
    root = Node("")
    for mark in marks:
        kind, _, path = mark.name.partition(" ")
        if kind not in TITLES:
            kind, path = "", mark.name
        node = root
        for name in [*([TITLES[kind]] if kind else []), *_path(path)]:
            if not node.parts or node.parts[-1].name != name or node.parts[-1].mark is not None:
                node.parts.append(Node(name))
            node = node.parts[-1]
        node.mark = mark
    return [_shortened(part) for part in root.parts]


def role(name: str) -> str:
    """Return the role of a tensor: its name without the layer, and with its block's kind instead of the block's name.

    Tensors with the same function in different layers, or in different blocks of the same kind, have the same role.

    The last word of a block's name is its kind. For example, ``self_attention`` and ``cross_attention`` both have the
    kind ``attention``.
    """
    block, _, rest = name.partition(".")
    if rest.startswith("layers."):
        block, _, rest = rest.partition(".")[2].partition(".")[2].partition(".")
        return f"{block.rpartition('_')[2]}.{rest}"
    return f"norm.{rest}" if block.endswith("_norm") else name


def block_of(name: str) -> str:
    """Return the block of a tensor: its layer or, outside the layers, the first part of its name."""
    path = name.split(".")
    return ".".join(path[:3]) if path[1:2] == ["layers"] else path[0]


def first_places(marks: Iterable[Mark]) -> dict[str, int]:
    """Group the tensors that introduce a difference by role.

    Return a dict from the first tensor of each group to the number of other tensors in the group.
    """
    places: dict[str, list[str]] = {}
    for mark in marks:
        if mark.verdict == INTRODUCED:
            places.setdefault(role(mark.name), []).append(mark.name)
    return {names[0]: len(names) - 1 for names in places.values()}


def print_blame(console: Console, blame: Blame, trusted: str = "reference") -> None:
    """Print the tree of a model's blocks. A part is expanded only if it contains differences.

    Args:
        console: The console to print to.
        blame: The result of the localization.
        trusted: The word for the implementation that the port was compared with.
    """
    title = Text(f"{blame.backend} {blame.dtype} {blame.case}", "bold")
    title += Text(f"\n{WAYS[blame.replayed].replace('reference', trusted)}", "dim")
    if all(mark.verdict == FINE for mark in blame.marks):
        console.print(title)
        what = "gradients" if any(mark.name.startswith("at ") for mark in blame.marks) else "tensors"
        console.print(
            Text(f"within tolerance: {len(blame.marks)} {what if len(blame.marks) > 1 else what[:-1]}", STYLES[FINE])
        )
        return
    places = first_places(blame.marks)
    attempts = [(len(places), False), *((number, True) for number in range(len(places), -1, -1))]
    for number, folds in attempts:
        tree = Tree(title, guide_style="dim")
        _add_all(tree, nodes(blame.marks), dict(list(places.items())[:number]), folds)
        if _count(tree) <= LINES:
            break
    console.print(tree)


def _shortened(node: Node) -> Node:
    """Merge a node with its only part, if this part is a leaf.

    For example, merge ``self_attention_norm`` and ``output`` into ``self_attention_norm.output``.
    """
    node.parts = [_shortened(part) for part in node.parts]
    if len(node.parts) == 1 and node.parts[0].mark is not None:
        return Node(f"{node.name}.{node.parts[0].name}", node.parts[0].mark)
    return node


def _path(name: str) -> list[str]:
    """Split a name into the layer (including the stack), the sublayer, and the tensor."""
    path = name.split(".")
    if path[1:2] != ["layers"]:
        return path[:1] if len(path) == 1 else [".".join(path)]
    layer = ".".join(path[:3])
    return [layer, *path[3:4], *([".".join(path[4:])] if path[4:] else [])]


def _add_all(tree: Tree, parts: Sequence[Node], first: Mapping[str, int], folds: bool) -> None:
    """Add model parts to a tree. Adjacent parts whose tensors have the same verdicts share one line."""
    groups: list[list[Node]] = []
    for part in parts:
        together = groups and not any(_is_spelled_out(other, first, folds) for other in (part, groups[-1][-1]))
        if together and _content(part) == _content(groups[-1][-1]):
            groups[-1].append(part)
        else:
            groups.append([part])
    for alike in groups:
        part = alike[0]
        if len(alike) == 1 and part.mark is not None and part.mark.verdict != FINE:
            tree.add(_leaf(part.name, part.mark, first.get(part.mark.name)))
        elif _is_spelled_out(part, first, folds):
            _add_all(tree.add(Text(part.name, "bold")), part.parts, first, folds)
        else:
            tree.add(_folded(alike))


def _content(part: Node) -> tuple[object, ...]:
    if part.mark is not None:
        return (part.mark.verdict,)
    return tuple((role(mark.name), mark.verdict) for mark in part.marks())


def _is_spelled_out(part: Node, first: Mapping[str, int], folds: bool) -> bool:
    """Return True if a part must not share a line with adjacent parts. Such a part is expanded."""
    if any(mark.name in first for mark in part.marks()):
        return True
    return part.mark is not None and part.mark.verdict != FINE and not folds


def _leaf(name: str, mark: Mark, others: int | None) -> Text:
    line = Text(f"{name}  error {mark.free:.1e}, tolerance {mark.tolerance:.0e}  ", STYLES[mark.verdict])
    if mark.verdict != INTRODUCED:
        return line + Text(mark.verdict, STYLES[mark.verdict])
    line += Text("<- introduced here" if others is not None else "<- introduced here too", STYLES[INTRODUCED])
    return line + Text(f", and in {others} similar place{'s' if others > 1 else ''}" if others else "", "default")


def _folded(alike: Sequence[Node]) -> Text:
    """Return one line that describes adjacent parts of the model whose tensors have the same verdicts."""
    name = alike[0].name
    if len(alike) > 1:
        stem, _, number = alike[-1].name.rpartition(".")
        is_range = number.isdecimal() and stem == name.rpartition(".")[0]
        together = f"{name} to {number}" if is_range else ", ".join(part.name for part in alike)
        name = together if len(together) < 60 else f"{name} to {alike[-1].name}"
    marks = [mark for part in alike for mark in part.marks()]
    counts = {verdict: sum(mark.verdict == verdict for mark in marks) for verdict in STYLES}
    verdict = next(verdict for verdict in (INTRODUCED, INHERITED, FINE) if counts[verdict])
    taps = f", {len(marks)} tensors" if len(marks) > 1 else ""
    if verdict == FINE:
        return Text(f"{name}  within tolerance{taps}", STYLES[FINE])
    worst = max(mark.free for mark in marks)
    if verdict == INHERITED:
        return Text(
            f"{name}  inherited, {counts[INHERITED]} of {len(marks)}, error up to {worst:.1e}", STYLES[INHERITED]
        )
    starts = dict.fromkeys(".".join(_path(mark.name)[1:]) or mark.name for mark in marks if mark.verdict == INTRODUCED)
    what = ", ".join(list(starts)[:2]) + (f" and {len(starts) - 2} more" if len(starts) > 2 else "")
    line = Text(f"{name}  {counts[INHERITED]} of {len(marks)} inherited  ", STYLES[INHERITED])
    return line + Text(f"<- introduced here too: {what}", STYLES[INTRODUCED])


def _count(tree: Tree) -> int:
    return 1 + sum(map(_count, tree.children))
