"""``parity translate`` translates every line in order with the right model, and reports differing backends."""

from __future__ import annotations

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest
from conftest import parity
from search_models import lively
from translate_runs import LETTERS, LIMIT, all_hypotheses, one_by_one, random_lines, translated
from translate_runs import model as model  # a fixture
from translate_runs import short as short  # a fixture

import reference_numpy as ref
from transformer_parity.apps.translate import translator
from transformer_parity.apps.translate.agreement import TranslationComparison
from transformer_parity.apps.translate.lines import Line, TranslatedLine
from transformer_parity.apps.translate.report import differences
from transformer_parity.apps.translate.trained import read_trained
from transformer_parity.apps.translate.translator import Translator
from transformer_parity.cli import translate
from transformer_parity.cli.main import main
from transformer_parity.transformer.ports.protocol import Placement
from transformer_parity.transformer.ports.registry import PORTS
from transformer_parity.transformer.sentences.subwords import Subwords
from transformer_spec.search import Search

COMMAND = [sys.executable, "-m", "transformer_parity", "translate"]


@pytest.fixture
def _small_batches(monkeypatch):
    monkeypatch.setattr(translate, "WINDOW", 8)
    monkeypatch.setattr(translator, "MOST_SENTENCES", 3)


def spelled(pieces):
    """Join subwords into the text of a translation."""
    return "".join(pieces).replace("</s>", "").replace("<s>", "").replace("<unk>", " ⁇ ")


@pytest.mark.usefixtures("_small_batches")
def test_every_line_is_translated_in_order(model, capfd):
    lines = random_lines(43)
    for number in (0, 7, 8, 20, 21, *range(24, 32), 42):  # first and last lines of blocks, and an entire block
        lines[number] = " " * (number % 3)
    expected = one_by_one(model, lines)
    assert len(set(expected)) > 20
    assert translated(capfd, model, lines, "--backend", "numpy") == (0, expected, "")


@pytest.mark.extended("translations", "tf")
def test_every_backend_translates_identically(model, capfd, backend):
    lines = random_lines(20, seed=1)
    for options, asked in (({}, ()), ({"beam_size": 4}, ("--beam", 4))):
        expected = one_by_one(model, lines, **options)
        assert translated(capfd, model, lines, "--backend", backend.name, *asked) == (0, expected, "")


@pytest.mark.usefixtures("_small_batches")
def test_lines_are_translated_without_unnecessary_delay(model):
    """The first batch contains the first line, and no line is delayed by a batch that doesn't contain it."""
    trained = read_trained(model)
    port = PORTS["numpy"].load(trained.config, trained.weights, Placement("float64"))
    batches = []

    class Spy:
        def search(self, source_ids, options):
            batches.append([trained.vocabulary.text(ids) for ids in source_ids])
            return port.search(source_ids, options)

    lines = ["aaaa", "b", "ccccc", "d", "eeee", "ff", "gggggg", "h", "iiii"]
    options = Search(max_length=5)
    found = Translator(trained.config, trained.vocabulary, options, window=8).translate(Spy(), iter(lines))
    searched = []
    for line in lines:
        assert next(found).line.text == line
        searched.append(len(batches))
    assert batches == [["ff", "aaaa", "eeee"], ["b", "d", "h"], ["ccccc", "gggggg"], ["iiii"]]
    assert searched == [1, 2, 3, 3, 3, 3, 3, 3, 4]


def test_batch_is_limited_in_sentences_and_positions(model, monkeypatch):
    trained = read_trained(model)
    sizes = []

    class Spy:
        def search(self, source_ids, options):
            sizes.append(source_ids.shape)
            return options.run(ref, loaded, source_ids)

    loaded = ref.Transformer.from_weights(trained.config, trained.weights, "float64")
    monkeypatch.setattr(translator, "MOST_SENTENCES", 64)
    monkeypatch.setattr(translator, "MOST_POSITIONS", 60)
    lines = ["a", "bb", "a" * 9, *["a" * 4] * 5, "a" * 40]
    options = Search(beam_size=2, max_length=3)
    assert len(list(Translator(trained.config, trained.vocabulary, options).translate(Spy(), lines))) == 9
    assert sorted(sizes) == [(1, 41), (2, 10), (6, 5)]


