"""Precision recipes: bytes per parameter for weights, gradients and optimizer state."""

from dataclasses import dataclass

from course_lib.core.errors import CourseError


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Bytes per parameter, by purpose. Adam keeps two moments.

    master_bytes        the fp32 copy that the optimizer updates; 0 where the weights are fp32
    accumulator_bytes   an fp32 sum of the gradients, in addition to those that backward computes
    activation_bytes    per element of an activation

    Raises: CourseError for a number of bytes that is no whole number of 0 or more
    """

    name: str = "own"
    weight_bytes: int
    grad_bytes: int
    accumulator_bytes: int = 0
    master_bytes: int = 0
    moment_bytes: int = 4
    num_moments: int = 2
    activation_bytes: int = 2

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            size = getattr(self, name)
            if name != "name" and (not isinstance(size, int) or size < 0):
                raise CourseError(
                    f"recipe {self.name}: need {name} as a whole number of 0 or more; got {size!r}."
                )

    @property
    def optim_bytes(self) -> int:
        """Bytes of one parameter's optimizer state: master copy and moments."""
        return self.master_bytes + self.num_moments * self.moment_bytes


FP32 = Recipe(name="fp32", weight_bytes=4, grad_bytes=4, activation_bytes=4)
# Rajbhandari et al. 2020 (ZeRO), section 3.1: 2 + 2 + 12
BF16 = Recipe(name="bf16", weight_bytes=2, grad_bytes=2, master_bytes=4)
# gradients summed over micro-batches in fp32: with bf16 ones in addition, or without
BF16_ACCUMULATED = Recipe(
    name="bf16+fp32-accumulator",
    weight_bytes=2,
    grad_bytes=2,
    accumulator_bytes=4,
    master_bytes=4,
)
BF16_FP32_GRADS = Recipe(name="bf16+fp32-grads", weight_bytes=2, grad_bytes=4, master_bytes=4)
# everything in bf16, no master copy: small updates are rounded away (lesson 03)
PURE_BF16 = Recipe(name="pure-bf16", weight_bytes=2, grad_bytes=2, moment_bytes=2)

RECIPES = {
    recipe.name: recipe for recipe in (BF16, BF16_ACCUMULATED, BF16_FP32_GRADS, FP32, PURE_BF16)
}


def find_recipe(name: str | Recipe) -> Recipe:
    """Return the recipe of that name; a recipe is returned as it is.

    Raises: CourseError that names all recipes
    """
    if isinstance(name, Recipe):
        return name
    if name not in RECIPES:
        raise CourseError(f"recipe: need one of {', '.join(RECIPES)}; got {name!r}.")
    return RECIPES[name]
