"""`parity explore`: the page shows the recorded values, agrees with blame, stays small, and works in a browser."""

from __future__ import annotations

import base64
import json
import math
import re
import zlib
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from conftest import exit_code
from search_models import lively
from test_reports_page import open_page
from tiers import first_alone
from translate_runs import save

from transformer_parity.apps.text.dates import SHIPPED
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.engine.localization import FINE, INTRODUCED, Mark
from transformer_parity.engine.report.page import Scale, page
from transformer_parity.engine.style import PAGE
from transformer_parity.engine.tensors import relative_error
from transformer_parity.engine.tolerances import tolerance
from transformer_parity.plugin import Port
from transformer_parity.transformer.bugs.bug import FOUR
from transformer_parity.transformer.bugs.catalog import FORWARD, cases
from transformer_parity.transformer.explore.recording import Recorded, Recording, record
from transformer_parity.transformer.explore.view import MOST_CHANNELS, view
from transformer_parity.transformer.ports.registry import DEFINITION, PORTS
from transformer_parity.transformer.selftest.buggy_ports import injected
from transformer_spec.config import TransformerConfig
from transformer_spec.names import tap_shapes

CASES = cases()
MAIN = CASES["full/padded"]
BUGS = {bug.name: bug for part in FORWARD.values() for bug in part}
SCORES = "encoder.layers.0.self_attention.scores"
LIMIT = 3_000_000  # bytes


def recorded(name: str, bug: str = "", dtype: str = "float64", case=MAIN) -> Recording:
    """Return a recording of one port on a case, with or without an injected bug."""
    port = injected(BUGS[bug], name) if bug else PORTS[name]
    return record(case.config, case.load_weights(), case.inputs, [port], dtype)


def ids_as_tokens(inputs) -> dict[str, list[list[str]]]:
    return {side: [[str(token) for token in row] for row in inputs[f"{side}_ids"]] for side in ("source", "target")}


def shown(recording: Recording, case=MAIN) -> dict:
    return view(recording, "a title", ids_as_tokens(case.inputs))


