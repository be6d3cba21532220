"""Every parser gives what was written, and answers garbage with a DataError: no crash, no endless loop, no flood."""

import gzip
import re
import struct
import tracemalloc
import unicodedata
import zipfile
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from lab.data import making

from deepmemory.lab.data import EOS, DataError, matlab, vocabulary
from deepmemory.lab.data.digits import as_digits, parse_idx
from deepmemory.lab.data.music import parse_music
from deepmemory.lab.data.pairs import END, START, as_sentences, parse_pairs, split_words
from deepmemory.lab.data.text import as_corpus, tokens
from deepmemory.lab.data.unpacking import gunzip_if_packed, zip_member

LIMIT = 2**20
PARSERS = {
    "mat": (parse_music, making.mat()),
    "mat, not compressed": (parse_music, making.mat(pack=bytes)),
    "idx": (parse_idx, making.idx(np.arange(24).reshape(2, 3, 4))),
    "text": (lambda raw: as_corpus(tokens(raw), [EOS], []), making.TEXTS["train"]),
    "pairs": (lambda raw: parse_pairs(raw, "spanish"), making.PAIRS),
    "gzip": (lambda raw: gunzip_if_packed(raw, LIMIT), gzip.compress(b"some text " * 9, mtime=0)),
    "zip": (lambda raw: zip_member(raw, "spa.txt", LIMIT), making.zipped({"a/spa.txt": making.PAIRS, "b": b"b"})),
}


@st.composite
def damaged(draw, whole):
    """Garbage, or a good file cut short, with bytes changed, left out or put in."""
    if draw(st.booleans()):
        return draw(st.binary(max_size=64)) if draw(st.booleans()) else whole[:128] + draw(st.binary(max_size=64))
    data = bytearray(whole)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(data) - 1))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
        if not data:
            return b""
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


@pytest.mark.parametrize("kind", PARSERS)
def test_garbage_gets_a_data_error_and_little_memory(kind):
    parse, whole = PARSERS[kind]
    parse(whole)

    @settings(max_examples=100)
    @given(damaged(whole))
    def fuzz(raw):
        with suppress(DataError):
            parse(raw)

    tracemalloc.start()
    try:
        fuzz()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 64e6  # hypothesis included


@pytest.mark.parametrize("kind", ["mat", "mat, not compressed", "idx", "gzip", "zip"])
def test_a_file_cut_anywhere_is_refused(kind):
    parse, whole = PARSERS[kind]
    for size in range(len(whole)):
        if kind == "mat, not compressed" and size > len(whole) - 8:
            continue  # padding at the very end may be left out
        if kind == "gzip" and size < 2:
            continue  # no longer recognised; the hash tells
        with pytest.raises(DataError):
            parse(whole[:size])


@pytest.mark.parametrize("pack", [making.packed, bytes], ids=["compressed", "plain"])
@pytest.mark.parametrize("stored", making.CODES)
def test_music(pack, stored):
    music = parse_music(making.mat(pack=pack, stored=stored))
    for split, variable in (("train", "traindata"), ("valid", "validdata"), ("test", "testdata")):
        assert len(music[split]) == len(making.MUSIC[variable])
        for roll, written in zip(music[split], making.MUSIC[variable], strict=True):
            assert roll.dtype == torch.uint8
            assert roll.is_contiguous()
            assert (roll.numpy() == written).all()


def test_a_name_may_stand_in_its_tag():
    (variable,) = matlab.read_cells(making.HEADER + making.cells("abc", [np.eye(3)], short=True)).items()
    assert variable[0] == "abc"
    assert (variable[1][0] == np.eye(3)).all()


def other(**changed):
    return making.mat(making.MUSIC | changed)


def head(bits, *sizes):
    flags = making.element(6, struct.pack("<II", bits, 0))
    return making.element(
        14, flags + making.element(5, struct.pack(f"<{len(sizes)}i", *sizes)) + making.element(1, b"x")
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "not a MATLAB version 5 file"),
        (making.HEADER[:126] + b"MI", "another version or byte order"),
        (making.HEADER, "no traindata and validdata and testdata"),
        (making.mat({"traindata": making.MUSIC["traindata"]}), "no validdata and testdata in the file, which has trai"),
        (other(testdata=[]), "no testdata"),
        (other(testdata=making.rolls(0, (3,), 87)), r"should be \(frames, 88\), got \(3, 87\)"),
        (other(testdata=making.rolls(0, (0,))), r"got \(0, 88\)"),
        (other(testdata=[np.full((1, 88), 2)]), "zeros and ones only"),
        (making.mat(stored="<f8")[:-1], "ends too early|declares"),
        (making.mat() + making.packed(making.cells("testdata", [])), "'testdata' occurs twice"),
        (making.mat() + making.element(9, bytes(8)), "should be a matrix, found an element of type 9"),
        (making.mat() + making.numbers(np.eye(2)), "should be a cell array, is of class 6"),
        (making.HEADER + head(1, 2**31 - 1, 2**31 - 1), "more than it can hold"),
        (making.HEADER + head(1, -1, 1), "a matrix cannot have -1 x 1 elements"),
        (making.HEADER + head(1, 1, 1, 1), "two sizes, got 8 and 3"),
        (making.HEADER + head(1 + 0x0800, 1, 1), "complex"),
        (making.HEADER + struct.pack("<II", 15, 2**32 - 1), "declares 4294967295 bytes, 0 are left"),
        (making.HEADER + struct.pack("<HHI", 14, 5, 0), "a tag cannot hold 5 bytes"),
    ],
)
def test_music_of_another_kind(raw, message):
    with pytest.raises(DataError, match=message):
        parse_music(raw)


