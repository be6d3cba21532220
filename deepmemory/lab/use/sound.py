"""Piano-rolls as MIDI files and as sound, and MIDI files as piano-rolls."""

from __future__ import annotations

import io
import struct
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepmemory.lab.data.errors import DataError
from deepmemory.lab.data.music import KEYS

LOWEST = 21  # MIDI number of a piano's first key, A0
TICKS = 480  # per beat, in the files we write
VELOCITY = 80
RATE = 22050  # samples per second
LOUDEST = 0.9  # of what 16 bits can hold
OVERTONES = (1.0, 0.5, 0.25, 0.15, 0.08, 0.05)  # initial loudness of each multiple of a key's frequency
ATTACK, RELEASE = 0.006, 0.08  # seconds
FRAMES_PER_BEAT = {"jsb-chorales": 1}  # a frame is a quarter note there, and an eighth note in all other datasets
EIGHTHS = 2

# Limits on MIDI files, which may come from anybody.
LARGEST = 2**22  # bytes; a symphony has a tenth of it
LONGEST = 2**15  # frames, more than two hours of eighths
NUMBER_BYTES = 4  # of one variable-length number, by the standard


class Note(NamedTuple):
    """One key, from its onset to its release."""

    key: int  # 0 to 87
    start: int  # frame
    end: int  # the first frame without it


def frames_per_beat(music: str) -> int:
    """Frames per beat in the piano-rolls of a dataset."""
    return FRAMES_PER_BEAT.get(music, EIGHTHS)


def notes_of(roll: Tensor) -> list[Note]:
    """The notes of a piano-roll (frames, 88), ordered by onset; a key held over several frames is one note."""
    if roll.dim() != 2 or roll.shape[1] != KEYS:
        raise ValueError(f"a piano-roll should be (frames, {KEYS}), got {tuple(roll.shape)}")
    silence = torch.zeros(1, KEYS, dtype=torch.int8)
    change = torch.cat([silence, (roll != 0).to(torch.int8), silence]).diff(dim=0).mT  # [keys, frames + 1]
    starts, ends = ((change == sign).nonzero().tolist() for sign in (1, -1))  # both by key, then by frame
    notes = [Note(key, start, end) for (key, start), (_, end) in zip(starts, ends, strict=True)]
    return sorted(notes, key=lambda note: (note.start, note.key))


def midi(roll: Tensor, per_beat: int = EIGHTHS, tempo: float = 120.0) -> bytes:
    """A MIDI file (type 0) of a piano-roll; ``tempo`` in beats per minute."""
    frame = TICKS // per_beat
    events = [(0, 0, b"\xff\x51\x03" + round(60e6 / tempo).to_bytes(3, "big")), (0, 0, b"\xc0\x00")]  # tempo, piano
    for key, start, end in notes_of(roll):
        events.append((start * frame, 2, bytes((0x90, LOWEST + key, VELOCITY))))
        events.append((end * frame, 1, bytes((0x80, LOWEST + key, 0))))  # releases before onsets at the same time
    events.append((len(roll) * frame, 3, b"\xff\x2f\x00"))
    track, now = bytearray(), 0
    for time, _, message in sorted(events):
        track += variable_length(time - now) + message
        now = time
    return b"MThd" + struct.pack(">IHHH", 6, 0, 1, TICKS) + b"MTrk" + struct.pack(">I", len(track)) + bytes(track)


def variable_length(number: int) -> bytes:
    """A MIDI variable-length number: seven bits per byte, high bits first; the eighth bit is set in all but the last.

    >>> variable_length(127).hex(), variable_length(128).hex(), variable_length(480).hex()
    ('7f', '8100', '8360')
    """
    parts = [number & 0x7F]
    while number := number >> 7:
        parts.append(number & 0x7F | 0x80)
    return bytes(reversed(parts))


def read_roll(path: Path, per_beat: int = EIGHTHS) -> Tensor:
    """The piano-roll of a MIDI file."""
    with open(path, "rb") as file:
        return roll_of(file.read(LARGEST + 1), per_beat)


def roll_of(raw: bytes, per_beat: int = EIGHTHS) -> Tensor:
    """The piano-roll (frames, 88) of a MIDI file of type 0 or 1: all tracks but drums, to the nearest frame."""
    try:
        return parse_midi(raw, per_beat)
    except (IndexError, struct.error):
        raise DataError("the MIDI file ends too early") from None


