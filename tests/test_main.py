"""The `parity` command itself: its list of commands, its imports, its exit codes, and its progress display."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from transformer_parity import __version__
from transformer_parity.cli import info
from transformer_parity.cli.main import COMMANDS, main
from transformer_parity.cli.progress import PlainConsole, Progress
from transformer_parity.engine.system.environment import Stream, quiet_frameworks
from transformer_parity.engine.system.errors import UsageError, refusals
from transformer_parity.engine.system.files import check_writable, replacing, write_json, write_results, write_text

ROOT = Path(__file__).resolve().parent.parent
posix = pytest.mark.needs(os.name != "nt", "pipes and device files")
HEAVY = ("numpy", "rich", "matplotlib", "jinja2", "PIL", "sentencepiece", "torch", "jax", "tensorflow")


def test_parity_without_arguments_lists_the_commands(capsys):
    assert main([]) == 0
    alone = capsys.readouterr().out
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == alone
    words = " ".join(alone.split())
    for name, (_, _, line) in COMMANDS.items():
        assert f" {name} {line}" in words


@pytest.mark.parametrize("arguments", [[], ["--help"], ["--version"]])
def test_heavy_libraries_are_not_imported_before_a_command_is_chosen(arguments):
    script = f"""
import sys
from transformer_parity.cli.main import main
try:
    main({arguments})
finally:
    print(sorted(set({HEAVY}) & set(sys.modules)))
    print([name for name in sys.modules if name.startswith("transformer_parity.cli.")])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "['transformer_parity.cli.main']"]


def test_only_the_module_of_a_command_is_imported():
    script = "import sys; from transformer_parity.cli.main import make_parser; make_parser('info');"
    script += "print([name for name in sys.modules if name.startswith('transformer_parity.cli.')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not any(f".{name}'" in done.stdout for name in ("check", "train", "bench", "show"))
    assert ".info'" in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help_text(name, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: parity {name} ")


def test_unknown_command_is_rejected(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["chekc"])
    assert leaving.value.code == 3
    assert "parity: error: there is no command 'chekc'; did you mean check?\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("translate --bakend jax test.en", "unrecognized arguments: --bakend test.en; did you mean --backend?"),
        ("bench forward --rouds=3", "unrecognized arguments: --rouds=3; did you mean --rounds?"),
        ("translate --qqq x", "unrecognized arguments: --qqq; `parity translate --help` lists the options"),
        ("info one two", "unrecognized arguments: two"),
        ("qqq", "there is no command 'qqq'; `parity` lists the commands"),
    ],
)
def test_unknown_argument_suggests_a_known_one(line, says, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(line.split())
    assert leaving.value.code == 3
    usage, *_, error = capsys.readouterr().err.splitlines()
    command = error.partition(": error: ")[0]
    assert command in ("parity", "parity translate", "parity bench", "parity info")
    assert usage.startswith(f"usage: {command} ")
    assert error.startswith(f"{command}: error: {says}")


def test_usage_errors_are_one_line_and_internal_errors_show_a_traceback(capsys, monkeypatch):
    def raising(error):
        def describe(*given):
            raise error

        monkeypatch.setattr(info, "describe_backend", describe)
        assert main(["info"]) == 3
        return capsys.readouterr().err

    assert raising(UsageError("x must be 1: got 2")) == "parity info: error: x must be 1: got 2\n"
    for error in (ValueError("x"), TypeError("x"), KeyError("x")):
        assert raising(error).startswith("Traceback (most recent call last):")
    assert raising(KeyboardInterrupt()) == "parity: interrupted\n"


def test_only_listed_exceptions_become_usage_errors():
    with pytest.raises(UsageError, match="no such file"), refusals(OSError, ValueError):
        raise FileNotFoundError("no such file")
    with pytest.raises(TypeError), refusals(OSError, ValueError):
        raise TypeError
    with pytest.raises(BrokenPipeError), refusals(OSError):  # a closed pipe isn't an input error
        raise BrokenPipeError


def test_framework_output_is_suppressed_on_usage_errors(capfd):
    with pytest.raises(UsageError), quiet_frameworks():  # noqa: PT012  the whole block is tested
        sys.__stderr__.write("oneDNN is on\n")
        raise UsageError("x")
    assert "oneDNN" not in capfd.readouterr().err


def test_file_is_written_completely_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})
    assert path.read_text("utf-8") == '{\n "a": 1\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(KeyError), replacing(path) as temporary:  # noqa: PT012  the whole block is tested
        temporary.write_text("half")
        raise KeyError
    assert path.read_text("utf-8") == '{\n "a": 1\n}\n'
    write_text(path, "ä")
    assert path.read_bytes() == "ä".encode()
    assert list(tmp_path.iterdir()) == [path]