def test_what_inflates_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(matlab, "LARGEST", 1000)
    with pytest.raises(DataError, match="more than the expected 1000 bytes"):
        parse_music(making.HEADER + making.packed(bytes(10**7)))
    with pytest.raises(DataError, match="more than the expected 1000 bytes"):
        gunzip_if_packed(gzip.compress(bytes(10**7)), 1000)
    with pytest.raises(DataError, match="has 10000000 bytes, at most 1000"):
        zip_member(making.zipped({"a": bytes(10**7)}), "a", 1000)


def test_idx():
    images = np.arange(24).reshape(2, 3, 4)
    parsed = parse_idx(making.idx(images))
    assert parsed.dtype == torch.uint8
    assert (parsed.numpy() == images).all()


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "starts with nothing"),
        (b"\0\0\x0d\1\0\0\0\1\0\0\0\0", "starts with 00 00 0d 01"),
        (b"\0\0\x08\4" + bytes(16), "1 to 3 sizes, this one says 4"),
        (b"\0\0\x08\3" + bytes(8), "has 12 bytes"),
        (b"\0\0\x08\1\0\0\0\0", r"\(0,\) do not fit the 0 bytes"),
        (b"\0\0\x08\3" + b"\xff" * 12 + b"x", r"\(4294967295, 4294967295, 4294967295\) do not fit the 1 bytes"),
        (making.idx([1, 2]) + b"x", r"\(2,\) do not fit the 3 bytes"),
    ],
)
def test_idx_of_another_kind(raw, message):
    with pytest.raises(DataError, match=message):
        parse_idx(raw)


