"""Every option of TRL, verl and OpenRLHF has an answer, and the list of options is that of the packages."""

import json
import subprocess
import sys
from itertools import islice

import pytest

from prefect_rlhf.flows.forms.dictionary.answer import every_dialect
from prefect_rlhf.flows.forms.dictionary.dialect import VERSIONS
from prefect_rlhf.flows.forms.dictionary.job import Job
from prefect_rlhf.flows.forms.dictionary.translation import MOST_OF_A_DUMP, translation
from tests import known_options

PACKAGES = {"trl": "1.16.0", "verl": "0.9.0"}
DIALECTS = pytest.mark.parametrize("dialect", every_dialect(), ids=lambda one: f"{one.library} {one.trainer}")


def batched(values, size):
    """As `itertools.batched` of Python 3.12."""
    rest = iter(values)
    return iter(lambda: tuple(islice(rest, size)), ())


def another(value):
    """A value that differs from a default."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    return [*value, "another"] if isinstance(value, list) else "another"


@DIALECTS
def test_each_option_at_another_value_is_translated_or_refused_or_without_effect_for_a_reason(dialect):
    options = {option: another(value) for option, value in dialect.defaults.items()}
    outcomes = translation(Job.of(dialect, options)).outcomes
    assert [each.option for each in outcomes] == list(options)
    assert [each.option for each in outcomes if each.what == "unknown" or not (each.made or each.why)] == []


@DIALECTS
def test_an_option_that_is_stated_at_its_default_is_known(dialect):
    """As many at once as are no dump of all defaults, which would be left out."""
    for stated in batched(dialect.defaults.items(), MOST_OF_A_DUMP):
        outcomes = translation(Job.of(dialect, dict(stated))).outcomes
        assert [each.option for each in outcomes] == [option for option, _ in stated]
        assert [each.option for each in outcomes if each.what == "unknown" or not (each.made or each.why)] == []


@DIALECTS
def test_no_table_has_an_option_twice_under_reasons_of_its_own(dialect):
    """An option has a parameter, or a reason; a reason counts where the rule has no value."""
    assert dialect.refused.keys() & dialect.without_effect.keys() == set()


def test_the_dictionary_has_hundreds_of_options():
    numbers = {(one.library, one.trainer): len(one.defaults) for one in every_dialect()}
    assert numbers["trl", "grpo"] > 200 and numbers["verl", "ppo"] > 700 and numbers["openrlhf", "ppo"] > 150


@pytest.mark.all
def test_the_list_of_options_matches_the_packages(tmp_path):
    """`python -m tests.known_options` writes it anew."""
    packages = [f"{name}=={version}" for name, version in PACKAGES.items()]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), *packages]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("TRL and verl cannot be installed here")
    listed = json.loads(known_options.FILE.read_text())
    assert {library: listed[library] for library in PACKAGES} == known_options.read(tmp_path)
    assert all(version.startswith(VERSIONS[library]) for library, version in PACKAGES.items())
