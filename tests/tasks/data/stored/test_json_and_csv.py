"""Lists of rows in JSON, text with commas or tabs, and compressed lines are read as JSON lines are."""

import gzip
import json

import pyarrow as pa
import pytest

from prefect_rlhf.tasks.data.stored.stored_rows import StoredRows

pytestmark = pytest.mark.quick

ROWS = [{"question": "How many?\nSay it.", "answer": 3}, {"question": 'He said "two", once', "answer": 2}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
CSV = 'question,answer\n"How many?\nSay it.",3\n"He said ""two"", once",2\n'


def zstd(path, text):
    with pa.output_stream(str(path), compression="zstd") as out:
        out.write(text.encode())


FILES = {
    "list.json": lambda path: path.write_text(json.dumps(ROWS)),
    "indented.json": lambda path: path.write_text("\n" + json.dumps(ROWS, indent=2)),
    "marked.json": lambda path: path.write_text("\ufeff" + json.dumps(ROWS), encoding="utf-8"),
    "lines.json": lambda path: path.write_text(LINES),
    "under_data.json": lambda path: path.write_text(json.dumps({"version": "1.1", "data": ROWS}, indent=1)),
    "under_rows.json": lambda path: path.write_text(json.dumps({"rows": ROWS})),
    "lines.jsonl.gz": lambda path: path.write_bytes(gzip.compress(LINES.encode())),
    "list.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(ROWS).encode())),
    "lines.jsonl.zst": lambda path: zstd(path, LINES),
    "rows.csv": lambda path: path.write_text(CSV),
    "rows.csv.gz": lambda path: path.write_bytes(gzip.compress(CSV.encode())),
    "rows.tsv": lambda path: path.write_text(CSV.replace(",3", "\t3").replace(",2", "\t2").replace("n,a", "n\ta")),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_same_rows_in_every_form(tmp_path, name):
    FILES[name](tmp_path / name)
    rows = StoredRows("d", str(tmp_path / name))
    assert rows.names == ("question", "answer")
    assert rows.read("question") == [row["question"] for row in ROWS]
    assert rows.read("answer") == [3, 2]
    assert rows.column("answer").kind == "number"


def test_the_key_of_a_list_is_logged(tmp_path):
    FILES["under_data.json"](tmp_path / "a.json")
    assert StoredRows("d", str(tmp_path / "a.json")).remark == "; the rows are the list 'data' of the file"
    FILES["list.json"](tmp_path / "b.json")
    assert StoredRows("d", str(tmp_path / "b.json")).remark == ""


@pytest.mark.parametrize("indent", [None, 1])
def test_an_object_that_is_a_conversation_is_a_row(tmp_path, indent):
    """It has a list of objects too."""
    row = {"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "add"}]}
    (tmp_path / "a.json").write_text(json.dumps(row, indent=indent))
    assert StoredRows("d", str(tmp_path / "a.json")).read("messages") == [row["messages"]]


def test_a_folder_with_lists_or_csv_files_is_one_dataset(tmp_path):
    for form, write in (("csv", FILES["rows.csv"]), ("json", FILES["list.json"])):
        folder = tmp_path / form
        folder.mkdir()
        write(folder / f"0.{form}")
        write(folder / f"1.{form}")
        assert StoredRows("d", str(folder)).read("answer") == [3, 2, 3, 2]


def test_text_in_a_csv_file_stays_text(tmp_path):
    """An empty field is an empty text, and a date is no point in time."""
    (tmp_path / "a.csv").write_text("prompt,input,label\nOn 2020-01-01 what?,,true\n2020-01-01,x,false\n")
    rows = StoredRows("d", str(tmp_path / "a.csv"))
    assert rows.read("prompt") == ["On 2020-01-01 what?", "2020-01-01"]
    assert (rows.read("input"), rows.read("label")) == (["", "x"], [True, False])
    (tmp_path / "b.csv").write_text("prompt\n2020-01-01\n2021-01-01\n")
    assert StoredRows("d", str(tmp_path / "b.csv")).read("prompt") == ["2020-01-01", "2021-01-01"]
