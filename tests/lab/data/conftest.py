import pytest
from lab.data.making import place, tiny_datasets

from deepmemory.lab.data import files, registry


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setattr(files, "cache_folder", lambda: folder)
    monkeypatch.delenv("DEEPMEMORY_DATA", raising=False)
    return folder


@pytest.fixture
def tiny(tmp_path, monkeypatch, cache):
    """A registry of tiny datasets, and a folder that holds them all."""
    datasets, contents = tiny_datasets()
    for name, entry in datasets.items():
        monkeypatch.setitem(registry.DATASETS, name, entry)
    place(tmp_path / "data", contents)
    return tmp_path / "data"
