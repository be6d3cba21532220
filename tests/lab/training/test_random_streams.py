"""Random numbers that depend on their keys alone."""

import torch

from deepmemory.lab.training import random_streams


def splitmix64(state: int) -> int:
    """The published generator, one number at a time in Python integers."""
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_is_splitmix64():
    states = [0, 1, 12345, 2**63 - 1, -1, -(2**63)]
    ours = random_streams.derive(torch.tensor(states), 0).tolist()
    assert [number % 2**64 for number in ours] == [splitmix64(state % 2**64) for state in states]


def test_a_run_draws_the_same_alone_and_among_others():
    seeds = torch.arange(51)
    together = random_streams.sequence_keys(seeds, random_streams.TRAINING, 7, 32)
    alone = random_streams.sequence_keys(seeds[17:18], random_streams.TRAINING, torch.tensor(7), 32)
    assert torch.equal(together[17:18], alone)


def test_a_sequence_is_the_same_in_a_batch_of_any_size():
    seeds = torch.arange(3)
    whole = random_streams.sequence_keys(seeds, random_streams.TEST, 0, 100)
    assert torch.equal(whole[:, 40:70], random_streams.sequence_keys(seeds, random_streams.TEST, 0, 30, first=40))


def test_keys_of_runs_streams_steps_and_sequences_all_differ():
    seeds = torch.arange(20)
    keys = [random_streams.sequence_keys(seeds, stream, step, 32) for stream in range(5) for step in range(50)]
    assert torch.cat(keys).unique().numel() == 20 * 5 * 50 * 32


def test_uniform_is_uniform():
    numbers = random_streams.uniform(random_streams.derive(torch.zeros(1, dtype=torch.int64), torch.arange(200_000)))
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.003
    assert abs(numbers.var() - 1 / 12) < 0.002
    neighbours = torch.corrcoef(torch.stack((numbers[:-1], numbers[1:])))[0, 1]
    assert abs(neighbours) < 0.01


def test_below_takes_every_value_as_often():
    numbers = random_streams.below(random_streams.derive(torch.zeros(1, dtype=torch.int64), torch.arange(110_000)), 11)
    counts = numbers.bincount(minlength=11)
    assert counts.numel() == 11
    assert ((counts - 10_000).abs() < 500).all()
