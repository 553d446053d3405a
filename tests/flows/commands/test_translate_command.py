"""`prefect-rlhf translate`: whose file it is, what it prints and writes, and a line for every file that it cannot read."""

import subprocess
import sys

import pytest
import yaml

from prefect_rlhf.flows.commands.cli import main
from tests.flows.commands.test_cli import heavy_after
from tests.support.cases import first

GRPO = "num_generations: 4\nper_device_train_batch_size: 8\n"
LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
BAD = {
    "nothing": ("empty.yaml", b"", "FILE: got '{file}', expected YAML or JSON of the options of TRL, verl or OpenRLHF"),
    "a list": ("list.yaml", b"- a\n- b\n", "expected YAML or JSON of the options"),
    "a word": ("word.yaml", b"hello", "expected YAML or JSON of the options"),
    "bytes": ("bytes.yaml", bytes(range(128, 256)), "expected a text file in UTF-8"),
    "control characters": ("control.yaml", b"a: \x01\x02", "expected text without control characters"),
    "10 MB": ("large.yaml", b"a: b\n" * (2 << 20), "expected a file of at most 1024 KiB"),
    "several documents": ("two.yaml", b"a: 1\n---\nb: 2\n", "expected YAML or JSON (line 2: but found another document)"),
    "a key twice": ("twice.yaml", b"beta: 1\nbeta: 2\n", "key 'beta' occurs twice"),
    "a billion laughs": ("laughs.yaml", LAUGHS.encode(), "more than 20000 values"),
    "a value that contains itself": ("circle.yaml", b"a: &a [*a]\n", "a value that contains itself"),
    "a tag of Python": ("tag.yaml", b"a: !!python/object:os.system {}\n", "plain values have no tag"),
    "a file of Python": ("train.py", b"config = GRPOConfig()\n", "a Config in Python writes them: config.to_json_string()"),
    "options of nobody": ("own.yaml", b"prompts: {path: x}\nactor: {path: y}\n", "it has prompts, actor"),
    "a configuration of accelerate": (
        "accelerate.yaml", b"compute_environment: LOCAL\ndistributed_type: MULTI_GPU\nmachine_rank: 0\ndebug: false\n"
        b"num_processes: 8\nmixed_precision: bf16\nuse_cpu: false\nsame_network: true\nmain_training_function: main\n",
        "it has compute_environment, distributed_type, machine_rank, debug and 5 more",
    ),
    "options of several trainers": ("few.yaml", b"learning_rate: 1.0e-5\nmax_steps: 5\n", "--algorithm: missing; expected grpo or dpo or sft or reward"),
    "options of several libraries": ("shared.yaml", b"temperature: 1.0\nseed: 5\n", "--from: missing; expected trl or openrlhf"),
    "verl's other trainer": ("sft.yaml", b"model: {partial_pretrain: m}\ndata: {train_files: t, micro_batch_size: 4}\ntrainer: {total_epochs: 1}\n", "expected a trainer of verl that is translated"),
    "a script without options": ("run.sh", b"echo hello\n", "or a shell script that passes them"),
    "a script of broken quotes": ("quotes.sh", b"python train.py --name 'a\n", "it has name"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_cannot_be_translated_costs_a_line(case, tmp_path, capsys):
    name, content, says = BAD[case]
    file = tmp_path / name
    file.write_bytes(content)
    assert main(["translate", str(file), "--out", str(tmp_path / "out.yaml")]) == 2
    said = capsys.readouterr()
    assert says.format(file=file) in said.err and said.err.count("\n") == 1 and said.out == ""
    assert not (tmp_path / "out.yaml").exists()


@pytest.mark.parametrize(
    ("text", "flags", "says"),
    [
        ("trainer: {n_gpus_per_node: 4, nnodes: 1}", [], " --devices 4 --dry-run"),
        ("trainer: {n_gpus_per_node: 4, nnodes: 2}", [], "out.yaml --dry-run"),
        ("trainer: {n_gpus_per_node: 4}", ["--devices", "2"], " --devices 2 --dry-run"),
        ("trainer: {n_gpus_per_node: 1}", [], "out.yaml --dry-run"),
    ],
)
def test_the_next_command_has_the_devices_of_the_run_there(text, flags, says, tmp_path, capsys):
    """A run here has one device unless the flag says otherwise; several machines take more than a flag."""
    (tmp_path / "verl.yaml").write_text(f"algorithm: {{adv_estimator: gae}}\n{text}\n")
    command = ["translate", str(tmp_path / "verl.yaml"), "--from", "verl", "--out", str(tmp_path / "out.yaml")]
    assert main([*command, *flags]) == 0
    assert capsys.readouterr().out.rstrip().endswith(says)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["none.yaml"], "FILE: got 'none.yaml', expected a readable file"),
        (["."], "FILE: got '.', expected a readable file (it is a directory)"),
        (["/dev/zero"], "expected a readable file (it is a pipe or a device"),
        (["grpo.yaml", "--from", "trlx"], "--from: got 'trlx', expected one of trl, verl, openrlhf"),
        (
            ["grpo.yaml", "--algorithm", "ppo"],
            "--algorithm: got 'ppo', expected one of grpo, rloo, dpo, kto, sft, reward",
        ),
        (
            ["grpo.yaml", "--out", "grpo.yaml"],
            "--out: got 'grpo.yaml', expected a file that does not exist: no file is",
        ),
        (
            ["grpo.yaml", "--out", "/proc/out.yaml"],
            "/proc/out.yaml cannot be written: ",
        ),
        (["grpo.yaml", "--devices", "0"], "got '0', expected a whole number from 1 to"),
        ([], "FILE: missing value"),
        (["grpo.yaml", "other.yaml"], "too many arguments: other.yaml"),
    ],
)
def test_a_wrong_flag_costs_a_line(flags, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").write_text(GRPO)
    assert main(["translate", *flags]) == 2
    line = capsys.readouterr().err
    assert says in line and line.count("\n") == 1


def translate(tmp_path, text, *flags, name="grpo.yaml"):
    """The parameters that are written."""
    (tmp_path / name).write_text(text)
    out = tmp_path / f"out{len(list(tmp_path.iterdir()))}.yaml"
    assert main(["translate", str(tmp_path / name), "--out", str(out), *flags]) == 0
    return yaml.safe_load(out.read_text())


def test_the_library_and_the_trainer_are_found_and_printed(tmp_path, capsys):
    translate(tmp_path, GRPO)
    assert capsys.readouterr().out.startswith("grpo.yaml: TRL's GRPO, 2 options: 2 translated\n")
    translate(tmp_path, "algorithm: {adv_estimator: rloo}\ntrainer: {foo: 1}\n")
    said = capsys.readouterr().out
    assert said.startswith("grpo.yaml: verl's GRPO, 2 options: 1 translated, 1 unknown\n")
    assert "\nunknown option of verl 0.9\n  trainer.foo 1" in said
    translate(tmp_path, "python -m openrlhf.cli.train_rm --adam.lr 1e-6", name="rm.sh")
    assert capsys.readouterr().out.startswith("rm.sh: OpenRLHF's reward model, 1 options")


def test_flags_decide_where_several_fit(tmp_path):
    assert (
        translate(tmp_path, "learning_rate: 1.0e-5\n", "--algorithm", "dpo", "--from", "trl")["algo"]["optimizer"]["lr"]
        == 1e-5
    )
    assert translate(tmp_path, "beta: 0.1\nmax_length: 5\ndesirable_weight: 2.0\n")["algo"]["good_weight"] == 2.0


def test_devices_are_assumed_and_said_or_stated(tmp_path, capsys):
    assert translate(tmp_path, GRPO)["algo"]["batch_size"] == 2
    assert "assumed: 1 device; state --devices for another number" in capsys.readouterr().out
    assert translate(tmp_path, GRPO, "--devices", "8")["algo"]["batch_size"] == 16
    assert "assumed: 1 device" not in capsys.readouterr().out


def test_conflicting_settings_are_reported(tmp_path, capsys):
    translate(tmp_path, "algorithm: {adv_estimator: grpo}\n")
    assert "to mend: algo.samples_per_prompt: got 1, expected at least 2 for a comparison" in capsys.readouterr().out


def test_untranslated_options_become_comments(tmp_path):
    (tmp_path / "theirs.yaml").write_text(GRPO + "use_dora: true\nfoo: 1\n")
    assert main(["translate", str(tmp_path / "theirs.yaml"), "--out", str(tmp_path / "ours.yaml")]) == 0
    lines = (tmp_path / "ours.yaml").read_text().splitlines()
    assert any(line.startswith("# not translated: use_dora true: only plain adapters are trained") for line in lines)
    assert "# not translated: foo 1: no option of TRL 1.16" in lines


NONSENSE = [
    None,
    True,
    -1,
    1e308,
    "",
    "x" * 500,
    "${a",
    "${output_dir}",
    [],
    {},
    [[1]],
    {"a": {"b": [1]}},
    "two\nlines",
    "# no comment: 'x",
]


@pytest.mark.parametrize("value", first(2, reversed(NONSENSE)), ids=repr)
def test_nonsense_at_every_option_neither_fails_nor_breaks_the_file(value, tmp_path):
    from prefect_rlhf.files.yaml_text import parse_yaml
    from prefect_rlhf.flows.forms.dictionary.answer import every_dialect
    from prefect_rlhf.flows.forms.dictionary.job import Job
    from prefect_rlhf.flows.forms.dictionary.translation import translation
    from prefect_rlhf.flows.forms.dictionary.written import parameter_file, table

    for dialect in every_dialect():
        found = translation(Job.of(dialect, dict.fromkeys(dialect.defaults, value)))
        assert all(line.isprintable() for line in table(found, "f").splitlines())
        assert parse_yaml("", "", parameter_file(found, "f")) == found.parameters


@pytest.mark.slow
def test_it_needs_neither_prefect_nor_an_engine(tmp_path):
    (tmp_path / "grpo.yaml").write_text(GRPO)
    assert heavy_after(tmp_path, "translate", "grpo.yaml", "--out", "out.yaml") == (set(), "")
    assert heavy_after(tmp_path, "translate", "--help") == (set(), "")


def test_it_works_without_engines(tmp_path):
    (tmp_path / "grpo.yaml").write_text(GRPO)
    command = [
        sys.executable,
        "-m",
        "tests.flows.without_engines",
        "translate",
        str(tmp_path / "grpo.yaml"),
        "--out",
        str(tmp_path / "o.yaml"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
