"""Tokenizers of folders that have sentencepiece's tokenizer.model and no tokenizer.json.

transformers 5 misreads them without a word. It merges pieces in the order of their numbers, not of their scores, so two
spaces become another token. For a Mistral, and for a folder that names no class, it leaves out the space before the
first word, and without `add_bos_token` it leaves out the beginning of a text. Version 4 reads the pieces as
sentencepiece does, and begins a text. So do we, or we refuse the folder.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prefect_rlhf.files.foreign_file import read_json_object
from prefect_rlhf.files.model_folder import TOKENIZER_CONFIG

FILE = "tokenizer.json"
_PIECES = "tokenizer.model"
_TEXT = "The film  is good.\n\n    The code is 4711 caf\u00e9 \u2603"
_WORDS = 512  # of a vocabulary, to compare
_SPACE = "\u2581"
_BPE = 2  # the number of this kind of model in sentencepiece's files


def stated(folder: str) -> dict[str, Any]:
    """Return a folder's tokenizer_config.json; empty without such a file."""
    file = Path(folder, TOKENIZER_CONFIG)
    return read_json_object(TOKENIZER_CONFIG, file) if file.is_file() else {}


def has_pieces_alone(folder: str) -> bool:
    """Whether a folder has sentencepiece's file and no tokenizer.json."""
    return Path(folder, _PIECES).is_file() and not Path(folder, FILE).is_file()


def read_as_pieces(tokenizer: Any, folder: str) -> Any:
    """Return the tokenizer of a folder with pieces alone if it reads them rightly, else another one that does.

    Raises ValueError if no class of transformers reads the file as sentencepiece does.
    """
    right = next((candidate for candidate in _candidates(tokenizer, folder) if _agrees(candidate, folder)), None)
    if right is None:
        raise ValueError(f"transformers reads {_PIECES} otherwise than sentencepiece: make a {FILE} of it")
    if "add_bos_token" not in stated(folder) and right.bos_token is not None:
        right.add_bos_token = True
    return right


def is_misread(folder: str, tokenizer: Any) -> bool:
    """Whether transformers alone reads the pieces of a folder otherwise than `tokenizer`, which is right."""
    from transformers import AutoTokenizer

    alone = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return bool(alone(_TEXT)["input_ids"] != tokenizer(_TEXT)["input_ids"])


def _candidates(tokenizer: Any, folder: str) -> Iterator[Any]:
    """Yield a tokenizer as it is, then with merges in the order of their scores, then of the class with such models."""
    from tokenizers.models import BPE
    from transformers import LlamaTokenizer
    from transformers.convert_slow_tokenizer import SentencePieceExtractor, generate_merges

    model = SentencePieceExtractor(str(Path(folder, _PIECES))).proto
    is_bpe = isinstance(tokenizer.backend_tokenizer.model, BPE)
    if is_bpe is (model.trainer_spec.model_type == _BPE):
        yield tokenizer
    if model.trainer_spec.model_type != _BPE:
        return
    scores = [(piece.piece, piece.score) for piece in model.pieces]
    vocabulary = {piece: number for number, (piece, _) in enumerate(scores)}
    merges = generate_merges(vocabulary, scores)
    for kind in (None, LlamaTokenizer):
        candidate = kind.from_pretrained(folder, local_files_only=True) if kind else tokenizer
        own = candidate.backend_tokenizer
        own.model = BPE(vocabulary, merges, fuse_unk=True, byte_fallback=True, unk_token=own.model.unk_token)
        yield candidate


def _agrees(tokenizer: Any, folder: str) -> bool:
    from sentencepiece import SentencePieceProcessor  # only here: few folders need it

    pieces = SentencePieceProcessor(model_file=str(Path(folder, _PIECES)))
    has_space = stated(folder).get("add_prefix_space") is not False
    for text in _texts(pieces):
        begun = text if has_space else f"\n{text}"
        expected = pieces.encode(begun)
        if not has_space and pieces.id_to_piece(expected[0]) == _SPACE:
            expected = expected[1:]
        if tokenizer(begun, add_special_tokens=False)["input_ids"] != expected:
            return False
    return True


def _texts(pieces: Any) -> Iterator[str]:
    """Yield texts to compare: a usual one, and one of the vocabulary's own words."""
    yield _TEXT
    names = map(pieces.id_to_piece, range(pieces.get_piece_size()))
    words = [name[1:] for name in names if name.startswith(_SPACE) and name[1:].isalpha()]
    yield " ".join(words[:: max(1, len(words) // _WORDS)])
