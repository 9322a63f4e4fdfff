"""What the demo found: report.json, the verdict and the table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from packed_sdpa import host, plots

if TYPE_CHECKING:
    from packed_sdpa.demo import HalfResult, Prepared

# How far two ways of the same arithmetic may drift apart, relative to the largest logit and to the loss. Exact for the
# gradients across documents. A leak moves logits by a tenth of the largest one and more.
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 4 * 2.0**-8}
_LOSS_TOLERANCE = {"float32": 0.01, "bfloat16": 0.05}


@dataclass(frozen=True)
class Check:
    """One thing that was to be proven."""

    name: str
    found: str
    holds: bool

    def line(self) -> str:
        """With rich's markup."""
        mark = "[green]holds[/]" if self.holds else "[bold red]FAILS[/]"
        return f"{mark}  {self.name}: {self.found}"


def judge_logits(difference: float, unmarked: float, largest: float, dtype: str) -> Check:
    """difference: to each document alone; unmarked: the same without marks; largest: the largest logit. Infinite or NaN
    logits prove nothing, so they fail."""
    finite = math.isfinite(difference) and math.isfinite(largest)
    found = f"off by {difference:.1e}; without marks {unmarked:.1e}; largest logit {largest:.1e}"
    return Check(
        "packed logits equal each document alone",
        found if finite else f"{found}: not finite",
        finite and difference <= LOGIT_TOLERANCE[dtype] * largest,
    )


def judge_gradients(across: float, own: float) -> Check:
    """Infinite or NaN gradients prove nothing, so they fail."""
    finite = math.isfinite(across) and math.isfinite(own)
    found = f"{across:.1e}; into itself {own:.1e}"
    return Check(
        "no gradient into other documents",
        found if finite else f"{found}: not finite",
        finite and across == 0.0 and own > 0.0,
    )


def build_report(prepared: Prepared, results: dict[str, HalfResult]) -> dict[str, Any]:
    """The content of report.json. Losses are lists, a value a step; step_seconds medians; peak_rss_mb MiB."""
    stock, packed = results["stock"], results["packed"]
    return {
        "documents": len(prepared.rows.pieces),
        "tokens": prepared.rows.num_tokens,
        "seq_len": prepared.rows.seq_len,
        "layers": prepared.num_layers,
        "attention_calls_taken": packed.proofs["attention_calls_taken"],
        "attention_calls_passed": packed.proofs["attention_calls_passed"],
        "isolation_max_abs": packed.proofs["isolation_max_abs"],
        "cross_document_grad": packed.proofs["cross_document_grad"],
        "loss_stock": stock.losses,
        "loss_packed": packed.losses,
        "step_seconds_stock": stock.step_seconds,
        "step_seconds_packed": packed.step_seconds,
        "speedup": stock.step_seconds / packed.step_seconds,
        "peak_rss_mb_stock": stock.peak_rss_mb,
        "peak_rss_mb_packed": packed.peak_rss_mb,
        "backend": packed.proofs["backend"],
        "cpu_isa": host.cpu_isa(),
    }


def judge(report: dict[str, Any], results: dict[str, HalfResult], dtype: str) -> list[Check]:
    """What must hold, from the report and the packed half's proofs."""
    proofs = results["packed"].proofs
    gap = max(
        abs(stock - packed) / max(abs(stock), 1e-9)
        for stock, packed in zip(report["loss_stock"], report["loss_packed"], strict=True)
    )
    finite = all(math.isfinite(loss) for loss in report["loss_stock"] + report["loss_packed"])
    taken, passed = report["attention_calls_taken"], report["attention_calls_passed"]
    return [
        judge_logits(report["isolation_max_abs"], proofs["unmarked_max_abs"], proofs["largest_logit"], dtype),
        judge_gradients(report["cross_document_grad"], proofs["own_document_grad"]),
        Check("same loss curve as Transformers", f"largest gap {gap:.2%}", finite and gap <= _LOSS_TOLERANCE[dtype]),
        Check("every attention call taken", f"{taken:,} taken, {passed:,} passed through", taken > 0 and passed == 0),
    ]


def print_report(
    console: Console, report: dict[str, Any], results: dict[str, HalfResult], verdict: list[Check]
) -> None:
    """The short table, what was proven, and the verdict."""
    console.print()
    console.print(_table(report, results), highlight=False)
    console.print()
    for check in verdict:
        console.print(check.line(), highlight=False)
    speed = f"{report['speedup']:.1f} times as fast as Transformers"
    by = f"backend {report['backend']}, {report['cpu_isa']}"
    good = all(check.holds for check in verdict)
    summary = f"[bold green]exact, and {speed}[/]" if good else "[bold red]not exact[/]"
    console.print(f"\nVerdict: {summary} ({by})\n", highlight=False)


def _table(report: dict[str, Any], results: dict[str, HalfResult]) -> Table:
    grid = Table(show_edge=False, pad_edge=False)
    grid.add_column("")
    for title in ("Transformers", "packed_sdpa", ""):
        grid.add_column(title, justify="right")
    stock, packed = results["stock"], results["packed"]
    memory = packed.peak_rss_mb - stock.peak_rss_mb
    rates = [sum(half.tokens) / sum(half.seconds) for half in (stock, packed)]
    rows = (
        ("seconds a step", f"{stock.step_seconds:.3f}", f"{packed.step_seconds:.3f}", f"{report['speedup']:.2f}x"),
        ("tokens a second", f"{rates[0]:,.0f}", f"{rates[1]:,.0f}", f"{rates[1] / rates[0]:.2f}x"),
        ("peak memory, MiB", f"{stock.peak_rss_mb:,.0f}", f"{packed.peak_rss_mb:,.0f}", f"{memory:+,.0f}"),
        ("first loss", f"{stock.losses[0]:.4f}", f"{packed.losses[0]:.4f}", ""),
        ("last loss", f"{stock.losses[-1]:.4f}", f"{packed.losses[-1]:.4f}", ""),
    )
    for row in rows:
        grid.add_row(*row)
    return grid


def write_plots(out: Path, prepared: Prepared, results: dict[str, HalfResult]) -> list[Path]:
    """Loss curves, bars of step time and memory, packed rows."""
    stock, packed = results["stock"], results["packed"]
    return [
        plots.plot_losses(out / "loss_curves.png", stock.losses, packed.losses),
        plots.plot_step_bars(
            out / "step_time_memory.png",
            seconds=(stock.step_seconds, packed.step_seconds),
            memory_mb=(stock.peak_rss_mb, packed.peak_rss_mb),
        ),
        plots.plot_packed_rows(out / "packed_rows.png", prepared.rows),
    ]