def test_only_newlines_separate_input_lines(model, capfd, monkeypatch):
    text = "ab\r\nc\x0bd\x0c\u2028e\x85f\n\n \ngh"  # the last line has no newline
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["translate", "--weights", str(model), "--backend", "numpy", "--dtype", "float64"]) == 0
    lines = ["ab", "c\x0bd\x0c\u2028e\x85f", "", " ", "gh"]
    expected = one_by_one(model, lines, max_length=None)
    assert capfd.readouterr().out.split("\n") == [*expected, ""]


def test_translation_never_contains_a_line_break(tmp_path, capfd):
    """Subwords may contain a character that some programs treat as a line break."""
    config, weights = lively()
    vocabulary = Subwords.train(["abcdefgh\x85"], kind="char")
    ref.save_weights(tmp_path / "model", config, weights, vocabulary=vocabulary.model)
    _, said, _ = translated(capfd, tmp_path / "model", ["ab", "cd"], "--backend", "numpy", "--json")
    assert any("\x85" in json.loads(line)["hypotheses"][0]["pieces"] for line in said[:-1])
    _, said, _ = translated(capfd, tmp_path / "model", ["ab", "cd"], "--backend", "numpy")
    assert [line.splitlines() for line in said] == [[line] for line in said]


@pytest.mark.usefixtures("_small_batches")
def test_nbest_prints_scores_and_hypotheses(model, capfd):
    lines = [*random_lines(9, seed=2), ""]
    plain = translated(capfd, model, lines, "--backend", "numpy", "--beam", 3)[1]
    scored = translated(capfd, model, lines, "--backend", "numpy", "--beam", 3, "--nbest", 1)[1]
    assert [line.split("\t")[2] for line in scored] == plain
    many = translated(capfd, model, lines, "--backend", "numpy", "--beam", 3, "--nbest", 2)[1]
    assert len(many) == 2 * len(lines)
    assert [line.split("\t")[0] for line in many] == [str(n) for n in range(1, 11) for _ in range(2)]
    assert many[::2] == scored
    assert many[-2:] == ["10\t-inf\t", "10\t-inf\t"]
    for best, second in zip(many[:-2:2], many[1:-2:2], strict=True):
        assert best.split("\t")[1:] != second.split("\t")[1:]
        assert float(best.split("\t")[1]) >= float(second.split("\t")[1])
    expected = all_hypotheses(model, lines[:-1], beam_size=3, num_hypotheses=2)
    assert [line.split("\t")[2] for line in many[:-2]] == [text for answers in expected for text in answers]


def test_json_contains_all_hypotheses_and_lines(model, capfd):
    lines = [*random_lines(5, seed=3), "", " Ä\t? "]
    code, found, _ = translated(capfd, model, lines, "--backend", "numpy", "--beam", 3, "--nbest", 3, "--json")
    plain = translated(capfd, model, lines, "--backend", "numpy", "--beam", 3, "--nbest", 1)[1]
    *found, last = [json.loads(line) for line in found]
    assert (code, last["exit_code"], last["result"]["lines"]) == (0, 0, len(lines))
    assert [(answer["line"], answer["source"]) for answer in found] == list(enumerate(lines, 1))
    vocabulary = read_trained(model).vocabulary
    assert found[5]["hypotheses"] == []
    for answer, line in zip(found, plain, strict=True):
        assert len(answer["hypotheses"]) == (3 if answer["source"] else 0)
        for best in answer["hypotheses"][:1]:
            assert f"{answer['line']}\t{best['score']:.4f}\t{best['text']}" == line
        for said in answer["hypotheses"]:
            assert said["text"] == vocabulary.text(said["ids"])
            assert said["text"] == spelled(said["pieces"])


