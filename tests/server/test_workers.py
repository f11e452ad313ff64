"""The worker pool behind grpcio's sync server."""

from __future__ import annotations

import logging
import threading
import time

from embedserve.server.frontend.workers import Workers


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_everything_submitted_runs_once_on_no_more_threads_than_allowed():
    workers, ran, names = Workers(3, "w"), [], set()

    def work(number):
        ran.append(number)
        names.add(threading.current_thread().name)

    for number in range(1000):
        workers.submit(work, number)
    workers.shutdown()
    assert sorted(ran) == list(range(1000))
    assert names <= {"w_0", "w_1", "w_2"}


def test_one_thread_keeps_the_order():
    workers, ran = Workers(1, "w"), []
    for number in range(100):
        workers.submit(ran.append, number)
    workers.shutdown()
    assert ran == list(range(100))


def test_a_waiting_call_holds_up_no_other_while_threads_are_left():
    workers, gate, done = Workers(2, "w"), threading.Event(), threading.Event()
    workers.submit(gate.wait)
    workers.submit(done.set)
    assert done.wait(10)
    gate.set()
    workers.shutdown()


def test_threads_are_made_only_when_all_are_busy():
    workers, done = Workers(50, "w"), []
    before = threading.active_count()
    for number in range(20):
        task = workers.submit(lambda: None)
        task.add_done_callback(done.append)
        wait_for(lambda number=number: len(done) > number)
    assert threading.active_count() == before + 1
    workers.shutdown()
    assert threading.active_count() == before


def test_callbacks_run_once_whether_added_before_or_after_the_end():
    workers, gate, calls = Workers(1, "w"), threading.Event(), []
    task = workers.submit(gate.wait)
    task.add_done_callback(lambda _: calls.append("before"))
    gate.set()
    wait_for(lambda: calls)
    task.add_done_callback(lambda _: calls.append("after"))
    workers.shutdown()
    assert calls == ["before", "after"]


def test_a_call_that_raises_is_logged_and_costs_no_worker(caplog):
    workers, ran = Workers(1, "w"), []
    with caplog.at_level(logging.ERROR):
        workers.submit(lambda: 1 / 0)
        workers.submit(ran.append, 1)
        workers.shutdown()
    assert ran == [1] and "ZeroDivisionError" in caplog.text


def test_what_a_call_held_is_let_go_when_it_ends():
    import weakref

    class Request:
        pass

    workers, request, done = Workers(1, "w"), Request(), threading.Event()
    gone = weakref.ref(request)
    workers.submit(id, request)
    workers.submit(done.set)
    del request
    assert done.wait(10)
    assert gone() is None
    workers.shutdown()
