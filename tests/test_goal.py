"""--goal names what matters most, and takes the recipe that serves it."""

import pytest

from kvfold.cli.compress import recipe_of
from kvfold.recipes import RECIPES


@pytest.mark.parametrize(
    ("goal", "recipe"), [("speed", None), ("balanced", "lean"), ("memory", "small")]
)
def test_a_goal_takes_a_recipe(goal: str, recipe: str | None) -> None:
    assert recipe_of(goal, None) == recipe
    assert recipe is None or recipe in RECIPES


def test_without_a_goal_the_recipe_is_the_one_that_is_named() -> None:
    assert recipe_of(None, "zack") == "zack"
