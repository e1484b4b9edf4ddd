"""The HTML page of a report, as text and in a browser."""

from __future__ import annotations

import json
import math
import re
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import GUILTY, SETTING, SIMPLE, TAPS, result_of, run_of
from report_runs import result as result  # a fixture

from transformer_parity.engine.findings import AGREES, DIVERGES
from transformer_parity.engine.system.files import write_json
from transformer_parity.transformer.report.html import html, write_html


# The page
class Page(HTMLParser):
    """Counts elements by name and class, and collects text and URLs."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements, self.addresses, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.elements.append((tag, (attributes.get("class") or "").split(), attributes))
        self.addresses += [attributes[name] for name in ("src", "href", "srcset", "action") if name in attributes]

    def handle_data(self, data):
        self.text += data

    def count(self, tag, kind=None):
        return sum(name == tag and (kind is None or kind in kinds) for name, kinds, _ in self.elements)


def rows_of(result) -> int:
    cases = {row["case"] for row in result["result"]["taps"]}
    return sum(len({row["tap"] for row in result["result"]["taps"] if row["case"] == case}) for case in cases)


def check_page(page: Page, result: dict) -> None:
    """Check that the page contains the complete result."""
    assert page.count("tr", "fails") + page.count("tr", "fine") == rows_of(result) == 2 * len(TAPS)
    assert page.count("tr", "fails") == len(TAPS) - TAPS.index(GUILTY) + 2
    assert page.count("em", "introduced") == 2  # float64 and float32
    assert page.count("path", "origin") == 2
    assert page.count("li", "introduced") == 2 * 3  # the layer, its attention, and the scores, in both trees
    assert page.count("article", "port") == 2
    assert page.count("div", "explorer") == 1
    assert page.count("h2") == 8
    rows = [attributes for tag, kinds, attributes in page.elements if tag == "td" and "imprecise" in kinds]
    assert page.count("table", "components") == 1
    assert len(rows) == 1  # the full model in float32
    for words in (
        "Diverge",
        "torch does not scale the scores",
        "jax: no search",
        "gpu (use --device gpu)",
        "1 of 2 weights is not used correctly",
        result["result"]["fingerprint"]["sha256"],
    ):
        assert words in " ".join(page.text.split()), words


def test_page_contains_the_complete_result(result):
    page = Page(html(result))
    check_page(page, result)
    assert "object at 0x" not in page.text


def test_page_counts_cases_and_comparisons_consistently(result):
    """A case with multiple dtypes is one case, and skipped cases aren't included in the comparisons."""
    text = " ".join(Page(html(result)).text.split())
    assert "2 ports4 cases" in text  # two list items
    assert "3 cases diverging" in text  # full/padded, full/untied, and gradients
    assert "3 cases agreeing, 1 case skipped" in text
    of_all, *of_ports = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) comparisons", text)]
    assert of_all == sum(of_ports[:2]) == result["result"]["comparisons"]


def test_page_needs_no_network(result):
    text = html(result)
    assert all(address.startswith("data:") for address in Page(text).addresses)
    assert re.findall(r"url\(|@import|https?://|fetch\(", text) == []


def test_page_escapes_text_from_ports(result):
    text = html(result)
    assert text.count("&lt;script&gt;alert(") == 1  # the detail of the audit
    assert "<script>alert" not in text


def test_page_without_comparisons_is_incomplete():
    page = Page(html(result_of([])))
    assert "Incomplete" in page.text
    assert page.count("tr") == 0
    for words in ("No taps of a full model were compared.", "The weights were not audited.", "Nothing was skipped."):
        assert words in page.text


def test_page_of_an_agreeing_result_shows_no_failure(result):
    text = html(result_of([*run_of("jax", "float64"), *run_of("torch", "float64")]))
    page = Page(text)
    assert page.count("tr", "fine") == len(TAPS)
    assert page.count("tr", "fails") == 0
    assert "Where the differences start" not in page.text
    assert page.count("div", "explorer") == page.count("canvas") == 0
    assert f"full/padded: all {len(TAPS)} taps are within tolerance" in page.text


def test_page_created_from_the_result_file_is_identical(result, tmp_path):
    write_json(tmp_path / "result.json", result)
    assert html(json.loads((tmp_path / "result.json").read_text("utf-8"))) == html(result)


