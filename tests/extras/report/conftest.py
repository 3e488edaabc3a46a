"""What tests of a run's books share."""

import pytest


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages whose figures are made and not drawn, which takes a second: for tests of words and sections."""
    monkeypatch.setattr("fedsync.extras.report.report_page.to_svg", lambda figure: '<svg viewBox="0 0 1 1"></svg>')
