"""The demo end to end on a tiny model: what it writes, and that the numbers mean what their names say."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from test_cli import TINY_LLAMA, model_folder

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import torch

import packed_sdpa
from packed_sdpa import demo, demo_report, host, proofs
from packed_sdpa.demo_model import build_model, make_config
from packed_sdpa.errors import WorkerError

KEYS = [
    "documents",
    "tokens",
    "seq_len",
    "layers",
    "attention_calls_taken",
    "attention_calls_passed",
    "isolation_max_abs",
    "cross_document_grad",
    "loss_stock",
    "loss_packed",
    "step_seconds_stock",
    "step_seconds_packed",
    "speedup",
    "peak_rss_mb_stock",
    "peak_rss_mb_packed",
    "backend",
    "cpu_isa",
]
STEPS = 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bool, str]:
    """Folder, verdict and printed text of one tiny demo on a folder of texts."""
    folder = tmp_path_factory.mktemp("demo")
    texts = folder / "texts"
    texts.mkdir()
    for number, count in enumerate((40, 3, 1, 2, 9)):
        (texts / f"{number}.txt").write_text(f"document {number} says this. " * count, encoding="utf-8")
    (texts / "latin.txt").write_bytes(b"caf\xe9")
    console = Console(file=io.StringIO(), width=100)
    options = demo.DemoOptions(
        data=texts, model=model_folder(folder / "model"), seq_len=64, steps=STEPS, threads=1, out=folder / "out"
    )
    holds = demo.run_demo(options, console)
    return folder / "out", holds, console.file.getvalue()


def test_it_proves_what_it_says(finished: tuple[Path, bool, str]) -> None:
    _, holds, text = finished
    assert holds, text
    assert text.count("holds") == 4 and "FAILS" not in text
    assert "Verdict: exact, and" in text
    assert "1 files skipped" in text and "documents longer than the row were split" in text


def test_report_has_the_keys_and_their_meaning(finished: tuple[Path, bool, str]) -> None:
    report = json.loads((finished[0] / "report.json").read_text(encoding="utf-8"))
    assert list(report) == KEYS
    assert report["seq_len"] == 64 and report["layers"] == TINY_LLAMA["num_hidden_layers"]
    assert report["documents"] >= 5 and report["tokens"] > 64
    # A forward and its recompute, in every layer, at every step.
    assert report["attention_calls_taken"] == 2 * report["layers"] * STEPS
    assert report["attention_calls_passed"] == 0
    assert report["cross_document_grad"] == 0.0
    assert 0.0 <= report["isolation_max_abs"] < 1e-4
    assert len(report["loss_stock"]) == len(report["loss_packed"]) == STEPS
    assert report["loss_packed"] == pytest.approx(report["loss_stock"], rel=1e-3)
    assert report["speedup"] == pytest.approx(report["step_seconds_stock"] / report["step_seconds_packed"])
    assert min(report["peak_rss_mb_stock"], report["peak_rss_mb_packed"]) > 50
    assert report["backend"] == "cpu" and report["cpu_isa"] == host.cpu_isa()


def test_plots_are_images(finished: tuple[Path, bool, str]) -> None:
    assert sorted(path.name for path in finished[0].iterdir()) == sorted(("report.json", *demo.PLOT_FILES))
    for name in demo.PLOT_FILES:
        content = (finished[0] / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5_000


def tiny_batch() -> proofs.Batch:
    rows = packed_sdpa.pack([list(range(20, 40)), list(range(50, 63)), [7] * 9], seq_len=48)
    return rows.select([0])


def tiny_model(tmp_path: Path) -> torch.nn.Module:
    folder = model_folder(tmp_path / "model")
    return build_model(make_config(folder, 0, 0), folder, torch.float32, seed=1)


def test_proofs_see_a_leak(tmp_path: Path) -> None:
    """The same proofs on the stock model, which is not told where documents end, must fail."""
    model = tiny_model(tmp_path)
    batch = tiny_batch()
    handle = packed_sdpa.attach(model, documents=lambda *args, **kwargs: None)
    batch["position_ids"] = torch.arange(48)[None]  # or stock Transformers would find the documents
    leak = proofs.cross_document_gradients(model, batch)
    assert leak["cross_document_grad"] > 1e-6
    assert proofs.isolation(model, handle, batch)["isolation_max_abs"] > 1e-4


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_proofs_fail_on_logits_that_are_not_finite(tmp_path: Path, bad: float) -> None:
    model = tiny_model(tmp_path)
    batch = tiny_batch()
    last = int(batch["input_ids"][0, (batch["doc_ids"][0] == 2).nonzero()[0]])
    with torch.no_grad():
        model.get_input_embeddings().weight[last] = bad  # in the second of three documents
    handle = packed_sdpa.attach(model)
    found = {**proofs.cross_document_gradients(model, batch), **proofs.isolation(model, handle, batch)}
    logits = demo_report.judge_logits(
        found["isolation_max_abs"], found["unmarked_max_abs"], found["largest_logit"], "float32"
    )
    gradients = demo_report.judge_gradients(found["cross_document_grad"], found["own_document_grad"])
    assert not logits.holds and "not finite" in logits.found
    assert not gradients.holds and "not finite" in gradients.found


def test_largest_and_smallest_keep_nan() -> None:
    nan = float("nan")
    for values in ([nan, 1.0], [1.0, nan], [nan]):
        assert proofs.largest_of(values) != proofs.largest_of(values)
        assert proofs.smallest_of(values) != proofs.smallest_of(values)
    assert proofs.largest_of([0.5, 2.0]) == 2.0 and proofs.smallest_of([0.5, 2.0]) == 0.5
    infinite = demo_report.judge_logits(float("inf"), 0.0, float("inf"), "float32")
    assert not infinite.holds and not demo_report.judge_gradients(0.0, float("inf")).holds


@pytest.mark.parametrize("training", [True, False])
def test_isolation_leaves_the_model_as_it_was(tmp_path: Path, training: bool) -> None:
    model = tiny_model(tmp_path).train(training)
    model.lm_head.train(not training)
    batch = tiny_batch()
    handle = packed_sdpa.attach(model)
    proofs.isolation(model, handle, batch)
    assert handle.enabled and model.training is training and model.lm_head.training is not training

    def fail(*_: object) -> None:
        if not handle.enabled:
            raise KeyboardInterrupt

    model.lm_head.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        proofs.isolation(model, handle, batch)
    assert handle.enabled and model.training is training and model.lm_head.training is not training


def test_weights_of_the_folder_are_loaded(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(0.5)
    model.save_pretrained(tmp_path / "saved")
    again = build_model(make_config(tmp_path / "saved", 0, 0), tmp_path / "saved", torch.float32, seed=2)
    assert (again.get_input_embeddings().weight == 0.5).all() and again.training


def test_a_worker_that_dies_is_told_with_what_it_said(tmp_path: Path) -> None:
    (tmp_path / "stock.json").write_text("{", encoding="utf-8")
    with pytest.raises(WorkerError, match=r"stock half of the demo ended with exit code 1:(.|\n)*JSONDecodeError"):
        list(demo._messages(tmp_path / "stock.json"))


def test_a_verdict_fails_where_a_proof_does() -> None:
    losses = {"loss_stock": [2.0, 1.0], "loss_packed": [2.0, 1.1]}
    report = {
        **losses,
        "isolation_max_abs": 0.5,
        "cross_document_grad": 1e-9,
        "attention_calls_taken": 8,
        "attention_calls_passed": 1,
    }
    found = {"largest_logit": 10.0, "unmarked_max_abs": 0.6, "own_document_grad": 1.0}
    verdict = demo_report.judge(report, {"packed": demo.HalfResult(proofs=found)}, "float32")
    assert [check.holds for check in verdict] == [False] * 4


def test_gradient_into_another_document_of_a_single_document_row_is_zero(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    packed_sdpa.attach(model)
    batch = packed_sdpa.pack([list(range(1, 11))], seq_len=10).select([0])
    assert proofs.cross_document_gradients(model, batch)["cross_document_grad"] == 0.0
