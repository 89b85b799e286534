"""Grading: from a folder of submissions to marks, feedback and exports. `nanochat grade …` calls it.

submissions.py ── what was handed in, by whom ──> cells of exercises
key.py         ── the chapter's cases, arguments and right results, made here from a seed
session.py     ── arguments to a confined child (server.py, child.py), plain data back (wire.py)
judge.py       ── compared here, where alone the right results are ──> marks.py ──> gradebook.py
"""
