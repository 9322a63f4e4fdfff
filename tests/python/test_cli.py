"""The command line: help, info, and for each bad input exit code 2, one line, no traceback, nothing written."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import packed_sdpa
from packed_sdpa import cli, host
from packed_sdpa._library import LIBRARY_PATH
from packed_sdpa.errors import WorkerError

TINY_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}


def model_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY_LLAMA, **changes}), encoding="utf-8")
    return folder


def assert_one_line(code: int | str | None, out: str, err: str, expected: str) -> None:
    assert code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("packed-sdpa") and "Traceback" not in err
    assert expected in err


def test_info_shows_library_backends_and_instruction_sets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert str(LIBRARY_PATH) in out
    for isa in host.available_cpu_isas():
        assert isa in out
    assert "which backend takes which call" in out and "reference" in out


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("info", "demo", "bench", "check"):
        with pytest.raises(SystemExit) as exit_code:
            cli.main([command, "--help"])
        assert exit_code.value.code == 0
        assert f"usage: packed-sdpa {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "required: COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["demo", "--dtype", "int8"], "argument --dtype: invalid choice: 'int8'"),
        (["demo", "--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["demo", "--colour", "red"], "unrecognized arguments: --colour red"),
        (["check"], "required: --model"),
    ],
)
def test_arguments_that_cannot_be_parsed(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        cli.main(arguments)
    captured = capsys.readouterr()
    assert_one_line(exit_code.value.code, captured.out, captured.err, expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["demo", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["demo", "--seq-len", "0"], "--seq-len must be at least 1, got 0"),
        (["demo", "--seq-len", "1"], "--seq-len must be at least 2, got 1"),
        (["demo", "--threads", "-1"], "--threads must be at least 1, got -1"),
        (["demo", "--seq-len", "99999999999"], "--seq-len must be at most 16777216, got 99999999999"),
        (["demo", "--seed", "99999999999999999999"], "--seed must be in [0, 2**63), got 99999999999999999999"),
        (["demo", "--learning-rate", "nan"], "--learning-rate must be above 0, got nan"),
        (["demo", "--data", "gone"], "--data gone does not exist"),
        (["demo", "--data", "empty"], "--data empty holds no .txt, .jsonl, .parquet files"),
        (["demo", "--data", "latin"], "--data latin holds no text; 1 files were skipped, the first: a.txt"),
        (["demo", "--data", "rows.jsonl", "--field", "body"], "--field body: rows.jsonl line 1 has no such text field"),
        (["demo", "--model", "gone"], "--model gone does not exist"),
        (["demo", "--model", "empty"], "--model empty holds no config.json"),
        (["demo", "--model", "broken"], "--model broken: its config cannot be read"),
        (["demo", "--model", "vision"], "--model vision: no causal language model on SDPA can be made"),
        (["demo", "--model", "odd"], "--model odd: its config cannot be read (Class validation error"),
        (["demo", "--model", "negative"], "--model negative: "),
        (["demo", "--model", "few_words"], "its vocabulary of 100 is too small for bytes"),
        (["demo", "--out", "rows.jsonl"], "--out rows.jsonl: rows.jsonl is a file"),
        (["demo", "--out", "rows.jsonl/new"], "--out rows.jsonl/new: rows.jsonl is a file"),
        (["demo", "--out", "taken"], "--out taken/report.json is a folder; pass a file to write"),
        (["demo", "--out", "/proc/new"], "--out /proc/new cannot be written into ("),
        (["check", "--model", "gone"], "--model gone does not exist"),
        (["check", "--model", "empty"], "--model empty holds no config.json"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("latin").mkdir()
    Path("latin/a.txt").write_bytes(b"caf\xe9")
    Path("rows.jsonl").write_text('{"text": "one"}\n', encoding="utf-8")
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{", encoding="utf-8")
    model_folder(tmp_path / "odd", hidden_size=10, num_attention_heads=3, num_key_value_heads=3)
    model_folder(tmp_path / "negative", hidden_size=-64)
    model_folder(Path("few_words"), vocab_size=100)
    Path("vision").mkdir()
    Path("vision/config.json").write_text('{"model_type": "vit"}', encoding="utf-8")
    Path("taken/report.json").mkdir(parents=True)
    Path("demo_out").mkdir()
    Path("demo_out/report.json").write_text("mine", encoding="utf-8")
    before = sorted(tmp_path.rglob("*"))
    code = cli.main(arguments)
    captured = capsys.readouterr()
    assert_one_line(code, captured.out, captured.err, expected)
    assert sorted(tmp_path.rglob("*")) == before
    assert Path("demo_out/report.json").read_text(encoding="utf-8") == "mine"


def test_missing_extra_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    code = cli.main(["demo"])
    captured = capsys.readouterr()
    assert_one_line(code, captured.out, captured.err, "transformers is not installed; run `pip install")
    assert "packed-sdpa[demo]" in captured.err


@pytest.mark.parametrize(
    ("raised", "code", "expected"),
    [
        (WorkerError("stock half ended:\nKilled"), 1, "stock half ended:\nKilled"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_other_ends_have_no_traceback(
    raised: BaseException, code: int, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise raised

    monkeypatch.setattr("packed_sdpa.info.print_info", fail)
    assert cli.main(["info"]) == code
    assert capsys.readouterr().err == f"packed-sdpa info: {expected}\n"


def test_unknown_instruction_set_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "packed_sdpa.cli", "info"],
        env={"PACKED_SDPA_CPU_ISA": "mmx", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_one_line(done.returncode, done.stdout, done.stderr, "PACKED_SDPA_CPU_ISA: got instruction set 'mmx'")


def test_check_proves_isolation_of_a_model_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder = model_folder(tmp_path / "model")
    (tmp_path / "a.txt").write_text("To be or not to be, that is the question. " * 9, encoding="utf-8")
    code = cli.main(["check", "--model", str(folder), "--data", str(tmp_path / "a.txt"), "--seq-len", "64"])
    out = capsys.readouterr().out
    assert code == 0, out
    assert out.count("holds") == 2 and "LlamaForCausalLM" in out
    for name in ("changed document", "gradient", "document alone"):
        assert re.search(rf"{name} +│ ok +│", out), out


def test_check_names_the_first_layer_that_leaks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.FalconH1Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, mamba_d_ssm=64, mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1,
    )  # fmt: skip
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "a.txt").write_text("To be or not to be, that is the question. " * 9, encoding="utf-8")
    short = ("--seq-len", "64")
    with pytest.warns(UserWarning, match="state-space"):
        code = cli.main(["check", "--model", str(tmp_path / "model"), "--data", str(tmp_path / "a.txt"), *short])
    out = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert code == 1 and "NOT isolated" in out
    assert "model.layers.0.mamba: FalconH1Mixer mixes tokens without attention" in out


def test_version_and_oldest_python_are_stated_once() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    assert packed_sdpa.__version__ == project["project"]["version"]
    assert project["project"]["requires-python"] == ">=3.11" and project["tool"]["ruff"]["target-version"] == "py311"
    assert project["tool"]["mypy"]["python_version"] == "3.11"
    assert "sys.version_info < (3, 11)" in (root / "tools" / "make_venv").read_text(encoding="utf-8")
    used = {
        line.split()[1].split(".")[0]
        for file in (root / "python").rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.strip().startswith(("import ", "from "))
    }
    assert not used & {"numpy", "psutil"}  # so they are no dependencies


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("number", "code", "after_seconds"),  # since the worker was started: in its imports, in its training
    [(signal.SIGTERM, 143, 0), (signal.SIGKILL, -9, 0), (signal.SIGTERM, 143, 4)],
)
def test_a_demo_that_ends_early_leaves_no_worker(tmp_path: Path, number: int, code: int, after_seconds: float) -> None:
    folder = model_folder(tmp_path / "model")
    command = [sys.executable, "-m", "packed_sdpa.cli", "demo", "--model", str(folder), "--out", str(tmp_path / "out")]
    demo = subprocess.Popen([*command, "--steps", "100000", "--seq-len", "64"], stdout=subprocess.DEVNULL)

    def workers() -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{demo.pid}/task/{demo.pid}/children").read_text().split()]

    def wait_until(holds: Callable[[], object]) -> bool:
        deadline = time.monotonic() + 60
        while not holds() and time.monotonic() < deadline:
            time.sleep(0.001)
        return bool(holds())

    assert wait_until(workers)
    children = workers()
    time.sleep(after_seconds)
    demo.send_signal(number)
    assert demo.wait(30) == code
    for pid in children:
        assert wait_until(lambda pid=pid: not is_running(pid)), pid
