"""Translate with an exported network, using only ONNX Runtime and NumPy: no torch, and not this library.

    dmu train translation --quick
    dmu export --to spanish.onnx
    python examples/translate_onnx.py spanish-encoder.onnx spanish-decoder.onnx "Estoy cansado."

The encoder reads a sentence and returns a state; the decoder takes a word and a state and returns the logits of the
next word and a state. The vocabularies are in the files' metadata.
"""

import argparse
import json
import unicodedata

import numpy as np
import onnxruntime as ort


def split_words(text: str) -> list[str]:
    """Lower case, no accents, punctuation apart, as the training text was split."""
    parts = unicodedata.normalize("NFD", text.lower())
    signs = (sign for sign in parts if unicodedata.category(sign) != "Mn")  # accents
    return "".join(s if "a" <= s <= "z" else f" {s} " if s in "?.!,¿" else " " for s in signs).split()


def translate(encoder: ort.InferenceSession, decoder: ort.InferenceSession, text: str) -> str:
    """Greedy decoding: the most likely word at every step, until the sentence ends."""
    about = encoder.get_modelmeta().custom_metadata_map
    foreign, english = json.loads(about["foreign_words"]), json.loads(about["english_words"])
    start, end = int(about["start"]), int(about["end"])
    numbers = {word: number for number, word in enumerate(foreign)}

    sentence = [start, *(numbers[word] for word in split_words(text) if word in numbers), end]
    state = encoder.run(None, {"foreign": np.array([sentence]), "lengths": np.array([len(sentence)])})
    said, word = [], start
    while len(said) < 2 * len(sentence) + 10:
        states = {f"state_{index}": part for index, part in enumerate(state)}
        logits, *state = decoder.run(None, {"word": np.array([word]), **states})
        word = int(logits[0].argmax())
        if word == end:
            break
        said.append(english[word])
    return " ".join(said)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("encoder", type=ort.InferenceSession, metavar="ENCODER.onnx")
    options.add_argument("decoder", type=ort.InferenceSession, metavar="DECODER.onnx")
    options.add_argument("text")
    print(translate(**vars(options.parse_args())))
