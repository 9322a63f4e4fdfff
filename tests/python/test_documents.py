"""Where documents are found, what is padding, and which sources disagree."""

import itertools

import pytest
import torch

import packed_sdpa
from packed_sdpa import PackedLayout
from packed_sdpa.documents import find_documents, found_or_armed, from_doc_ids
from packed_sdpa.numbering import numbered

TOKENS = torch.zeros(1, 8, dtype=torch.long)


def ids(*values):
    return torch.tensor([values])


def partition(documents):
    """doc_ids with documents numbered by first appearance, row by row; 0 stays padding."""
    rows = []
    for row in documents.doc_ids.tolist():
        seen: dict[int, int] = {}
        rows.append([0 if i == 0 else seen.setdefault(i, len(seen) + 1) for i in row])
    return rows


WANT = [[1, 1, 1, 2, 2, 3, 3, 3]]

SOURCES = {
    "doc_ids": ids(9, 9, 9, 3, 3, 700, 700, 700),
    "_packed_seq_ids": ids(1, 1, 1, 2, 2, 3, 3, 3),
    "seq_idx": ids(0, 0, 0, 1, 1, 2, 2, 2).int(),
    "cu_seq_lens_q": torch.tensor([0, 3, 5, 8], dtype=torch.int32),
    "cu_seq_lens_k": torch.tensor([0, 3, 5, 8]),
    "attention_mask": ids(1, 1, 1, 2, 2, 3, 3, 3),
    "position_ids": ids(0, 1, 2, 0, 1, 0, 1, 2),
}


@pytest.mark.parametrize("name", SOURCES)
def test_each_source(name):
    found = find_documents({"input_ids": TOKENS, name: SOURCES[name]})
    assert found.source == name and partition(found) == WANT and found.layout.num_documents == 3


def test_all_sources_agree_and_the_first_counts():
    found = find_documents({"input_ids": TOKENS, **SOURCES})
    assert found.source == "doc_ids" and found.doc_ids.tolist() == SOURCES["doc_ids"].tolist()


@pytest.mark.parametrize(("one", "two"), itertools.combinations(SOURCES, 2))
def test_disagreement_names_both(one, two):
    other = {
        "doc_ids": ids(1, 1, 2, 2, 2, 3, 3, 3),
        "_packed_seq_ids": ids(1, 1, 2, 2, 2, 3, 3, 3),
        "seq_idx": ids(0, 0, 1, 1, 1, 2, 2, 2),
        "cu_seq_lens_q": torch.tensor([0, 2, 5, 8]),
        "cu_seq_lens_k": torch.tensor([0, 2, 5, 8]),
        "attention_mask": ids(1, 1, 2, 2, 2, 3, 3, 3),
        "position_ids": ids(0, 1, 0, 1, 2, 0, 1, 2),
    }
    with pytest.raises(
        ValueError, match=rf"{one} and {two} disagree about the documents: at row 0, token 2, "
    ) as error:
        find_documents({"input_ids": TOKENS, one: SOURCES[one], two: other[two]})
    assert "pass one of them" in str(error.value)


def test_documents_callable_result_comes_first_and_must_agree():
    found = find_documents({"input_ids": TOKENS}, SOURCES["doc_ids"])
    assert found.source == "documents"
    layout = PackedLayout.from_doc_ids(SOURCES["doc_ids"])
    assert partition(find_documents({"input_ids": TOKENS}, layout)) == WANT
    with pytest.raises(ValueError, match="documents and position_ids disagree"):
        find_documents({"input_ids": TOKENS, "position_ids": SOURCES["position_ids"]}, ids(1, 1, 1, 1, 2, 2, 2, 2))


def test_layout_of_a_returning_document():
    layout = PackedLayout.from_doc_ids(ids(1, 1, 0, 2, 1, 1, 0, 5))
    assert partition(find_documents({"input_ids": TOKENS}, layout)) == [[1, 1, 0, 2, 1, 1, 0, 3]]


def test_a_returning_id_is_one_document_and_positions_may_go_on():
    found = find_documents({"doc_ids": ids(1, 1, 2, 1, 1), "position_ids": ids(0, 1, 0, 2, 3)})
    assert found.layout.num_documents == 2
    with pytest.raises(ValueError, match="one document of doc_ids is several"):
        find_documents({"doc_ids": ids(1, 1, 2, 1, 1), "seq_idx": ids(0, 0, 1, 2, 2)})


