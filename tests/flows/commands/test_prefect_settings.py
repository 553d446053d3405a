"""A wrong setting of Prefect is a line with the variable or the file, and no other output."""

import os
import subprocess
import sys

import pytest

from tests.support.cases import first

pytestmark = pytest.mark.quick

COMMAND = [sys.executable, "-m", "prefect_rlhf", "run", "grpo", "-p", "steps=3"]
CASES = (
    ("PREFECT_API_REQUEST_TIMEOUT", "soon", "PREFECT_API_REQUEST_TIMEOUT: got 'soon', expected a number"),
    (
        "profiles.toml",
        'active = "a"\n[profiles.a]\nPREFECT_CLIENT_MAX_RETRIES = "-1"\n',
        "PREFECT_CLIENT_MAX_RETRIES: got '-1', expected at least 0; it is stated in",
    ),
    ("prefect.toml", "[api]\nrequest_timeout = 'x'\n", "expected a number; it is stated in prefect.toml"),
    ("PREFECT_LOGGING_LEVEL", "loud", "PREFECT_LOGGING_LEVEL: got 'LOUD', expected 'DEBUG', 'INFO'"),
    ("PREFECT_CLIENT_CUSTOM_HEADERS", "abc", "PREFECT_CLIENT_CUSTOM_HEADERS: got 'abc', expected JSON, such as {}"),
    ("profiles.toml", 'active = "mine', "profiles.toml', expected TOML (Unterminated string"),
    ("prefect.toml", "[api\n", "got 'prefect.toml', expected TOML (Expected ']'"),
)


@pytest.mark.parametrize(("place", "value", "said"), first(3, CASES))
def test_a_wrong_setting_of_prefect_is_one_line_that_names_it(tmp_path, place, value, said):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment["PREFECT_HOME"] = str(tmp_path)
    if place.endswith(".toml"):
        (tmp_path / place).write_text(value)
    else:
        environment[place] = value
    done = subprocess.run(COMMAND, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, done.stdout, len(lines)) == (2, "", 1), done.stderr[-2000:]
    assert lines[0].startswith("prefect-rlhf: ") and said in lines[0]
