"""Small made data with the shapes of the real sets."""

import torch

from deepmemory.lab.data import Corpus, Digits, Pairs
from deepmemory.lab.data.pairs import as_sentences
from deepmemory.lab.tasks import NatLang, PixelMNIST, PolyMusic, Translation

SPOKEN = ["uno", "dos", "tres", "cuatro"]
MEANT = ["one", "two", "three", "four"]


def music(pieces=7, longest=12):
    """Scales that go up by one key each frame: what comes next is certain."""

    def piece(i):
        frames = 3 + (5 * i) % (longest - 2)
        return torch.nn.functional.one_hot((i + torch.arange(frames)) % 88, 88).to(torch.uint8)

    return PolyMusic(
        {split: [piece(i + at) for i in range(pieces)] for at, split in enumerate(("train", "valid", "test"))}
    )


def text(words=403, kinds=11, task=NatLang):
    """Words that count up."""
    train = torch.arange(words) % kinds
    return task(Corpus(train, train[:101].clone(), train[3:90].clone(), tuple(map(str, range(kinds)))))


def translation(count=40):
    """Numbers, word by word."""
    numbers = [[(i // 4**k) % 4 for k in range(1 + i % 3)] for i in range(count)]
    foreign = as_sentences([[SPOKEN[n] for n in row] for row in numbers])
    english = as_sentences([[MEANT[n] for n in row] for row in numbers])
    return Translation(Pairs("spanish", foreign, english, "made"))


def digits(permuted=False, count=60, side=5):
    """As much ink as the digit says."""
    labels = torch.arange(count) % 10
    ink = (torch.arange(side * side) < 2 * labels[:, None]).to(torch.uint8) * 255
    of_test = slice(0, 30)
    images = ink.view(count, side, side)
    return PixelMNIST({"train": Digits(images, labels), "test": Digits(images[of_test], labels[of_test])}, permuted)


TASKS = {"polymusic": music, "natlang": text, "translation": translation, "pixel-mnist": digits}
