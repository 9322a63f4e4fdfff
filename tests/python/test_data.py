"""Reading documents and tokenizing them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from packed_sdpa.data import help_topics, read_documents, tokenize
from packed_sdpa.errors import InputError, MissingExtraError, import_extra


def test_default_is_the_help_topics_of_python() -> None:
    documents = read_documents()
    assert documents.texts == list(help_topics().values())
    assert len(documents.texts) > 50 and documents.num_skipped == 0
    assert max(map(len, documents.texts)) > 20_000


def test_text_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second", encoding="utf-8")
    (tmp_path / "a.txt").write_text("first äöü", encoding="utf-8")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "c.jsonl").write_text('{"text": "third"}\n\n{"text": " "}\n', encoding="utf-8")
    (tmp_path / "readme.md").write_text("not read", encoding="utf-8")
    assert read_documents(tmp_path).texts == ["first äöü", "second", "third"]
    assert read_documents(tmp_path / "b.txt").texts == ["second"]


def test_files_that_are_not_utf8_or_unreadable_are_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 this is not a table")
    pytest.importorskip("pyarrow")
    documents = read_documents(tmp_path)
    assert documents.texts == ["good"] and documents.num_skipped == 2


def test_jsonl_field(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(json.dumps({"body": text, "n": 1}) for text in ("one", "two")), encoding="utf-8")
    assert read_documents(file, field="body").texts == ["one", "two"]
    with pytest.raises(InputError, match=r"--field text: .* line 1 has no such text field \(it has: body, n\)"):
        read_documents(file)


def test_parquet_field(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.table({"text": ["one", None, "two"], "n": [1, 2, 3]}), file)
    assert read_documents(file).texts == ["one", "two"]
    with pytest.raises(InputError, match=r"--field body: .* no such column \(it has: text, n\)"):
        read_documents(file, field="body")
    with pytest.raises(InputError, match="does not hold text"):
        read_documents(file, field="n")


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({}, "holds no .txt, .jsonl, .parquet files"),
        ({"a.md": b"x"}, "holds no .txt, .jsonl, .parquet files"),
        ({"a.txt": b"  \n"}, "holds no text"),
        ({"a.txt": b"\xff\xfe"}, "holds no text; 1 files were skipped, the first: a.txt"),
        ({"a.jsonl": b'{"text": "x"}\nnope\n'}, r"line 2 is not JSON \(Expecting value"),
        ({"a.jsonl": b"[1]"}, "not an object but list"),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, files: dict[str, bytes], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=text):
        read_documents(tmp_path)


def test_bad_paths_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone does not exist; pass a file or folder"):
        read_documents(tmp_path / "gone")
    (tmp_path / "a.csv").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match=r"ends in '.csv'; it must be a folder or one of .txt, .jsonl, .parquet"):
        read_documents(tmp_path / "a.csv")


def test_trained_tokenizer_is_small_repeatable_and_closes_documents() -> None:
    pytest.importorskip("tokenizers")
    texts = read_documents().texts[:10]
    first, second = tokenize(texts, vocab_size=400), tokenize(texts, vocab_size=400)
    assert first == second and first.vocab_size == 400
    ends = {document[-1] for document in first.documents}
    assert len(ends) == 1 and all(document.count(document[-1]) == 1 for document in first.documents)
    assert max(max(document) for document in first.documents) < 400
    with pytest.raises(InputError, match="vocabulary of 100 is too small for bytes; it must be at least 258"):
        tokenize(texts, vocab_size=100)


def test_model_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own, eos_token="</s>").save_pretrained(tmp_path)
    tokens = tokenize(["a b c", "b"], vocab_size=4, model_folder=tmp_path)
    assert tokens.documents == [[2, 3, 0, 1], [3, 1]] and tokens.pad_id == 1
    (tmp_path / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="its tokenizer cannot be loaded"):
        tokenize(["a"], vocab_size=4, model_folder=tmp_path)


def test_missing_extra_says_what_to_install() -> None:
    with pytest.raises(MissingExtraError, match=r"no_such_module_here is not installed; run `pip install 'packed"):
        import_extra("no_such_module_here", "demo")


def test_jsonl_lines_end_at_newlines_only(tmp_path: Path) -> None:
    """JSON allows U+2028, U+2029 and U+0085 inside strings, at which splitlines() splits."""
    texts = ["one\u2028line", "two\u2029lines", "three\u0085lines"]
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "a.jsonl").write_bytes("\r\n".join([*lines, "", ""]).encode("utf-8"))
    assert read_documents(tmp_path / "a.jsonl").texts == texts
