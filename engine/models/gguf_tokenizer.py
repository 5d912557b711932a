"""The tokenizer that a GGUF file's metadata describes, as tokenizer files that the reference library reads.

Such a file names how text is cut up before its merges apply (`tokenizer.ggml.pre`) but doesn't say what the
name means: only names whose meaning is known here are taken. A wrong guess gives right ids for most texts,
and so would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from headrace.engine.models.gguf_sentencepiece import (
    TokenType,
    has_space_prefix,
    respelled,
    sentencepiece_bpe,
)
from headrace.engine.models.json_file import JsonFields


@dataclass(frozen=True, slots=True)
class _PreTokenizer:
    """What one name of `tokenizer.ggml.pre` stands for.

    Args:
        make: builds what cuts the text up.
        ignore_merges: a piece that is a whole token is taken as it is.
        adds_bos: what a file that doesn't say means.
        normalizer: what is done to a text before.
    """

    make: Callable[[], pre_tokenizers.PreTokenizer]
    normalizer: Callable[[], normalizers.Normalizer] | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _llama3() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}{1,3}")


def _gpt4o() -> pre_tokenizers.PreTokenizer:
    """As `_split`, with words cut where small letters are followed by capital ones."""
    capital, small = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before, behind = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    pattern = (
        rf"{before}{capital}*{small}+{behind}|{before}{capital}+{small}*{behind}|\p{{N}}{{1,3}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return _cut_by(pattern)


def _qwen2() -> pre_tokenizers.PreTokenizer:
    return _split(r"\p{N}")


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    """The way to cut that GPT-4 brought, in which models differ by how many digits stay together."""
    pattern = (
        rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return _cut_by(pattern)


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_PRE_TOKENIZERS: Mapping[str, _PreTokenizer] = {
    "dbrx": _PreTokenizer(_llama3),
    "gpt-2": _PreTokenizer(_gpt2),
    "gpt-4o": _PreTokenizer(_gpt4o),
    "llama-bpe": _PreTokenizer(_llama3, ignore_merges=True, adds_bos=True),
    "qwen2": _PreTokenizer(_qwen2, normalizer=normalizers.NFC),
    "smollm": _PreTokenizer(_digits_then_gpt2),
}


_NEVER_TAKING_SPACES = frozenset({"<unk>", "<s>", "<|endoftext|>"})


def write_gguf_tokenizer(metadata: JsonFields, folder: Path) -> None:
    """Write tokenizer.json, its settings and the chat template.

    Args:
        metadata: of the GGUF file.
        folder: where to.

    Raises:
        ModelLoadError: the metadata is incomplete, or its tokenizer's ids might come out differently.
    """
    # transformers imports torch: only where a model is really wanted.
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415

    tokens = metadata.texts("tokenizer.ggml.tokens")
    backend = _build(metadata, tokens)
    special = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        full_key = f"tokenizer.ggml.{key}_token_id"
        if metadata.raw(full_key) is not None:
            special[f"{name}_token"] = _token_at(metadata, tokens, full_key)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    if template := metadata.text("tokenizer.chat_template", ""):
        fast.chat_template = template
    fast.save_pretrained(folder)


def _build(metadata: JsonFields, tokens: tuple[str, ...]) -> Tokenizer:
    kind = metadata.text("tokenizer.ggml.model")
    match kind:
        case "gpt2":
            return _byte_level(metadata, tokens)
        case "llama":
            return _sentencepiece(metadata, tokens)
        case _:
            raise metadata.error(
                f"the tokenizer model {kind!r} is not supported; supported: gpt2 (byte-level BPE), "
                "llama (SentencePiece BPE). Use the model's safetensors folder"
            )


def _byte_level(metadata: JsonFields, tokens: tuple[str, ...]) -> Tokenizer:
    name = metadata.text("tokenizer.ggml.pre", "default")
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(sorted(_PRE_TOKENIZERS))
        raise metadata.error(
            f"the pre-tokenizer {name!r} is not known, and a guess would give wrong ids; known: {known}. "
            "Use the model's safetensors folder"
        )
    if metadata.boolean("tokenizer.ggml.add_space_prefix", False):
        raise metadata.error("tokenizer.ggml.add_space_prefix is not supported for byte-level BPE")
    pre_tokenizer = _PRE_TOKENIZERS[name]
    vocabulary, merges = _vocabulary(metadata, tokens), _merges(metadata)
    try:
        bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenizer.ignore_merges)
    except Exception as error:
        # The compiled library raises the base class itself.
        raise metadata.error(f"tokens and merges don't make a tokenizer: {error}") from error
    tokenizer = Tokenizer(bpe)
    if pre_tokenizer.normalizer is not None:
        tokenizer.normalizer = pre_tokenizer.normalizer()
    tokenizer.pre_tokenizer = pre_tokenizer.make()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, _types(metadata, tokens), is_normalized=False)
    around = _around_text(metadata, tokens, adds_bos=pre_tokenizer.adds_bos)
    tokenizer.post_processor = around or processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentencepiece(metadata: JsonFields, tokens: tuple[str, ...]) -> Tokenizer:
    types = _types(metadata, tokens)
    if len(types) != len(tokens):
        raise metadata.error("tokenizer.ggml.token_type is missing")
    has_prefix = has_space_prefix(metadata)
    if not has_prefix:
        tokens = respelled(tokens, types)
    unknown = _token_at(metadata, tokens, "tokenizer.ggml.unknown_token_id")
    tokenizer = sentencepiece_bpe(metadata, _vocabulary(metadata, tokens), types, unknown)
    # Without a prefix, whole tokens are looked for where spaces are already written as the vocabulary writes
    # them; with it, before one is put there.
    _add_tokens(
        tokenizer,
        tokens,
        types,
        is_normalized=not has_prefix,
        takes_spaces=metadata.text("general.architecture", "") == "phi3",
    )
    around = _around_text(metadata, tokens, adds_bos=True)
    if around is not None:
        tokenizer.post_processor = around
    return tokenizer


def _vocabulary(metadata: JsonFields, tokens: tuple[str, ...]) -> dict[str, int]:
    if not tokens:
        raise metadata.error("tokenizer.ggml.tokens is missing or empty")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise metadata.error(f"tokenizer.ggml.tokens holds {twice!r} twice")
    return vocabulary


def _merges(metadata: JsonFields) -> list[tuple[str, str]]:
    merges = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or " " in right:
            raise metadata.error(f"tokenizer.ggml.merges holds {merge!r}, which is no pair")
        merges.append((left, right))
    return merges


def _types(metadata: JsonFields, tokens: Sequence[str]) -> tuple[int, ...]:
    """Kind of each token; empty where the file doesn't say."""
    types = metadata.integers("tokenizer.ggml.token_type")
    if types and len(types) != len(tokens):
        raise metadata.error(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    return types


def _add_tokens(
    tokenizer: Tokenizer,
    tokens: Sequence[str],
    types: Sequence[int],
    *,
    is_normalized: bool,
    takes_spaces: bool = False,
) -> None:
    """Make the tokens that llama.cpp finds whole in a text be found whole, before the text is cut up.

    Args:
        types: of the tokens, or empty.
        is_normalized: whether those that are no control tokens are looked for in the normalised text.
        takes_spaces: whether they swallow the white space behind them. That is so in Phi-3's vocabulary, and
            the file doesn't say it.
    """
    typed = list(zip(tokens, types, strict=False))
    control = [token for token, kind in typed if kind == TokenType.CONTROL]
    user_defined = [token for token, kind in typed if kind == TokenType.USER_DEFINED]

    def added(token: str, *, is_special: bool) -> AddedToken:
        rstrip = takes_spaces and token not in _NEVER_TAKING_SPACES
        return AddedToken(
            token, normalized=is_normalized and not is_special, special=is_special, rstrip=rstrip
        )

    tokenizer.add_special_tokens([added(token, is_special=True) for token in control])
    tokenizer.add_tokens([added(token, is_special=False) for token in user_defined])


def _around_text(
    metadata: JsonFields, tokens: tuple[str, ...], *, adds_bos: bool
) -> processors.PostProcessor | None:
    """What puts special tokens around a text; None where there are none.

    Args:
        adds_bos: what a file that doesn't say means.
    """
    first = metadata.boolean("tokenizer.ggml.add_bos_token", adds_bos)
    last = metadata.boolean("tokenizer.ggml.add_eos_token", False)
    if not first and not last:
        return None
    special = {}
    parts = ["$A"]
    if first:
        bos = _token_at(metadata, tokens, "tokenizer.ggml.bos_token_id")
        special[bos] = metadata.integer("tokenizer.ggml.bos_token_id", at_least=0)
        parts.insert(0, bos)
    if last:
        eos = _token_at(metadata, tokens, "tokenizer.ggml.eos_token_id")
        special[eos] = metadata.integer("tokenizer.ggml.eos_token_id", at_least=0)
        parts.append(eos)
    return processors.TemplateProcessing(single=parts, special_tokens=list(special.items()))


def _token_at(metadata: JsonFields, tokens: tuple[str, ...], key: str) -> str:
    token_id = metadata.integer(key, at_least=0)
    if token_id >= len(tokens):
        raise metadata.error(f"{key} is {token_id}: there are only {len(tokens)} tokens")
    return tokens[token_id]
