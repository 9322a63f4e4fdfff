"""`packed-sdpa demo`: the same training steps on real text, once with Transformers' own packing and once with
packed_sdpa, each in a process of its own; proofs that documents are isolated; a report, plots and a table."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from packed_sdpa import host
from packed_sdpa.data import TextDocuments, TokenDocuments, read_documents, tokenize
from packed_sdpa.demo_model import DTYPES, check_model, make_config
from packed_sdpa.demo_worker import Job
from packed_sdpa.errors import InputError, WorkerError, import_extra
from packed_sdpa.packing import PackedRows, pack
from packed_sdpa.tables import make_console
from packed_sdpa.targets import check_folder

HALVES = {"stock": "Transformers", "packed": "packed_sdpa"}
PLOT_FILES = ("loss_curves.png", "step_time_memory.png", "packed_rows.png")
_VOCAB_SIZE = 2048  # of the tokenizer that is trained on the spot


@dataclass(frozen=True)
class DemoOptions:
    """Arguments of the demo; see ``packed-sdpa demo --help``."""

    data: Path | None = None
    text_field: str = "text"
    model: Path | None = None
    seq_len: int = 4096
    steps: int = 16
    dtype: str = "float32"
    out: Path = Path("demo_out")
    learning_rate: float = 2e-3
    seed: int = 0
    threads: int = field(default_factory=torch.get_num_threads)


@dataclass(frozen=True)
class Prepared:
    """Everything that both halves share."""

    texts: TextDocuments
    tokens: TokenDocuments
    rows: PackedRows
    order: list[int]  # row of each step
    num_layers: int


@dataclass
class HalfResult:
    """What one half of the demo measured, a value a step; ``proofs`` of the packed half only."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    peak_rss_mb: float = 0.0
    proofs: dict[str, Any] = field(default_factory=dict)

    @property
    def step_seconds(self) -> float:
        """Median over the steps after the first, which also warms up."""
        return statistics.median(self.seconds[1:] or self.seconds)


_MAX_SEQ_LEN = 2**24  # a row's ids alone take 128 MiB there


def check_options(options: DemoOptions) -> None:
    """Raises InputError for what can be judged without reading anything; see :func:`check_out` for ``out``."""
    for name in ("seq_len", "steps", "threads"):
        if getattr(options, name) < 1:
            flag = name.replace("_", "-")
            raise InputError(f"--{flag} must be at least 1, got {getattr(options, name)}")
    if options.seq_len < 2:
        raise InputError(f"--seq-len must be at least 2, got {options.seq_len}: one token predicts nothing")
    if options.seq_len > _MAX_SEQ_LEN:
        raise InputError(f"--seq-len must be at most {_MAX_SEQ_LEN}, got {options.seq_len}")
    if not 0 <= options.seed < 2**63:
        raise InputError(f"--seed must be in [0, 2**63), got {options.seed}")
    if options.dtype not in DTYPES:
        raise InputError(f"--dtype must be one of {', '.join(DTYPES)}, got {options.dtype!r}")
    if not options.learning_rate > 0:
        raise InputError(f"--learning-rate must be above 0, got {options.learning_rate}")
    host.cpu_isa()


def check_out(options: DemoOptions) -> None:
    """Raises InputError when what the demo writes could not be written."""
    check_folder("--out", options.out, ("report.json", *PLOT_FILES))


def prepare(options: DemoOptions, max_doc_len: int | None = None) -> Prepared:
    """Reads, tokenizes and packs (documents cut at ``max_doc_len``). Raises InputError; writes nothing."""
    check_options(options)
    config = make_config(options.model, _VOCAB_SIZE, options.seq_len)
    text_config = config.get_text_config()
    check_model(config, options.model)
    texts = read_documents(options.data, options.text_field)
    folder = options.model if options.model is not None and options.model.is_dir() else None
    tokens = tokenize(texts.texts, min(_VOCAB_SIZE, text_config.vocab_size), folder)
    largest = max(max(document, default=0) for document in tokens.documents)
    if largest >= text_config.vocab_size:
        raise InputError(
            f"--model {options.model}: its tokenizer gives id {largest}, but its vocabulary has "
            f"{text_config.vocab_size} entries; pass a folder whose tokenizer belongs to the model"
        )
    positions = getattr(text_config, "max_position_embeddings", None) or options.seq_len
    longest = min(max_doc_len or options.seq_len, options.seq_len, positions)
    rows = pack(tokens.documents, options.seq_len, max_doc_len=longest, pad_id=tokens.pad_id)
    order = list(range(rows.num_rows))
    random.Random(options.seed).shuffle(order)
    steps = [order[step % len(order)] for step in range(options.steps)]
    return Prepared(texts, tokens, rows, steps, text_config.num_hidden_layers)


