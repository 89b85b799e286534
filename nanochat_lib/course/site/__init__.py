"""The course as a read-only site and as slides, from executed chapters: `nanochat course site` and `course slides`.

    solutions/*.py ─ build ─> notebooks ─ executed.py ─> outputs, kept by hash ─┬─ pages.py, book.py ─> HTML pages
                                                                                └─ slides.py ─────────> slides
    verify.py looks through what came out: links, alternative text, nothing from other hosts, no answer for learners

Learners' and instructors' pages lie in folders of their own. Neither making nor reading them needs a network.
"""
