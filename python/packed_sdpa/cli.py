"""Command line: ``packed-sdpa info | demo | bench | check``. Bad input: exit code 2 and one line on standard error."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from packed_sdpa.errors import InputError, MissingExtraError, WorkerError

_INPUT_ERROR = 2
_INTERRUPTED = 130  # as a shell says of a process that ended by SIGINT
_DATA_HELP = ".txt, .jsonl or .parquet file, or a folder of them (default: the help topics in Python)"


class _OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(_INPUT_ERROR, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _OneLineParser(prog="packed-sdpa", description="Exact, fast attention for packed sequences.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add, run in (
        ("info", _add_info, _info),
        ("demo", _add_demo, _demo),
        ("bench", _add_bench, _bench),
        ("check", _add_check, _check),
    ):
        summary = (add.__doc__ or "").strip()
        command = commands.add_parser(
            name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        add(command)
        command.set_defaults(run=run)
    return parser


def _add_info(parser: argparse.ArgumentParser) -> None:
    """versions, library, backends, instruction sets, and which calls each backend takes"""


def _info(arguments: argparse.Namespace) -> int:
    from packed_sdpa import info

    info.print_info()
    return 0


def _add_documents(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", type=Path, help=_DATA_HELP)
    parser.add_argument("--field", default="text", help="text field of .jsonl and .parquet files")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of rows")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    """train on real text with Transformers' packing and with packed_sdpa, prove that both are the same, compare"""
    _add_documents(parser)
    parser.add_argument("--model", type=Path, help="config.json or model folder, local only (default: a small Llama)")
    parser.add_argument("--seq-len", type=int, default=4096, help="tokens in a row")
    parser.add_argument("--steps", type=int, default=16, help="training steps of one row each")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations"
    )
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="of AdamW")
    parser.add_argument("--threads", type=int, default=None, help="of torch (default: what torch takes)")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for report.json and the plots")


def _demo(arguments: argparse.Namespace) -> int:
    import torch

    from packed_sdpa.demo import DemoOptions, run_demo

    options = DemoOptions(
        data=arguments.data,
        text_field=arguments.field,
        model=arguments.model,
        seq_len=arguments.seq_len,
        steps=arguments.steps,
        dtype=arguments.dtype,
        out=arguments.out,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        threads=torch.get_num_threads() if arguments.threads is None else arguments.threads,
    )
    return 0 if run_demo(options) else 1


def _add_bench(parser: argparse.ArgumentParser) -> None:
    """measure attention against every peer, side by side in one process"""
    from packed_sdpa.bench_options import add_bench_arguments

    add_bench_arguments(parser)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: M1 to M3 in bfloat16 only")


def _bench_cuda(arguments: argparse.Namespace) -> int:
    import torch

    from packed_sdpa import bench_cuda
    from packed_sdpa.bench_options import check_targets

    check_targets(arguments.json, None, arguments.plot, (bench_cuda.PLOT_FILE,))
    if not torch.cuda.is_available():
        raise InputError("--device cuda needs a CUDA device, and this machine has none")
    wanted = [("--json", arguments.json), ("--plot", arguments.plot), ("--rounds", arguments.rounds)]
    return bench_cuda.main([str(part) for flag, value in wanted if value is not None for part in (flag, value)])


def _bench(arguments: argparse.Namespace) -> int:
    if arguments.device == "cuda":
        return _bench_cuda(arguments)
    from packed_sdpa.bench import run_bench
    from packed_sdpa.bench_options import BenchOptions

    run_bench(BenchOptions.from_arguments(arguments))
    return 0


def _add_check(parser: argparse.ArgumentParser) -> None:
    """prove on a model folder of yours that no document of a packed row sees another"""
    _add_documents(parser)
    parser.add_argument("--model", type=Path, required=True, help="config.json or model folder, local only")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens in the row that is tried")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="float32", help="of weights and activations"
    )


def _check(arguments: argparse.Namespace) -> int:
    from packed_sdpa.model_check import CheckOptions, check_model_folder

    options = CheckOptions(
        model=arguments.model,
        data=arguments.data,
        text_field=arguments.field,
        seq_len=arguments.seq_len,
        dtype=arguments.dtype,
        seed=arguments.seed,
    )
    return 0 if check_model_folder(options) else 1


@contextlib.contextmanager
def _unwinding_on_sigterm() -> Iterator[None]:
    """SIGTERM ends by an exception, so that a demo's worker ends with it. Signals belong to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: object) -> NoReturn:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 1 when something that was to be proven
    failed or a process ended without a result, 2 for bad input, 130 when interrupted, 143 when terminated."""
    parsed = _parser().parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = parsed.run
    try:
        with _unwinding_on_sigterm():
            return run(parsed)
    except (InputError, MissingExtraError) as error:
        print(f"packed-sdpa {parsed.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return _INPUT_ERROR
    except WorkerError as error:
        print(f"packed-sdpa {parsed.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"packed-sdpa {parsed.command}: interrupted", file=sys.stderr)
        return _INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
