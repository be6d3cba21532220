"""Tasks with real data, on small made data: what is fed, what is counted, what is learnt."""

import math
from contextlib import nullcontext
from dataclasses import replace
from unittest.mock import MagicMock

import pytest
import torch
from lab.real_data import TASKS, digits, music, text, translation
from torch.nn import functional as F

import deepmemory as dm
from deepmemory.lab import paper
from deepmemory.lab.settings import Machine
from deepmemory.lab.tasks import series_of
from deepmemory.lab.tasks.sequences import PADDING
from deepmemory.lab.training import loop, random_streams
from deepmemory.lab.training.group import fresh_group
from deepmemory.lab.training.loop import evaluate
from deepmemory.lab.training.network import initial_weights
from deepmemory.lab.training.random_streams import derive
from deepmemory.lab.training.trainer import make_trainer

CPU = Machine("cpu", engine="plain")
SEEDS = torch.tensor([4, 9])


def small(task, cell="dmu", **changes):
    """The paper's setting with a small network."""
    setting = paper.setting(task, cell)
    made = {"hidden": (6,), "batch": 4, "epochs": 2, "lr": 0.01, "gamma": 0.9, **changes}
    return replace(setting, **made, **({"window": 10} if task == "natlang" else {}))


def train_all(setting, seeds):
    trainer = make_trainer(setting, CPU)
    group = fresh_group(trainer, seeds)
    return trainer, group, list(loop.train(trainer, group))


def batches(task, split, setting, seeds=SEEDS, epoch=0):
    feed = task.feed(split, setting, seeds, setting.batch, torch.float32)
    return [feed.batch(step, shape) for step, shape in enumerate(feed.plan(epoch))]


@pytest.mark.usefixtures("made_data")
@pytest.mark.parametrize("cell", paper.KINDS)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_trains_with_every_cell(task, cell):
    trainer, group, epochs = train_all(small(task, cell), [0, 1])
    assert len(epochs) == 2
    for values in epochs[-1].values.values():
        assert tuple(values) == series_of(task)
        assert all(map(math.isfinite, values.values()))
    tested = loop.test(trainer, group)
    if group.best_epoch[1] == 2:
        last = epochs[-1].values[1]
        assert tested[1] == pytest.approx({name: last[f"test_{name}"] for name in tested[1]}, rel=1e-5)