@pytest.mark.parametrize(
    ("ratio", "step"),
    [(0.0, 0), (0.01, 1), (0.011, 2), (0.5, 3), (1.0, 3), (1.01, 4), (1e6, 6), (1e12, 7), (math.nan, 7)],
)
def test_color_is_the_ratio_on_a_logarithmic_scale(ratio, step):
    verdict = AGREES if ratio <= 1.0 else DIVERGES
    page = Page(html(result_of([replace(SIMPLE, error=ratio, tolerance=1.0, verdict=verdict)])))
    cells = [kinds for tag, kinds, _ in page.elements if tag == "td" and kinds and kinds[0] != verdict]
    assert cells == [[f"s{step}"]]


PROBE = """
<script>
const rows = () => [...document.querySelectorAll("#matrix .scroll")][0]
  .querySelectorAll("tbody tr").values().filter(row => row.offsetHeight > 0).toArray().length;
const said = {wide: document.documentElement.scrollWidth - document.documentElement.clientWidth};
said.tall = document.documentElement.scrollHeight;
const ready = setInterval(() => {
  const explorers = [...document.querySelectorAll(".explorer")];
  if (explorers.some(one => !one.dataset.ready)) return;
  clearInterval(ready);
  said.maps = document.querySelectorAll(".maps canvas").length;
  said.clipped = [...document.querySelectorAll(".scroll")].every(box =>
    !box.clientWidth || (box.scrollWidth > box.clientWidth + 1) === "clipped" in box.dataset);
  document.querySelector("#matrix").open = true;
  said.all = rows();
  document.querySelector(".only")?.click();
  said.failing = rows();
  parent.postMessage(JSON.stringify(said), "*");
}, 50);
</script>
"""
FRAME = """<body><iframe src="page.html" style="width: %dpx; height: 900px; border: 0"></iframe><pre></pre>
<script>addEventListener("message", event => document.querySelector("pre").textContent = event.data)</script></body>"""


def open_page(browser: str, path: Path, *more: str) -> tuple[str, str]:
    """Return the DOM after rendering, and the browser's console output."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={path.parent / 'profile'}", *more]
    command = [browser, *options, "--timeout=20000", "--virtual-time-tolerance=3000", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


def test_page_renders_completely_in_a_browser(browser, result, tmp_path):
    write_html(tmp_path / "page.html", result)
    text, console = open_page(browser, tmp_path / "page.html")
    assert console == ""
    check_page(Page(text), result)


def probed(browser, result, tmp_path, width):
    """Return the measurements that a page takes of itself at a given width."""
    (tmp_path / "page.html").write_text(html(result).replace("</body>", f"{PROBE}</body>"), "utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width, "utf-8")
    text, console = open_page(
        browser, tmp_path / "frame.html", "--virtual-time-budget=20000", f"--window-size={width + 40},1000"
    )
    assert console == ""
    return json.loads(re.search(r"<pre>(.*)</pre>", text)[1])


def test_page_fits_a_phone_and_filters_failures(browser, result, tmp_path):
    said = probed(browser, result, tmp_path, 400)
    assert said.pop("tall") > 900
    failing = len(TAPS) - TAPS.index(GUILTY)
    assert said == {"all": len(TAPS), "wide": 0, "failing": failing, "maps": 3, "clipped": True}


def test_page_of_a_passing_check_fits_two_screens_without_maps(browser, tmp_path):
    components = [f"part {i}" for i in range(18)]  # as many as in a complete check
    findings = [finding for name in ("torch", "jax") for dtype in SETTING.dtypes for finding in run_of(name, dtype)]
    findings += [
        replace(finding, component=part, path="fast") for finding in findings[:: len(TAPS)] for part in components
    ]
    said = probed(browser, result_of(findings, not_tested=["gpu", "tf", "decode", "steps"]), tmp_path, 1280)
    assert said.pop("tall") <= 2 * 900
    assert said == {"all": len(TAPS), "wide": 0, "failing": len(TAPS), "maps": 0, "clipped": True}


def test_browser_error_is_detected_by_the_tests(browser, tmp_path):
    (tmp_path / "page.html").write_text("<script>console.error('broken')</script>", "utf-8")
    assert "broken" in open_page(browser, tmp_path / "page.html")[1]