@pytest.mark.parametrize(
    "arguments",
    [
        {"position_ids": torch.arange(8)[None]},
        {"position_ids": torch.arange(5, 13)[None]},
        {"position_ids": torch.arange(8)},
        {"attention_mask": torch.ones(1, 8, dtype=torch.long)},
        {"attention_mask": ids(0, 0, 0, 1, 1, 1, 1, 1), "position_ids": ids(1, 1, 1, 0, 1, 2, 3, 4)},
        {"attention_mask": ids(1, 1, 1, 1, 1, 1, 0, 0), "position_ids": ids(0, 1, 2, 3, 4, 5, 1, 1)},
        {"attention_mask": torch.ones(1, 1, 8, 8, dtype=torch.bool)},
        {"position_ids": torch.tensor([[3]])},
        {"position_ids": torch.arange(8.0)[None]},
        {"attention_mask": torch.ones(1, 8)},
        {},
    ],
)
def test_an_unpacked_forward_tells_none(arguments):
    assert find_documents({"input_ids": TOKENS, **arguments}) is None


def test_zeros_of_the_mask_are_padding():
    mask = ids(0, 1, 1, 1, 1, 1, 1, 0)
    found = find_documents({"attention_mask": mask, "doc_ids": SOURCES["doc_ids"]})
    assert found.doc_ids.tolist() == [[0, 9, 9, 3, 3, 700, 700, 0]]
    found = find_documents({"attention_mask": mask.bool(), "position_ids": ids(7, 0, 1, 0, 1, 2, 3, 9)})
    assert partition(found) == [[0, 1, 1, 2, 2, 2, 2, 0]]


def test_padding_between_documents_and_indexed_mask():
    found = find_documents({"attention_mask": ids(1, 1, 0, 2, 2, 0, 3, 3)})
    assert found.doc_ids.tolist() == [[1, 1, 0, 2, 2, 0, 3, 3]]


def test_rows_are_told_apart():
    positions = torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1]])
    found = find_documents({"input_ids": torch.zeros(2, 4), "position_ids": positions})
    assert found.layout.num_documents == 3 and partition(found) == [[1, 1, 1, 1], [1, 1, 2, 2]]
    found = find_documents({"input_ids": torch.zeros(2, 4), "position_ids": positions[1:]})  # [1, S], as HF takes it
    assert found.layout.num_documents == 4
    found = find_documents({"input_ids": torch.zeros(2, 4), "cu_seq_lens_q": torch.tensor([0, 4, 6, 8])})
    assert partition(found) == [[1, 1, 1, 1], [1, 1, 2, 2]]


def test_offsets_may_leave_padding_at_the_end():
    found = find_documents({"input_ids": TOKENS, "cu_seq_lens_q": torch.tensor([0, 3, 6])})
    assert found.doc_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]


def test_first_document_of_seq_idx_is_no_padding():
    """Case 8; -1 is."""
    assert find_documents({"seq_idx": ids(0, 0, 1, -1)}).doc_ids.tolist() == [[1, 1, 2, 0]]


def test_positions_of_four_axes_use_the_text_axis():
    text = ids(0, 1, 2, 0, 1, 0, 1, 2)
    rope = torch.zeros(3, 1, 8, dtype=torch.long)
    found = find_documents({"input_ids": TOKENS, "position_ids": torch.cat([text[None], rope])})
    assert partition(found) == WANT