@pytest.mark.usefixtures("_small_batches")
def test_overlong_line_is_left_empty_with_a_warning(short, capfd):
    lines = ["abcde", "abcdef", "a", "abcdefghi", "", "bc"]  # six and seven tokens, including EOS
    code, found, said = translated(capfd, short, lines, "--backend", "numpy")
    assert code == 3
    first, third, last = one_by_one(short, [lines[0], lines[2], lines[5]])
    assert found == [first, "", third, "", "", last]
    assert said.splitlines() == [
        f"parity translate: warning: the translation of line {number} is empty: the line has {length} tokens, but at "
        "most 6 "
        "are supported"
        for number, length in ((2, 7), (4, 10))
    ]
    assert translated(capfd, short, lines[:1], "--backend", "numpy") == (0, [first], "")


def test_line_of_a_million_characters_is_left_empty_immediately(model, capfd):
    """The line is rejected even though the model's positional encodings have no maximum length."""
    code, found, said = translated(capfd, model, ["abc", 1_000_000 * "a", "de"], "--backend", "numpy")
    assert (code, found) == (3, [*one_by_one(model, ["abc"]), "", *one_by_one(model, ["de"])])
    lengths = "the line has 1,000,001 tokens, but at most 4,096 are supported"
    assert said == f"parity translate: warning: the translation of line 2 is empty: {lengths}\n"
    code, found, said = translated(capfd, model, ["abc"], "--backend", "numpy", "--search", f"max_length={10**9}")
    assert (code, found) == (3, [])
    assert said.endswith("max_length must be at most 4,096 for this model: got 1,000,000,000\n")


def test_closed_standard_input_is_rejected(model, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["translate", "--weights", str(model), "--backend", "numpy"]) == 3
    said = "parity translate: error: standard input is closed; specify the file to translate\n"
    assert capfd.readouterr().err == said


@pytest.mark.parametrize("is_terminal", [False, True])
def test_control_characters_are_not_written_to_a_terminal(is_terminal, monkeypatch):
    """Control characters from a vocabulary or text are written unchanged only to files."""
    stream = io.TextIOWrapper(io.BytesIO())
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    translate._Output().write(["-1.5\ta\x1b[2J\rb\x9b"])
    shown = "-1.5\ta\N{REPLACEMENT CHARACTER}[2J b\N{REPLACEMENT CHARACTER}\n"
    assert stream.buffer.getvalue().decode() == (shown if is_terminal else "-1.5\ta\x1b[2J\rb\x9b\n")


def test_control_characters_in_a_text_cannot_forge_a_comparison_line():
    hypothesis = TranslatedLine("a\x1b[2J\rAGREE", -1.0, (1,), ("a",))
    found = TranslationComparison(Line(1, "b\rAGREE", (1,), 4), {"numpy": hypothesis}, {"numpy": ()})
    assert differences(found, as_json=False) == [
        "line 1: near-tie",
        "  source  b AGREE",
        "  numpy   a\N{REPLACEMENT CHARACTER}[2J AGREE",
    ]


def start(model, *options, **streams):
    """Start the command in a separate process, which is killed if it hangs."""
    options = ["--weights", model, "--backend", "numpy", "--search", f"max_length={LIMIT}", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    process = subprocess.Popen([*COMMAND, *map(str, options)], env=environment, **streams)
    watchdog = threading.Timer(120, process.kill)
    watchdog.daemon = True
    watchdog.start()
    return process


@pytest.fixture(scope="module")
def many_lines(tmp_path_factory):
    path = tmp_path_factory.mktemp("lines") / "lines"
    path.write_text("".join(f"{line}\n" for line in random_lines(3000)), "utf-8")
    return path


def test_output_before_ctrl_c_is_a_prefix_of_the_full_output(model, many_lines):
    with start(model, many_lines) as process:
        whole = process.stdout.read()
    assert process.returncode == 0
    assert whole.count(b"\n") == 3000
    with start(model, many_lines) as process:
        written = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        written += process.stdout.read()
        said = process.stderr.read().decode()
    assert process.returncode == 3
    assert whole.startswith(written)
    assert written.endswith(b"\n")
    answered = written.count(b"\n")
    assert 0 < answered < 3000
    assert said == f"parity translate: interrupted: stopped after input line {answered}\n"


def test_ctrl_c_waits_until_a_line_is_written_completely(capfd, monkeypatch):
    output = translate._Output()

    class Interrupted(io.BytesIO):
        def flush(self):
            os.kill(os.getpid(), signal.SIGINT)

    stream = Interrupted()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stream))
    with pytest.raises(KeyboardInterrupt):
        output.write(["one", "two"])
    del Interrupted.flush  # the wrapper flushes the stream again when it is deleted
    assert (stream.getvalue(), output.answered) == (b"one\ntwo\n", 1)
    assert str(output) == "stopped after input line 1"


