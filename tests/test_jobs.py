import json

import pytest

from nas.errors import InputError
from nas.jobs import Jobs


def test_what_is_done_is_not_done_again_and_each_process_has_its_share(tmp_path):
    done = []
    for _ in range(2):
        jobs = Jobs(tmp_path / "out", ["train.steps=3"], "alone-*,other")
        assert jobs.do("alone-ad-1", lambda: done.append(1) or {"nll": 2.0}) == {"nll": 2.0}
        assert jobs.do("search-x-1", lambda: done.append(2) or {}) is None
    assert done == [1] and json.loads((tmp_path / "out" / "alone-ad-1.json").read_text()) == {"nll": 2.0}
    assert Jobs(tmp_path / "out", ["train.steps=3"]).do("search-x-1", lambda: {"a": 1}) == {"a": 1}


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
