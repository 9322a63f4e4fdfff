"""Text documents for the demo, the benchmark and `packed-sdpa check`, and the tokenizer that goes with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packed_sdpa.errors import InputError, import_extra

SUFFIXES = (".txt", ".jsonl", ".parquet")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True)
class TextDocuments:
    """Texts in a fixed order, none of them blank."""

    texts: list[str]
    source: str  # where they came from, for people
    num_skipped: int = 0  # files that could not be read or are not UTF-8


def read_documents(path: str | Path | None = None, field: str = "text") -> TextDocuments:
    """Reads documents from a .txt file (one document), a .jsonl or .parquet file (one a row, in ``field``), or a folder
    of such files, subfolders included; ``None``: the help topics that come with Python.

    Files that cannot be read or are not UTF-8 are skipped and counted. Raises InputError when there is no such path, no
    file of these kinds, no text left, a line that is not JSON, or no such field.
    """
    if path is None:
        return TextDocuments(list(help_topics().values()), "Python's help topics")
    path = Path(path)
    files = list(_files(path))
    texts: list[str] = []
    skipped: list[str] = []
    for file in files:
        try:
            texts += [text for text in _READERS[file.suffix.lower()](file, field) if text.strip()]
        except (OSError, UnicodeDecodeError) as error:
            skipped.append(f"{file.name}: {error}")
    if not texts:
        why = f"; {len(skipped)} files were skipped, the first: {skipped[0]}" if skipped else ""
        raise InputError(f"--data {path} holds no text{why}; pass UTF-8 files that are not empty")
    return TextDocuments(texts, str(path), len(skipped))


def help_topics() -> dict[str, str]:
    """The help topics that come with Python, by name, in alphabetical order."""
    from pydoc_data.topics import topics

    return {name: topics[name] for name in sorted(topics) if topics[name].strip()}


def _files(path: Path) -> Iterator[Path]:
    kinds = ", ".join(SUFFIXES)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
        if not files:
            raise InputError(f"--data {path} holds no {kinds} files; pass a folder with at least one")
        yield from files
    elif not path.exists():
        raise InputError(f"--data {path} does not exist; pass a file or folder of {kinds}, or leave --data out")
    elif path.suffix.lower() not in SUFFIXES:
        raise InputError(f"--data {path} ends in {path.suffix or 'nothing'!r}; it must be a folder or one of {kinds}")
    else:
        yield path


def _read_text(file: Path, field: str) -> list[str]:
    return [file.read_text(encoding="utf-8")]


def _read_jsonl(file: Path, field: str) -> list[str]:
    texts = []
    # Not splitlines: it also splits at U+2028, U+2029 and U+0085, which JSON allows inside strings.
    for number, line in enumerate(file.read_bytes().decode("utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(f"--data {file} line {number} is not JSON ({error}); write one object a line") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            keys = ", ".join(row) if isinstance(row, dict) else f"not an object but {type(row).__name__}"
            raise InputError(
                f"--field {field}: {file} line {number} has no such text field (it has: {keys}); pass another --field"
            )
        texts.append(row[field])
    return texts


def _read_parquet(file: Path, field: str) -> list[str]:
    parquet = import_extra("pyarrow.parquet", "parquet")
    pyarrow = import_extra("pyarrow", "parquet")
    try:
        columns = parquet.read_schema(file).names
        if field not in columns:
            raise InputError(
                f"--field {field}: {file} has no such column (it has: {', '.join(columns)}); pass another --field"
            )
        values = parquet.read_table(file, columns=[field]).column(field).to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise OSError(f"not a parquet file ({error})") from error
    if not all(value is None or isinstance(value, str) for value in values):
        raise InputError(f"--field {field}: the column of {file} does not hold text; pass another --field")
    return [value for value in values if value is not None]


_READERS: dict[str, Callable[[Path, str], list[str]]] = {
    ".txt": _read_text,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}


@dataclass(frozen=True)
class TokenDocuments:
    """Token ids of each text, closed by an end-of-text token."""

    documents: list[list[int]]
    vocab_size: int
    pad_id: int
    tokenizer: str  # what made them, for people


def tokenize(texts: list[str], vocab_size: int, model_folder: Path | None = None) -> TokenDocuments:
    """Token ids of the texts: by the model folder's own tokenizer where it has one (local files only), else by a
    byte-level BPE of at most ``vocab_size`` entries trained on these texts."""
    if model_folder is not None and any((model_folder / name).exists() for name in _TOKENIZER_FILES):
        return _tokenize_by_model(texts, model_folder)
    return _tokenize_by_training(texts, vocab_size)


def _tokenize_by_model(texts: list[str], folder: Path) -> TokenDocuments:
    transformers = import_extra("transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--model {folder}: its tokenizer cannot be loaded ({reason}); repair or remove it") from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (end or [0])[0]
    documents = [list(ids) + end for ids in encoded]
    return TokenDocuments(documents, len(tokenizer), pad_id, f"the tokenizer of {folder}")


def _tokenize_by_training(texts: list[str], vocab_size: int) -> TokenDocuments:
    tokenizers = import_extra("tokenizers", "hf")
    specials = ["<pad>", "<end>"]
    smallest = 256 + len(specials)
    if vocab_size < smallest:
        raise InputError(
            f"--model: its vocabulary of {vocab_size} is too small for bytes; it must be at least {smallest}"
        )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id("<end>")
    documents = [[*encoding.ids, end] for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]
    size = tokenizer.get_vocab_size()
    return TokenDocuments(documents, size, tokenizer.token_to_id("<pad>"), f"a BPE of {size} trained on these texts")
