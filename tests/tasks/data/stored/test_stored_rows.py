"""Rows are the same whatever holds them, and what cannot be read is refused in one line that names field and place."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefect_rlhf.errors.errors import InvalidInput
from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows
from tests.support.cases import examples
from tests.tasks.data.stored import json_lines, parquet, saved, saved_splits

ROWS = [
    {"text": "a", "number": 1, "chat": [{"role": "user", "content": "x"}], "info": {"truth": "1"}, "split": "train"},
    {"text": "b", "number": None, "chat": [], "info": None, "split": "test"},
    {"text": "c", "number": 3, "chat": None, "info": {"truth": None}, "split": "train"},
    {"text": None, "number": 4, "chat": [], "info": {"truth": "4"}, "split": "train"},
]
TABLE = pa.Table.from_pylist(ROWS)


def stores(folder):
    """The same rows in every format: path by name."""
    (folder / "parts").mkdir()
    (folder / "lines").mkdir()
    for number in (0, 2):
        pq.write_table(TABLE.slice(number, 2), folder / "parts" / f"part-{number}.parquet")
        json_lines(folder / "lines" / f"part-{number}.jsonl", *ROWS[number : number + 2])
    pq.write_table(TABLE, folder / "one.parquet")
    return {
        "file": str(folder / "one.parquet"),
        "folder": str(folder / "parts"),
        "pattern": str(folder / "parts" / "part-*.parquet"),
        "deep pattern": str(folder / "**" / "part-?.parquet"),
        "lines": json_lines(folder / "rows.jsonl", *ROWS),
        "lines named json": json_lines(folder / "rows.json", *ROWS),
        "folder of lines": str(folder / "lines"),
        "pattern of lines": str(folder / "lines" / "*.jsonl"),
        "saved": saved(folder / "saved", TABLE.slice(0, 3), TABLE.slice(3)),
    }


def test_every_format_gives_the_same_rows(tmp_path):
    """Names, kinds and values; of one split, numbered within it; a field of structs by its path."""
    for name, path in stores(tmp_path).items():
        rows = StoredRows("data", path, "split", "train")
        assert (len(rows), rows.names) == (3, ("text", "number", "chat", "info")), name
        assert [rows.column(column).kind for column in rows.names] == ["text", "number", "other", "other"], name
        assert rows.column("chat").holds_messages, name
        assert rows.read("text") == ["a", "c", None], name
        assert rows.read("number", [2, 0]) == [4, 1], name
        assert rows.read("chat", [0, 1]) == [[{"role": "user", "content": "x"}], None], name
        assert (rows.read("info.truth"), rows.column("info.truth").kind) == (["1", None, "4"], "text"), name
        assert StoredRows("data", path).read("info") == [{"truth": "1"}, None, {"truth": None}, {"truth": "4"}], name


SCALARS = st.none() | st.booleans() | st.integers(-(2**62), 2**62) | st.text(max_size=4)


@settings(max_examples=examples(30), deadline=None)
@given(st.lists(SCALARS.flatmap(lambda value: st.sampled_from([value, None])), min_size=1, max_size=6), st.data())
def test_values_of_lines_come_back_as_written(tmp_path_factory, values, data):
    """Whatever scalars a name has, of one type, and at whatever lines it is left out."""
    some = next((value for value in values if value is not None), None)
    values = [value if type(value) is type(some) else None for value in values]
    written = [
        {"n": n} | ({} if value is None and data.draw(st.booleans()) else {"v": value})
        for n, value in enumerate(values)
    ]
    rows = StoredRows("data", json_lines(tmp_path_factory.mktemp("lines") / "rows.jsonl", *written))
    if any("v" in row for row in written):
        assert rows.read("v") == values
    assert rows.read("n") == list(range(len(values)))


def test_objects_in_json_lines_keep_their_own_keys(tmp_path):
    """Nothing is filled in where lines differ within a value, nor made a date that looks like one."""
    infos = [{"a": 1}, {"b": ["x", 2]}, {"a": "2024-01-01"}]
    path = json_lines(tmp_path / "rows.jsonl", *({"info": info, "day": "2024-01-01"} for info in infos))
    rows = StoredRows("data", path)
    assert rows.read("info") == infos
    assert rows.read("day") == ["2024-01-01"] * 3


def test_read_values_may_be_changed(tmp_path):
    """A reward that changes its arguments changes no later ones."""
    rows = StoredRows("data", json_lines(tmp_path / "rows.jsonl", {"info": {"a": [1]}}))
    rows.read("info")[0]["a"].append(2)
    assert rows.read("info") == [{"a": [1]}]


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"a": 2}')
    assert StoredRows("data", str(tmp_path / "rows.jsonl")).read("a") == [1, 2]


def test_a_split_names_a_folder_in_a_saved_dataset_dictionary(tmp_path):
    """It then needs no column, and one of that name is like any other."""
    path = saved_splits(tmp_path / "both", train=pa.table({"text": ["a"]}), test=pa.table({"text": ["b", "c"]}))
    assert StoredRows("data", path, "split", "test").read("text") == ["b", "c"]
    path = saved_splits(tmp_path / "named", train=pa.table({"text": ["a"], "split": ["x"]}))
    assert StoredRows("data", path, "split", "train").read("split") == ["x"]


def test_objects_that_datasets_stores_as_json_text_are_objects(tmp_path):
    """Its feature `Json`, alone and in lists and structs."""
    text = pa.array(['{"a": 1}', None]).cast(pa.json_())
    inside = pa.StructArray.from_arrays([text], names=["j"])
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2]), text)
    rows = StoredRows("data", saved(tmp_path / "json", pa.table({"j": text, "inside": inside, "lists": lists})))
    assert rows.read("j") == [{"a": 1}, None]
    assert rows.read("inside") == [{"j": {"a": 1}}, {"j": None}]
    assert rows.read("lists") == [[{"a": 1}], [None]]


def test_a_columns_type_ignores_files_with_only_nulls(tmp_path):
    parquet(tmp_path / "0.parquet", a=pa.nulls(1))
    parquet(tmp_path / "1.parquet", a=["x"])
    assert StoredRows("data", str(tmp_path)).read("a") == [None, "x"]


def test_hidden_files_and_folders_are_left_out(tmp_path):
    """As a download of a data set leaves them beside its files."""
    parquet(tmp_path / "0.parquet", a=["x"])
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "0.metadata").write_text("")
    (tmp_path / "_SUCCESS").write_text("")
    assert StoredRows("data", str(tmp_path)).read("a") == ["x"]


def test_folders_may_name_a_column(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"split={split}").mkdir()
        parquet(tmp_path / f"split={split}" / "0.parquet", text=[split])
    assert StoredRows("data", str(tmp_path), "split", "test").read("text") == ["test"]


def test_a_file_is_read_once_and_a_column_only_if_asked_for(tmp_path):
    """However often rows are read: files may be large. Damage to a column matters to those who read it."""
    no_text = pa.array([b"caf\xe9"] * 2, pa.binary()).view(pa.string())
    table = pa.table({"a": ["x", "y"], "bad": no_text})
    places = [parquet(tmp_path / "p.parquet", a=["x", "y"], bad=no_text), saved(tmp_path / "saved", table)]
    places.append(json_lines(tmp_path / "rows.jsonl", {"a": "x"}, {"a": "y"}))
    opened = [StoredRows("data", place) for place in places]
    assert [rows.read("a", [1]) for rows in opened] == [["y"]] * 3
    for file in tmp_path.rglob("*.*"):
        file.unlink()
    assert [rows.read("a", [0]) for rows in opened] == [["x"]] * 3
    for rows in opened[:2]:
        with pytest.raises(InvalidInput, match=r"^data.path: .*expected whole (Parquet|Arrow) files"):
            rows.read("bad")


def holding(folder, files):
    """Write files into a folder, over existing files; return its path."""
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return str(folder)


def broken_save(folder, name, content):
    """Write a saved folder with one file replaced."""
    saved(folder / "s", pa.table({"a": ["x"]}))
    return holding(folder / "s", {name: content})


CHATTY = '{"a": [' * 100_000

# what is wrong: (how it is written, the column that is read, what the error says)
BAD = {
    "no such file": (lambda t: str(t / "x.parquet"), r"^d.path: .*, expected an existing file of Parquet"),
    "a pattern that nothing matches": (
        lambda t: str(t / "shard-*.jsonl"),
        r"^d.path: .*shard-.*a pattern that matches a file",
    ),
    "a pattern of two formats": (
        lambda t: holding(t, {"a.jsonl": b"{}", "b.parquet": b""}) + "/*",
        r"^d.path: .*files of the same format, unlike .*a.jsonl and .*b.parquet",
    ),

    "a folder of other files": (lambda t: holding(t, {"a.txt": b"a"}), r"^d.path: got '.*a.txt'.*a pattern such as"),
    "no object on a line": (lambda t: json_lines(t / "a.jsonl", {"a": 1}, "[1]"), r"a.jsonl line 2', .* not a list"),
    "null on a line": (lambda t: json_lines(t / "a.jsonl", "null"), r"a.jsonl line 1', .* not null"),
    "half a line": (lambda t: json_lines(t / "a.jsonl", {"a": 1}, '{"a":'), r"^d.path: .*a.jsonl line 2', .*Expecting"),
    "a list in a file of lines": (lambda t: json_lines(t / "a.jsonl", '[{"a": 1},', "{}]"), r"line 1', .*named .json"),
    "half a list": (lambda t: json_lines(t / "a.json", '[{"a": 1},'), r"^d.path: .*a.json', expected a JSON list"),
    "a list of numbers": (lambda t: json_lines(t / "a.json", "[1]"), r"a.json item 0', expected a JSON object"),
    "two lists": (lambda t: json_lines(t / "a.json", {"train": [{}], "data": [{}]}), r"a single list.* data and train"),
    "half an object": (lambda t: json_lines(t / "a.json", "{", '"data": [{"a": 1}]'), r"a.json line 1', expected"),
    "fields that commas do not end": (lambda t: holding(t, {"a.csv": b"a,b\n1\n"}) + "/a.csv", r"^d.path: .*fields"),
    "an object on two lines": (lambda t: json_lines(t / "a.jsonl", "{", '"a": 1}'), r"line 1', .* alone on its line"),
    "another encoding": (lambda t: holding(t, {"a.csv": b"a\ncaf\xe9\n"}) + "/a.csv", r"^d.path: .*in UTF-8; 'a' has"),
    "another ending": (lambda t: holding(t, {"a.txt": b"a"}) + "/a.txt", r"^d.path: .*, or a name with .jsonl"),
    "no gzip": (lambda t: holding(t, {"a.jsonl.gz": b'{"a": 1}'}) + "/a.jsonl.gz", r"^d.path: .*a file that can"),
    "brackets without end": (lambda t: json_lines(t / "a.jsonl", CHATTY), r"a.jsonl line 1', expected a JSON object"),
    "5,000 digits": (lambda t: json_lines(t / "a.jsonl", '{"a": ' + "1" * 5000 + "}"), r"line 1', .*digits"),
    "text that is no UTF-8": (lambda t: holding(t, {"a.jsonl": b'{"a": "\xe9"}'}), r"a.jsonl line 1', .*utf-8"),
    "half a character": (lambda t: json_lines(t / "a.jsonl", '{"a": "\\ud83d"}'), r"line 1', .*surrogates"),
    "two types of a name": (
        lambda t: json_lines(t / "a.jsonl", {"a": None}, {"a": 3}, {"a": "3"}),
        r"^d.a: got 'text in .*a.jsonl line 3', expected a number, as in .*a.jsonl line 2",
    ),
    "true among numbers": (lambda t: json_lines(t / "a.jsonl", {"a": 3}, {"a": True}), r"^d.a: got 'true or false in"),
    "two types in two shards": (
        lambda t: json_lines(t / "0.jsonl", {"a": {}}) and json_lines(t / "1.jsonl", {"a": "x"}) and str(t),
        r"^d.a: got 'text in .*1.jsonl line 1', expected an object, as in .*0.jsonl line 1",
    ),
    "an empty file of lines": (lambda t: json_lines(t / "a.jsonl"), r"^d.path: .*at least one row"),
    "lines without a name": (lambda t: json_lines(t / "a.jsonl", "{}"), r"^d.path: .*rows with at least one column"),
    "a saved folder without rows": (lambda t: saved(t / "s"), r"^d.path: .*at least one row"),
    "an empty file of a saved folder": (
        lambda t: broken_save(t, "data-00000-of-00001.arrow", b""),
        r"^d.path: .*data-00000-of-00001.arrow', expected a whole Arrow file",
    ),
    "a saved folder without its state": (
        lambda t: broken_save(t, "state.json", b"{"),
        r"^d.path: .*state.json', expected a file from datasets.save_to_disk",
    ),
    "a saved folder whose files have no names": (
        lambda t: broken_save(t, "state.json", b'{"_data_files": [3]}'),
        r"^d.path: .*state.json', expected the name",
    ),
    "a saved folder without one of its files": (
        lambda t: broken_save(t, "state.json", b'{"_data_files": [{"filename": "lost.arrow"}]}'),
        r"^d.path: got '.*lost.arrow', expected a whole Arrow file .*Failed to open",
    ),
    "shards of different columns": (
        lambda t: parquet(t / "0.parquet", a=["x"], b=[1]) and parquet(t / "1.parquet", a=["x"]) and str(t),
        r"^d.path: got '.*1.parquet', expected the same columns as .*0.parquet, which differ in b",
    ),
    "two columns of one name": (
        lambda t: saved(t / "s", pa.Table.from_arrays([pa.array(["x"])] * 2, names=["a", "a"])),
        r"^d.path: .*.arrow', expected columns with different names; 'a' occurs twice",
    ),
    "shards of different types": (
        lambda t: parquet(t / "0.parquet", a=["x"]) and parquet(t / "1.parquet", a=[1]) and str(t),
        r"^d.path: .*Parquet that can be read .*a has incompatible types",
    ),
    "saved shards of different types": (
        lambda t: saved(t / "s", pa.table({"a": ["x"]}), pa.table({"a": [1]})),
        r"^d.path: .*files of the same types",
    ),
    "no such column": (lambda t: json_lines(t / "a.jsonl", {"b": 1, "c": 2}), r"^d.a: .*a column of .*; it has b, c"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_unreadable_files_are_refused_in_one_line(tmp_path, case):
    write, says = BAD[case]
    with pytest.raises(InvalidInput, match=says) as refused:
        StoredRows("d", write(tmp_path)).read("a")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("at", [-30, -200, 40])
def test_a_damaged_saved_file_is_refused(tmp_path, at):
    """Cut off in the middle of its rows, or before them."""
    path = saved(tmp_path / "s", pa.table({"a": ["x" * 50] * 10}))
    file = tmp_path / "s" / "data-00000-of-00001.arrow"
    file.write_bytes(file.read_bytes()[:at])
    with pytest.raises(InvalidInput, match=r"^d.path: got '.*.arrow', expected a? ?whole Arrow files? "):
        StoredRows("d", path).read("a")


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("info.answer", r"^d.info.answer: got 'info.answer', expected a field of 'info' in .*; it has truth$"),
        ("info.truth.x", r"^d.info.truth.x: .* a field of 'info.truth' in .*; it is (string|str)$"),
        ("inform.x", r"^d.inform.x: got 'inform.x', expected a column of .*; it has text, number, chat, info"),
    ],
)
def test_a_wrong_path_is_refused_with_a_list_of_existing_files(tmp_path, path, says):
    for place in stores(tmp_path).values():
        with pytest.raises(InvalidInput, match=says):
            StoredRows("d", place).column(path)


def test_a_column_name_with_a_dot_takes_precedence_over_a_path(tmp_path):
    path = parquet(tmp_path / "p.parquet", **{"info.truth": ["name"]}, info=[{"truth": "path"}])
    assert StoredRows("d", path).read("info.truth") == ["name"]


def test_an_unknown_split_is_refused_with_a_list_of_splits(tmp_path):
    path = saved_splits(tmp_path / "both", train=pa.table({"a": ["x"]}), test=pa.table({"a": ["x"]}))
    with pytest.raises(InvalidInput, match=r"^d.split: got 'valid', expected a split of .*: train, test$"):
        StoredRows("d", path, "split", "valid").read("a")
    with pytest.raises(InvalidInput, match=r"^d.split_column: 'part' is not used: the folders of"):
        StoredRows("d", path, "part", "train").read("a")
    lines = json_lines(tmp_path / "rows.jsonl", {"a": "x", "split": "train"})
    with pytest.raises(InvalidInput, match=r"^d.split: got 'valid', expected a split of .*: train$"):
        StoredRows("d", lines, "split", "valid").read("a")
    with pytest.raises(
        InvalidInput, match=r"^d.split_column: got 'part', expected a column of .*rows; it has a, split"
    ):
        StoredRows("d", lines, "part", "train").read("a")
