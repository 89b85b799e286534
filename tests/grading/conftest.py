"""One small course and one open desk for all tests of grading: starting them is what costs."""

from __future__ import annotations

import grade_course
import pytest

from nanochat_lib.course import checks


@pytest.fixture(scope="session")
def course(tmp_path_factory):
    """The course's folder."""
    root, before = grade_course.write(tmp_path_factory.mktemp("course")), list(checks.__path__)
    patch = pytest.MonkeyPatch()
    patch.setenv("COURSE_HOME", str(tmp_path_factory.mktemp("home")))
    yield root
    patch.undo()
    grade_course.forget(before)


@pytest.fixture(scope="session")
def desk(course, tmp_path_factory):
    """Keys and a running fork server."""
    from nanochat_lib.course.grading import grade

    with grade.open_desk(course, tmp_path_factory.mktemp("cache"), say=lambda words: None) as found:
        yield found
