"""Text to token ids and back, for one model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from distserve.core.model_config import ModelConfig
from distserve.serving.detokenizer import ByteDetokenizer, Detokenizer, NoDetokenizer, OffsetDetokenizer
from distserve.serving.schema import ServingError

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


class TextCodec(Protocol):
    """What the orchestrator needs of a tokenizer."""

    vocab_size: int  # of the model; ids must be below it
    end_ids: frozenset[int]  # the model's end tokens
    max_token_bytes: int  # of text, in the longest token

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens that the model's tokenizer adds."""

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        """A fresh one, for the output that follows ``prompt``."""

    def decode_token(self, token: int) -> str:
        """One token by itself, for log-probabilities."""


class TokenizerCodec:
    """A Hugging Face tokenizer with its fast (Rust) part.

    Args:
        tokenizer: `tokenizers.Tokenizer`.
        vocab_size: of the model, which may be padded beyond the tokenizer's.
        end_ids: the model's end tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, info in added.items() if info.special)
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        self._byte_of_char = _byte_of_char() if decoder.get("type") == "ByteLevel" else None
        self._bytes_of_id: dict[int, bytes] = {}
        longest = max((len(token.encode()) for token in tokenizer.get_vocab()), default=1)
        self.max_token_bytes = max(1, longest)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=True).ids
        return ids

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        if self._byte_of_char is not None:
            return ByteDetokenizer(self._token_bytes)
        return OffsetDetokenizer(self._decode, prompt)

    def decode_token(self, token: int) -> str:
        text: str = self._tokenizer.decode([token], skip_special_tokens=False)
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text

    def _token_bytes(self, token: int) -> bytes:
        known = self._bytes_of_id.get(token)
        if known is None:
            known = self._bytes_of_id[token] = self._make_bytes(token)
        return known

    def _make_bytes(self, token: int) -> bytes:
        text = self._tokenizer.id_to_token(token)
        if text is None or token in self._special:
            return b""
        assert self._byte_of_char is not None
        try:
            return bytes(self._byte_of_char[char] for char in text)
        except KeyError:  # an added token, written as it is
            return bytes(text.encode())


class IdsOnlyCodec:
    """For a model folder without a tokenizer: requests bring ``input_ids`` and read ``output_ids``."""

    def __init__(self, vocab_size: int, end_ids: Sequence[int]) -> None:
        self.vocab_size = vocab_size
        self.end_ids = frozenset(end_ids)
        self.max_token_bytes = 1

    def encode(self, text: str) -> list[int]:
        raise ServingError("INVALID_ARGUMENT", "text_input: this model has no tokenizer; send input_ids")

    def detokenizer(self, prompt: Sequence[int]) -> Detokenizer:
        return NoDetokenizer()

    def decode_token(self, token: int) -> str:
        return ""


def load_codec(folder: Path) -> TextCodec:
    """The codec of a model folder; without tokenizer files, one for ids only."""
    model = ModelConfig.load(folder)
    if not any((folder / name).exists() for name in _TOKENIZER_FILES):
        return IdsOnlyCodec(model.vocab_size, model.eos_token_ids)
    # transformers, not tokenizer.json alone: tokenizer_config.json has a say in the special tokens
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, local_files_only=True)
    return TokenizerCodec(tokenizer.backend_tokenizer, model.vocab_size, model.eos_token_ids)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's mapping of bytes to printable characters, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in chars]
    chars.update({byte: chr(256 + i) for i, byte in enumerate(others)})
    return {char: byte for byte, char in chars.items()}
