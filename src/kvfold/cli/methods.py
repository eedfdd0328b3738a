"""The methods that `kvfold compare` measures: those of --methods, or every recipe at every share.

A method is written like a command line, with a recipe, a size and options of the cache, such as
`zdc .5 --evict h2o --keep-tokens .5`; or it is a name below.
"""

import shlex
from dataclasses import replace
from typing import Any

from cyclopts import App, CycloptsError, UnusedCliTokensError

from kvfold.cli.options import STORAGE, Storage, flag, parse_levels, parse_list
from kvfold.cli.settings import VerbatimError
from kvfold.compression.planning.target import Target, check_align
from kvfold.config import Prefer
from kvfold.evaluation.comparison import Method
from kvfold.recipes import get
from kvfold.utils.errors import SettingError

PUBLISHED = {  # as published, alone or with a recipe, at about a quarter of the cache
    "int8": "--bits 8",
    "int4": "--bits 4",
    "KIVI 4 bits": "--bits 4 --format kivi",
    "KIVI 2 bits": "--bits 2 --format kivi",
    "KVQuant 4 bits": "kvquant --bits 4 --format kvquant",
    "KVQuant 3 bits": "kvquant --bits 3 --format kvquant",
    "KVQuant 2 bits": "kvquant --bits 2 --format kvquant",
    "GEAR 4 bits": "--bits 4 --format gear",
    "GEAR 2 bits": "--bits 2 --format gear",
    "GEAR 2 bits, pages of 256": "--bits 2 --format gear --page 256 --residual 256",
    "Keyformer": "--evict keyformer --keep-tokens .25 --page 16",
    "H2O": "--evict h2o --keep-tokens .25 --page 16",
    "KV-Compress": "--evict kv-compress --keep-tokens .25 --page 16",
    "ZACK": "zack .25",
    "Keyformer-Z": "zack .5 --evict keyformer --keep-tokens .5 --page 16",
    "KVQuant-Z 4 bits": "kvquant-z .5 --bits 4 --format kvquant",
    "KVQuant-Z 3 bits": "kvquant-z .5 --bits 3 --format kvquant",
    "KVQuant-Z 2 bits": "kvquant-z .5 --bits 2 --format kvquant",
    "ZDC": "zdc .25",
    "H2O-ZDC": "zdc .5 --evict h2o --keep-tokens .5 --page 16",
    "GEAR-ZDC 4 bits": "zdc .5 --bits 4 --format gear",
    "GEAR-ZDC 2 bits": "zdc .5 --bits 2 --format gear",
}
OURS = [f"swift {factor}x" for factor in (3, 4, 5, 6)]
OURS += [f"{recipe} {factor}x" for recipe in ("lean", "small") for factor in (4, 6)]
SETS = {"ours": OURS, "published": [*PUBLISHED], "papers": [*OURS, *PUBLISHED]}


StoredMethod = tuple[Method, Storage]


def by_recipe(recipes: str, keep: str, align: int | None, storage: Storage) -> list[StoredMethod]:
    """Every recipe at every share. Raises ValueError for unknown recipes and illegal shares."""
    names = parse_list(recipes, "--recipes", str)
    targets = [Target(keep=share) for share in parse_list(keep, "--keep", float)]
    check_align(align)
    return [
        (Method(name=recipe.name, recipe=recipe, target=target, align=align), storage)
        for recipe in map(get, names)
        for target in targets
    ]


def read(text: str) -> list[StoredMethod]:
    """The methods of a text, separated by semicolons: names of SETS or PUBLISHED, or written out.
    All use the paged cache. Raises SettingError for a method that is neither."""
    parts = [part.strip() for part in text.split(";") if part.strip()]
    names = dict.fromkeys(name for part in parts for name in SETS.get(part, [part]))
    if not names:
        raise SettingError(f"`methods`: {text!r} names none; separate methods by semicolons")
    return [_read(name) for name in names]


def written(name: str) -> str:
    """The options that a name stands for."""
    return PUBLISHED.get(name, name)


def _read(name: str) -> StoredMethod:
    reader = App(help_flags=(), version_flags=())

    @reader.default
    def method_of(
        recipe: str | None = None,
        size: str | None = None,
        /,
        *,
        levels: str | None = None,
        prefer: Prefer | None = None,
        align: int | None = None,
        storage: Storage = STORAGE,
    ) -> StoredMethod:
        target = _target(size, levels=parse_levels(levels), prefer=prefer)
        target.check_align(align)
        known = None if recipe is None else get(recipe)
        return Method(name=name, recipe=known, target=target, align=align), storage

    try:
        method, storage = reader(
            shlex.split(written(name)),
            exit_on_error=False,
            print_error=False,
            result_action="return_value",
        )
        return method, replace(storage, paged=True)
    except (CycloptsError, ValueError) as error:
        raise VerbatimError(f"`methods`: {name!r}: {_said(error)}") from None


def _target(size: str | None, **how: Any) -> Target:
    """The size of a method: `4x`, a factor in dimensions and bits, or `.25`, a share of the
    dimensions."""
    text = "1" if size is None else size
    try:
        number = float(text.removesuffix("x"))
    except ValueError:
        raise SettingError(f"a size is written like 4x or .25, not {size!r}") from None
    return Target(factor=number, **how) if text.endswith("x") else Target(keep=number, **how)


def _said(error: Exception) -> str:
    if isinstance(error, SettingError):
        return error.with_names(flag)
    if isinstance(error, UnusedCliTokensError):
        return (
            "not a recipe, a size and options, and none of the names"
            f" {', '.join([*SETS, *PUBLISHED])}"
        )
    return str(error)
