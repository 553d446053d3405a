"""Paths on the Hugging Face Hub: a model's name, or hf:// with a model or a dataset."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prefect_rlhf.errors.errors import InvalidInput

SCHEME = "hf://"
Kind = Literal["model", "dataset"]
_WORD = r"[A-Za-z0-9][\w.-]{0,95}"
_NAME = re.compile(rf"(?P<owner>{_WORD})/{_WORD}(@(refs/(pr|convert)/)?[^/@]{{1,200}})?", re.ASCII)
_PAGE = re.compile(
    r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<datasets>datasets/)?(?P<repo>[^/?#]+/[^/?#]+)"
    r"(/(tree|blob)/(?P<revision>[^/?#]+)(/(?P<inside>[^?#]*))?)?/?([?#].*)?"
)  # a file's address (/resolve/) is no page: it can be read
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})/?$")
_PAGES = ("models", "datasets", "spaces", "buckets", "kernels", "collections", "papers", "docs", "blog", "api")
"""Names that cannot be owners, because pages of the Hub's site have them: `models/smollm2` is always a folder."""


@dataclass(frozen=True, slots=True)
class HubPath:
    """A repository on the Hub, at a revision (None: its default), and a file or folder `inside` it, empty for all of
    it.

    >>> str(HubPath("dataset", "openai/gsm8k", "v1", "main/train.parquet"))
    'hf://datasets/openai/gsm8k@v1/main/train.parquet'
    """

    kind: Kind
    repo: str
    revision: str | None = None
    inside: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{_in_url(self.revision)}"
        inside = f"/{self.inside}" if self.inside else ""
        return f"{SCHEME}{'datasets/' if self.kind == 'dataset' else ''}{self.repo}{revision}{inside}"

    @property
    def commit(self) -> str | None:
        """The commit in the path, whose files never change; None for a branch or a tag."""
        return self.revision if self.revision and _COMMIT.fullmatch(self.revision) else None

    @property
    def page(self) -> str:
        """The path of the repository's page on the site."""
        return f"{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"

    @property
    def command(self) -> str:
        """The command that downloads the repository into the Hub's cache."""
        kind = " --repo-type dataset" if self.kind == "dataset" else ""
        return f"hf download {self.repo}{kind}" + ("" if self.revision is None else f" --revision {self.revision}")

    def at(self, commit: str) -> HubPath:
        """Return the path at a commit."""
        return replace(self, revision=commit)


def hub_path(text: str, field: str) -> HubPath | None:
    """Parse a path with the scheme hf://; None for another text, and for a space or a bucket.

    Raises InvalidInput, at `field`, for a malformed path, and for the address of a page of the Hub's site.
    """
    if (page := _PAGE.fullmatch(text)) is not None:
        raise InvalidInput(field, text, f"a name, not the address of a page: {_named(page)}")
    if not text.startswith(SCHEME):
        return None
    from huggingface_hub import parse_hf_uri
    from huggingface_hub.errors import HfUriError  # only here: most runs need no Hub

    form = "hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME@REVISION/FILE"
    try:
        found = parse_hf_uri(text.rstrip("/"))
    except HfUriError as error:
        raise InvalidInput(field, text, form) from error
    if found.type not in ("model", "dataset"):
        return None
    if {".", ".."} & {*found.path_in_repo.split("/")}:
        raise InvalidInput(field, text, f"{form}, without the names . and ..")
    return HubPath("model" if found.type == "model" else "dataset", found.id, found.revision, found.path_in_repo)


def named_model(text: str, field: str) -> HubPath | None:
    """Return the model that a text names, if it has the form of a name and no such file or folder exists here.

    >>> named_model("Qwen/Qwen2.5-0.5B-Instruct@main", "actor.path")
    HubPath(kind='model', repo='Qwen/Qwen2.5-0.5B-Instruct', revision='main', inside='')
    >>> named_model("models/smollm2", "actor.path"), named_model("./out/model", "actor.path")
    (None, None)
    """
    return hub_path(f"{SCHEME}{text}", field) if is_name(text) and not Path(text).exists() else None


def is_name(text: str) -> bool:
    """Return whether a text has the form OWNER/NAME or OWNER/NAME@REVISION.

    >>> is_name("Qwen/Qwen2.5-0.5B-Instruct"), is_name("runs/ppo/actor")
    (True, False)
    """
    found = _NAME.fullmatch(text)
    return (
        found is not None and found["owner"] not in _PAGES and "--" not in text.partition("@")[0] and ".." not in text
    )


def _named(page: re.Match[str]) -> str:
    """Return the path that a page's address stands for."""
    revision = f"@{page['revision']}" if page["revision"] not in (None, "main") else ""
    inside = f"/{page['inside'].rstrip('/')}" if page["inside"] else ""
    if page["datasets"]:
        return f"{SCHEME}datasets/{page['repo']}{revision}{inside}"
    return f"{SCHEME}{page['repo']}{revision}{inside}" if inside else f"{page['repo']}{revision}"


def shown_folder(folder: str) -> str:
    """Return a folder as people know it: a folder of the Hub's cache becomes the model's name and a short commit.

    >>> shown_folder("/home/me/hub/models--acme--tiny/snapshots/7ae557604adf67be50417f59c2c2f167def9a775")
    'acme/tiny@7ae557604adf'
    """
    found = _SNAPSHOT.search(folder)
    return folder if found is None else f"{found['owner']}/{found['name']}@{found['commit'][:12]}"


def repository_of(path: str) -> str | None:
    """Return the name on the Hub of a model at a path there, or in the Hub's cache; None for any other folder.

    >>> repository_of("hf://acme/tiny@main"), repository_of("models/tiny")
    ('acme/tiny', None)
    """
    if (found := _SNAPSHOT.search(path)) is not None:
        return f"{found['owner']}/{found['name']}"
    place = hub_path(path, "path")
    return None if place is None else place.repo


def commit_of(path: str) -> str | None:
    """Return the commit of a model's copy in the Hub's cache; None for any other folder.

    >>> commit_of(f"/home/me/hub/models--acme--tiny/snapshots/{'7a' * 20}") == "7a" * 20, commit_of("models/tiny")
    (True, None)
    """
    found = _SNAPSHOT.search(path)
    return None if found is None else found["commit"]


def _in_url(revision: str) -> str:
    is_ref = revision.startswith(("refs/pr/", "refs/convert/"))  # hf:// takes only these with slashes
    return revision if is_ref else revision.replace("/", "%2F")
