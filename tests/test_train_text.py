"""Text, tokens and batches of the training example."""

import json
import math

import numpy as np
import pytest
from training import text


def test_bytes_round_trip_and_end_token():
    tokenizer = text.ByteTokenizer()
    tokens = text.encode(["añb", "c"], tokenizer)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*"añb".encode(), 0, ord("c"), 0]
    assert tokenizer.decode(tokens.tolist()) == "añbc"


def test_unigram_entropy():
    assert text.unigram_entropy(np.array([3, 3, 5, 7])) == pytest.approx(1.5 * math.log(2))
    assert text.unigram_entropy(np.zeros(9, np.int32)) == 0.0


def test_documents_of_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.jsonl").write_text('{"text": "first"}\n\n"bare \\u2028 string"\n')
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    assert list(text.documents([tmp_path])) == ["first", "bare \u2028 string", "second"]
    assert list(text.documents([tmp_path / "b.txt"])) == ["second"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "a.txt is empty; it must hold text"),
        ("a.txt", " \n\n", "a.txt is empty"),
        ("a.jsonl", "", "a.jsonl is empty"),
        ("a.jsonl", '{"text": "x"}\n{oops\n', "a.jsonl, line 2, is not JSON"),
        ("a.jsonl", '{"body": "x"}\n', 'line 1, must be a string or an object with "text"'),
        ("a.csv", "x", "a.csv; a file must be a .txt or .jsonl file"),
    ],
)
def test_bad_file_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        list(text.documents([tmp_path / name]))


def test_missing_path_empty_folder_and_too_little_text(tmp_path):
    with pytest.raises(ValueError, match="--data is .*nowhere, which does not exist; it must name"):
        list(text.documents([tmp_path / "nowhere"]))
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match="a folder that has no .txt or .jsonl file; it must hold"):
        list(text.documents([tmp_path]))
    with pytest.raises(ValueError, match="fewer than two tokens"):
        text.encode(["a"], text.ByteTokenizer())


def test_standard_library_is_python_source():
    first = next(text.standard_library())
    assert "import" in first or "def " in first


def test_batches_cover_each_epoch_once_and_pad_the_tail():
    tokens = np.arange(1, 24, dtype=np.int32)  # 6 sequences of 4, the last one short
    batches = text.Batches(tokens, batch=3, seq_len=4, seed=5)
    assert batches.count == 6
    epochs = [
        np.concatenate([batches[2 * e].input_ids, batches[2 * e + 1].input_ids]) for e in (0, 1)
    ]
    for epoch in epochs:
        assert sorted(epoch[epoch > 0]) == tokens.tolist()
    assert (epochs[0] != epochs[1]).any()
    for step in range(2):
        batch = batches[step]
        padding = batch.attention_mask == 0
        assert (batch.labels[padding] == text.IGNORED_LABEL).all()
        np.testing.assert_array_equal(batch.labels[~padding], batch.input_ids[~padding])
    assert sum((batches[s].attention_mask == 0).sum() for s in range(2)) == 1


def test_batch_depends_on_seed_and_step_only():
    tokens = np.random.default_rng(0).integers(1, 99, 1000).astype(np.int32)
    ordered = text.Batches(tokens, batch=7, seq_len=10, seed=1)
    all_batches = [ordered[i].input_ids for i in range(40)]
    fresh = text.Batches(tokens, batch=7, seq_len=10, seed=1)
    for step in (33, 2, 14):  # batch 14 spans two epochs
        np.testing.assert_array_equal(fresh[step].input_ids, all_batches[step])
    other = text.Batches(tokens, batch=7, seq_len=10, seed=2)
    assert (other[0].input_ids != all_batches[0]).any()


def test_text_shorter_than_a_batch_is_repeated():
    batches = text.Batches(np.array([1, 2, 3], np.int32), batch=4, seq_len=8, seed=0)
    assert (batches[0].input_ids[:, :3] == [1, 2, 3]).all()


def test_tokenizer_file(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<|endoftext|>": 0, "[UNK]": 1, "hello": 2, "world": 3}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = text.FileTokenizer(tmp_path / "tokenizer.json")
    assert (loaded.vocab_size, loaded.end_id) == (4, 0)
    assert text.encode(["hello world"], loaded).tolist() == [2, 3, 0]
    assert loaded.decode([2, 3]) == "hello world"


def test_bad_tokenizer_files(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        text.FileTokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        text.FileTokenizer(tmp_path / "tokenizer.json")
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no end token"):
        text.FileTokenizer(tmp_path / "tokenizer.json")
