"""Replacements for ``processes.WORK`` with which test_train_processes.py makes processes fail."""

from __future__ import annotations

from threading import Event

from transformer_parity.apps.train.learner import Learner
from transformer_parity.apps.train.processes import work


def fail_in_the_second(parent):
    """Train, but raise an exception in the third step of the second process."""
    train_step = Learner.train_step

    def failing(self, batch):
        if self.where.group.rank == 1 and self.trainer.step == 2:
            raise ZeroDivisionError("only here")
        return train_step(self, batch)

    Learner.train_step = failing
    work(parent)


def lack_the_second(parent):
    """Train, but never let the second process join the others."""
    told, receive = [parent.receive()], parent.receive
    if told[0][0].where.group.rank == 1:
        Event().wait()
    parent.receive = lambda: told.pop() if told else receive()
    work(parent)
