"""What processes of test_train_processes.py do in place of their part: what ``processes.WORK`` names."""

from __future__ import annotations

from threading import Event

from transformer_parity.apps.train.learner import Learner
from transformer_parity.apps.train.processes import work


def fail_in_the_second(parent):
    """Train, but meet an exception in the third step of the second process."""
    train_step = Learner.train_step

    def failing(self, batch):
        if self.where.group.rank == 1 and self.trainer.step == 2:
            raise ZeroDivisionError("only here")
        return train_step(self, batch)

    Learner.train_step = failing
    work(parent)


def lack_the_second(parent):
    """Train, but let the second process never come to the others."""
    told, receive = [parent.receive()], parent.receive
    if told[0][0].where.group.rank == 1:
        Event().wait()
    parent.receive = lambda: told.pop() if told else receive()
    work(parent)
