"""Run by test_distributed.py in each of two processes: trains every task on made data, the first process prints."""

import json
import sys

import torch
from lab.real_data import TASKS
from lab.tasks.test_real_tasks import small

from deepmemory.lab.settings import Machine
from deepmemory.lab.training import loop
from deepmemory.lab.training import trainer as trainer_module
from deepmemory.lab.training.group import fresh_group
from deepmemory.lab.training.trainer import make_trainer

SEEDS = [3, 8]


def trained(task, devices):
    """Values of every epoch, by seed."""
    trainer_module.task_of = lambda setting, data=None: TASKS[setting.task]()
    trainer = make_trainer(small(task, batch=5), Machine("cpu", engine="plain", devices=devices))
    group = fresh_group(trainer, SEEDS)
    epochs = [epoch.values for epoch in loop.train(trainer, group)]
    return trainer, [[list(values[seed].values()) for seed in SEEDS] for values in epochs]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for name in TASKS:
        trainer, values = trained(name, devices=2)
        if trainer.fabric.is_global_zero:
            print(json.dumps({name: values}), file=sys.stdout, flush=True)
