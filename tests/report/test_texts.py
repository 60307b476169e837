"""The texts of documents on the pages."""

from raypd.report import marked


def test_pages_of_a_pdf_are_apart_and_no_form_feed_is_shown():
    text = "Page one\n\fPage two\n\f"
    (before, _), (value, names), (after, _) = marked(text, [((15, 18), "Number")])
    assert (value, names) == ("two", "Number")
    assert before + value + after == "Page one\n\nPage two"
