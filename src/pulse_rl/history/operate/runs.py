"""Which store the directory of a run stands for, as the recipe in it says."""

import tomllib
from pathlib import Path

RECIPE = "recipe.toml"  # in the directory of a run


def store_of_run(directory: Path) -> str:
    """The path or URL of the store of a run's only policy.

    Raises ValueError for a run of several policies, which has a store for each, and for a recipe that is broken.
    """
    try:
        recipe = tomllib.loads((directory / RECIPE).read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{directory / RECIPE}: expected TOML: {error}") from None
    store = str(recipe.get("store", directory / "store"))
    if len(names := list(recipe.get("policies", {}))) > 1:
        stores = ", ".join(f"{store.rstrip('/')}/{name}" for name in names)
        raise ValueError(f"{directory}: the run has a store for each of its policies: expected one of {stores}")
    return store
