"""The shared vocabulary of passes: description and order."""

from __future__ import annotations

from torchq.graph import PassInfo, describe_pass, run_to_fixpoint


def halve(numbers: list[int]) -> bool:
    """Halve the even numbers.

    More words.

    Before::

        2n
          and more

    After::

        n

    Args:
        numbers: changed in place.
    """
    changed = any(n and n % 2 == 0 for n in numbers)
    numbers[:] = [n if n % 2 else n // 2 for n in numbers]
    return changed


def drop_zeros(numbers: list[int]) -> bool:
    """Drop zeros."""
    changed = 0 in numbers
    numbers[:] = [n for n in numbers if n]
    return changed


def double(numbers: list[int]) -> bool:
    """Double the numbers.

    Before: numbers of
    any kind. After: ``2 * n`` of each.

    Args:
        numbers: changed in place.
    """
    numbers[:] = [2 * n for n in numbers]
    return True


def test_a_pass_is_described_by_its_docstring() -> None:
    described = describe_pass(double)
    assert (described.before, described.after) == ("numbers of any kind.", "``2 * n`` of each.")
    expected = PassInfo("halve", "Halve the even numbers.", "2n\n  and more", "n")
    assert describe_pass(halve) == expected
    assert describe_pass(drop_zeros) == PassInfo("drop_zeros", "Drop zeros.", "", "")


def test_the_first_pass_is_tried_again_after_every_change() -> None:
    numbers, log = [8, 0, 3], list[str]()

    def apply(rewrite: object) -> bool:
        assert callable(rewrite)
        log.append(rewrite.__name__)
        return bool(rewrite(numbers))

    run_to_fixpoint([drop_zeros, halve], apply)
    assert numbers == [1, 3]
    assert log == ["drop_zeros", *["drop_zeros", "halve"] * 4]
