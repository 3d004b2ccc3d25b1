"""The units of a model: the modules whose parameters FSDP gathers and frees together.

A unit is a module, usually a block, and its parameters form one parameter group, whatever their
dtypes, trained or frozen. Parameters outside of all units belong to the root. Notebook 10_fsdp.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves, tree_map_only

from course_lib.collectives.coalesced import overwrite
from course_lib.collectives.group import group_of, member_of, sources_of
from course_lib.core.errors import CourseError
from course_lib.data_parallel.composition import check_compiled
from course_lib.data_parallel.gradients import PLAIN, tensors_within
from course_lib.fsdp.mesh import ShardingGroups
from course_lib.fsdp.mixed_precision import MixedPrecisionPolicy
from course_lib.fsdp.param_group import FoundParam, FSDPParamGroup
from course_lib.ranks.world import is_dry

Choice = Iterable[nn.Module] | Callable[[nn.Module], bool] | None


@dataclass(eq=False)
class Unit:
    """A module whose parameters, if it has any, are gathered and freed together.

    needed      backward still needs frozen parameters: they have no gradient whose hook could tell
    first_use   number of its first use among all uses since the last backward; 0 if unknown
    """

    name: str
    module: nn.Module
    param_group: FSDPParamGroup | None
    has_units: bool  # other units lie within it
    parts: list[nn.Module]  # it and the modules within it, but for those of other units
    needed: bool = False
    first_use: int = 0

    @property
    def owners(self) -> set[nn.Module]:
        """The modules within it that have its parameters."""
        found = self.param_group.found if self.param_group else []
        return {owner for one in found for _, owner, _ in one.owners} - {self.module}

    def start_gather(self) -> None:
        """Launch the all_gather, unless the unit is gathered."""
        if self.param_group is not None:
            self.param_group.start_gather()

    def wait_gather(self) -> None:
        """Wait until all parameters are gathered."""
        if self.param_group is not None:
            self.param_group.wait_gather()

    def free(self, *, keep_part: bool = False) -> None:
        """Free (reshard) all parameters; see `FSDPParamGroup.keep_part`."""
        if self.param_group is not None:
            if keep_part:
                self.param_group.keep_part()
            self.param_group.free()

    def free_if_done(self) -> None:
        """Free all parameters if every gradient is complete, and no frozen one is needed."""
        if self.param_group is not None and not self.param_group.missing and not self.needed:
            self.free()

    def complete(self) -> None:
        """Free all parameters: those that wait for a gradient get none in this backward."""
        if self.param_group is not None and self.param_group.missing:
            self.param_group.missing.clear()
            self.needed = False
            self.free_if_done()

    @property
    def has_frozen(self) -> bool:
        """Whether a parameter is frozen: it gets no gradient."""
        group = self.param_group
        return group is not None and len(group.trained) < len(group.shards)

    def free_behind(self, inputs: Any) -> Any:
        """Free frozen parameters when backward has computed the gradients of the inputs.

        The inputs become views of themselves, so that this happens before anything that waits for
        their gradients.
        """
        views: list[Tensor] = []

        def view_of(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                views.append(tensor := tensor.view_as(tensor))
            return tensor

        def done(_grads: Any) -> None:
            self.needed = False
            self.free_if_done()

        inputs = tree_map_only(Tensor, view_of, inputs)
        if views:
            register_multi_grad_hook(views, done)
        return inputs

    def check_unchanged(self) -> None:
        """Check that the shards have not changed since forward gathered them.

        Raises:  CourseError if one has
        """
        if self.param_group is not None and self.param_group.has_changed():
            raise CourseError(
                f"FSDP: need the weights of forward in backward; those of {self.name or 'the root'}"
                " have changed since. Try optimizer.step() after backward()."
            )

    def tensors_in(self, output: Any) -> list[Tensor]:
        """Return the tensors of an output: backward begins with their gradients.

        Raises:  CourseError for an object that hides them
        """
        leaves = tree_leaves(output)
        tensors = [one for leaf in leaves for one in tensors_within(leaf)]
        strange = [leaf for leaf in leaves if not isinstance(leaf, Tensor | PLAIN)]
        if strange and not tensors and self.param_group:
            raise CourseError(
                f"FSDP: need tensors, or tuples, lists and dicts of them, from "
                f"{self.name or 'the module'}; got {type(strange[0]).__name__}. "
                "Try to return a dict."
            )
        return tensors


def make_units(
    module: nn.Module, choice: Choice, groups: ShardingGroups, policy: MixedPrecisionPolicy
) -> list[Unit]:
    """Shard a module's parameters unit by unit; return the root first, then the units in order."""
    chosen = choose(module, choice)
    attempt = "torch.compile(block) for each unit: model.blocks[i] = torch.compile(model.blocks[i])"
    check_compiled(module, chosen.values(), "FSDP", attempt)
    device = _device(module)
    found = find_params(module, chosen)
    units = []
    for name, part in chosen.items():
        own = [one for one in found if one.unit == name]
        among = _groups_of(own, groups)
        param_group = FSDPParamGroup(name, own, among, policy, device) if own else None
        within = [one for one in part.modules() if one is not part and one in chosen.values()]
        inner = {one for unit in within for one in unit.modules()}
        parts = [one for one in part.modules() if one not in inner]
        units.append(Unit(name, part, param_group, bool(within), parts))
    return units