def test_unwritable_output_file_is_rejected_before_the_work_starts(tmp_path):
    check_writable(None)
    check_writable(tmp_path / "a")
    with pytest.raises(UsageError, match="must be a file: got a directory"):
        check_writable(tmp_path)
    with pytest.raises(UsageError, match="there is no directory"):
        check_writable(tmp_path / "none" / "a")


@posix
@pytest.mark.parametrize("place", ["pipe", "/dev/full"])
def test_unwritable_stream_does_not_stop_the_program(place):
    """Printing never raises an error: a closed pipe (`| head`) isn't an error, and a full disk is recorded as one."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing if place == "pipe" else place, "wb") as file, Stream(file) as stream:
        console = PlainConsole(file=stream)
        for _ in range(3):
            console.print("x" * 10_000)  # rich would exit with code 1
            print("y" * 100_000, file=stream)
        stream.flush()
        assert (stream.error is None) == (place == "pipe")


def test_unencodable_characters_are_escaped():
    with open(os.devnull, "wb") as file, Stream(file, "ascii") as stream:
        stream.write("\u2500 \udcff")
    assert stream.error is None


@posix
def test_result_can_be_written_to_pipes_links_and_devices(tmp_path):
    def write(path):
        write_results({"a": 1}, (path, write_json))
        return text

    text = '{\n "a": 1\n}\n'
    os.mkfifo(tmp_path / "pipe")
    with ThreadPoolExecutor() as pool:
        found = pool.submit((tmp_path / "pipe").read_text)
        write(tmp_path / "pipe")
        assert found.result(10) == text
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "to").write_text("old")
    (tmp_path / "link").symlink_to("to")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "to").read_text() == text
    write(Path(os.devnull))
    assert Path(os.devnull).is_char_device()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "to"]


WRITER = """
from pathlib import Path
from transformer_parity.engine.system.files import check_writable, write_json, write_results
check_writable(Path("/dev/stdout"))
print("a table", flush=True)
write_results([1], *2 * [(Path("/dev/stdout"), write_json)])
"""


@posix
def test_results_are_appended_to_standard_output(tmp_path):
    """Results are written to a pipe, a closed pipe, or a file, after a table that the file already contains."""
    command = [sys.executable, "-c", WRITER]
    expected = "a table\n[\n 1\n]\n[\n 1\n]\n"
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout == expected
    with (tmp_path / "out").open("w") as out:
        subprocess.run(command, stdout=out, check=True, cwd=ROOT)
    assert (tmp_path / "out").read_text() == expected
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
    assert Path("/dev/stdout").is_symlink()


@posix
def test_unwritable_result_does_not_prevent_other_results(tmp_path):
    with pytest.raises(
        UsageError, match="/dev/full cannot be written: No space left on device; the result was printed"
    ):
        write_results([1], (Path("/dev/full"), write_json), (None, write_json), (tmp_path / "a", write_json))
    assert (tmp_path / "a").read_text() == "[\n 1\n]\n"
    gone = tmp_path / "gone" / "a"
    with pytest.raises(UsageError, match=f"{gone} cannot be written: No such file"):  # the path that was passed
        write_results([1], (gone, write_json))
    assert list(tmp_path.iterdir()) == [tmp_path / "a"]


def test_usage_error_escapes_control_characters(capsys):
    assert main(["evaluate", "a\x1b[31m\nAGREE  3 ports\r\u2028.", "--task", "dates", "--backend", "numpy"]) == 3
    assert capsys.readouterr().err == (
        "parity evaluate: error: there is no weight file a\N{REPLACEMENT CHARACTER}[31m AGREE  3 ports  .\n"
    )


@posix
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_is_handled_after_the_import_of_a_command(number, capsys, monkeypatch):
    """Signals are handled only after an import, because they could otherwise cause an unrelated exit code."""
    imported = []

    def interrupted(name):
        os.kill(os.getpid(), number)
        imported.append(name)
        return info

    monkeypatch.setattr("transformer_parity.cli.main.import_module", interrupted)
    assert main(["info"]) == 3
    assert imported == ["transformer_parity.cli.info"]
    assert capsys.readouterr().err == "parity: interrupted\n"


SENT_WHILE_IMPORTED = """
import os, signal, sys, tomllib
from importlib.metadata import EntryPoint
name, number = sys.argv[1], int(sys.argv[2])
class Sender:
    def find_spec(module, *rest):
        if module == name:
            os.kill(os.getpid(), number)
sys.meta_path.insert(0, Sender)
with open("pyproject.toml", "rb") as file:
    entry = EntryPoint("parity", tomllib.load(file)["project"]["scripts"]["parity"], "console_scripts")
