"""The figure of a scored prompt shows every token with its loss, what is scored and what was cut."""

from matplotlib.patches import Rectangle

from nanochat_lib.course.loss_figures import MAX_LINES, loss_map

PIECES = ["<|bos|>", " low", "\n", " wide", " est"]


def drawn(figure):
    ax = figure.axes[0]
    boxes = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    return boxes, [text.get_text() for text in ax.texts]


def test_tokens_losses_and_the_frame():
    boxes, words = drawn(loss_map(PIECES, [None, 1.25, 0.0, 7.0, 0.5], (3, 5), 0, "a title"))
    assert words[0] == "a title" and "0 of 5" in words[1]
    assert words[2:] == ["<|bos|>", "·low", "1.2", "↵", "0.0", "·wide", "7.0", "·est", "0.5"]
    assert [box.get_linewidth() > 0 for box in boxes] == [False, False, False, True, True]
    tints = [box.get_facecolor()[3] for box in boxes]
    assert tints[3] == max(tints) and tints[2] < tints[4] < tints[1]  # the more nats, the more colour


def test_what_was_cut_is_grey_and_has_no_loss():
    boxes, words = drawn(loss_map(PIECES, [None, None, None, 7.0, 0.5], (3, 5), 2))
    assert "2 of 5" in words[1] and [word for word in words if word[:1].isdigit()] == ["7.0", "0.5"]
    assert boxes[0].get_facecolor() == boxes[1].get_facecolor() != boxes[2].get_facecolor()


def test_of_a_long_prompt_the_end_is_shown():
    count = 40 * MAX_LINES
    boxes, words = drawn(loss_map([f" w{i}" for i in range(count)], [0.1] * count, (count - 1, count), 0))
    assert len(boxes) < count and f"{count - len(boxes)} more tokens before" in words[1]
    assert boxes[-1].get_linewidth() > 0 and f"·w{count - 1}" in words
