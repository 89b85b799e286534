"""One module a chapter: public checks, hints, quizzes, predictions. Learners have them; no answer stands here."""
