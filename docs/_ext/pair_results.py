"""Tables generated from the committed results of ``parity pair`` on port bugs and on pairs in the wild."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator

from results import RESULTS, read


def port_bugs() -> Iterator[str]:
    """Yield the lines of Markdown tables with the results on port bugs: totals, then one row per bug and control."""
    report = read(RESULTS / "port-bugs.json")
    ports = report["ports"]
    bugs, right = [one for one in ports if one["is_bug"]], [one for one in ports if not one["is_bug"]]
    named = [one for one in bugs if one["kind"]]
    yield from ("| rule | bugs found | false alarms |", "|---|---:|---:|")
    alarms = sum(not one["is_found"] for one in right)
    yield f"| `parity pair` | {sum(one['is_found'] for one in bugs)} of {len(bugs)} | {alarms} of {len(right)} |"
    for rule in bugs[0]["rules"]:
        found, false = (sum(one["rules"][rule] is False for one in group) for group in (bugs, right))
        yield f"| {rule} | {found} of {len(bugs)} | {false} of {len(right)} |"
    yield ""
    places = [one for one in bugs if one["blocks"]]
    yield (
        f"`parity pair` located {sum(one['is_located'] for one in places)} of {len(places)} bugs that have a place in "
        f"the forward pass, and named {sum(one['is_named'] for one in named)} of {len(named)} bugs that have a name. "
        f"Processor: {report['processor']}."
    )
    yield ""
    yield from ("| bug | source | verdict | starts at | cause in the report |", "|---|---|---|---|---|")
    for one in bugs:
        place = f"`{one['introduced'][0]}`" if one["introduced"] else ""
        cause = one["causes"][0].partition(", ")[2].replace("|", "\\|") if one["causes"] else ""
        what = one["what"].rstrip(".").replace("|", "\\|")
        yield f"| {what} | {one['source']} | {one['verdict']} | {place} | {cause} |"
    yield ""
    yield from ("| control | verdict |", "|---|---|")
    for one in right:
        if one["port"] == "Port":
            yield f"| {one['what'].rstrip('.')} | {one['verdict']} |"


def wild() -> Iterator[str]:
    """Yield the lines of Markdown tables with the results on pairs in the wild, sorted by verdict."""
    report = read(RESULTS / "wild-pairs.json")
    pairs = report["pairs"]
    causes = tomllib.loads((RESULTS / "wild-causes.toml").read_text("utf-8"))
    counts = Counter((one["library"], one["verdict"]) for one in pairs)
    libraries, verdicts = (list(dict.fromkeys(key[i] for key in counts)) for i in (0, 1))
    yield f"| library | {' | '.join(verdicts)} |"
    yield "|---|" + "---:|" * len(verdicts)
    for library in libraries:
        yield f"| {library} | {' | '.join(str(counts[library, verdict]) for verdict in verdicts)} |"
    yield ""
    agreeing = {
        name: [one["name"] for one in pairs if one["library"] == name and one["verdict"] == "AGREE"]
        for name in libraries
    }
    for library, names in agreeing.items():
        yield f"**{library} agrees:** {', '.join(names)}."
        yield ""
    yield from ("| pair | verdict | cause | report |", "|---|---|---|---|")
    for one in pairs:
        if one["verdict"] == "AGREE":
            continue
        cause = causes.get(one["library"], {}).get(one["name"], "not examined")
        place = f"at {one['introduced'][0]}" if one["introduced"] else ""
        named = next(iter(one["causes"]), place).replace("|", "\\|")
        yield f"| {one['library']} {one['name']} | {one['verdict']} | {cause} | {named} |"
    yield ""
    yield f"Processor: {report['processor']}."
