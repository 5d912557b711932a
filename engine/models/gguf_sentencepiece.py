"""SentencePiece's BPE as a GGUF file describes it, made into a tokenizer of the `tokenizers` library.

SentencePiece joins the neighbours whose joint piece has the highest score; `tokenizers` joins those whose
merge stands first in a list. A list of every way to make every piece, the highest score first, gives the same
pieces. What can't be said so, or what the file leaves open, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise

from tokenizers import Tokenizer, decoders, models, normalizers

from headrace.engine.models.json_file import JsonFields

SPACE = "\u2581"
"""What SentencePiece writes a space with."""


class TokenType(IntEnum):
    """llama.cpp's kinds of vocabulary entries."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def respelled(tokens: Sequence[str], types: Sequence[int]) -> tuple[str, ...]:
    """Tokens as the vocabulary writes them: files spell those that are found whole with real spaces."""
    return tuple(
        token.replace(" ", SPACE) if kind == TokenType.USER_DEFINED else token
        for token, kind in zip(tokens, types, strict=True)
    )


def has_space_prefix(metadata: JsonFields) -> bool:
    """Whether a space is put before a text, and before what stands behind a token that is found whole.

    The first is SentencePiece's own way. The second is llama.cpp's, and that of the tokenizer files that
    Llama 2 and Mistral were published with: each turn of a conversation begins like a text.
    """
    return metadata.boolean("tokenizer.ggml.add_space_prefix", True)


def sentencepiece_bpe(
    metadata: JsonFields, vocabulary: Mapping[str, int], types: Sequence[int], unknown: str
) -> Tokenizer:
    """Build a tokenizer without its added tokens and without what it puts around a text.

    Args:
        metadata: of the GGUF file.
        vocabulary: id of each token, as `respelled` writes them where no space is put before a text.
        types: a `TokenType` for each id.
        unknown: the token for what nothing else stands for.

    Raises:
        ModelLoadError: the ids might come out differently from SentencePiece's.
    """
    if metadata.boolean("tokenizer.ggml.remove_extra_whitespaces", False):
        raise metadata.error("tokenizer.ggml.remove_extra_whitespaces is not supported for this tokenizer")
    tokens = list(vocabulary)
    _require_bytes(metadata, tokens, types)
    pieces = [token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL]
    _require_order(metadata, pieces, vocabulary)
    known = {token for token, kind in zip(tokens, types, strict=True) if kind in _JOINED}
    if missing := {character for piece in pieces for character in piece} - known:
        raise metadata.error(
            f"{min(missing)!r} is part of tokens and no token itself, which is not supported"
        )
    bpe = models.BPE(
        vocab=dict(vocabulary),
        merges=list(_merges(pieces, known)),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(bpe)
    spaces, pieces_to_text = (
        normalizers.Replace(" ", SPACE),
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()],
    )
    if has_space_prefix(metadata):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces])
        tokenizer.decoder = decoders.Sequence([*pieces_to_text, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spaces
        tokenizer.decoder = decoders.Sequence(pieces_to_text)
    return tokenizer


_JOINED = (TokenType.NORMAL, TokenType.USER_DEFINED)


def _merges(pieces: Sequence[str], known: set[str]) -> Iterator[tuple[str, str]]:
    """Every way to make each piece, the piece of the highest score first, in the reference's order."""
    for piece in pieces:
        for length in range(len(piece) - 1, 0, -1):
            left, right = piece[:length], piece[length:]
            if left in known and right in known:
                yield left, right


def _require_bytes(metadata: JsonFields, tokens: Sequence[str], types: Sequence[int]) -> None:
    found = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.BYTE}
    wanted = {f"<0x{byte:02X}>" for byte in range(256)}
    if found != wanted:
        raise metadata.error(
            f"tokenizer.ggml.tokens has {len(found & wanted)} of the 256 byte tokens: text that the "
            "vocabulary doesn't spell would be lost, which is not supported"
        )


def _require_order(metadata: JsonFields, pieces: Sequence[str], vocabulary: Mapping[str, int]) -> None:
    """Scores have to fall from piece to piece: the reference goes by places, SentencePiece by scores."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    if len(scores) != len(vocabulary):
        raise metadata.error(f"tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary)} tokens")
    ordered = [scores[vocabulary[piece]] for piece in pieces]
    if any(second >= first for first, second in pairwise(ordered)):
        raise metadata.error(
            "tokenizer.ggml.scores does not fall from token to token: which merge goes first is not certain"
        )
