"""--goal names what matters most, and takes the recipe that serves it."""

import pytest

import kvfold
from kvfold import published
from kvfold.cli.compress import recipe_of
from kvfold.published import PUBLISHED
from kvfold.recipes import NAMES, RECIPES


@pytest.mark.parametrize(
    ("goal", "recipe"), [("speed", None), ("balanced", "lean"), ("memory", "small")]
)
def test_a_goal_takes_a_recipe(goal: str, recipe: str | None) -> None:
    assert recipe_of(goal, None) == recipe
    assert recipe is None or recipe in RECIPES


def test_published_recipes_are_listed_apart() -> None:
    assert {*PUBLISHED} < {*RECIPES}
    chosen, papers = NAMES.split("; of papers: ")
    assert papers.split(", ") == [*PUBLISHED]
    assert {*chosen.split(", "), *PUBLISHED} == {*RECIPES}
    assert kvfold.recipes.zack() == published.zack()


def test_without_a_goal_the_recipe_is_the_one_that_is_named() -> None:
    assert recipe_of(None, "zack") == "zack"
