"""Arguments of `packed-sdpa bench`."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from packed_sdpa.errors import InputError
from packed_sdpa.targets import check_file, check_folder

CASE_NAMES = ("M1", "M2", "M3", "M4", "M5", "M6", "M7")
CONTENDER_NAMES = ("packed_sdpa", "loop_expanded", "loop_gqa", "dense", "flex")
ALL_TRAINING_TOKENS = (4096, 16384)
ALL_MEMORY = (8192, 16384, 32768, 65536)
ALL_CORES = 64
PLOT_FILES = ("kernels.png", "gflops_by_document_length.png", "cost_per_token.png", "memory.png")
DTYPE_NAMES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class BenchOptions:
    """What to measure; see ``packed-sdpa bench --help``."""

    cases: tuple[str, ...] = CASE_NAMES
    contenders: tuple[str, ...] = CONTENDER_NAMES
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    forward_only: bool = False
    rounds: int = 5
    seconds_each: float = 20.0
    threads: int | None = None
    training_tokens: tuple[int, ...] = ()
    sweeps: bool = False
    memory: tuple[int, ...] = ()
    overheads: bool = False
    simulate_cores: int | None = None
    json: Path | None = None
    plot: Path | None = None
    markdown: Path | None = None

    @staticmethod
    def from_arguments(arguments: argparse.Namespace) -> BenchOptions:
        """Raises InputError that names the argument, the value and what it may be."""
        options = BenchOptions(
            cases=_names("--cases", arguments.cases, CASE_NAMES),
            contenders=_names("--contenders", arguments.contenders, CONTENDER_NAMES),
            dtypes=_names("--dtype", arguments.dtype, DTYPE_NAMES),
            forward_only=arguments.forward_only,
            rounds=arguments.rounds,
            seconds_each=arguments.seconds_each,
            threads=arguments.threads,
            training_tokens=_counts("--training-tokens", arguments.training_tokens)
            or (ALL_TRAINING_TOKENS if arguments.all else ()),
            sweeps=arguments.sweeps or arguments.all,
            memory=_counts("--memory", arguments.memory) or (ALL_MEMORY if arguments.all else ()),
            overheads=arguments.overheads or arguments.all,
            simulate_cores=ALL_CORES
            if arguments.simulate_cores is None and arguments.all
            else arguments.simulate_cores,
            json=arguments.json,
            plot=arguments.plot,
            markdown=arguments.markdown,
        )
        for flag, value in (
            ("--rounds", options.rounds),
            ("--threads", options.threads),
            ("--simulate-cores", options.simulate_cores),
        ):
            if value is not None and value < 1:
                raise InputError(f"{flag} must be at least 1, got {value}")
        if not options.seconds_each > 0:
            raise InputError(f"--seconds-each must be above 0, got {options.seconds_each}")
        check_targets(options.json, options.markdown, options.plot, PLOT_FILES)
        return options


def check_targets(json: Path | None, markdown: Path | None, plot: Path | None, plot_files: tuple[str, ...]) -> None:
    """Raises InputError when what the benchmark writes could not be written."""
    for flag, file in (("--json", json), ("--markdown", markdown)):
        if file is not None:
            check_file(flag, file)
    if markdown is not None and markdown.exists():
        try:
            markdown.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"--markdown {markdown} is not UTF-8 ({error.reason}); pass another file") from error
    if plot is not None:
        check_folder("--plot", plot, plot_files)


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every option of the benchmark."""
    defaults = BenchOptions()
    parser.add_argument("--cases", default=",".join(defaults.cases), help="which packings, separated by commas")
    parser.add_argument("--contenders", default=",".join(defaults.contenders), help="which ways, separated by commas")
    parser.add_argument("--dtype", default=",".join(defaults.dtypes), help=f"of {', '.join(DTYPE_NAMES)}")
    parser.add_argument("--forward-only", action="store_true", help="leave backward out")
    parser.add_argument("--rounds", type=int, default=defaults.rounds, help="the minimum of so many is reported")
    parser.add_argument(
        "--seconds-each",
        type=float,
        default=defaults.seconds_each,
        help="a contender that took so long sits out (a training step: three times so long)",
    )
    parser.add_argument("--threads", type=int, default=None, help="of torch (default: what torch takes)")
    parser.add_argument(
        "--training-tokens", default="", help="also training steps of a small Llama with so many tokens, as 4096,16384"
    )
    parser.add_argument("--sweeps", action="store_true", help="also by length of documents and by length of rows")
    parser.add_argument("--memory", default="", help="also peak memory at so many tokens a row, as 8192,65536")
    parser.add_argument("--overheads", action="store_true", help="also small calls, layout and threads")
    parser.add_argument(
        "--all", action="store_true", help="all of these, with 64 simulated cores, as in docs/performance.md"
    )
    parser.add_argument("--simulate-cores", type=int, default=None, help="also the schedule on so many cores")
    parser.add_argument("--json", type=Path, default=None, help="file for every number")
    parser.add_argument("--plot", type=Path, default=None, help="folder for plots (PNG)")
    parser.add_argument("--markdown", type=Path, default=None, help="file whose generated part becomes these tables")


def _names(flag: str, text: str, allowed: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in allowed:
            raise InputError(f"{flag} must be of {', '.join(allowed)}, got {name!r}")
    if not names:
        raise InputError(f"{flag} is empty; pass at least one of {', '.join(allowed)}")
    return names


def _counts(flag: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise InputError(f"{flag} must be counts of at least 1 separated by commas, got {text!r}")
    return tuple(int(part) for part in parts)
