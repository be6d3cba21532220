"""Local copies: found where they may lie, packed or not, and never used if they are not what they should be."""

import gzip
import sys

import pytest
from lab.data import making
from lab.data.making import digest, place

from deepmemory.lab.data import (
    DataError,
    MissingData,
    files,
    load_digits,
    load_music,
    load_pairs,
    load_text,
    registry,
)

CACHE_FOLDER = files.cache_folder  # the fixtures put another in its place


def test_loaders_read_a_data_folder(tiny):
    music = load_music("jsb-chorales", tiny)
    assert [len(roll) for roll in music["train"]] == [3, 1, 5]
    assert load_text(tiny).words[0] == "the"
    digits = load_digits(tiny)
    assert digits["train"].images.shape == (5, 28, 28)
    assert digits["train"].labels.tolist() == [3, 1, 4, 1, 5]
    assert len(digits["test"].images) == 2
    for name in ("spanish", "german", "german-2018", "portuguese"):
        assert load_pairs(name, None, tiny).foreign.lengths.tolist() == [4, 4, 5]
    assert load_pairs("german-2018", None, tiny).language == "german"


def test_the_variable_names_the_folder_and_an_argument_comes_first(tiny, monkeypatch, tmp_path):
    monkeypatch.setenv("DEEPMEMORY_DATA", str(tiny))
    assert len(load_music()["test"]) == 2
    (tmp_path / "empty").mkdir()
    with pytest.raises(MissingData, match=r"empty, .*cache\. Run: dmu data fetch nottingham"):
        load_music("nottingham", tmp_path / "empty")
    with pytest.raises(DataError, match="no data folder nowhere"):
        load_music("nottingham", "nowhere")


def test_the_cache_is_looked_in_last(tiny, cache):
    (tiny / "ptb").rename(cache.parent / "ptb")
    cache.mkdir()
    (cache.parent / "ptb").rename(cache / "ptb")
    assert len(load_text(tiny).words) == len(load_text().words) == 6


def test_without_pooch_there_is_no_cache_and_copies_are_read_all_the_same(monkeypatch, tiny):
    monkeypatch.setitem(sys.modules, "pooch", None)
    monkeypatch.setattr(files, "cache_folder", CACHE_FOLDER)
    assert files.cache_folder() is None
    assert len(load_text(tiny).words) == 6
    with pytest.raises(MissingData, match=r"no folder .*pooch is not installed"):
        load_text()


def test_packed_or_not(tiny):
    """gzip made by anyone, plain files, a plain file that kept its packed name."""
    for part in ("train", "valid"):
        path = tiny / f"ptb/ptb.{part}.txt"
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
        path.unlink()
    images = tiny / "mnist/train-images-idx3-ubyte.gz"
    images.with_suffix("").write_bytes(gzip.decompress(images.read_bytes()))
    images.unlink()
    labels = tiny / "mnist/train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.decompress(labels.read_bytes()))
    assert len(load_text(tiny).words) == 6
    assert load_digits(tiny)["train"].labels.tolist() == [3, 1, 4, 1, 5]


def test_archives_with_and_without_a_folder(tiny):
    for members in ({"spa.txt": making.PAIRS}, {"any/spa.txt": making.PAIRS, "other": b"x"}):
        place(tiny, {"translation/spa-eng.zip": making.zipped(members)})
        assert len(load_pairs("spanish", None, tiny).english.ids) == 3


def wrong_copies():
    gz = gzip.compress(making.idx(making.LABELS["train"]), mtime=0)
    other = making.idx([1, 2, 3, 4, 5])
    labels, pairs = "mnist/train-labels-idx1-ubyte.gz", "translation/spa-eng.zip"
    members = making.zipped({"spa.txt": making.PAIRS.replace(b"Go", b"No")})
    return {
        "cut": (labels, gz[:-3], digest(gz[:-3]), digest(gz)),
        "other contents": (labels, other, digest(other), digest(gzip.decompress(gz))),
        "too much": (labels, bytes(2**21), digest(bytes(2**21)), digest(gz)),
        "other member": (pairs, members, digest(making.PAIRS.replace(b"Go", b"No")), digest(making.PAIRS)),
        "no archive": (pairs, b"<html>", digest(b"<html>"), None),
        "text": ("ptb/ptb.test.txt", b"cat\n", digest(b"cat\n"), digest(making.TEXTS["test"])),
    }


@pytest.mark.parametrize("case", wrong_copies())
def test_a_wrong_copy_is_named_with_both_hashes_and_not_used(tiny, cache, case):
    path, data, got, expected = wrong_copies()[case]
    _, contents = making.tiny_datasets()
    place(cache, contents)  # a good copy elsewhere does not hide the bad one
    place(tiny, {path: data})
    (file,) = (file for entry in registry.DATASETS.values() for file in entry.files if file.path == path)
    with pytest.raises(DataError) as error:
        files.read(file, tiny)
    assert str(tiny / path) in str(error.value)
    assert f"sha256 {got}, expected {expected or file.sha256}" in str(error.value)
    assert f"dmu data fetch {file.dataset}" in str(error.value)


def test_a_recorded_hash_counts_where_the_registry_has_none(tiny):
    archive = tiny / "translation/por-eng.zip"
    record = files.record_path(archive)
    record.write_text(f"{digest(archive.read_bytes())}  por-eng.zip\n")
    assert len(load_pairs("portuguese", None, tiny).english.ids) == 3
    record.write_text(f"{'0' * 64}  por-eng.zip\n")
    with pytest.raises(DataError, match=r"not the file that was recorded.*expected 0000"):
        load_pairs("portuguese", None, tiny)
    record.write_text("?")
    with pytest.raises(DataError, match="holds no sha256"):
        load_pairs("portuguese", None, tiny)


def test_names_that_do_not_exist():
    with pytest.raises(ValueError, match="unknown music 'ptb'; choose from nottingham, jsb-chorales"):
        load_music("ptb")
    with pytest.raises(ValueError, match="unknown language 'dutch'; choose from spanish, german, german-2018"):
        load_pairs("dutch")
    with pytest.raises(ValueError, match="unknown dataset 'x'; choose from nottingham"):
        registry.dataset("x")


def test_the_registry_is_whole():
    for name, entry in registry.DATASETS.items():
        assert entry.name == name
        assert entry.licence
        for file in entry.files:
            assert file.dataset == name
            assert file.addresses
            assert all(address.startswith("http") for address in file.addresses)
            assert (file.sha256 is None) == (file.size is None) == (name == "portuguese")
            for known in (file.sha256, file.contents_sha256):
                assert known is None or len(bytes.fromhex(known)) == 32
        assert bool(entry.counts) == (name != "portuguese")
