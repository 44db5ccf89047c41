import json
from dataclasses import replace

import pytest

from nas.core.errors import InputError
from nas.jobs.engines import LocalEngine
from nas.jobs.tasks import Task, run_tasks
from tests.making import load_script

Jobs = load_script("jobs").Jobs


def test_a_finished_job_is_not_repeated(tmp_path):
    done = []
    for _ in range(2):
        jobs = Jobs(tmp_path / "out", ["train.steps=3"])
        assert jobs.do("alone-ad-1", lambda: done.append(1) or {"nll": 2.0}) == {"nll": 2.0}
    assert done == [1] and json.loads((tmp_path / "out" / "alone-ad-1.json").read_text()) == {"nll": 2.0}


def test_a_job_that_fails_leaves_nothing_behind(tmp_path):
    jobs = Jobs(tmp_path, [])
    with pytest.raises(ZeroDivisionError):
        jobs.do("x", lambda: {"a": 1 / 0})
    assert jobs.get("x") is None


def test_results_of_other_settings_are_not_mixed(tmp_path):
    Jobs(tmp_path, ["b=2", "a=1"])
    Jobs(tmp_path, ["a=1", "b=2"])
    with pytest.raises(InputError, match="holds results with a=1 b=2, not with a=1;"):
        Jobs(tmp_path, ["a=1"])


@pytest.fixture
def task(tmp_path):
    def make(name: str, code: str) -> Task:
        code = f"import os, pathlib, sys, time; result = pathlib.Path({str(tmp_path / name)!r}); {code}"
        (script := tmp_path / f"{name}.py").write_text(code)
        return Task(name, [str(script)], tmp_path / name, tmp_path / "logs" / f"{name}.txt")

    return make


@pytest.mark.slow
def test_finished_tasks_are_skipped_and_a_failure_does_not_stop_the_others(task, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "done").write_text("before")
    tasks = [
        task("done", "result.write_text('again')"),
        task("bad", "print('some words'); print('what is wrong', file=sys.stderr); sys.exit(3)"),
        task("silent", "sys.exit(4)"),
        task("good", "result.touch()"),
        task("idle", "print('nothing to do')"),
    ]
    tasks[2].log.parent.mkdir()
    tasks[2].log.write_text("output of an earlier call\n")
    failed = run_tasks(tasks, LocalEngine([None]))
    assert failed.pop("idle") == f"it did not write {tmp_path / 'idle'}"
    assert failed == {"bad": "what is wrong", "silent": "exit status 4"}
    assert tasks[2].log.read_text() == "output of an earlier call\n"
    assert (tmp_path / "done").read_text() == "before"
    said = capfd.readouterr().out.splitlines()
    assert len(said) == 4 and said[0].startswith("[1/4] bad FAILED: what is wrong") and "good finished" in said[2]


@pytest.mark.slow
def test_a_task_that_dies_goes_on_and_one_that_always_dies_is_given_up(task, capsys):
    """The second call of the first task sees what the first one left, and has --resume."""
    die = "os.kill(os.getpid(), 9)"
    once = task(
        "once", f"again = '--resume' in sys.argv; run = result.parent; result.write_text('x') if again else {die}"
    )
    once = replace(once, run=once.result.parent)
    (once.run / "config.yaml").touch()
    always = task("always", f"print('nearly done', flush=True); {die}")
    calls = task("calls", "(result.parent / f'call-{time.time()}').touch(); " + die)
    failed = run_tasks([once, always, calls], LocalEngine([None]))
    assert once.result.exists() and failed["always"] == "it died 3 times; its last line: nearly done"
    assert len([*calls.result.parent.glob("call-*")]) == 3
    assert capsys.readouterr().out.count("NOTICE: always died; it goes on from its last checkpoint") == 2


@pytest.mark.slow
def test_tasks_run_in_parallel(task, tmp_path):
    """Each task waits until the other has begun, so they can only finish in parallel."""
    meet = "result.with_suffix('.begun').touch(); [time.sleep(0.02) for _ in range(1000) if not other.exists()]; "
    meet += "result.touch() if other.exists() else sys.exit(1)"
    pair = [
        task(name, f"other = pathlib.Path({str(tmp_path / other)!r}).with_suffix('.begun'); {meet}")
        for name, other in (("one", "two"), ("two", "one"))
    ]
    assert run_tasks(pair, LocalEngine([None] * 2)) == {}


@pytest.mark.slow
def test_at_most_the_given_number_of_tasks_run_at_a_time(task, tmp_path):
    """Each task counts the tasks that run at the same time."""
    count = "begun = result.with_suffix('.begun'); begun.touch(); time.sleep(0.3); "
    count += "result.write_text(str(len(list(result.parent.glob('*.begun'))))); begun.unlink()"
    assert run_tasks([task(f"t{number}", count) for number in range(5)], LocalEngine([None] * 2)) == {}
    assert max(int((tmp_path / f"t{number}").read_text()) for number in range(5)) == 2


@pytest.mark.slow
def test_each_worker_has_a_gpu_of_its_own(task, tmp_path, monkeypatch):
    """A task fails if its GPU is in use. Without GPUs the environment stays."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "as before")
    tell = "gpu = os.environ['CUDA_VISIBLE_DEVICES']; result.write_text(gpu); "
    alone = "used = result.with_name('used-' + gpu); used.mkdir(); time.sleep(0.3 + 0.3 * ('0' in result.name)); "
    tasks = [task(f"t{number}", tell + alone + "used.rmdir()") for number in range(6)]
    assert run_tasks(tasks, LocalEngine(["7", "GPU-ab"])) == {}
    assert {task.result.read_text() for task in tasks} == {"7", "GPU-ab"}
    cpu = task("cpu", tell)
    assert run_tasks([cpu], LocalEngine([None])) == {} and cpu.result.read_text() == "as before"
