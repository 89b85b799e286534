"""Chapter 12, the capstone: what to guess before the run knows it, and quizzes about the report."""

from __future__ import annotations

from nanochat_lib.course.cases import Option, Prediction, Quiz

EXERCISES: list = []

PREDICTIONS = [
    Prediction("capstone.p_bpb", "How many bits per byte of real text will be left after pretraining?", unit="bits"),
    Prediction("capstone.p_reward", "How many of 100 held-out sums in words are right after RL?", unit="right of 100"),
]

QUIZZES = [
    Quiz(
        "capstone.q_moved",
        "SFT lifts a score from 31 % (24 – 40) to 36 % (28 – 45), on 128 questions. What do you write?",
        [
            Option(
                "SFT added five points",
                why="The two intervals overlap in large part. Another seed, or 128 other questions, moves such a score "
                "by as much.",
            ),
            Option(
                "nothing moved that these questions could show",
                right=True,
                why="Five points are less than the noise of 128 answers. With 2,000 questions the same five points "
                "would be outside it.",
            ),
            Option(
                "SFT did nothing",
                why="That is not shown either. A true gain of ten points, or a loss of five, may look like this.",
            ),
        ],
    ),
    Quiz(
        "capstone.q_mine",
        "A run with all your functions ends with the same loss as the library's, to the last digit. Why?",
        [
            Option(
                "the run did not use them",
                why="The report would say so: it names every function that it took, and why it refused another.",
            ),
            Option(
                "they compile to the same program, and the seed is the same",
                right=True,
                why="Data order, initial weights and samples all follow from the seed. Equal programs on equal inputs "
                "give equal numbers on one machine.",
            ),
            Option(
                "training always ends in the same place",
                why="Another seed gives another loss. Look at the three seeds in the README's table.",
            ),
        ],
    ),
]
