"""The result as JUnit's XML, which every CI server reads: a suite per backend, a test case per case and dtype."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from transformer_parity.engine.findings import AGREES, SKIPPED
from transformer_parity.engine.system.files import write_text

NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # of XML 1.0, section 2.2
Result = Mapping[str, Any]


def write_junit(path: Path, result: Result) -> None:
    """Write a result (see ``result.build``), atomically."""
    write_text(path, junit(result))


def junit(result: Result) -> str:
    """Return the XML.

    A suite of which nothing was compared holds a failing test case that says so: without it, it would pass.
    """
    suites = [_suite(result, backend) for backend in _backends(result)]
    totals = {name: str(sum(int(suite.get(name, 0)) for suite in suites)) for name in _COUNTS}
    root = ElementTree.Element("testsuites", {"name": "parity check", **totals})
    root.extend(suites)
    ElementTree.indent(root)
    text = NOT_XML.sub("", ElementTree.tostring(root, "unicode"))  # what XML cannot hold, not even escaped
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{text}\n'


_COUNTS = ("tests", "failures", "errors", "skipped")


def _backends(result: Result) -> list[str]:
    """Return the backends, with ports by the name that findings have."""
    found = list(dict.fromkeys(row["backend"] for row in result["cases"]))
    return found or list(result["backends"])


def _suite(result: Result, backend: str) -> ElementTree.Element:
    rows = [row for row in result["cases"] if row["backend"] == backend]
    cases = [_case(row, _diagnosis(result, row)) for row in rows]
    if all(row["verdict"] == SKIPPED for row in rows):
        case = ElementTree.Element("testcase", {"classname": backend, "name": "something was compared"})
        ElementTree.SubElement(case, "failure", {"type": "nothing compared", "message": "nothing was compared"})
        cases.append(case)
    for what in result["missing"]:
        if what.startswith(f"{backend}: "):
            case = ElementTree.Element("testcase", {"classname": backend, "name": f"compared: {what}"})
            ElementTree.SubElement(case, "failure", {"type": "not compared", "message": what})
            cases.append(case)
    counts = {
        "tests": len(cases),
        "failures": sum(case.find("failure") is not None for case in cases),
        "errors": 0,
        "skipped": sum(case.find("skipped") is not None for case in cases),
    }
    fields = {"name": backend, "timestamp": result["date"], **{name: str(count) for name, count in counts.items()}}
    suite = ElementTree.Element("testsuite", fields)
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (
        ("fingerprint", result["fingerprint"]["sha256"]),
        ("precision", result["setting"]["precision"]),
        *result["environment"].get(backend, {}).items(),
        *(("not tested", what) for what in result["not_tested"]),
    ):
        ElementTree.SubElement(properties, "property", {"name": name, "value": str(value)})
    suite.extend(cases)
    return suite


def _case(row: Result, diagnosis: str) -> ElementTree.Element:
    name = f"{row['case']} ({row['dtype']})" if row["case"] else "the port as a whole"
    case = ElementTree.Element("testcase", {"classname": f"{row['backend']}.{row['stage']}", "name": name})
    skips = "\n".join(row["skips"])
    if row["verdict"] == SKIPPED:
        ElementTree.SubElement(case, "skipped", {"message": skips})
    elif row["verdict"] != AGREES:
        finding = row["finding"]
        numbers = f"error {finding['error']}, tolerance {finding['tolerance']}"
        message = f"{finding['tap']}: {finding['detail'] or numbers}".removeprefix(": ")
        failure = ElementTree.SubElement(case, "failure", {"type": row["verdict"], "message": message})
        others = f"{row['failed']} of {row['comparisons']} comparisons failed; the first is {message}"
        failure.text = "\n".join(filter(None, (diagnosis, others)))
    if skips and row["verdict"] != SKIPPED:
        ElementTree.SubElement(case, "system-out").text = f"skipped: {skips}"
    return case


def _diagnosis(result: Result, row: Result) -> str:
    """Return the diagnosis of a case, or that of another case of the same port: only the first failures have one."""
    found = [entry for entry in result["diagnoses"] if entry["backend"] == row["backend"]]
    if not found:
        return ""
    own = [entry for entry in found if (entry["case"], entry["dtype"]) == (row["case"], row["dtype"])]
    entry = (own or found)[0]
    where = "" if own else f"{entry['case']} ({entry['dtype']}): "
    return f"{where}{entry['sentence']} [{entry['confidence']}]"