sys.argv = ["parity", "--version"]
sys.exit(entry.load()())
"""


@posix
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("transformer_parity.engine.system.interrupts", signal.SIGINT),
        ("transformer_parity.cli.main", signal.SIGINT),
        ("argparse", signal.SIGINT),
        ("argparse", signal.SIGTERM),
    ],
)
def test_signal_during_startup_ends_the_command_without_a_traceback(name, number):
    command = [sys.executable, "-c", SENT_WHILE_IMPORTED, name, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


ENDED = """
import ctypes, sys
from importlib import import_module
from transformer_parity.cli.entry import main
{}
sys.argv = ["parity", "--version"]
sys.exit(main())
"""
INSTEAD = "import_module('transformer_parity.cli.main').main = lambda given: {}"


@posix
@pytest.mark.parametrize(
    ("begin", "code"),
    [
        ("", 0),
        ("sys.modules['transformer_parity.cli.main'] = None  # whose import fails", 3),
        ("sys.modules['argparse'] = None", 3),
        (INSTEAD.format("ctypes.CDLL(None).exit(1)  # as OpenBLAS does without memory"), 3),
        (INSTEAD.format("[].pop()"), 3),
        (INSTEAD.format("bytes(2**62)"), 3),
        (INSTEAD.format("sys.exit(3)"), 3),
        (INSTEAD.format("sys.exit('words')"), 3),
        (INSTEAD.format("1"), 1),
        (INSTEAD.format("import_module('atexit').register(lambda: [].pop()) and 0"), 0),
    ],
)
def test_startup_failures_exit_with_code_3(begin, code):
    command = [sys.executable, "-c", ENDED.format(begin)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == code, done.stderr
    assert begin or done.stdout == f"parity {__version__}\n"


@pytest.mark.parametrize("code", [0, 1, None, "words"])
def test_sys_exit_in_a_library_is_reported_as_an_error(code, capsys, monkeypatch):
    monkeypatch.setattr(info, "describe_backend", lambda port: sys.exit(code))
    assert main(["info"]) == 3
    assert capsys.readouterr().err == f"parity info: error: a port or a library called sys.exit({code!r})\n"


def test_path_without_permission_is_a_usage_error(capsys, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)
    assert main(["evaluate", "a", "--task", "dates", "--json", "x/y"]) == 3
    assert capsys.readouterr().err == "parity evaluate: error: x: Permission denied\n"


def test_too_little_memory_is_a_usage_error(capsys, monkeypatch):
    monkeypatch.setattr(info, "describe_backend", lambda port: np.empty(2**47))
    assert main(["info"]) == 3
    assert capsys.readouterr().err.startswith("parity info: error: out of memory: Unable to allocate 1.00 PiB")


@pytest.mark.parametrize(
    "line", [("explore", "M\udce4rz"), ("explore", "2024", "M\udce4rz"), ("show", "attention", "--source", "M\udce4rz")]
)
def test_non_utf8_text_is_a_usage_error(line, capsys):
    with pytest.raises(SystemExit, match="3"):
        main([*line])
    assert "must be UTF-8: got 'M\\udce4rz'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"def f(:", "SyntaxError: invalid syntax (broken_port.py, line 1)"),
        (b"x = '\xe4'", "SyntaxError"),
        (b"raise RecursionError", "RecursionError (broken_port.py, line 1)"),
        (b"raise SystemExit(1)", "sys.exit(1)"),
    ],
)
@pytest.mark.parametrize("command", ["explore 2024 --out x.html", "golden --out x"])
def test_port_import_failure_is_a_usage_error(command, text, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_port", raising=False)
    (tmp_path / "broken_port.py").write_bytes(text)
    assert main([*command.split(), "--port", "broken_port:X"]) == 3
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@posix
def test_device_file_is_rejected_as_checkpoint(capsys):
    assert main(["import", "/dev/zero"]) == 3
    assert capsys.readouterr().err == "parity import: error: /dev/zero must be a regular file or a directory\n"


def test_progress_shows_no_bars_without_a_terminal(capsys):
    file = io.StringIO()
    with Progress(["torch", "jax"], 2, file) as progress:
        for _ in range(2):
            progress.update("torch", "loading", advance=1)
            progress.log("torch: loading")
        progress.say("a line that is [not] markup")
    assert file.getvalue() == "a line that is [not] markup\n"
    assert capsys.readouterr().err == "torch: loading\n"  # printed once


def test_progress_shows_one_bar_for_each_name_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    file = io.StringIO()
    with Progress(["mine:Port", "jax"], None, file) as progress:
        progress.update("mine:Port", "full/[padded]", total=7, completed=3)
        progress.log("not here")
    for text in ("Port", "jax", "3/7", "0/?", "full/[padded]"):
        assert text in file.getvalue()
    assert "mine:" not in file.getvalue()
    assert capsys.readouterr().err == ""