class Page(HTMLParser):
    """The contents of a page's scripts, and every address in the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts, self.addresses, self.options, self._kind = {}, [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self._kind = attributes.get("class", "code") if tag == "script" else None
        self.addresses += [attributes[name] for name in ("src", "href", "srcset", "action") if name in attributes]
        if attributes.get("role") == "option":
            self.options.append(attributes)

    def handle_data(self, data):
        if self._kind is not None:
            self.scripts[self._kind] = self.scripts.get(self._kind, "") + data


def decoded(text: str) -> dict[tuple[str, str], np.ndarray]:
    """Return the values in a page, decoded as by its script: by tap, and by ``reference`` or the name of a port."""
    found = Page(text)
    content = json.loads(found.scripts["view"])
    planes = np.frombuffer(zlib.decompress(base64.b64decode(found.scripts["data"])), np.uint8)
    bits = np.ascontiguousarray(planes.reshape(4, -1).T).view("<u4").ravel()
    assert bits.size == content["size"]
    values = {}
    for tap in content["taps"]:
        count, place = math.prod(tap["shape"]), tap["reference"]
        own = bits[place : place + count]
        values[tap["name"], "reference"] = own.view("<f4").reshape(tap["shape"])
        for name, port in zip(content["ports"], tap["ports"], strict=True):
            if port is not None and "values" in port:
                theirs = bits[port["values"] : port["values"] + count] ^ own
                values[tap["name"], name] = theirs.view("<f4").reshape(tap["shape"])
            if port is not None and "apart" in port:
                apart = bits[port["apart"] : port["apart"] + count]
                values[tap["name"], f"{name} apart"] = apart.view("<f4").reshape(tap["shape"])
    return values


# --- The page shows the recorded values ---


@pytest.mark.only("numpy", "torch", "jax", "tf")
@pytest.mark.parametrize(
    "name",
    [
        "numpy",
        pytest.param("torch", marks=pytest.mark.only("torch")),
        *(pytest.param(name, marks=[pytest.mark.only(name), pytest.mark.extended("pages")]) for name in ("jax", "tf")),
    ],
)
def test_explore_page_contains_the_recorded_taps(name):
    recording = recorded(name, "scores not scaled", "float32")
    values = decoded(page(shown(recording), []))
    row, rng = recording.sentence, np.random.default_rng(0)
    full = {tap for tap, which in values if which == name and (tap, f"{name} apart") not in values}
    # The first wrong tap is scores, whose inputs are query and key.
    assert {tap.rpartition(".")[2] for tap in full} == {"scores", "weights", "query", "key"}
    for tap, expected in recording.expected.items():
        actual = recording.ports[0].actual[tap][row]
        expected = expected[row].astype(np.float32) if tap in full else expected[row]
        if tap not in full:
            apart = np.linalg.norm(actual - expected, axis=-1)
            expected, actual = np.linalg.norm(expected, axis=-1), np.linalg.norm(actual, axis=-1)
            close(values[tap, f"{name} apart"], apart)
        close(values[tap, "reference"], expected)
        close(values[tap, name], actual)
        for _ in range(3):  # a pointer selects individual cells, which must show the exact value
            cell = tuple(rng.integers(0, n) for n in actual.shape)
            found = values[tap, name].reshape(actual.shape)[cell]
            assert found == np.float32(actual[cell]), (tap, cell)


def close(found, wanted):
    np.testing.assert_array_equal(found.reshape(wanted.shape), wanted.astype(np.float32))


def test_nan_and_infinity_are_displayed():
    recording = recorded("numpy")
    port = recording.ports[0]
    actual = {tap: value.copy() for tap, value in port.actual.items()}
    actual[SCORES][0, 0, 1, 2], actual[SCORES][0, 1, 0, 0] = np.nan, np.inf
    marks = [replace(mark, free=math.inf, verdict=INTRODUCED) if mark.name == SCORES else mark for mark in port.marks]
    text = page(shown(replace(recording, ports=[Recorded("numpy", marks, actual)])), [])
    values = decoded(text)[SCORES, "numpy"]
    assert math.isnan(values[0, 1, 2])
    assert values[1, 0, 0] == math.inf
    assert '"error":"inf"' in text  # JSON can't represent infinity


def test_tap_with_wrong_shape_is_reported():
    recording = recorded("numpy")
    port = recording.ports[0]
    actual = {**port.actual, SCORES: port.actual[SCORES][:, :2]}
    marks = [replace(mark, free=math.inf, verdict=INTRODUCED) if mark.name == SCORES else mark for mark in port.marks]
    found = shown(replace(recording, ports=[Recorded("numpy", marks, actual)]))
    entry = next(tap for tap in found["taps"] if tap["name"] == SCORES)["ports"][0]
    assert entry["problem"] == "the shape is [4, 2, 9, 9] instead of [4, 3, 9, 9]"
    assert "values" not in entry


def test_errors_and_tolerances_match_parity_check():
    recording = record(MAIN.config, MAIN.load_weights(), MAIN.inputs, [DEFINITION], "float32")
    for mark in recording.ports[0].marks:
        actual = recording.ports[0].actual[mark.name]
        assert mark.free == relative_error(actual, recording.expected[mark.name])
        assert mark.tolerance == tolerance(mark.name, "float32", mark.free)  # the reference is its own baseline
        assert mark.verdict == FINE


# --- The start of a difference ---


def injected_everywhere() -> list:
    """Return every forward bug in every package; only some of those in the first two packages run by default."""
    every, parameters = {"numpy": 4, "torch": 30}, []
    for name in FOUR:
        for i, (bug, entry) in enumerate(BUGS.items()):
            if name in entry.edits and not CASES[entry.case].block:
                marks = [pytest.mark.only(name)]
                if name not in every or i % every[name]:
                    marks.append(pytest.mark.extended("bugs"))
                parameters.append(pytest.param(name, bug, id=f"{name}-{bug}", marks=marks))
    return parameters


@pytest.mark.parametrize(("name", "bug"), injected_everywhere())
def test_first_tap_over_tolerance_matches_blame(name, bug):
    entry = BUGS[bug]
    recording = recorded(name, bug, entry.dtype, CASES[entry.case])
    (port,) = recording.ports
    introduced = [mark.name for mark in port.marks if mark.verdict == INTRODUCED]
    assert port.first_over == introduced[0] == entry.at
    assert list(recording.feeds) == [entry.at]


@pytest.mark.parametrize(
    ("bug", "inputs"), [("scores not scaled", ("query", "key")), ("softmax over the queries", ("scores",))]
)
def test_inputs_of_the_first_wrong_tap_are_found(bug, inputs):
    recording = recorded("numpy", bug)
    ((name, feeds),) = recording.feeds.items()
    assert feeds == tuple(f"{name.rpartition('.')[0]}.{tap}" for tap in inputs)


def test_sentence_with_the_largest_error_is_shown():
    recording = recorded("numpy", "encoder without padding mask")
    assert recording.sentence != 0  # the first sentence has no padding
    notes = shown(recording)["notes"]
    said = f"Values are shown for sentence {recording.sentence + 1} of 4."
    assert notes == [f"{said} Errors and tolerances apply to all sentences."]


# --- The page is small for any model ---


def of_sizes(config: TransformerConfig, source: int, target: int, guilty: str) -> tuple[Recording, dict]:
    """Return a recording of random values with a model's shapes, and its tokens.

    The four ports differ by rounding, except that torch is wrong at ``guilty``.
    """
    rng = np.random.default_rng(0)
    expected = {tap: rng.normal(size=shape) for tap, shape in tap_shapes(config, 1, source, target).items()}
    ports = []
    for name in FOUR:
        wrong = 4.0 if name == "torch" else 1.0
        actual = {
            tap: (value * (1 + 1e-7 * rng.normal(size=value.shape))).astype(np.float32)
            for tap, value in expected.items()
        }
        actual[guilty] = actual[guilty] * np.float32(wrong)
        marks = [
            Mark(tap, 1e-7, 1e-7, 1e-6, FINE) if tap != guilty or wrong == 1.0 else Mark(tap, 3, 3, 1e-6, INTRODUCED)
            for tap in expected
        ]
        ports.append(Recorded(name, marks, actual))
    tokens = {"source": [[f"s{i}" for i in range(source)]], "target": [[f"t{i}" for i in range(target)]]}
    return Recording("float32", expected, ports, {guilty: ()}), tokens


def test_page_of_a_base_model_with_four_ports_is_below_three_megabytes():
    config = TransformerConfig.preset("paper_base", source_vocab_size=9, target_vocab_size=2500, tie_embeddings="none")
    recording, tokens = of_sizes(config, 20, 20, "logits")
    found = view(recording, "base", tokens)
    assert found["notes"] == []
    logits = next(tap for tap in found["taps"] if tap["name"] == "logits")
    assert logits["note"] == f"Only the {MOST_CHANNELS:,} of 2,500 channels that differ most are shown."
    assert logits["shape"] == [1, 20, MOST_CHANNELS]
    assert len(page(found, []).encode()) <= LIMIT


def test_long_inputs_are_cropped_with_a_note():
    config = TransformerConfig.preset("paper_base", source_vocab_size=9, target_vocab_size=9, d_ff=8)
    config = config.replace(num_encoder_layers=2, num_decoder_layers=2, num_heads=40)
    recording, tokens = of_sizes(config, 90, 12, SCORES)
    recording.ports[1].actual[SCORES][0, 0, 70] += 9.0  # makes this query differ the most
    found = view(recording, "long", tokens)
    (note,) = found["notes"]
    first = found["starts"]["source"]
    last = first + len(found["tokens"]["source"]) - 1
    assert first < 70 < last < 90
    assert note == (
        f"Only source tokens {first} to {last} (counting from 0) of 90 are shown. Errors and tolerances apply to all "
        "tokens."
    )
    assert found["tokens"]["source"][0] == f"s{first}"
    text = page(found, [])
    assert len(text.encode()) <= LIMIT
    scores = decoded(text)[SCORES, "torch"]
    close(scores, recording.ports[1].actual[SCORES][0][:, first : last + 1, first : last + 1])


# --- The page ---


def test_page_loads_no_external_resources():
    nasty = "<script>alert('&')</script>"
    found = view(recorded("numpy"), nasty, ids_as_tokens(MAIN.inputs))
    found["tokens"]["source"][0] = nasty
    text = page(found, [nasty])
    assert all(address.startswith("data:") for address in Page(text).addresses)
    assert re.findall(r"url\(|@import|https?://|fetch\(|XMLHttpRequest", text) == []
    assert "<script>alert" not in text
    assert text.rstrip().endswith("</html>")


def test_ladder_lists_every_error_without_javascript():
    recording = recorded("numpy", "scores not scaled")
    options = Page(page(shown(recording), [])).options
    assert len(options) == len(recording.expected)
    said = next(option for option in options if option["aria-label"].startswith("scores: "))
    assert said["aria-label"] == "scores: numpy 1.8e+00 introduced here"
    assert "introduced" in said["class"]


def test_error_scale_is_logarithmic():
    scale = Scale(-8, 0)
    assert [scale(value) for value in (0.0, 1e-8, 1e-4, 1.0, "inf", "nan")] == [0.0, 4.0, 50.0, 96.0, 100.0, 100.0]


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("behind", ["page", "panel"])
def test_page_colors_have_sufficient_contrast(scheme, behind):
    """WCAG 2.2 AA requires a contrast of 4.5 to 1 for text and 3 to 1 for marks."""

    def contrast(name):
        one, other = sorted(luminance(PAGE[which][scheme]) + 0.05 for which in (name, behind))
        return other / one

    assert {name: contrast(name) for name in ("ink", "soft", "good", "bad", "open") if contrast(name) < 4.5} == {}
    assert {name: contrast(name) for name in (*FOUR, "other") if contrast(name) < 3.0} == {}


PROBE = """
<script>
const said = {};
const root = () => document.querySelector(".explorer");
const text = selector => root().querySelector(selector).textContent.trim();
const press = (key, on = document.body) => on.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true}));
addEventListener("error", event => { said.error = event.message; });
addEventListener("unhandledrejection", event => { said.error = String(event.reason); });
const timer = setInterval(() => {
  if (!root().dataset.ready && !said.error) return;
  clearInterval(timer);
  const maps = root().querySelector(".maps"), list = root().querySelector(".taps");
  said.start = text(".title");
  said.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  said.clipped = [...root().querySelectorAll(".scroll")].map(
    box => [box.scrollWidth > box.clientWidth + 1, "clipped" in box.dataset]);
  press("n"); said.next = text(".title");
  press("f"); said.first = text(".title");
  said.verdict = text(".ports tbody tr:last-child td:last-child");
  press("w"); said.worst = text(".cell");
  press("ArrowLeft", maps); press("ArrowUp", maps); said.moved = text(".cell");
  said.cells = [...root().querySelectorAll(".ports tbody tr")].map(row => row.children[1].textContent);
  press("h"); said.head = text(".heads [aria-checked=true]");
  press("ArrowDown", list); said.down = text(".title");
  press("End", list); said.end = text(".title");
  const canvases = [...root().querySelectorAll(".maps canvas")];
  said.drawn = canvases.map(one => one.getContext("2d").getImageData(0, 0, one.width, one.height).data.some(x => x));
  parent.postMessage(JSON.stringify(said), "*");
}, 20);
</script>
"""
FRAME = """<body><iframe src="page.html" style="width: %dpx; height: 900px; border: 0"></iframe><pre></pre>
<script>addEventListener("message", event => document.querySelector("pre").textContent = event.data)</script></body>"""


@pytest.mark.parametrize(
    "screen", first_alone([(1280, "dark"), (400, "light"), (400, "dark"), (1280, "light")], "pages"), ids=str
)
def test_explore_page_works_in_a_browser(browser, tmp_path, screen):
    """The page works by keyboard, at both widths, light and dark, without overflow, network requests, or errors."""
    width, scheme = screen
    recording = recorded("numpy", "scores not scaled", "float32")
    text = page(shown(recording), ["about"])
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{PROBE}</body>"), "utf-8")
    (tmp_path / "frame.html").write_text(FRAME % width, "utf-8")
    dom, console = open_page(
        browser,
        tmp_path / "frame.html",
        "--virtual-time-budget=20000",
        f"--window-size={width + 40},1000",
        f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",
    )
    assert console == ""
    said = json.loads(re.search(r"<pre>(.*)</pre>", dom)[1].replace("&gt;", ">"))
    assert "error" not in said
    assert (said["start"], said["first"]) == (SCORES, SCORES)
    assert said["next"] == said["down"] == SCORES.replace("scores", "weights")
    assert (said["end"], said["wide"]) == ("output", 0)
    assert said["clipped"] == [[width == 400] * 2]
    assert said["verdict"] == "◆ introduced here"
    assert all(said["drawn"])
    head, query, key = (int(part) for part in re.findall(r"(?:head|source) (\d+)", said["moved"]))
    before = [int(part) for part in re.findall(r"(?:head|source) (\d+)", said["worst"])]
    assert [head, query, key] == [before[0], max(before[1] - 1, 0), max(before[2] - 1, 0)]
    assert said["head"] == f"head {(head + 1) % 3}"
    row = recording.sentence
    for words, values in zip(said["cells"], (recording.expected, recording.ports[0].actual), strict=True):
        number = np.float32(words.replace("\N{MINUS SIGN}", "-"))  # the text identifies the exact float32 value
        assert number == np.float32(values[SCORES][row, head, query, key])


# --- The command ---


@pytest.fixture
def model(tmp_path):
    save(tmp_path / "model", *lively())
    return tmp_path / "model"


def explore(*arguments, out: Path) -> int:
    return exit_code("explore", *arguments, "--out", out)


def test_explore_uses_the_shipped_model_by_default(tmp_path, capsys):
    out = tmp_path / "page.html"
    assert explore("Freitag, 3. Mai 2024", "--backends", "numpy", out=out) == 0
    said = capsys.readouterr().out
    assert said.startswith("All 70 taps of numpy are within tolerance.\n")
    assert str(out) in said
    text = out.read_text("utf-8")
    assert "<h1>Freitag, 3. Mai 2024 → 2024-05-03</h1>" in text
    assert json.loads(Page(text).scripts["view"])["tokens"]["target"] == ["<s>", *"2024-05-03"]


class Unscaled(Port):
    """A user's port that is wrong and has few taps."""

    dtypes = ("float32",)
    taps = ("*.output", "logits")

    def load(self, config, weights, dtype):
        import reference_numpy

        self.model = reference_numpy.Transformer.from_weights(config, weights, dtype)

    def forward(self, source_ids, target_ids, tap):
        return tap("logits", 2 * self.model(source_ids, target_ids))