def test_closed_output_pipe_prints_no_error(model, many_lines):
    with start(model, many_lines) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 3


def test_each_line_is_translated_immediately_at_a_terminal(model):
    ours, theirs = pty.openpty()
    with start(model, stdin=theirs) as process:
        for _ in range(3):
            os.write(ours, b"abc\n")
            assert process.stdout.readline()
        os.write(ours, b"\x04")
        assert process.stdout.read() == b""
        assert process.stderr.read() == b"Enter one sentence per line. Press Ctrl-D to finish.\n"
    assert process.returncode == 0
    os.close(ours)
    os.close(theirs)


# --- Errors ---


@pytest.fixture
def narrow(tmp_path):
    """Return a model whose file requests a beam of two and both hypotheses."""
    notes = {"search": Search(2, num_hypotheses=2).to_dict()}
    vocabulary = Subwords.train([LETTERS], kind="char").model
    ref.save_weights(tmp_path / "narrow", *lively(), vocabulary=vocabulary, notes=notes)
    return tmp_path / "narrow"


@pytest.mark.parametrize(
    ("asked", "lines"), [(["--nbest", "4", "--beam", "4"], 4), (["--nbest", "2"], 2), (["--beam", "1"], 1), ([], 1)]
)
def test_options_override_the_beam_size_in_the_file(narrow, capfd, asked, lines):
    code, found, _ = translated(capfd, narrow, ["abc"], "--backend", "numpy", *asked)
    assert (code, len(found)) == (0, lines)


def test_nbest_larger_than_the_stored_beam_is_rejected(narrow, capfd):
    code, found, said = translated(capfd, narrow, ["abc"], "--backend", "numpy", "--nbest", "4")
    assert (code, found) == (3, [])
    assert "--nbest 4 requires a beam of at least that size; add --beam 4" in said


REFUSED = {
    "missing weights": (["--weights", "{directory}/none"], "there is no weight file"),
    "no vocabulary": (["--weights", "{directory}/bare"], "bare contains no vocabulary"),
    "not a weight file": (["--weights", "{directory}/text"], "text is not a usable weight file"),
    "missing text": (["{directory}/none"], "/none; to translate the argument itself, use --text "),
    "a line and a file": (["--text", "abc"], "remove either --text or "),
    "a directory": (["{directory}"], "directory"),
    "not UTF-8": (["{directory}/latin"], "latin is not valid UTF-8 in line 601: "),
    "not gzipped": (["{directory}/text.gz"], "text.gz is not a valid gzip file"),
    "unknown backend": (["--backend", "theano"], "unknown theano; choose from numpy"),
    "two backends": (["--backend", "numpy,torch"], "without --compare, exactly one backend is required"),
    "only one backend to compare": (
        ["--compare", "--backend", "numpy"],
        "two backends; use, for example, --backends numpy,torch, or",
    ),
    "only one framework to compare": (["--compare", "--backend", "jax"], "for example, --backends jax,numpy, or"),
    "compared in bfloat16": (["--compare", "--dtype", "bfloat16"], "remove --dtype bfloat16 or --precision fast"),
    "scores of a comparison": (["--compare", "--nbest", "1"], "remove --nbest"),
    "n-best without a beam": (["--nbest", "2"], "--nbest 2 requires a beam of at least that size"),
    "n-best beyond the beam": (["--nbest", "5", "--beam", "4"], "add --beam 5"),
    "a penalty without a beam": (["--search", "length_penalty=1"], "length_penalty requires beam search"),
    "a negative penalty": (
        ["--beam", "2", "--search", "length_penalty=-1"],
        "length_penalty must be at least 0: got -1",
    ),
    "unknown search field": (
        ["--search", "beam_size=2"],
        "unknown --search field beam_size; choose from at_limit, banned_ids, ",
    ),
    "unknown program": (["--search", "rules=ours"], "rules must be one of paper, hf, fairseq, marian"),
    "a length as text": (["--search", "max_length=many"], "max_length must be an integer: got 'many'"),
    "a field without a value": (["--search", "max_length"], "must be FIELD=VALUE"),
    "bfloat16 in numpy": (["--backend", "numpy", "--dtype", "bfloat16"], "dtype must be one of float64, float32"),
    "more than the positions": (
        ["--weights", "{short}", "--search", "max_length=7"],
        "max_length must be at most 6 for this model: got 7",
    ),
}


