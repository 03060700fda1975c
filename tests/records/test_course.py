"""Which files of a folder are of its newest run: by the runs that they and the folder name."""

import pytest

from hf_hybrid.records.course import is_on_course, is_same_run

OLD, FIRST, SECOND = [["old", 0]], [["a", 0]], [["a", 0], ["b", 40]]


@pytest.mark.parametrize(
    ("run", "step", "newest", "expected"),
    [
        (FIRST, 60, FIRST, True),
        (OLD, 60, FIRST, False),
        (FIRST, 40, SECOND, True),  # what the run went on from
        (FIRST, 60, SECOND, False),  # what it abandoned
        (SECOND, 60, SECOND, True),
        (SECOND, 60, FIRST, False),
        (None, 60, FIRST, True),
        (FIRST, 60, None, True),
        ([], 60, FIRST, True),
        (FIRST, 60, [["a", 0], ["b", "forty"], 7, ["c"]], True),  # of a damaged file
    ],
)
def test_a_file_is_of_the_course_that_it_began_on_until_the_run_left_it(run, step, newest, expected):
    assert is_on_course(run, step, newest) is expected


def test_a_run_has_one_beginning_whatever_its_course():
    assert is_same_run(SECOND, FIRST) and not is_same_run(OLD, FIRST) and not is_same_run(None, FIRST)