def parse_midi(raw: bytes, per_beat: int) -> Tensor:
    """The same as :func:`roll_of`, but a file that ends too early raises IndexError or struct.error."""
    if len(raw) > LARGEST:
        raise DataError(f"the MIDI file has more than the limit of {LARGEST} bytes")
    if raw[:4] != b"MThd":
        raise DataError(f"not a MIDI file: it starts with {raw[:4].hex(' ') or 'nothing'}")
    size, kind, tracks, division = struct.unpack_from(">IHHH", raw, 4)
    if kind > 1 or division == 0 or division & 0x8000:
        raise DataError(f"expected a MIDI file of type 0 or 1 with time in beats, got type {kind}, division {division}")
    at, spans = 8 + size, []
    for _ in range(tracks):
        name, length = struct.unpack_from(">4sI", raw, at)
        if at + 8 + length > len(raw):
            raise IndexError
        if name == b"MTrk":
            spans += list(spans_of(raw[at + 8 : at + 8 + length]))
        at += 8 + length
    notes = [
        Note(key, round(start * per_beat / division), round(end * per_beat / division))
        for key, start, end in spans
        if 0 <= key < KEYS
    ]
    frames = max((max(note.end, note.start + 1) for note in notes), default=0)
    if frames > LONGEST:
        raise DataError(f"the MIDI file lasts {frames} frames; up to {LONGEST} are read")
    if not notes:
        raise DataError("the MIDI file has no notes of a piano")
    keys, starts, ends = torch.tensor(notes).unbind(1)
    change = torch.zeros(frames + 1, KEYS, dtype=torch.int64)  # notes that begin minus notes that end
    change.index_put_((starts, keys), torch.tensor(1), accumulate=True)
    change.index_put_((ends.clamp(min=starts + 1), keys), torch.tensor(-1), accumulate=True)
    return (change.cumsum(0)[:-1] > 0).to(torch.uint8)


def spans_of(track: bytes) -> Iterator[Note]:
    """The notes of one track, in ticks; drums, which are on channel 10, are left out."""
    at, now, status = 0, 0, 0
    struck: dict[tuple[int, int], int] = {}

    def number() -> int:
        nonlocal at
        value = 0
        for _ in range(NUMBER_BYTES):
            at += 1
            value = value << 7 | track[at - 1] & 0x7F
            if track[at - 1] < 0x80:
                return value
        raise DataError(f"a number in the MIDI file is longer than {NUMBER_BYTES} bytes")

    while at < len(track):
        now += number()
        if track[at] >= 0x80:  # otherwise the status of the previous message holds
            status, at = track[at], at + 1
        if status in (0xFF, 0xF0, 0xF7):
            at += status == 0xFF
            length = number()
            at += length
        elif 0x80 <= status < 0xF0:
            kind, channel = status & 0xF0, status & 0x0F
            if kind in (0x80, 0x90) and channel != 9:
                key, velocity = track[at] - LOWEST, track[at + 1]
                if (channel, key) in struck:
                    yield Note(key, struck.pop((channel, key)), now)
                if kind == 0x90 and velocity:
                    struck[channel, key] = now
            at += 1 if kind in (0xC0, 0xD0) else 2
        else:
            raise DataError(f"no MIDI message begins with {status:#x}")
    yield from (Note(key, start, now) for (_, key), start in struck.items())


def wav(roll: Tensor, per_beat: int = EIGHTHS, tempo: float = 120.0) -> bytes:
    """A WAV file, 16 bits, one channel, of a piano-roll."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes((sound(roll, per_beat, tempo) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()


def sound(roll: Tensor, per_beat: int = EIGHTHS, tempo: float = 120.0) -> np.ndarray:
    """The piano-roll as samples between -1 and 1, every note a decaying tone with overtones."""
    frame = 60 / tempo / per_beat * RATE  # samples
    samples = np.zeros(round(len(roll) * frame) + round(RELEASE * RATE))
    for key, start, end in notes_of(roll):
        first, count = round(start * frame), round(end * frame) - round(start * frame)
        heard = tone(key, count)
        samples[first : first + len(heard)] += heard
    peak = np.abs(samples).max(initial=0)
    return samples * (LOUDEST / peak) if peak else samples


def tone(key: int, held: int) -> np.ndarray:
    """The samples of one key, held for ``held`` samples and then released; higher keys decay faster."""
    time = np.arange(held + round(RELEASE * RATE)) / RATE
    frequency = 440 * 2 ** ((LOWEST + key - 69) / 12)
    tone = np.zeros(len(time))
    for place, loudness in enumerate(OVERTONES, 1):
        if place * frequency < RATE / 2:
            fall = np.exp(-time * (1 + frequency / 440) * place**0.5)
            tone += loudness * fall * np.sin(2 * np.pi * place * frequency * time)
    let_go = np.clip((held + round(RELEASE * RATE) - np.arange(len(time))) / round(RELEASE * RATE), 0, 1)
    return tone * np.clip(time / ATTACK, 0, 1) * let_go
