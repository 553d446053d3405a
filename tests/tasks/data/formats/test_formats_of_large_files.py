"""The format is found from the schema and a few rows; it is part of a run's identity, and ranks find it again."""

import pickle

import pytest

from prefect_rlhf.blocks.chats import Chats
from prefect_rlhf.blocks.dataset import Preferences, Prompts, read_as
from prefect_rlhf.flows.training.inputs import open_source
from prefect_rlhf.tasks.data.formats.format import OWN_TITLES
from prefect_rlhf.tasks.data.formats.table import FORMATS
from prefect_rlhf.tasks.data.stored.columns import ArrowColumn
from tests.tasks.data.formats.test_found_formats import GLAIVE, TURNS
from tests.tasks.data.stored import parquet

pytestmark = pytest.mark.quick


@pytest.fixture
def loaded(monkeypatch):
    """The columns whose values were read from a file."""
    read, values = [], ArrowColumn.__dict__["values"].func

    def spied(column):
        read.append(str(column.type))
        return values(column)

    spy = type(ArrowColumn.__dict__["values"])(spied)
    spy.__set_name__(ArrowColumn, "values")
    monkeypatch.setattr(ArrowColumn, "values", spy)
    return read


def test_a_schema_that_fits_one_format_is_enough(tmp_path, qwen, loaded):
    path = parquet(tmp_path / "c.parquet", conversations=[TURNS] * 3, system=["a"] * 3, score=[1.0] * 3)
    source = open_source("chats", Chats(path=path, split_column=None), qwen)
    assert source.rows.found.form == "sharegpt"
    assert loaded == []
    source.check(max_tokens=4096)
    assert "double" not in loaded


def test_a_row_in_another_format_is_found_when_it_is_read(tmp_path, qwen):
    """Rows that a run does not read are not looked at."""
    path = parquet(tmp_path / "c.parquet", conversations=[TURNS] * 3 + [[]])
    source = open_source("chats", Chats(path=path, split_column=None), qwen)
    source.check(max_tokens=4096, items=range(3))
    with pytest.raises(ValueError, match="row 3 conversations"):
        source.check(max_tokens=4096, items=range(4))


def test_a_runs_identity_has_the_format_and_its_columns(tmp_path, qwen):
    path = parquet(tmp_path / "c.parquet", **{name: [value] for name, value in GLAIVE.items()})
    value = Chats(path=path, split_column=None)
    found = open_source("chats", value, qwen).rows.found
    assert (
        value.to_spec("chats", 1, (), found.identity).read_as
        == f"{read_as(value)} form=sharegpt of conversations,tools"
    )


@pytest.mark.parametrize("kind", [Chats, Prompts, Preferences])
def test_our_own_columns_do_not_change_the_identity(tmp_path, qwen, kind):
    columns = {"messages": [TURNS]} if kind is Chats else {"prompt": ["a"], "chosen": ["b"], "rejected": ["c"]}
    value = kind(path=parquet(tmp_path / "c.parquet", **columns), split_column=None)
    assert open_source("data", value, qwen).rows.found.identity == ""


def test_a_rank_reads_the_rows_that_the_controller_checked(tmp_path, qwen):
    source = open_source(
        "chats", Chats(path=parquet(tmp_path / "c.parquet", conversations=[TURNS]), split_column=None), qwen
    )
    source.check(max_tokens=4096)
    there = pickle.loads(pickle.dumps(source))
    assert "rows" not in there.__dict__
    assert there.read([0]) == source.read([0])


def test_every_format_has_one_name_that_a_setting_accepts():
    forms = [format.form for format in FORMATS]
    assert len(set(forms)) == len(forms)
    kinds = {"prompts": Prompts, "chats": Chats, "pairs": Preferences}
    for kind, parameter in kinds.items():
        known = {format.form for format in FORMATS if kind in format.kinds} | (
            set(OWN_TITLES) if kind == "chats" else set()
        )
        for form in known - {"prompt", "pairs"}:
            assert parameter(path="x", form=form).form == form
