"""The comparison that the documents rest on says no where it should."""

import pytest

from tests.printed import differences

SHOWN = """
FP32: 99.3%
name   error    amax
-----  -------  ----
a.b    2e-16    1.25
1.5 dB  ####
"""


@pytest.mark.parametrize(
    "printed",
    [
        SHOWN,
        SHOWN.replace("2e-16", "7e-17"),
        SHOWN.replace("1.25", "1.31"),
        SHOWN.replace("####", "#####"),
    ],
)
def test_the_output_of_another_machine_agrees(printed: str) -> None:
    assert differences(SHOWN, printed) == []


@pytest.mark.parametrize(
    "printed",
    [
        "",
        SHOWN + "one more line\n",
        SHOWN.replace("a.b", "a.c"),
        SHOWN.replace("99.3", "79.3"),
        SHOWN.replace("####", "----"),
    ],
)
def test_another_output_is_seen(printed: str) -> None:
    assert differences(SHOWN, printed) != []


def test_dots_stand_for_any_words_and_the_caller_may_allow_more() -> None:
    assert differences("took ... seconds", "took about 3 or 4 seconds") == []
    assert differences("took ... seconds", "took about 3 or 4 minutes") != []
    assert differences("80%", "68%", 0.25) == [] != differences("80%", "58%", 0.25)