def test_positions_of_three_axes():
    text = ids(0, 1, 2, 0, 1, 0, 1, 2).expand(3, 1, 8)
    assert partition(find_documents({"input_ids": TOKENS, "position_ids": text})) == WANT
    image = torch.tensor([[0, 1, 1, 1, 1, 3, 0, 1], [0, 1, 1, 2, 2, 3, 0, 1], [0, 1, 2, 1, 2, 3, 0, 1]])[:, None]
    found = find_documents(
        {"input_ids": TOKENS, "position_ids": image}
    )  # t stands still and h, w go back: one document
    assert partition(found) == [[1, 1, 1, 1, 1, 1, 2, 2]]
    assert find_documents({"input_ids": TOKENS[:, :6], "position_ids": image[..., :6]}) is None


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"doc_ids": ids(1, 1, 2)},
            ValueError,
            r"doc_ids has shape \[1, 3\] but the forward has tokens \[B, S\] = \[1, 8\]",
        ),
        (
            {"doc_ids": torch.ones(1, 2, 4).long()},
            ValueError,
            r"doc_ids must be \[B, S\] or \[S\], got shape \[1, 2, 4\]",
        ),
        ({"doc_ids": ids(1.0, 2.0)}, TypeError, "doc_ids must hold integers, got dtype torch.float32"),
        ({"doc_ids": torch.ones(1, 8, dtype=torch.long, device="meta")}, ValueError, "doc_ids is on the meta device"),
        ({"doc_ids": [1, 1]}, TypeError, "doc_ids must be an integer tensor, got list"),
        (
            {"doc_ids": ids(1, 1, 1, 1, 1, 1, -2, 2)},
            ValueError,
            "doc_ids must not be negative, got -2; use 0 for padding",
        ),
        ({"seq_idx": ids(0, 0, 0, 0, 0, 0, 0, -2)}, ValueError, r"seq_idx must be 0, 1, .* got -2; use -1 for padding"),
        ({"cu_seq_lens_q": torch.tensor([1, 8])}, ValueError, r"cu_seq_lens_q must start at 0, .* got \[1, 8\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 3])}, ValueError, "not decrease"),
        ({"cu_seq_lens_q": torch.tensor([0, 9])}, ValueError, "end at most at the 8 tokens"),
        ({"cu_seq_lens_q": torch.tensor(3)}, ValueError, r"offsets \[N \+ 1\]"),
    ],
)
def test_bad_sources_are_named(arguments, error, text):
    with pytest.raises(error, match=text):
        find_documents({"input_ids": TOKENS, **arguments})


def test_an_offset_across_rows_is_refused():
    with pytest.raises(ValueError, match="crosses the end of a row of 4 tokens"):
        find_documents({"input_ids": torch.zeros(2, 4), "cu_seq_lens_q": torch.tensor([0, 5, 8])})


def test_row_ids_for_a_batch_are_refused():
    with pytest.raises(ValueError, match=r"doc_ids has shape \[8\] but the forward has tokens \[B, S\] = \[2, 8\]"):
        find_documents({"input_ids": torch.zeros(2, 8), "doc_ids": torch.ones(8).long()})


def test_ids_are_copied():
    buffer = ids(1, 1, 2, 2)
    found = from_doc_ids(buffer)
    buffer.fill_(5)
    assert found.doc_ids.tolist() == [[1, 1, 2, 2]]


def test_documents_of_arguments_and_armed_ones():
    found, armed = from_doc_ids(ids(1, 1, 2)), from_doc_ids(ids(5, 5, 7), "other")
    assert found_or_armed(found, armed) is found and found_or_armed(found, None) is found
    assert found_or_armed(None, armed) is armed and found_or_armed(None, None) is None
    with pytest.raises(ValueError, match="doc_ids and other disagree"):
        found_or_armed(found, from_doc_ids(ids(5, 7, 7), "other"))
    with pytest.raises(ValueError, match=r"tells documents of \[1, 3\] tokens but other of \[1, 2\]"):
        found_or_armed(found, from_doc_ids(ids(5, 7), "other"))
    with pytest.raises(ValueError, match="one document of doc_ids is several of the other's"):
        found_or_armed(from_doc_ids(ids(1, 1, 2, 1)), from_doc_ids(ids(5, 5, 7, 8), "other"))


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "position_ids"])
def test_a_document_that_comes_back_is_told_by_whoever_can(name):
    """Offsets and positions say where documents begin; which of them are one is for others to say."""
    boundaries = {"cu_seq_lens_q": torch.tensor([0, 2, 3, 5]), "position_ids": ids(0, 1, 0, 2, 3)}[name]
    alone = find_documents({name: boundaries})
    assert partition(alone) == [[1, 1, 2, 3, 3]] and alone.boundaries_only
    for other in ("doc_ids", "_packed_seq_ids", "attention_mask"):
        found = find_documents({name: boundaries, other: ids(1, 1, 2, 1, 1)})
        assert partition(found) == [[1, 1, 2, 1, 1]] and found.source == other and not found.boundaries_only
    armed = from_doc_ids(ids(3, 3, 9, 3, 3), "armed")
    assert found_or_armed(alone, armed) is armed
    with pytest.raises(ValueError, match=f"{name} and armed disagree"):
        found_or_armed(alone, from_doc_ids(ids(3, 3, 3, 4, 4), "armed"))


