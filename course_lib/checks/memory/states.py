"""Exercise 2 of 01_memory: the bytes of parameters, gradients and optimizer state."""

from dataclasses import replace
from random import Random

from course_lib.checks.cases import TOO_NARROW, Case, Cases, whole
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.core.recipes import RECIPES, Recipe

# powers of 3, so that a sum tells which size is missing, or is in it twice
ODD = Recipe(
    name="a made-up recipe",
    weight_bytes=1,
    grad_bytes=3,
    accumulator_bytes=9,
    master_bytes=27,
    moment_bytes=81,
    activation_bytes=243,
)


ODD_NUMBERS = (15, 30, 60, 63, 8_030_261_249)  # in billions, as a float, they have no last digit


def _cases() -> list[Case]:
    odd: tuple[tuple[str, dict[str, int]], ...] = (
        (ODD.name, {}),
        ("a made-up recipe without a master copy", {"master_bytes": 0}),
        ("a made-up recipe with weights of 4 bytes", {"weight_bytes": 4}),
        ("a made-up recipe with one moment", {"num_moments": 1}),
        ("a made-up recipe without moments", {"num_moments": 0}),
        ("a made-up recipe with three moments", {"num_moments": 3}),
        ("a made-up recipe with moments of 0 bytes", {"moment_bytes": 0}),
        ("a made-up recipe with moments of 1 byte", {"weight_bytes": 4, "moment_bytes": 1}),
        ("a made-up recipe that keeps no gradients", {"grad_bytes": 0}),
        ("a made-up recipe that keeps no weights", {"weight_bytes": 0}),
        ("own", {"grad_bytes": 5}),
        ("own", {"grad_bytes": 7}),
    )
    recipes = *(replace(ODD, name=name, **sizes) for name, sizes in odd), *RECIPES.values()
    pairs = [(number, recipe) for recipe in recipes for number in (1, 1000)]
    return [
        (f"{number:,} parameter{'s' if number > 1 else ''} in {recipe.name}", (number, recipe))
        for number, recipe in (*pairs, *((number, RECIPES["bf16"]) for number in ODD_NUMBERS))
    ]


def _drawn(random: Random) -> list[Case]:
    numbers = [random.randint(2, 10**6) for _ in range(3)]
    return [(f"{number:,} parameters in {ODD.name}", (number, ODD)) for number in numbers]


GRADS, MOMENTS = "+ recipe.grad_bytes", "recipe.num_moments * recipe.moment_bytes"
ACCUMULATOR, TOTAL = "+ recipe.accumulator_bytes", "num_params * (weights_and_grads + adam)"
ONE_MOMENT = Cause("Adam has a second moment: moment_bytes counts num_moments times.")
NO_MOMENTS = Cause("Adam's moments are missing.")
TWO_MOMENTS = Cause("Not every optimizer has two moments: look at num_moments.")
IN_FP32 = Cause("Moments need not be in fp32: each has moment_bytes.")
NO_ACCUMULATOR = Cause("The fp32 gradient accumulator is missing.")
NO_COPY = Cause("The fp32 master copy is missing.")
NO_MASTER = Cause("Without a master copy there may still be an accumulator and moments.")
SIXTEEN = Cause("16 is one recipe: add up the sizes of the one you are given.")
NO_WEIGHTS = Cause("The weights are missing.")
NO_GRADS = Cause("The gradients are missing.")
AS_THEY_ARE = Cause("A size may be 0 or small: take each of the recipe's sizes as it is.")
ONE_PARAMETER = Cause("That is one parameter: there are num_params of them.")
CUT_OFF = Cause("A float has 16 digits, and int() cuts off: multiply whole numbers, to the end.")

STATES = Exercise(
    key="memory-2",
    title="model states",
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=whole,
        rtol=0.0,
        unit=" bytes",
        look="Add up its sizes: which is missing, or there twice? Moments count num_moments times.",
        success="8, 16 and 20 bytes a parameter, and whatever else a recipe says.",
    ),
    wrong=(
        Edit("recipe.num_moments *", "", ONE_MOMENT),
        Edit(f" + {MOMENTS}", "", NO_MOMENTS),
        Edit("recipe.num_moments", "2", TWO_MOMENTS),
        Edit("recipe.moment_bytes", "4", IN_FP32),
        Edit(ACCUMULATOR, "", NO_ACCUMULATOR),
        Edit("recipe.master_bytes + ", "", NO_COPY),
        Edit(MOMENTS, f"(recipe.master_bytes and {MOMENTS})", NO_MASTER),
        Edit(TOTAL, "num_params * 16", SIXTEEN),
        Edit("recipe.weight_bytes +", "", NO_WEIGHTS),
        Edit(f" {GRADS}", "", NO_GRADS),
        Edit("recipe.moment_bytes", "(recipe.moment_bytes or 4)", AS_THEY_ARE),
        Edit(TOTAL, "weights_and_grads + adam", ONE_PARAMETER),
        Edit(TOTAL, "int(num_params / 1e9 * (weights_and_grads + adam) * 1e9)", CUT_OFF),
        Edit(TOTAL, f"int(torch.tensor([{TOTAL}], dtype=torch.float32))", TOO_NARROW),
    ),
)
