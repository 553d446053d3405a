"""Small files of every format that datasets are read from, and messages of chats."""

import json

import pyarrow as pa
import pyarrow.parquet as pq


def parquet(path, **columns):
    """Write a Parquet file; return its path."""
    pq.write_table(pa.table(columns), path)
    return str(path)


def json_lines(path, *rows):
    """Write rows, objects or lines as they are; return the file's path."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def saved(folder, *tables):
    """Write a folder as `datasets.Dataset.save_to_disk` does, a file for each table; return its path."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-{len(tables):05}.arrow" for number in range(len(tables))]
    for name, table in zip(names, tables, strict=True):
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"citation": "", "description": "", "features": {}}))
    return str(folder)


def saved_splits(folder, **tables):
    """Write a folder as `datasets.DatasetDict.save_to_disk` does; return its path."""
    for split, table in tables.items():
        saved(folder / split, table)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(tables)}))
    return str(folder)


def ask(text):
    return {"role": "user", "content": text}


def say(text):
    return {"role": "assistant", "content": text}
