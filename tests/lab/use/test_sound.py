"""What is written as MIDI and as sound is the piano-roll it was made from."""

import io
import struct
import wave
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepmemory.lab.data import DataError
from deepmemory.lab.use import sound
from deepmemory.lab.use.sound import Note, midi, notes_of, roll_of, wav


def roll(*rows):
    made = torch.zeros(len(rows), 88, dtype=torch.uint8)
    for row, keys in zip(made, rows, strict=True):
        row[list(keys)] = 1
    return made


rolls = st.builds(
    lambda seed, frames, share: (torch.rand(frames, 88, generator=torch.Generator().manual_seed(seed)) < share).byte(),
    st.integers(0, 2**31),
    st.integers(1, 40),
    st.floats(0.01, 1),
)


def samples(raw):
    with wave.open(io.BytesIO(raw)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, 22050)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(float)


def test_a_key_that_goes_on_is_one_note():
    assert notes_of(roll([0], [0, 87], [], [0])) == [Note(0, 0, 2), Note(87, 1, 2), Note(0, 3, 4)]
    with pytest.raises(ValueError, match=r"should be \(frames, 88\), got \(3, 87\)"):
        notes_of(torch.zeros(3, 87))


def test_the_bytes_of_a_midi_file():
    track = bytes.fromhex(
        "00 c0 00"  # a piano
        "00 ff 51 03 07 a1 20"  # 500,000 microseconds a beat
        "00 90 45 50"  # A4, struck
        "83 60 80 45 00"  # let go after 480 ticks
        "00 ff 2f 00"
    )
    assert midi(roll([48], [48])) == b"MThd" + struct.pack(">IHHH", 6, 0, 1, 480) + b"MTrk" + struct.pack(
        ">I", len(track)
    ) + bytes(track)


@settings(deadline=None, max_examples=40)
@given(rolls, st.sampled_from([1, 2, 4]))
def test_midi_comes_back(made, per_beat):
    back = roll_of(midi(made, per_beat), per_beat) if made.any() else made[:0]
    assert torch.equal(back, made[: len(back)])
    assert not made[len(back) :].any()


def chunk(*messages, name=b"MTrk"):
    data = bytes.fromhex("".join(messages))
    return name + struct.pack(">I", len(data)) + data


def test_midi_files_of_others():
    """Several tracks, a status that holds on, a velocity of zero for letting go, drums, and chunks nobody knows."""
    raw = b"MThd" + struct.pack(">IHHH", 6, 1, 3, 96)
    raw += chunk("00 ff 03 01 41", "00 ff 51 03 07 a1 20", "00 ff 2f 00")
    raw += chunk("00 00", name=b"Xfoo")
    raw += chunk(
        "00 90 15 40", "30 15 00", "00 18 40", "60 18 00", "00 99 30 40", "30 99 30 00", "00 c0 05", "00 ff 2f 00"
    )
    assert torch.equal(roll_of(raw), roll([0], [3], [3]))


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"", "not a MIDI file: it starts with nothing"),
        (b"RIFF", "not a MIDI file"),
        (midi(roll([1]))[:20], "ends too early"),
        (midi(roll([]), 2), "no notes of a piano"),
        (b"MThd" + struct.pack(">IHHH", 6, 2, 1, 96), "type 0 or 1"),
        (b"MThd" + struct.pack(">IHHH", 6, 0, 1, 96) + chunk("00 90 15 40", "ff ff ff 7f 80 15 00"), "frames; up to"),
    ],
)
def test_other_files_are_refused(raw, problem):
    with pytest.raises(DataError, match=problem):
        roll_of(raw)


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_damaged_midi_gives_a_roll_or_an_error(data):
    raw = bytearray(midi(roll([1, 5], [5], [7])))
    for _ in range(data.draw(st.integers(1, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with suppress(DataError):
        assert roll_of(bytes(raw)).shape[1] == 88


@pytest.mark.parametrize("made", [torch.ones(3, 88), torch.zeros(2, 88), roll([3], [3, 80], [], [50])])
def test_sound_is_as_long_as_the_roll_and_never_clips(made):
    heard = samples(wav(made, 2, 120))
    assert len(heard) == round(len(made) * 0.25 * 22050) + round(sound.RELEASE * 22050)
    assert abs(heard).max() == (round(sound.LOUDEST * 32767) if made.any() else 0)


def test_a_key_sounds_at_its_frequency_while_it_is_held():
    heard = samples(wav(roll([48], [48], [48], [48], [], [], [], []), 2, 120))
    spectrum = abs(np.fft.rfft(heard[:22050]))
    assert spectrum.argmax() == 440  # Hz: one second was taken
    quiet = round((1 + sound.RELEASE) * 22050)
    assert abs(heard[:22050]).max() > 1000
    assert not heard[quiet + 1 :].any()
    assert abs(heard[[0, quiet - 1]]).max() < 50  # no clicks


def test_chorales_are_in_quarters():
    assert [sound.frames_per_beat(name) for name in ("nottingham", "jsb-chorales")] == [2, 1]
