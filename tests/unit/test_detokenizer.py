"""Incremental text: any split of any ids gives the text that the tokenizer gives for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from distserve.serving.output_text import OutputText
from distserve.serving.params import Parameters
from distserve.serving.stop_strings import StopStrings
from distserve.serving.text_codec import TokenizerCodec

TEXTS = [
    "Hello world, hello there.",
    " leading  spaces\n\ttabs",
    "你好，世界。今天天气很好",
    "emoji 😀👩‍👩‍👧 and ñandú",
    "x" * 30,
]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_tokens([AddedToken("<think now>", special=False)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """In the manner of Llama 2: pieces with ▁ for a space, single bytes for the rest."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "▁Hello",
        "▁world",
        "H",
        "e",
        "l",
        "o",
        "世",
    ]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def codec_of(make: Callable[[], Tokenizer]) -> TokenizerCodec:
    tokenizer = make()
    return TokenizerCodec(tokenizer, tokenizer.get_vocab_size() + 10, [0])


BYTES, FALLBACK = codec_of(byte_level), codec_of(byte_fallback)
BYTES_TOKENIZER = byte_level()


def streamed(codec: TokenizerCodec, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = codec.detokenizer(prompt or [])
    return [*(detokenizer.push([token]) for token in ids), detokenizer.flush()]


@settings(max_examples=500)
@given(st.lists(st.integers(0, BYTES.vocab_size - 1), max_size=40))
def test_byte_level_equals_the_tokenizer_for_any_ids(ids: list[int]) -> None:
    expected = BYTES_TOKENIZER.decode(ids, skip_special_tokens=True)
    assert "".join(streamed(BYTES, ids)) == expected
    detokenizer = BYTES.detokenizer([])
    assert detokenizer.push(ids) + detokenizer.flush() == expected


@given(st.text(max_size=60))
def test_byte_level_round_trip_of_any_text(text: str) -> None:
    assert "".join(streamed(BYTES, BYTES.encode(text))) == text.replace("<|endoftext|>", "")


@given(st.text(st.sampled_from("Hello 世界😀é"), min_size=1, max_size=30))
def test_byte_fallback_round_trip(text: str) -> None:
    ids = FALLBACK.encode(text)
    assert "".join(streamed(FALLBACK, ids, prompt=FALLBACK.encode("Hello"))) == " " + text


def test_nothing_is_shown_before_a_character_is_whole() -> None:
    for codec in (BYTES, FALLBACK):
        for piece in streamed(codec, codec.encode("a😀b你")):
            assert "�" not in piece


def test_leading_space_is_kept_behind_a_prompt() -> None:
    prompt, output = FALLBACK.encode("Hello"), FALLBACK.encode("world")
    assert "".join(streamed(FALLBACK, output, prompt)) == " world"
    assert "".join(streamed(BYTES, BYTES.encode(" world"))) == " world"


def test_endless_invalid_bytes_do_not_pile_up() -> None:
    token = FALLBACK._tokenizer.token_to_id("<0x80>")
    detokenizer = FALLBACK.detokenizer([])
    shown = [detokenizer.push([token]) for _ in range(500)]
    assert sum(map(len, shown)) > 300
    assert len(detokenizer._ids) < 200  # type: ignore[attr-defined]


# stop strings


@given(st.data())
def test_stop_strings_cut_where_a_search_in_the_whole_text_would(data: st.DataObject) -> None:
    text = data.draw(st.text("ab", max_size=30))
    stops = tuple(data.draw(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3, unique=True)))
    finder, out, stopped = StopStrings(stops), "", False
    consumed = 0
    while consumed < len(text) and not stopped:
        size = data.draw(st.integers(1, 5))
        piece, stopped = finder.push(text[consumed : consumed + size])
        consumed += size
        out += piece
        assert text.startswith(out)
    if not stopped:
        out += finder.flush()
    seen = text[:consumed]
    found = [at for at in (seen.find(stop) for stop in stops) if at >= 0]
    assert stopped == bool(found)
    if not stopped:
        assert out == text
    else:
        assert out == seen[: min(found)]


def test_only_what_may_become_a_stop_string_is_held() -> None:
    finder = StopStrings(("STOP", "\n\n"))
    assert finder.push("go S") == ("go ", False)
    assert finder.push("TO") == ("", False)
    assert finder.push("RE\n") == ("STORE", False)
    assert finder.push("x") == ("\nx", False)
    assert finder.push("abcSTOPdef") == ("abc", True)


def test_stop_string_inside_one_token() -> None:
    ids = BYTES.encode("Hello world")
    text = OutputText(BYTES, Parameters(stop=("lo w",)), [])
    pieces, stopped = "", False
    for token in ids:
        piece, stopped = text.push(token)
        pieces += piece
        if stopped:
            break
    assert (pieces, stopped) == ("Hel", True)


@pytest.mark.parametrize(("ignore_eos", "expected"), [(False, "a"), (True, "a")])
def test_end_tokens_have_no_text(ignore_eos: bool, expected: str) -> None:
    text = OutputText(BYTES, Parameters(ignore_eos=ignore_eos), [])
    out = text.push(BYTES.encode("a")[0])[0] + text.push(0)[0] + text.flush()
    assert out == expected


def test_a_stop_token_has_no_text() -> None:
    token = BYTES.encode("H")[0]
    text = OutputText(BYTES, Parameters(stop_token_ids=(token,)), [])
    assert text.push(token)[0] + text.flush() == ""


def test_added_tokens_and_padding_of_the_vocabulary() -> None:
    think: Any = BYTES_TOKENIZER.token_to_id("<think now>")
    assert "".join(streamed(BYTES, [think, BYTES.vocab_size - 1])) == "<think now>"