class Doubled(Unscaled):
    dtypes = ("float64", "float32")


@pytest.mark.parametrize(("dtype", "code", "word"), [("float64", 1, "DIVERGE"), ("float32", 3, "INCOMPLETE")])
def test_verdicts_and_exit_codes_match_parity_check(tmp_path, dtype, code, word):
    asked = "--port", "test_explore:Doubled", "--dtype", dtype, "--json", tmp_path / "found.json"
    assert explore("3 May 2024", "2024-05-03", *asked, out=tmp_path / "page.html") == code
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["verdict"], found["exit_code"]) == (word, code)


class Broken(Unscaled):
    def forward(self, source_ids, target_ids, tap):
        raise RuntimeError("no such luck")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_user_port_can_be_explored(tmp_path, capsys, dtype):
    out = tmp_path / "page.html"
    code = explore("3 May 2024", "2024-05-03", "--port", "test_explore:Unscaled", "--dtype", dtype, out=out)
    said = capsys.readouterr()
    if dtype == "float64":
        assert (code, out.exists()) == (3, False)
        assert said.err.splitlines()[-1] == "parity explore: error: Unscaled supports only float32"
        return
    assert code == 3  # the same exit code as parity check, because float32 results may only have lost precision
    assert said.out.splitlines()[:2] == [
        "First tap over tolerance: logits in Unscaled.",
        "Unscaled may have a bug or may only lose precision. To find out, also compare in float64.",
    ]
    found = json.loads(Page(out.read_text("utf-8")).scripts["view"])
    assert [tap["name"] for tap in found["taps"] if tap["ports"][0] is not None] == ["logits", "output"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["  "], "SOURCE must not be blank"),
        (["x", "--weights", "nowhere"], "nowhere"),
        (["x", "--port", "test_explore:Nothing"], "Nothing"),
        (["x", "--port", "test_explore:Broken"], "Broken: RuntimeError: no such luck"),
        (["1" * 5000, "--backends", "numpy"], "a sentence must have at most 4,096 tokens: got 5,001"),
        ([], "the following arguments are required: SOURCE"),
    ],
)
def test_invalid_explore_input_is_rejected_without_writing_a_file(tmp_path, capsys, arguments, message):
    assert explore(*arguments, out=tmp_path / "page.html") == 3
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_output_directory_is_rejected_before_exploring(tmp_path, capsys):
    assert explore("x", out=tmp_path / "nowhere" / "page.html") == 3
    assert "there is no directory" in capsys.readouterr().err


def test_shipped_model_is_small_and_encodes_dates():
    trained = read_trained(SHIPPED)
    assert SHIPPED.stat().st_size < LIMIT
    assert trained.config.num_encoder_layers == 2
    assert trained.vocabulary.text(trained.vocabulary.ids("Freitag, 3. Mai 2024")) == "Freitag, 3. Mai 2024"
