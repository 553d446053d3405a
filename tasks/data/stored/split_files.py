"""Finds the split in a file's name, as Hugging Face's `datasets` does: data/test-00000-of-00001.parquet is `test`.

A folder of train and test files is never read as one.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from prefect_rlhf.errors.errors import InvalidInput

SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(?:-[0-9a-f]+)?")
WORDS: Mapping[str, str] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""The split for each word in a name."""


def split_of(file: PurePath) -> str | None:
    """Return the split in a file's path below its folder; None if there is none.

    >>> [split_of(PurePath(file)) for file in ("data/train_sft-00000-of-00002.parquet", "main/test/0000.parquet")]
    ['train_sft', 'test']
    >>> [split_of(PurePath(file)) for file in ("gsm8k_dev.jsonl.gz", "latest.jsonl", "split=test/0.parquet")]
    ['validation', None, None]
    """
    stem, *_ = file.name.split(".")
    if any("=" in part for part in file.parts):  # its folders are columns
        return None
    if shard := SHARD.fullmatch(stem):
        return shard[1]
    if stem.isdigit() and file.parent.name:  # as the Hub names the Parquet files of its own
        return file.parent.name
    parts = (stem, *reversed(file.parent.parts))
    return next((WORDS[word] for part in parts for word in re.split(r"[-_ .\d]+", part.lower()) if word in WORDS), None)


def shards(file: PurePath) -> str:
    """Return a pattern for the names of all shards of a file's split; for other files, of all files of its kind.

    >>> shards(PurePath("main/train-00000-of-00002.parquet")), shards(PurePath("rows.parquet"))
    ('train-*.parquet', '*.parquet')
    """
    stem, *suffixes = file.name.split(".")
    shard = SHARD.fullmatch(stem)
    return ".".join((f"{shard[1]}-*" if shard else "*", *suffixes))


def _dataset_of(file: PurePath) -> PurePath | None:
    """Return the folder that holds all splits of a shard's dataset; None for a file that is no shard."""
    stem, *_ = file.name.split(".")
    return file.parent if SHARD.fullmatch(stem) else file.parent.parent if stem.isdigit() else None


def of_split(field: str, files: Sequence[PurePath], folder: PurePath, split: str) -> tuple[str, ...] | None:
    """Return the files of a split, if the names of a folder's `files` say several splits; else None.

    Raises InvalidInput for a split that no name says, for a file that says none beside files that do, and for several
    datasets.
    """
    splits = {file: split_of(file.relative_to(folder)) for file in files}
    names = sorted({name for name in splits.values() if name is not None})
    all_files = f"for all files, a pattern such as {folder}/**/*{''.join(files[0].suffixes[-1:])}"
    first: dict[PurePath, PurePath] = {}
    for file, name in splits.items():
        if name is None or (dataset := _dataset_of(file)) is None:
            continue
        shard = file.relative_to(dataset)
        if (other := first.setdefault(shard, dataset)) != dataset:  # as main/ and socratic/ of GSM8K
            expected = f"one of its datasets, as {other} or {dataset}, which both have {shard}; {all_files}"
            raise InvalidInput(f"{field}.path", str(folder), expected)
    if len(names) < 2:
        return None
    without = next((file for file, name in splits.items() if name is None), None)
    if without is not None:
        expected = f"the name of a split in each file's name, as {' and '.join(names)} in others; {all_files}"
        raise InvalidInput(f"{field}.path", str(without), expected)
    if split not in names:
        raise InvalidInput(f"{field}.split", split, f"a split of {folder}: {', '.join(names)}; {all_files}")
    return tuple(str(file) for file, name in splits.items() if name == split)
