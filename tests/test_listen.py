"""The loop that supervises child processes handles messages, exits, silence, and time limits, and ends entire teams."""

from __future__ import annotations

import os
import time

import pytest
from conftest import child_processes

from transformer_parity.engine.processes.child import ChildEndedError
from transformer_parity.engine.processes.children import Children
from transformer_parity.engine.processes.team import Team, TeamError

FUNCTIONS = """
import os, time
from transformer_parity.engine.processes.messages import Broken

def answer(parent):
    while True:
        parent.send(2 * parent.receive())

def ends(parent):
    parent.send("here")
    print("the last line", flush=True)
    os._exit(7)

def sleeps(parent):
    print("asleep", flush=True)
    time.sleep(600)

def follows(parent):
    for action in iter(parent.receive, None):
        if action == "break":
            parent.send(Broken("ZeroDivisionError: only here"))
        elif action == "refuse":
            parent.send(Broken("too few sentences", is_usage=True))
        elif action == "end":
            print("killed", flush=True)
            os._exit(9)
        elif action == "sleep":
            time.sleep(600)
        else:
            parent.send(action)
"""


@pytest.fixture
def children(tmp_path):
    """The child processes of a test, which can run the functions above."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    with Children({**os.environ, "PYTHONPATH": str(tmp_path)}) as children:
        yield children
    assert child_processes() == []


def start(children, *names):
    return [children.start(f"functions:{name}") for name in names]


def test_listen_yields_messages_with_senders_until_no_member_is_left(children):
    one, two = members = start(children, "answer", "answer")
    for number in (1, 2):
        one.send(number)
        two.send(10 * number)
    found = {one: [], two: []}
    for child, message in children.listen(members):
        found[child].append(message)
        if len(found[child]) == 2:
            members.remove(child)
    assert found == {one: [2, 4], two: [20, 40]}


def test_members_may_be_added_while_listening(children):
    (first,) = members = start(children, "answer")
    first.send(1)
    found = []
    for child, message in children.listen(members):
        found.append(message)
        members.remove(child)
        if len(found) == 1:
            members += start(children, "answer")
            members[0].send(5)
    assert found == [2, 10]


def test_exit_of_a_member_is_its_last_message_and_others_continue(children):
    ending, other = members = start(children, "ends", "answer")
    found = []
    for child, message in children.listen(members):
        if isinstance(message, ChildEndedError):
            assert child is ending
            found.append(str(message))
            other.send(4)
        elif child is other:
            found.append(message)
            members.remove(other)
        else:
            assert message == "here"
    assert found == ["the process ended with exit code 7: the last line", 8]


def test_silent_member_is_stopped_and_others_continue(children):
    silent, other = members = start(children, "sleeps", "answer")
    other.send(1)
    found = {}
    for child, message in children.listen(members, patience=1.0):
        if child is other:
            time.sleep(0.1)
            other.send(1)
        else:
            members.remove(other)
            found[child] = str(message)
    assert found == {silent: "no progress for 1 s: asleep"}
    assert silent.process.poll() is not None
    assert other.process.poll() is None


def test_listen_ends_after_the_given_seconds(children):
    (child,) = members = start(children, "sleeps")
    started = time.monotonic()
    assert list(children.listen(members, seconds=0.3)) == []
    assert 0.3 <= time.monotonic() - started < 10.0
    assert child.process.poll() is None


def test_pulse_runs_while_idle_and_may_end_the_iteration(children):
    members, calls = start(children, "sleeps"), []

    def pulse():
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(children.listen(members, pulse=pulse))
    assert len(calls) == 3


def test_team_replies_are_ordered_by_rank(children):
    team = Team(children, start(children, "follows", "follows"))
    team.send("one")
    assert team.replies() == ["one", "one"]
    team.send(2)
    assert sorted(team.listen(until=int)) == [(0, 2), (1, 2)]
    assert not team.is_over
    team.stop(0.0)
    assert team.is_over


@pytest.mark.parametrize(
    ("actions", "why"),
    [
        (("reply", "break"), "process 1 of 2: ZeroDivisionError: only here"),
        (("break", "end"), "process 1 of 2: the process ended with exit code 9: killed"),
        (("end", "sleep"), "process 0 of 2: the process ended with exit code 9: killed"),
        (("end", "refuse"), "process 1 of 2: too few sentences"),
        (("refuse", "refuse"), "process 0 of 2: too few sentences"),
    ],
    ids="-".join,
)
def test_exit_of_one_member_ends_the_team_and_is_reported(children, actions, why, monkeypatch):
    monkeypatch.setattr("transformer_parity.engine.processes.team.CAUSE", 1.0)
    members = start(children, "follows", "follows")
    team = Team(children, members)
    for member, action in zip(members, actions, strict=True):
        member.send(action)
    with pytest.raises(TeamError) as error:
        team.replies()
    assert str(error.value) == why
    assert team.is_over
    assert [member.process.poll() is None for member in members] == [False, False]


def test_silent_team_is_stopped(children):
    members = start(children, "sleeps", "sleeps")
    with pytest.raises(TeamError, match=r"^process [01] of 2: no progress for 1 s: asleep$"):
        Team(children, members).replies(patience=1.0)
    assert [member.process.poll() is None for member in members] == [False, False]
