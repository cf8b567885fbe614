"""Many calls in several processes: in order, equal to one process, and errors come through."""

from __future__ import annotations

import os

import pytest
from memplan.planner.compare import at_once as module
from memplan.planner.compare.at_once import at_once


def where(number):
    return number, os.getpid()


@pytest.fixture
def cores(monkeypatch):
    monkeypatch.setattr(module.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(module.sys, "platform", "linux")


def test_many_calls_are_divided_and_come_back_in_order(cores):
    found = at_once(where, [(n,) for n in range(40)])
    assert [number for number, _ in found] == list(range(40))
    assert os.getpid() not in {process for _, process in found}


def test_a_few_calls_stay_here(cores):
    assert {process for _, process in at_once(where, [(n,) for n in range(5)])} == {os.getpid()}


def test_elsewhere_than_on_linux_they_stay_here(cores, monkeypatch):
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert {process for _, process in at_once(where, [(n,) for n in range(40)])} == {os.getpid()}


def test_arguments_need_not_be_sent(cores):
    assert at_once(lambda function: function(), [((lambda n=n: n * n),) for n in range(30)]) == [n * n for n in range(30)]


def test_an_error_comes_through_and_nothing_is_left(cores):
    with pytest.raises(ZeroDivisionError):
        at_once(lambda n: 1 // n, [(n,) for n in range(30)])
    assert module._work is None