def test_digits_that_do_not_fit():
    images = torch.zeros(2, 28, 28, dtype=torch.uint8)
    with pytest.raises(DataError, match=r"got \(2, 28, 28\) and \(3,\)"):
        as_digits(images, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(DataError, match="0 to 9, found 10"):
        as_digits(images, torch.tensor([1, 10], dtype=torch.uint8))


def test_text():
    train, valid, test = (tokens(making.TEXTS[part]) for part in ("train", "valid", "test"))
    assert train == ["the", "cat", "saw", "the", "dog", EOS, "the", "dog", "ran", EOS]
    corpus = as_corpus(train, valid, test)
    assert corpus.words == ("the", EOS, "dog", "cat", "ran", "saw")  # counts 3, 2, 2, then one each
    assert corpus.train.dtype == torch.int64
    assert [corpus.words[i] for i in corpus.train] == train
    assert corpus.valid.tolist() == [0, 3, 4, 1]
    assert corpus.test.tolist() == [2, 1]


def test_a_last_line_needs_no_end():
    assert tokens(b"a\nb") == tokens(b"a\nb\n") == tokens(b"a\r\nb\r\n") == ["a", EOS, "b", EOS]
    assert tokens("a\u2028b\x0bc\n".encode()) == ["a", "b", "c", EOS]  # only a line feed ends a line


def test_text_of_another_kind():
    with pytest.raises(DataError, match=r"not a text in UTF-8 .* at byte 1"):
        tokens(b"a\xff")
    with pytest.raises(DataError, match="the validation text has 'cow', a word that the training text lacks"):
        as_corpus(["a", EOS], ["cow", EOS], [EOS])


@given(st.lists(st.sampled_from("abcde"), max_size=30), st.randoms(use_true_random=False))
def test_numbers_of_words_do_not_depend_on_the_order_they_are_met_in(words, random):
    mixed = random.sample(words, len(words))
    assert vocabulary.in_order(Counter(words)) == vocabulary.in_order(Counter(mixed))


def literally(sentence):
    """The rule, word by word."""
    sentence = unicodedata.normalize("NFD", sentence.lower())
    sentence = "".join(c for c in sentence if unicodedata.category(c) != "Mn")
    sentence = re.sub(r"([?.!,¿])", r" \1 ", sentence)
    return re.sub(r"[^a-zA-Z?.!,¿]+", " ", sentence).split()


@settings(max_examples=200)
@given(st.text())
@example("¡Ay, İstanbul! ¿Qué? Å \u212a \u212b ǅ ﬁ naïve co\u0301mo don't 100% über-Straße 한국")
def test_spelling_follows_the_rule(sentence):
    assert split_words(sentence) == literally(sentence)


def test_pairs():
    pairs = parse_pairs(making.PAIRS, "spanish")
    assert pairs.language == "spanish"
    assert pairs.sha256 == making.digest(making.PAIRS)
    assert pairs.english.words == ("<start>", "<end>", ".", "go", "?", "who")
    assert pairs.foreign.words == ("<start>", "<end>", "!", ".", "?", "quien", "ve", "vete", "¿")
    assert pairs.english.ids.tolist() == [[START, 3, 2, END], [START, 3, 2, END], [START, 5, 4, END]]
    assert pairs.foreign.ids.tolist() == [[0, 6, 3, 1, 1], [0, 7, 2, 1, 1], [0, 8, 5, 4, 1]]
    assert pairs.foreign.lengths.tolist() == [4, 4, 5]


def test_a_limit_takes_the_first_lines_and_their_words():
    pairs = parse_pairs(making.PAIRS, "spanish", 1)
    assert pairs.foreign.words == ("<start>", "<end>", ".", "ve")
    assert len(pairs.english.ids) == 1
    assert parse_pairs(making.PAIRS, "spanish", 3).english.words == parse_pairs(making.PAIRS, "spanish").english.words
    with pytest.raises(DataError, match="4 pairs were requested, but the spanish file has 3"):
        parse_pairs(making.PAIRS, "spanish", 4)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        parse_pairs(making.PAIRS, "spanish", 0)


def test_pairs_with_rare_words_are_left_out():
    raw = b"one one.\tuno uno.\none two.\tuno dos.\ntwo one.\tdos uno.\nthree.\tuno.\none.\tcinco.\n"
    pairs = parse_pairs(raw, "spanish", min_count=2)
    assert pairs.foreign.words == ("<start>", "<end>", "uno", ".", "dos")
    assert pairs.english.words == ("<start>", "<end>", "one", ".", "two")
    assert len(pairs.english.ids) == len(pairs.foreign.ids) == 3
    with pytest.raises(ValueError, match="every spanish pair has a word that occurs fewer than 9 times"):
        parse_pairs(raw, "spanish", min_count=9)


def test_a_header_is_no_pair_and_line_ends_of_windows_are_no_words():
    raw = b"1\t2\r\n" + making.PAIRS.replace(b"\n", b"\r\n")
    for limit in (None, 2):
        headed, plain = parse_pairs(raw, "german", limit, header=1), parse_pairs(making.PAIRS, "german", limit)
        assert headed.foreign.words == plain.foreign.words
        assert headed.english.ids.tolist() == plain.english.ids.tolist()
    with pytest.raises(DataError, match="1 pairs were requested, but the german file has 0"):
        parse_pairs(b"1\t2\r\n", "german", header=1)
    with pytest.raises(DataError, match="line 3 of the german pairs has no tab"):
        parse_pairs(b"1\t2\na\tb\nc\n", "german", header=1)


def test_pairs_of_another_kind():
    with pytest.raises(DataError, match="line 2 of the german pairs has no tab"):
        parse_pairs(b"a\tb\nc\n", "german")
    with pytest.raises(DataError, match="not a text in UTF-8"):
        parse_pairs(b"a\tb\xff", "german")
    with pytest.raises(DataError, match="not the kind of text expected"):
        as_sentences([["a"] * 10_000, *([[]] * 10_000)])  # padded, these few words would be 800 MB


@pytest.mark.parametrize(
    "name", ["../spa.txt", "/spa.txt", "a/../../spa.txt", "..\\spa.txt", "C:\\spa.txt", "\\spa.txt"]
)
def test_an_archive_with_a_name_that_leads_outside_is_refused(name):
    with pytest.raises(DataError, match="leads out of its folder"):
        zip_member(making.zipped({"spa.txt": b"good", name: b"bad"}), "spa.txt", LIMIT)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"<html>not found</html>", "not a whole zip archive"),
        (making.zipped({"deu.txt": b""}), "should hold one spa.txt, got 0"),
        (making.zipped({"a/spa.txt": b"", "b/spa.txt": b""}), "should hold one spa.txt, got 2"),
    ],
)
def test_archives_of_another_kind(raw, message):
    with pytest.raises(DataError, match=message):
        zip_member(raw, "spa.txt", LIMIT)


def test_a_member_that_is_locked_or_packed_in_another_way_is_refused():
    whole = bytearray(making.zipped({"spa.txt": making.PAIRS}))
    central = whole.index(b"PK\x01\x02")
    locked, strange = bytearray(whole), bytearray(whole)
    locked[6], locked[central + 8] = 1, 1
    strange[8], strange[central + 10] = zipfile.ZIP_LZMA, zipfile.ZIP_LZMA
    with pytest.raises(DataError, match="encrypted"):
        zip_member(bytes(locked), "spa.txt", LIMIT)
    with pytest.raises(DataError, match="compressed with an unsupported method"):
        zip_member(bytes(strange), "spa.txt", LIMIT)


def test_gzip_and_plain():
    assert gunzip_if_packed(b"plain", 5) == gunzip_if_packed(gzip.compress(b"plain"), 5) == b"plain"
    with pytest.raises(DataError, match="bytes after the compressed data"):
        gunzip_if_packed(gzip.compress(b"plain") + b"x", 5)
    with pytest.raises(DataError, match="damaged compressed data"):
        gunzip_if_packed(gzip.compress(b"plain")[:-8] + bytes(8), 5)