def test_positions_of_a_document_that_comes_back():
    """They may happen to follow those of the document between."""
    returning, positions = ids(1, 1, 2, 2, 1, 1), ids(0, 1, 0, 1, 2, 3)
    found = find_documents({"doc_ids": returning, "position_ids": positions})
    assert partition(found) == [[1, 1, 2, 2, 1, 1]] and found.source == "doc_ids"
    armed = from_doc_ids(returning, "armed")
    assert found_or_armed(find_documents({"position_ids": positions}), armed) is armed
    two = {"doc_ids": torch.cat([returning, returning + 5]), "position_ids": torch.cat([positions, positions])}
    assert partition(find_documents(two)) == [[1, 1, 2, 2, 1, 1]] * 2
    for wrong in (ids(0, 1, 0, 1, 2, 0), ids(0, 1, 2, 3, 2, 3), ids(0, 1, 0, 0, 2, 3)):
        with pytest.raises(ValueError, match="doc_ids and position_ids disagree"):
            find_documents({"doc_ids": returning, "position_ids": wrong})


def test_positions_that_count_through_padding():
    """As arange does: the token behind the padding is as far on as it stands behind."""
    hole = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1]])
    through, without = ids(0, 1, 2, 3, 4, 5, 6, 7), ids(0, 1, 2, 0, 3, 4, 5, 6)
    arguments = {"input_ids": TOKENS, "attention_mask": hole}
    for positions in (through, without):
        assert find_documents({**arguments, "position_ids": positions}) is None
        told = find_documents({**arguments, "position_ids": positions, "doc_ids": ids(1, 1, 1, 1, 1, 1, 1, 1)})
        assert partition(told) == [[1, 1, 1, 0, 1, 1, 1, 1]]
    restarts = find_documents({**arguments, "position_ids": ids(0, 1, 2, 3, 4, 0, 1, 2)})
    assert partition(restarts) == [[1, 1, 1, 0, 1, 2, 2, 2]]
    said = r"token 4, doc_ids says that a document begins and position_ids says that a document goes on"
    with pytest.raises(ValueError, match=said):
        later = {"position_ids": ids(0, 1, 2, 3, 4, 5, 0, 1), "doc_ids": ids(1, 1, 1, 1, 2, 2, 3, 3)}
        find_documents({**arguments, **later})


