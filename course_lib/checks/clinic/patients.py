"""Exercises 1 to 4 of 17_clinic: padded documents, DDP, FSDP with clipping, experts."""

from course_lib.checks.clinic.patient import KIND, PARAMETER, PHASE, RETURN, STEP, Patient
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise

SUCCESS = "The diagnosis is that of the instruments; the mended runs are those of one process."

PADDING = Cause("Padding counts for nothing in the loss: a share is one of tokens, not of places.")
WHOLE = Cause(
    "A share is the part's number of tokens divided by that of the whole batch, which the second "
    "argument has: then the shares of all micro-batches add up to 1."
)
PADDED = Exercise(
    key="clinic-1",
    title="unequal micro-batches",
    check=Patient(case="unequal micro-batches", twin={"global_batch": 12}, success=SUCCESS),
    wrong=(
        Edit("(part != IGNORED).sum()", "part.numel()", WHOLE),
        Edit("int((part != IGNORED).sum()) / int((whole != IGNORED).sum())",
             "part.numel() / whole.numel()", PADDING),
        Edit("int((part != IGNORED).sum()) / int((whole != IGNORED).sum())",
             "len(part) / len(whole)", PADDING),
        Edit("int((part != IGNORED).sum()) / int((whole != IGNORED).sum())",
             "int((part != 0).sum()) / int((whole != 0).sum())", PADDING),
        Edit("/ int((whole != IGNORED).sum())", "/ part.numel()", WHOLE),
        Edit('0, "gradient"', '1, "gradient"', STEP),
        Edit('"gradient", "embedding.weight"', '"parameter", "embedding.weight"', PHASE),
        Edit('"embedding.weight"', '"positions.weight"', PARAMETER),
        Edit('"another gradient"', '"not summed"', KIND),
        Edit("), share", "), share(IGNORED, IGNORED)", RETURN,
             also=(("return int((part", "return part == whole or int((part"),)),
    ),
)  # fmt: skip

LAST = Cause(
    "The all-reduce of DDP belongs to the backward of the last micro-batch: before it, gradients "
    "only accumulate on each rank."
)
COUNTED = Cause("The number of micro-batches is not always the same: the last is len(shares) - 1.")
NEVER = Cause("Inside no_sync, DDP sends nothing: one backward has to be outside.")
WEIGHTED = Cause("A micro-batch's loss counts with its share, or gradients add up to a sum.")
SYNCED = Exercise(
    key="clinic-2",
    title="the first and the last",
    check=Patient(
        case="the first and the last",
        twin={"global_batch": 12},
        padded=True,
        success=SUCCESS,
    ),
    wrong=(
        Edit("index == len(shares) - 1", "index % len(shares) == 0", LAST),
        Edit("index == len(shares) - 1", "index == 1", COUNTED),
        Edit("index == len(shares) - 1", "index == len(shares)", NEVER),
        Edit("loss_fn(wrapped.model(inputs), targets) * share",
             "loss_fn(wrapped.model(inputs), targets)", WEIGHTED),
        Edit('"gradient"', '"parameter"', PHASE),
        Edit('"not averaged"', '"not summed"', KIND),
    ),
)  # fmt: skip

SHARDS = Cause(
    "With FSDP each rank has the gradients of its own shards, so the squares have to be added over "
    "the ranks that share them: the data-parallel ones, in the group mesh.copies."
)
MEASURED = Cause("The norm to compare with max_norm is that of all shards, not a guess from one.")
CLIPPED = Exercise(
    key="clinic-3",
    title="its own ruler",
    check=Patient(case="its own ruler", success=SUCCESS),
    wrong=(
        Edit("[*groups, mesh.copies]", "groups", SHARDS),
        Edit("max_norm,\n", "max_norm / len(dist.get_process_group_ranks(mesh.copies)) ** 0.5,\n",
             MEASURED, also=(("[*groups, mesh.copies]", "groups"),)),
        Edit("max_norm,\n", "max_norm / len(dist.get_process_group_ranks(mesh.copies)),\n",
             MEASURED, also=(("[*groups, mesh.copies]", "groups"),)),
        Edit('"parameter"', '"gradient"', PHASE),
        Edit('"right"', '"a multiple"', KIND),
    ),
)  # fmt: skip

FORWARD = Cause("In forward the values stay as they are: only backward multiplies.")
INVERSE = Cause("Backward multiplies the gradient by the factor; it does not divide by it.")
NOTHING = Cause("Backward leaves the gradient as it is: multiply it by the factor.")
CUT = Cause("The gradient ends at detach(): something has to carry it on to x.")
SCALED = "x.detach() + factor * (x - x.detach())"
EXPERTS = Exercise(
    key="clinic-4",
    title="the experts' share",
    check=Patient(case="the experts' share", success=SUCCESS),
    wrong=(
        Edit(SCALED, "x", NOTHING),
        Edit(SCALED, "factor * x", FORWARD),
        Edit(SCALED, "x.detach() + (x - x.detach()) / factor", INVERSE),
        Edit(SCALED, "x.detach()", CUT),
        Edit('"a multiple"', '"not summed"', KIND),
        Edit('"blocks.0.mlp.experts.0.up.weight"', '"blocks.0.mlp.experts.0.out.weight"',
             PARAMETER),
    ),
)  # fmt: skip

PATIENTS = (PADDED, SYNCED, CLIPPED, EXPERTS)
