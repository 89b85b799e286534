"""What a learner reads: marks in a course's texts, guesses in words, what a brief row of a check still says."""

from nanochat_lib.course import predicting
from nanochat_lib.course.cases import Prediction
from nanochat_lib.course.result import FAILED, Row
from nanochat_lib.course.showing import words_html


def test_marks_in_texts():
    assert words_html("the *mean* of `a*b*c` and **all**, 2*3*4") == (
        "the <i>mean</i> of <code>a*b*c</code> and <b>all</b>, 2*3*4"
    )
    assert words_html("<b> & *x < y*") == "&lt;b&gt; &amp; <i>x &lt; y</i>"


def test_a_guess_in_words_keeps_its_own_unit(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    data = Prediction("a.p", "How long?", unit="minutes")
    assert predicting.keep(data, "2.5 hours") == "Your guess: 2.5 hours"
    assert predicting.keep(data, predicting.read_guess("2.5 minutes", "minutes")) == "Your guess: 2.5 minutes"


def test_a_brief_row_says_what_was_raised():
    row = Row("nothing", "example", FAILED, "f(0)", "1", "ZeroDivisionError: division by zero", "raised at: 1 / n")
    assert ("got", "ZeroDivisionError: division by zero") in row.details(brief=True)
    other = Row("other", "example", FAILED, "f(1)", "1", "2", "at [0]")
    assert [label for label, _ in other.details(brief=True)] == ["difference"]