def run_halves(options: DemoOptions, prepared: Prepared, console: Console) -> dict[str, HalfResult]:
    """Both trainings, one after the other, each in its own process. Raises WorkerError, or InputError from a worker."""
    results: dict[str, HalfResult] = {}
    with tempfile.TemporaryDirectory(prefix="packed_sdpa_demo_") as folder:
        rows_file = Path(folder) / "rows.pt"
        torch.save(prepared.rows.select(slice(None)), rows_file)
        for kind, title in HALVES.items():
            job = Job(
                kind=kind,
                rows=str(rows_file),
                order=prepared.order,
                model=None if options.model is None else str(options.model),
                vocab_size=_VOCAB_SIZE,
                dtype=options.dtype,
                learning_rate=options.learning_rate,
                seed=options.seed,
                threads=options.threads,
            )
            job.save(Path(folder) / f"{kind}.json")
            results[kind] = _run_half(Path(folder) / f"{kind}.json", title, options.steps, console)
    return results


def _run_half(job_file: Path, title: str, steps: int, console: Console) -> HalfResult:
    half = HalfResult()
    with _progress(console) as progress:
        task = progress.add_task(f"{title:<12}", total=steps, state="starting")
        for message in _messages(job_file):
            if "input_error" in message:
                raise InputError(message["input_error"])
            if "step" in message:
                half.losses.append(message["loss"])
                half.seconds.append(message["seconds"])
                half.tokens.append(message["tokens"])
                rate = message["tokens"] / message["seconds"]
                state = f"loss {message['loss']:.3f}  {message['seconds']:.2f} s/step  {rate:,.0f} tokens/s"
                progress.update(task, completed=message["step"], state=state)
                if not console.is_interactive:
                    console.print(f"{title:<12} step {message['step']}/{steps}  {state}", highlight=False)
            if "result" in message:
                half.proofs = message["result"]
                half.peak_rss_mb = half.proofs.pop("peak_rss_mb")
    return half


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), MofNCompleteColumn())
    return Progress(
        *columns,
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_interactive,
    )


def _messages(job_file: Path) -> Iterator[dict[str, Any]]:
    """What a worker writes, object by object. Raises WorkerError when it ends without a result."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as errors, _worker(job_file, errors) as process:
        assert process.stdout is not None
        finished = False
        for line in process.stdout:
            message = json.loads(line)
            finished = finished or "result" in message or "input_error" in message
            yield message
        code = process.wait()
        if not finished:
            errors.seek(0)
            said = errors.read().strip().splitlines()[-12:]
            raise WorkerError("\n".join([f"{job_file.stem} half of the demo ended with exit code {code}:", *said]))


@contextmanager
def _worker(job_file: Path, errors: Any) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "packed_sdpa.demo_worker", str(job_file)]
    # Threads that wait must sleep: on a machine that is busy otherwise, spinning made both halves 3 to 5 times as slow.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    # Closing its standard input ends it too, when this process is killed or a signal comes while Popen runs.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def run_demo(options: DemoOptions, console: Console | None = None) -> bool:
    """The whole demo; returns whether everything that was to be proven held. Writes report.json and three PNG files
    into ``options.out``; with bad input it raises InputError and writes nothing."""
    from packed_sdpa import demo_report

    console = console or make_console()
    import_extra("transformers", "demo")
    import_extra("matplotlib", "demo")
    check_out(options)
    with console.status("reading, tokenizing and packing"):
        prepared = prepare(options)
    _describe(options, prepared, console)
    results = run_halves(options, prepared, console)
    report = demo_report.build_report(prepared, results)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    plots = demo_report.write_plots(options.out, prepared, results)
    verdict = demo_report.judge(report, results, options.dtype)
    demo_report.print_report(console, report, results, verdict)
    written = ["report.json", *(plot.name for plot in plots)]
    console.print(f"wrote {', '.join(written)} into {options.out}/", highlight=False, soft_wrap=True)
    return all(check.holds for check in verdict)


def _describe(options: DemoOptions, prepared: Prepared, console: Console) -> None:
    rows, texts = prepared.rows, prepared.texts
    notes = [
        f"{len(texts.texts)} documents from {texts.source}, {rows.num_tokens:,} tokens by {prepared.tokens.tokenizer}",
        f"{rows.num_rows} rows of {rows.seq_len} ({rows.fill:.1%} full, {len(rows.pieces)} documents marked)",
    ]
    if texts.num_skipped:
        notes.append(f"{texts.num_skipped} files skipped: unreadable or not UTF-8")
    if rows.num_split:
        notes.append(f"{rows.num_split} documents longer than the row were split, each piece a document")
    notes.append(f"{options.steps} steps of one row, {options.dtype}, {options.threads} threads, twice")
    for note in notes:
        console.print(f"  {note}", highlight=False, soft_wrap=True)
