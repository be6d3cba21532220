"""Tiny files of the kinds the parsers read, written by hand from the formats' descriptions."""

import gzip
import hashlib
import io
import struct
import zipfile
import zlib
from dataclasses import replace

import numpy as np

from deepmemory.lab.data.registry import DATASETS

HEADER = b"MATLAB 5.0 MAT-file, made by hand".ljust(124) + b"\x00\x01IM"
CODES = {"u1": 2, "i1": 1, "<u2": 4, "<f8": 9}


def element(kind, data, short=False):
    if short and len(data) <= 4:
        return struct.pack("<HH", kind, len(data)) + data.ljust(4, b"\0")
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(kind, shape, name, body, short=False):
    flags = element(6, struct.pack("<II", kind, 0))
    return element(14, flags + element(5, struct.pack("<ii", *shape)) + element(1, name.encode(), short) + body)


def numbers(array, stored="u1"):
    array = np.asarray(array)
    return matrix(6, array.shape, "", element(CODES[stored], array.astype(stored).tobytes("F")))


def cells(name, arrays, stored="u1", short=False):
    return matrix(1, (1, len(arrays)), name, b"".join(numbers(array, stored) for array in arrays), short)


def packed(variable):
    data = zlib.compress(variable)
    return struct.pack("<II", 15, len(data)) + data  # not padded


def rolls(seed, lengths, keys=88):
    random = np.random.default_rng(seed)
    return [random.integers(0, 2, (length, keys)) for length in lengths]


MUSIC = {"traindata": rolls(0, (3, 1, 5)), "validdata": rolls(1, (2,)), "testdata": rolls(2, (4, 4))}


def mat(music=None, pack=packed, stored="u1"):
    return HEADER + b"".join(pack(cells(name, arrays, stored)) for name, arrays in (music or MUSIC).items())


def idx(array):
    array = np.asarray(array)
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype("u1").tobytes()


def zipped(members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in members.items():
            archive.writestr(zipfile.ZipInfo(name), contents, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


PAIRS = "Go.\tVe.\nGo.\t¡Vete!\nWho?\t¿Quién?\tCC-BY 2.0 (France) Attribution: nobody\n".encode()
TEXTS = {"train": b" the cat saw the dog \n the dog ran \n", "valid": b"the cat ran\n", "test": b"dog\n"}
IMAGES = {"train": np.arange(5 * 28 * 28).reshape(5, 28, 28) % 251, "test": np.ones((2, 28, 28))}
LABELS = {"train": np.array([3, 1, 4, 1, 5]), "test": np.array([9, 2])}


def digest(data):
    return hashlib.sha256(data).hexdigest()


def served(file, data, addresses=("http://127.0.0.1:9/nothing",)):
    """The registry's entry for ``file`` with other contents."""
    changes = {"size": len(data), "sha256": digest(data), "addresses": tuple(addresses)}
    if file.member:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            contents = next(archive.read(name) for name in archive.namelist() if name.endswith(file.member))
        return replace(file, **changes, contents_size=len(contents), contents_sha256=digest(contents))
    if data.startswith(b"\x1f\x8b"):
        contents = gzip.decompress(data)
        return replace(file, **changes, contents_size=len(contents), contents_sha256=digest(contents))
    return replace(file, **changes, contents_size=None, contents_sha256=None)


def tiny_datasets():
    """The registry with tiny contents: its datasets, and the file contents by path."""
    contents = {}
    for name in ("nottingham", "jsb-chorales", "musedata", "piano-midi"):
        contents[DATASETS[name].files[0].path] = mat()
    for part, text in TEXTS.items():
        contents[f"ptb/ptb.{part}.txt"] = text
    for part, short in (("train", "train"), ("test", "t10k")):
        contents[f"mnist/{short}-images-idx3-ubyte.gz"] = gzip.compress(idx(IMAGES[part]), mtime=0)
        contents[f"mnist/{short}-labels-idx1-ubyte.gz"] = gzip.compress(idx(LABELS[part]), mtime=0)
    contents["translation/spa-eng.zip"] = zipped({"spa-eng/_about.txt": b"about", "spa-eng/spa.txt": PAIRS})
    contents["translation/deu-2020-12.txt"] = b"1\t2\n" + PAIRS
    contents["translation/deu-eng.zip"] = zipped({"deu.txt": PAIRS, "_about.txt": b"about"})
    contents["translation/por-eng.zip"] = zipped({"por.txt": PAIRS})
    datasets = {}
    for name, entry in DATASETS.items():
        files = tuple(f if f.sha256 is None else served(f, contents[f.path]) for f in entry.files)
        datasets[name] = replace(entry, files=files, counts={})
    return datasets, contents


def place(folder, contents):
    for path, data in contents.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)