@pytest.mark.parametrize("why", REFUSED)
def test_invalid_translate_arguments_are_rejected_in_one_line(why, model, short, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("ab\ncd\n")
    (tmp_path / "text.gz").write_text("ab\ncd\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "latin").write_bytes(600 * b"ab\n" + b"\xe4\n")  # invalid only after the first block of lines
    ref.save_weights(tmp_path / "bare", *lively())
    arguments, message = REFUSED[why]
    arguments = [argument.format(directory=tmp_path, short=short) for argument in arguments]
    given = ["--weights", str(model)] * ("--weights" not in arguments)
    given += ["--backend", "numpy"] * (not {"--backend", "--compare"} & {*arguments})
    text = ["text"] * (not arguments[-1].startswith(str(tmp_path)) or "--weights" in arguments)
    code, out, err = parity(capfd, "translate", *given, *arguments, *text)
    assert (code, out) == (3, "")
    assert message in err.splitlines()[-1]
    assert err.startswith(("parity translate: error: ", "usage: "))


@pytest.mark.usefixtures("_small_batches")
def test_input_is_translated_up_to_the_first_invalid_line(model, capfd, monkeypatch):
    """If the input is a pipe, the command can't detect the invalid line in advance."""
    text = "".join(f"{line}\n" for line in random_lines(16)).encode() + b"\xff\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    assert main(["translate", "--weights", str(model), "--backend", "numpy", "--search", f"max_length={LIMIT}"]) == 3
    captured = capfd.readouterr()
    assert captured.out.split("\n")[:-1] == one_by_one(model, random_lines(16))
    assert "line 17: " in captured.err
    assert captured.err.endswith("(stopped after input line 16)\n")


def test_bundled_model_translates_a_line(capfd):
    assert main(["translate", "--text", "Freitag, 3. Mai 2024", "--backend", "numpy"]) == 0
    assert capfd.readouterr().out == "2024-05-03\n"
    assert main(["translate", "--text", "5/3/2024\nle 1er juin 1999", "--backend", "numpy"]) == 0
    assert capfd.readouterr().out == "2024-05-03\n1999-06-01\n"


def test_evaluate_uses_the_given_beam_size(model, tmp_path, capfd):
    lines = random_lines(12, seed=8)
    expected = one_by_one(model, lines, beam_size=3, length_penalty=2.0)
    (tmp_path / "source").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    (tmp_path / "target").write_text("".join(f"{answer}\n" for answer in expected), "utf-8")
    text = ["--text", str(tmp_path / "source"), str(tmp_path / "target"), "--json", str(tmp_path / "json")]
    scores = {}
    for asked in ((), ("--beam", "3", "--search", "length_penalty=2")):
        assert main(["evaluate", str(model), "--backend", "numpy", *text, *asked]) == 0
        (found,) = json.loads((tmp_path / "json").read_text("utf-8"))["result"]["evaluations"]
        scores[found["beam"]] = found["BLEU"]
        assert found["length_penalty"] == (2.0 if asked else None)
        assert ("BLEU, beam 3" if asked else "BLEU, greedy") in capfd.readouterr().out
    assert scores[3] > scores[None] + 1