def choose(module: nn.Module, choice: Choice) -> dict[str, nn.Module]:
    """Return the modules that become units, by name; "" is the root, for all other parameters.

    Raises:  CourseError for a module that is not in the model, or without a forward of its own
    """
    named = dict(module.named_modules())
    if choice is None:
        wanted = list(_blocks(module))
    elif isinstance(choice, nn.Module) or not callable(choice):
        wanted = list(choice.children() if isinstance(choice, nn.Module) else choice)
    else:
        wanted = [part for part in named.values() if choice(part)]
    wanted += _apart(module)
    known = {part: name for name, part in named.items()}
    for part in wanted:
        has_own = type(part).forward is not nn.Module.forward or "forward" in vars(part)
        if part not in known or not has_own:
            problem = "a list of modules" if part in known else "one that is not in the model"
            raise CourseError(
                f"FSDP: need units out of model.modules(), each with a forward of its own; got "
                f"{problem} ({type(part).__name__}). Try units=list(model.blocks)."
            )
    ordered = [name for name, part in named.items() if any(part is one for one in wanted)]
    return {"": module} | {name: named[name] for name in ordered}


def find_params(module: nn.Module, chosen: dict[str, nn.Module]) -> list[FoundParam]:
    """Return every parameter once, with its unit: the innermost one around it.

    Raises:  CourseError for a parameter in two units
    """
    names = {part: name for name, part in chosen.items()}
    found: dict[Tensor, FoundParam] = {}

    def search(part: nn.Module, path: str, unit: str) -> None:
        unit = names.get(part, unit)
        for attribute, param in part._parameters.items():
            if param is None:
                continue
            one = found.setdefault(param, FoundParam(param, unit))
            one.owners.append((f"{path}{attribute}", part, attribute))
            if one.unit != unit:
                raise CourseError(
                    f"FSDP: need tied parameters in one unit; got {one.names[0]} in "
                    f"{one.unit or 'the root'} and {one.names[-1]} in {unit or 'the root'}. "
                    "Try units that leave both to the root."
                )
        for name, child in part._modules.items():  # a shared one by each of its names
            if child is not None:
                search(child, f"{path}{name}.", unit)

    search(module, "", "")
    return list(found.values())


@torch.no_grad()
def share_buffers(module: nn.Module, groups: ShardingGroups) -> None:
    """Broadcast the buffers of the first rank of all; replace meta tensors by real ones."""
    device = _device(module)
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                here = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer
                values = here.contiguous()
                for member in (groups.replicas, groups.shard):  # down the first column, then rows
                    if member is not None:
                        dist.broadcast(values, member.global_rank(0), member.group)
                overwrite(here, values)
                part._buffers[name] = here


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost members of ModuleLists: what a model calls its blocks or layers."""
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _blocks(child)


def _apart(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules all of whose parameters are averaged over a group of their own.

    Experts that are divided over ranks are such: fewer ranks hold the same ones.
    """
    params = list(module.parameters())
    if params and all(sources_of(param) for param in params):
        yield module
    elif any(sources_of(param) for param in params):
        for child in module.children():
            yield from _apart(child)


def _groups_of(found: Sequence[FoundParam], groups: ShardingGroups) -> ShardingGroups:
    """Return the groups that shard these parameters: their own one, or those of the model."""
    own = {group_of(one.param, groups.shard.group) for one in found}
    if own <= {groups.shard.group}:
        return groups
    return ShardingGroups(member_of(own.pop(), "FSDP"))


def _device(module: nn.Module) -> torch.device:
    """Return the device of the weights; if all are on meta, one the group can communicate on."""
    tensors = [*module.parameters(), *module.buffers()]
    real = [tensor.device for tensor in tensors if not tensor.is_meta]
    if is_dry():
        return torch.device("meta")
    fallback = "cuda" if torch.cuda.is_available() else "cpu"
    return real[0] if real else torch.device(fallback)
