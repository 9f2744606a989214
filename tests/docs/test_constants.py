"""docs/bounds.md says what the code says."""

import pytest

from draftconf.conformance.catalogue import constants


def test_the_page_lists_the_constants_as_they_are():
    text = constants.PAGE.read_text(encoding="utf-8")
    assert constants.page(text) == text, (
        "run python -m draftconf.conformance.catalogue.constants and say why in CHANGELOG.md"
    )


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(ValueError, match="no part between"):
        constants.page("nothing here")