@pytest.mark.usefixtures("made_data")
@pytest.mark.parametrize("task", TASKS)
def test_a_run_beside_others_follows_the_run_alone(task):
    setting = small(task)
    _, beside, among = train_all(setting, [3, 17, 8])
    _, single, alone = train_all(setting, [17])
    for one, all_ in zip(alone, among, strict=True):
        assert all_.values[17] == pytest.approx(one.values[17], rel=1e-4, abs=1e-5)
    for name, weight in single.weights.items():
        torch.testing.assert_close(beside.weights[name][1], weight[0], rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("made_data")
@pytest.mark.parametrize("task", TASKS)
def test_it_learns(task):
    setting = small(task, epochs=30, gamma=1.0, hidden=(12,))  # twelve seeds learn it
    trainer, _, epochs = train_all(setting, [0])
    first, last = epochs[0].values[0], epochs[-1].values[0]
    assert last["train_loss"] < 0.6 * first["train_loss"]
    for name in trainer.task.measures:
        better = last[f"train_{name}"] / first[f"train_{name}"]
        assert better < 0.9 if name == "perplexity" else better > 1.2


@pytest.mark.parametrize("task", ["polymusic", "translation", "pixel-mnist"])
def test_an_epoch_reads_everything_once_in_an_order_of_each_run(task):
    made, setting = TASKS[task](), small(task)
    orders = []
    for epoch in (0, 1):
        feed = made.feed(random_streams.TRAINING, setting, SEEDS, setting.batch, torch.float32)
        feed.plan(epoch)
        orders.append(feed.order.flatten(1))
    for order in orders:
        for run, items in zip(order, feed.items, strict=True):
            assert sorted(run[run != PADDING].tolist()) == sorted(items.tolist())
    assert not torch.equal(orders[0][0], orders[0][1])
    assert not torch.equal(orders[0][0], orders[1][0])


def test_music_asks_for_the_next_frame_of_every_piece():
    task, setting = music(), small("polymusic")
    seen = 0
    for batch in batches(task, random_streams.TRAINING, setting):
        x, lengths = batch.inputs
        real = batch.real
        assert torch.equal(real.sum(-1), lengths)
        assert (x[~real] == 0).all()
        assert torch.equal(x[real].argmax(-1) + 1, batch.target[real].argmax(-1))
        seen += int(real[0].sum())
    assert seen == sum(len(piece) - 1 for piece in task.pieces["train"])


def test_the_loss_of_music_is_summed_over_keys_and_averaged_over_frames(made_data):
    setting = small("polymusic")
    trainer = make_trainer(setting, CPU)
    start = initial_weights(setting, trainer.task, [4])
    network = trainer.task.network(setting, "plain")
    network.load_state_dict({name: weight[0] for name, weight in start.items()})
    total = frames = 0
    for piece in trainer.task.pieces["test"]:
        roll = piece.float()[None]
        total += F.binary_cross_entropy_with_logits(network(roll[:, :-1])[0], roll[:, 1:], reduction="sum").item()
        frames += len(piece) - 1
    assert evaluate(trainer, start, random_streams.TEST, [4]).item() == pytest.approx(total / frames, rel=1e-5)


@pytest.mark.parametrize("words", [44, 45, 403])
def test_every_word_but_the_first_is_predicted_once(words):
    task, setting = text(words=words), small("natlang")
    asked = []
    for batch in batches(task, random_streams.TRAINING, setting):
        word, state = batch.inputs
        assert word.shape == (4, 10)
        assert all(tensor.shape[0] == 2 for tensor in [state])
        real = batch.real[0]
        assert torch.equal((word[real] + 1) % 11, batch.target[0][real])
        asked += batch.target[0][real].tolist()
    assert sorted(asked) == sorted((torch.arange(1, words) % 11).tolist())


def test_the_state_goes_on_from_window_to_window_and_starts_at_zero(made_data):
    """One stream in windows gives the loss of the whole text read at once."""
    setting = small("natlang", batch=1)
    trainer = make_trainer(setting, CPU)
    start = initial_weights(setting, trainer.task, [4, 5])
    network = trainer.task.network(setting, "plain")
    network.load_state_dict({name: weight[1] for name, weight in start.items()})
    whole = trainer.task.texts.on(torch.device("cpu"))["valid"]
    losses = F.cross_entropy(network(whole[None, :-1])[0][0], whole[1:], reduction="none")
    for _ in range(2):  # the second evaluation starts from zero, too
        loss, perplexity = evaluate(trainer, start, random_streams.VALIDATION, [4, 5])[1].tolist()
        assert loss == pytest.approx(losses.mean().item(), rel=1e-5)
        windows = [part.mean().exp().item() for part in losses.split(10)]
        assert perplexity == pytest.approx(sum(windows) / len(windows), rel=1e-5)


def test_splits_of_pairs_are_each_runs_own():
    parts = translation(count=200).split(SEEDS)
    assert [
        parts[split].shape for split in (random_streams.TRAINING, random_streams.VALIDATION, random_streams.TEST)
    ] == [
        (2, 140),
        (2, 30),
        (2, 30),
    ]
    for run in range(2):
        everything = torch.cat([parts[split][run] for split in parts])
        assert sorted(everything.tolist()) == list(range(200))
    assert not torch.equal(parts[random_streams.TEST][0], parts[random_streams.TEST][1])


@pytest.mark.parametrize("feedback", ["own", "teacher"])
def test_dropout_of_a_translator_has_one_mask_for_each_sentence(feedback):
    """The decoder finds its own words under the masks that it then computes outputs and gradients with."""
    rates = {f"{where}_dropout": 0.4 for where in ("input", "output", "recurrent")}
    task, setting = translation(), small("translation", "dmu", feedback=feedback, features=7, **rates)
    torch.manual_seed(0)
    network = task.network(setting, "plain")
    assert network.read.embedding_dim == network.said.embedding_dim == 7
    (foreign, lengths, english), _, _ = batches(task, random_streams.TRAINING, setting)[0]
    foreign, lengths, english = foreign[0], lengths[0], english[0]
    keys = torch.arange(len(lengths))
    encoder, decoder = (network.dropout.masks(derive(keys, part), torch.float32) for part in range(2))
    assert not torch.equal(encoder["input"], decoder["input"])
    state, word, outputs = network.encode(foreign, lengths, encoder), english[:, 0], []
    for t in range(english.shape[1] - 1):
        output, state = network.step(word, state, decoder)
        outputs.append(output)
        word = output.argmax(-1) if feedback == "own" else english[:, t + 1]
    with_dropout = network(foreign, lengths, english, keys)
    torch.testing.assert_close(with_dropout, torch.stack(outputs, 1))
    assert not torch.allclose(with_dropout, network(foreign, lengths, english))


@pytest.mark.parametrize("feedback", ["own", "teacher"])
@pytest.mark.parametrize("cell", ["dmu", "lstm"])
def test_a_decoder_that_runs_freely_is_fed_its_own_words(cell, feedback):
    """Step by step with feedback gives the outputs and the gradients that the two passes give."""
    task, setting = translation(), small("translation", cell, feedback=feedback)
    torch.manual_seed(0)
    network = task.network(setting, "plain").double()
    (foreign, lengths, english), target, real = batches(task, random_streams.TRAINING, setting)[0]
    foreign, lengths, english = foreign[0], lengths[0], english[0]

    def losses(output):
        return (F.cross_entropy(output.flatten(0, 1), target[0].flatten(), reduction="none") * real[0].flatten()).sum()

    def step_by_step(feed_own):
        state, word, outputs = network.encode(foreign, lengths), english[:, 0], []
        for t in range(english.shape[1] - 1):
            output, state = network.step(word, state)
            outputs.append(output)
            word = output.argmax(-1) if feed_own else english[:, t + 1]
        return torch.stack(outputs, 1)

    for training_, feed_own in ((True, feedback == "own"), (False, True)):
        network.train(training_)
        fast, slow = network(foreign, lengths, english), step_by_step(feed_own)
        torch.testing.assert_close(fast, slow)
        weights = list(network.parameters())
        grads = [torch.autograd.grad(losses(output), weights) for output in (fast, slow)]
        torch.testing.assert_close(*grads)


def test_words_after_the_end_do_not_count(made_data):
    setting = small("translation")
    trainer = make_trainer(setting, CPU)
    start = initial_weights(setting, trainer.task, [4])
    network = trainer.task.network(setting, "plain").eval()
    network.load_state_dict({name: weight[0] for name, weight in start.items()})
    pairs = trainer.task.pairs
    losses, right, counts = [], [], []
    for i in trainer.task.split(torch.tensor([4]))[random_streams.TEST][0].tolist():
        foreign, english = (s.ids[i, : s.lengths[i]] for s in (pairs.foreign, pairs.english))
        output = network(foreign[None], torch.tensor([len(foreign)]), english[None])[0]
        losses.append(F.cross_entropy(output, english[1:], reduction="sum").item())
        right.append((output.argmax(-1) == english[1:]).sum().item())
        counts.append(len(english) - 1)
    loss, perplexity, accuracy = evaluate(trainer, start, random_streams.TEST, [4])[0].tolist()
    assert loss == pytest.approx(sum(losses) / sum(counts), rel=1e-5)
    assert accuracy == pytest.approx(sum(right) / sum(counts), rel=1e-5)
    of_batches = [sum(losses[i : i + 4]) / sum(counts[i : i + 4]) for i in range(0, len(losses), 4)]
    assert perplexity == pytest.approx(sum(map(math.exp, of_batches)) / len(of_batches), rel=1e-5)


def test_pixels_come_row_by_row_or_in_one_order_for_all():
    ordered, permuted = digits(), digits(permuted=True)
    setting = small("pixel-mnist")
    images = batches(ordered, random_streams.TEST, setting)[0].inputs[0]
    mixed = batches(permuted, random_streams.TEST, setting)[0].inputs[0]
    assert images.shape == (4, 25, 1)
    assert torch.equal(images[:, :, 0].sum(1), 2.0 * torch.arange(4))
    assert (images.diff(dim=1) <= 0).all()
    assert torch.equal(mixed[:, :, 0], images[:, permuted.order(True), 0])
    assert not torch.equal(mixed, images)


def test_validation_images_are_not_trained_with():
    task = digits()
    images = task.images.on(torch.device("cpu"))
    assert [len(images[split]) for split in ("train", "valid", "test")] == [50, 10, 30]


@pytest.mark.usefixtures("made_data")
def test_dmu_c_learns_at_one_rate():
    def rates(cell):
        adam = fresh_group(make_trainer(small("natlang", cell, transition=(5, 5), weight_decay=0.6), CPU), [0]).adam
        return {(group["lr"], group["weight_decay"]) for group in adam.param_groups}

    assert rates("dmu") == {(0.01, 0.6), (0.01 / 6, 0.6 / 6)}
    assert rates("dmu-c") == {(0.01, 0.6)}


@pytest.mark.usefixtures("made_data")
def test_a_run_equals_an_ordinary_training_loop():
    setting = small("natlang", epochs=1, weight_decay=1e-3)
    trainer, group, (epoch,) = train_all(setting, [3, 4])
    task = trainer.task
    network = task.network(setting, "plain")
    start = initial_weights(setting, task, [4])
    network.load_state_dict({name: weight[0] for name, weight in start.items()})
    adam = torch.optim.Adam(dm.parameter_groups(network, setting.lr, setting.weight_decay))
    words = task.texts.on(torch.device("cpu"))["train"]
    length = -(-(len(words) - 1) // 4)
    state, losses = None, []
    for at in range(0, length, 10):
        rows = [words[b * length + at : min(b * length + min(at + 10, length), len(words) - 1) + 1] for b in range(4)]
        steps = max(len(row) - 1 for row in rows)
        padded = torch.stack([F.pad(row, (0, steps + 1 - len(row))) for row in rows])
        real = torch.tensor([[t < len(row) - 1 for t in range(steps)] for row in rows])
        output, state = network(padded[:, :-1], state)
        loss = F.cross_entropy(output[real], padded[:, 1:][real])
        adam.zero_grad()
        loss.backward()
        adam.step()
        state = state.detach()
        losses.append(loss.item())
    assert epoch.values[4]["train_loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-4)
    for name, weight in network.named_parameters():
        torch.testing.assert_close(group.weights[name][1], weight, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_the_shards_of_a_batch_are_the_batch(task):
    """Loss and gradient of several processes' parts add up to those of the whole."""
    made, setting = TASKS[task](), small(task, batch=5)
    weights = initial_weights(setting, made, [4, 9])
    network = made.network(setting, "plain")

    def tally(shard):
        feed = made.feed(random_streams.TRAINING, setting, SEEDS, setting.batch, torch.float32, shard)
        batch = feed.batch(0, feed.plan(0)[0])
        return made.tally(loop.forward(network, weights, batch.inputs, feed.in_dims), batch)

    whole, parts = tally((0, 1)), [tally((rank, 3)) for rank in range(3)]
    for name in ("loss", "counts", "correct"):
        if getattr(whole, name) is not None:
            total = sum(getattr(part, name).sum(1) for part in parts)
            torch.testing.assert_close(total, getattr(whole, name).sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("made_data")
def test_evaluation_in_pieces_is_evaluation_at_once(monkeypatch):
    """The last piece may hold batches of padding alone."""
    setting = small("translation", batch=2)
    trainer = make_trainer(setting, CPU)
    weights = initial_weights(setting, trainer.task, [4, 9])
    whole = evaluate(trainer, weights, random_streams.TEST, [4, 9])
    monkeypatch.setattr(loop, "EVALUATED_AT_ONCE", {"cpu": 2 * 4 * trainer.task.largest_tensor})
    torch.testing.assert_close(evaluate(trainer, weights, random_streams.TEST, [4, 9]), whole)


def test_the_longest_sequences_of_a_batch_come_first():
    feed = music().feed(random_streams.TRAINING, small("polymusic"), SEEDS, 4, torch.float32)
    for step, shape in enumerate(feed.plan(0)):
        _, lengths = feed.batch(step, shape).inputs
        assert (lengths.diff(dim=1) <= 0).all()
        assert lengths.max() <= shape[0]


@pytest.mark.usefixtures("made_data")
def test_the_last_step_of_an_epoch_can_be_captured(monkeypatch):
    """Its warm-up must not read the data of steps that do not exist; the GPU's part is played by the CPU."""
    for name in ("Stream", "current_stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    trainer = replace(make_trainer(small("pixel-mnist"), CPU), graph=True)
    steps = loop.Steps(trainer, fresh_group(trainer, [0]))
    shapes = steps.feed.plan(0)
    steps.counter.fill_(len(shapes) - 1)
    steps.step_of(shapes[-1])
    assert steps.counter == len(shapes)  # after one step, which a true capture would not execute