def test_masks_of_cached_tokens():
    tokens = torch.zeros(2, 3, dtype=torch.long)
    longer = torch.tensor(
        [[0, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    )  # two tokens are cached; the first row is padded to the left
    positions = torch.tensor([[0, 0, 1], [2, 3, 4]])
    assert find_documents({"input_ids": tokens, "attention_mask": longer, "position_ids": positions}) is None
    told = {"input_ids": tokens, "doc_ids": torch.tensor([[1, 1, 2], [3, 3, 3]])}
    assert partition(find_documents({**told, "attention_mask": longer})) == [[0, 1, 2], [1, 1, 1]]
    prepared = torch.ones(2, 1, 3, 9, dtype=torch.bool)
    for mask in (prepared, {"full_attention": prepared}):
        assert find_documents({"input_ids": tokens, "attention_mask": mask, "position_ids": positions}) is None
        assert find_documents({**told, "attention_mask": mask}) is not None
    square = prepared[..., :3]
    by_kind = {"full_attention": square, "sliding_attention": None}
    assert find_documents({"input_ids": tokens, "attention_mask": by_kind, "position_ids": positions}) is not None
    assert find_documents({"input_ids": tokens, "attention_mask": square, "position_ids": positions}) is not None


def test_padding_masks_of_another_kind():
    tokens = torch.zeros(2, 4, dtype=torch.long)
    told = {"input_ids": tokens, "doc_ids": torch.tensor([[1, 1, 2, 2], [3, 3, 3, 3]])}
    one_row = find_documents({**told, "attention_mask": torch.tensor([[1, 1, 1, 0]])})
    assert partition(one_row) == [[1, 1, 2, 0], [1, 1, 1, 0]]
    halves = find_documents({**told, "attention_mask": torch.tensor([[1.0, 1.0, 1.0, 0.0]]).half()})
    assert partition(halves) == partition(one_row)
    with pytest.raises(TypeError, match=r"attention_mask \[2, 4\] is additive \(its smallest value is -10000\)"):
        find_documents({**told, "attention_mask": torch.tensor([[0.0, 0.0, 0.0, -1e4]]).expand(2, 4)})
    with pytest.raises(TypeError, match=r"attention_mask .* is additive"):
        by_position = {"input_ids": tokens, "position_ids": torch.tensor([[0, 1, 0, 1]])}
        find_documents({**by_position, "attention_mask": torch.tensor([[0.0, 0.0, 0.0, -1e9]])})
    for shape in ((2, 3), (3, 4), (1, 3)):
        with pytest.raises(ValueError, match=rf"attention_mask has shape \[{shape[0]}, {shape[1]}\] but the documents"):
            find_documents({**told, "attention_mask": torch.ones(shape)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_documents_told_in_floats_are_refused_not_overlooked(dtype):
    with pytest.raises(TypeError, match=r"attention_mask numbers documents \(its largest value is 3\) but has dtype"):
        find_documents({"input_ids": TOKENS, "attention_mask": SOURCES["attention_mask"].to(dtype)})
    with pytest.raises(TypeError, match="position_ids restart, so they tell documents, but have dtype"):
        find_documents({"input_ids": TOKENS, "position_ids": SOURCES["position_ids"].to(dtype)})


@pytest.mark.parametrize("name", [*SOURCES, "three axes", "told", "layout"])
def test_host_tensors_stay_on_the_host_under_another_default_device(name):
    """torch.set_default_device: what is made here is of the host, also in chunks. meta: any use of it would be seen."""
    value = {"three axes": SOURCES["position_ids"].expand(3, 1, 8), "told": SOURCES["doc_ids"]}.get(name)
    told = PackedLayout.from_seqlens([3, 2, 3]) if name == "layout" else value if name == "told" else None
    argument = {"three axes": "position_ids"}.get(name, name)
    arguments = {} if told is not None else {argument: SOURCES.get(name, value)}
    with torch.device("meta"):
        found = find_documents({"input_ids": TOKENS, **arguments}, told)
        chunks = found.in_chunks(2)
    assert partition(found) == WANT
    assert partition(chunks) == [[1, 1, 2, 3, 3, 4, 4, 5]]


def test_layouts_and_packed_rows_under_another_default_device():
    with torch.device("meta"):
        layout = PackedLayout.from_seqlens([3, 2], total=6)
        packed = packed_sdpa.pack([[5, 6, 7], torch.tensor([8, 9], device="cpu")], 6)
    assert (
        layout.materialize_mask()[0].tolist()
        == PackedLayout.from_doc_ids(ids(1, 1, 1, 2, 2, 0)).materialize_mask()[0].tolist()
    )
    assert packed.doc_ids.tolist() == [[1, 1, 1, 2, 2, 0]] and packed.input_ids.tolist() == [[5, 6, 7, 8, 9, 0]]


def test_a_mask_of_one_row_is_every_rows():
    arguments = {"input_ids": TOKENS.expand(2, 8), "attention_mask": ids(0, 1, 1, 1, 1, 1, 1, 0)}
    found = find_documents({**arguments, "doc_ids": SOURCES["doc_ids"].expand(2, 8)})
    assert partition(found) == [[0, 1, 1, 2, 2, 3, 3, 0]] * 2
    found = find_documents({**arguments, "position_ids": ids(9, 0, 1, 0, 1, 2, 3, 9)})
    assert partition(found) == [[0, 1, 1, 2, 2, 2, 2, 0]] * 2


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("scale", [1, 10**17])
def test_numbers_of_tuples_are_those_of_unique(columns: int, scale: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    parts = [torch.randint(-3, 5, (60,), generator=generator) * scale for _ in range(columns)]
    distinct, expected = torch.stack(parts).unique(dim=1, return_inverse=True)
    numbers, count = numbered(*parts)
    assert torch.equal(numbers, expected) and count == distinct.shape[1]
    assert numbered(*(part[:0] for part in parts))[1] == 0
