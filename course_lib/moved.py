"""Old import paths: modules and names that have moved say where they are now.

`import course_lib` puts `MovedFinder` last on Python's list of finders. It is asked only when an
import below course_lib would fail anyway, and answers with the new import instead of "No module
named ...". `course update` rewrites the imports in a learner's notebooks from the same table.
"""

import functools
import sys
from types import FrameType

HERE = "course_lib"
MACHINERY = ("importlib", "_frozen_importlib")
# new module < old modules, and single names as old_module:name or old_module:name=new_name
TABLE = """
core.parallelism < core.degrees core.degrees:Degrees=Parallelism
cost.network < cost.network:Group=RankGroup
cost.packing < cost.overlap:fill_buckets
cost.traffic < cost.tensor_traffic:Collective=CollectiveCall cost.tensor_traffic:sent_bytes
    cost.tensor_traffic:traffic_s
models.emulated < overlap_lab:EmulatedLayer overlap_lab:emulated_loss overlap_lab:emulated_model
ranks.timing < turns overlap_lab:Build overlap_lab:LossOf overlap_lab:Measured
    overlap_lab:in_turns=record_interleaved turns:in_turns=time_interleaved
    turns:talking_s=communication_s parameter_server:LossOf
collectives.coalesced < buckets:STATE_BYTES buckets:broadcast_together buckets:group_alike
collectives.collectives < collectives:SMALL_BYTES
collectives.group < point_to_point point_to_point:Place=GroupMember
    point_to_point:place_in=member_of
collectives.messages < cost.messages display:Message display.frames:Message
collectives.ring < ring
collectives.tree < tree
display.gpu_links < display.links
display.labels < display.glyphs
display.lanes < display.lanes:Place=Slot
display.paired_bars < display.beside display.beside:beside=paired_bars
display.show < display.live
memory.calculator < calculator
memory.estimators < estimators
memory.explorer < display.accounting
memory.formulas < memory:by_part
memory.layer_bytes < cost.layer_bytes
memory.saved_tensors < held saved held:held_over_time=activation_ledger
accumulation.pictures < display.graph display:graph display:graph_words
accumulation.worked_graph < worked_graph worked_graph:moments=graph_states
    worked_graph:Moment=GraphState accumulation.worked_graph:moments=graph_states
    accumulation.worked_graph:Moment=GraphState
recompute.mixed_precision < mixed_precision
data_parallel.cost < cost.staleness
data_parallel.local_sgd < local_sgd
data_parallel.parameter_server < parameter_server
data_parallel.thread_parallel < thread_parallel
ddp.buckets < buckets
ddp.comm_hooks < compression
ddp.cost < cost.overlap
ddp.lab < overlap_lab
tensor_parallel.cost < cost.tensor_traffic
tensor_parallel.cross_entropy < vocab_parallel
tensor_parallel.layers < parallel_linear vocab_parallel:VocabParallelEmbedding
    vocab_parallel:VocabParallelHead vocab_parallel:own_tokens
tensor_parallel.pictures < display.matrices display:Matrix display:matrices display:split_mlp
tensor_parallel.regions < parallel_regions parallel_regions:Way=TensorFn
tensor_parallel.state < parallel_tensors
pipeline.actions < cost.actions
pipeline.balance < cost.balance
pipeline.cost < cost.bubbles cost.micro_batches cost.published_bubbles
pipeline.engine < stage_run stage_run:StageRun=StageExecutor
pipeline.explorer < display.schedule_explorer display:schedule_explorer
pipeline.lab < pipeline_lab pipeline_lab:Build=BuildStage pipeline_lab:EmulatedLayer=TimedLayer
    pipeline_lab:Run=PipelineRun
pipeline.p2p < mailbox mailbox:Routes=CommPlan mailbox:Mailbox=StageComm
    mailbox:Message=StageMessage mailbox:Form=TensorMeta
pipeline.pictures < display.pipelines display:pipelines display.pipelines:Run=DrawnRun
pipeline.schedule_rules < cost.schedule_rules
pipeline.schedules < cost.schedules
pipeline.simulation < cost.schedule_player cost.schedule_simulation cost.schedule_times
    cost.schedule_player:Player=SchedulePlayer
pipeline.split_backward < backward_halves backward_halves:Halves=SplitBackward
pipeline.stage < stages
pipeline.token_pipeline < cost.token_pipeline
zero.beside_frameworks < zero_lab:some_steps=run_stage
zero.cost < cost.sharded_traffic cost.sharded_traffic:RowTraffic=ParamTraffic
    cost.sharded_traffic:offload_trips=offload_bytes
zero.explorer < display.zero_explorer
zero.flat_layout < flat_shards
zero.flat_param < flat_rows flat_rows:FlatRow=FlatParam flat_rows:Sending=PendingReduceScatter
zero.gather_hooks < module_rows module_rows:ModuleRows=GatherHooks
zero.lab < zero_lab zero_lab:MOMENTS=CHANGES
zero.offload < offload
zero.pictures < display.flat_row display.flat_row:flat_row=flat_param_shards
zero.reducer < gradient_rounds gradient_rounds:GradientRounds=Reducer
zero.sharded_optimizer < sharded_optimizer sharded_state
zero.zero < zero_state zero:BUCKET_BYTES
fsdp.beside_frameworks < fsdp_beside fsdp_beside:Beside=FrameworkRun
    fsdp_beside:some_steps=run_framework
fsdp.cost < cost.fsdp_overlap cost.fsdp_plan
fsdp.explorer < display.fsdp_explorer
fsdp.lab < fsdp_lab fsdp_lab:MOMENTS=CHANGES
fsdp.param_group < fsdp_row fsdp_row:Row=FSDPParamGroup fsdp_row:Found=FoundParam
fsdp.state < fsdp_state fsdp_state:State=StateDict fsdp_state:whole_of=gather_whole
fsdp.units < fsdp_units
train < training
train.__main__ < train:COMMAND train:configure train:SEQ train:app train:main train:train
train.checkpoint < training.state
train.config < training.split:SCHEDULES training.split:degrees_of=parallelism_of
    training.split:schedule_of
train.forward_backward < training.passes training.passes:Pass=GradientPass
train.launcher < training.start
train.mesh < training.axes training.axes:Axes=TrainMesh
train.metrics < training.gauge training.tally training.gauge:Gauge=ResourceMonitor
    training.tally:Tally=Metrics
train.model_part < training.parts training.parts:Parts=ModelPart
train.optimizers < training.framework_steps training.steps training.whole_state
    training.framework_steps:TorchFSDPSteps=TorchFSDPAdapter
    training.framework_steps:FrameworkSteps=FrameworkAdapter training.steps:Steps=OptimizerAdapter
    training.steps:PlainSteps=PlainAdapter training.steps:ZeROSteps=ZeROAdapter
    training.steps:FSDPSteps=FSDPAdapter training.whole_state:held_bytes=state_bytes
train.progress < training.bar training.bar:Teller=ProgressBar
train.rules < training.fits training.split
train.trainer < training.loop
cluster.lint.check < cluster.lint:lint_job cluster.lint:findings_text
scaling_study < study
scaling_study.array_element < study.element
scaling_study.html_report < study.page
scaling_study.lab < scaling_lab scaling_lab:Device=EmulatedDevice
scaling_study.explorer < study.explorer:CARDS=DEVICES
scaling_study.measure_link < study.link
scaling_study.prediction < study.prediction:Prediction=PredictedRun
scaling_study.results < study.own
scaling_study.run_local < study.here study.here:Failure=RunFailure
scaling_study.study_run < study.run
notebooks < authoring
notebooks.grading < authoring.grading:Report=GradeReport
notebooks.learner_work < authoring.work
notebooks.merge_answers < authoring.merging
notebooks.progress_bar < authoring.bar
notebooks.source_rules < authoring.proof
notebooks.verdict_files < authoring.exports
"""


@functools.cache
def moves() -> tuple[dict[str, str], dict[tuple[str, str], tuple[str, str]]]:
    """Return two tables: old module to new, and (old module, name) to (new module, name)."""
    modules: dict[str, str] = {}
    names: dict[tuple[str, str], tuple[str, str]] = {}
    for line in TABLE.replace("\n    ", " ").strip().splitlines():
        new, _, olds = line.partition(" < ")
        for old in olds.split():
            module, _, name = old.partition(":")
            name, _, new_name = name.partition("=")
            if name:
                names[f"{HERE}.{module}", name] = f"{HERE}.{new}", new_name or name
            else:
                modules[f"{HERE}.{module}"] = f"{HERE}.{new}"
    return modules, names


def new_module(old: str) -> str | None:
    """Return where a module has moved, by itself or with its package; None if it has not."""
    modules, _ = moves()
    package, _, name = old.rpartition(".")
    if old in modules or not package:
        return modules.get(old)
    moved = new_module(package)
    return f"{moved}.{name}" if moved else None


def new_place(module: str, name: str) -> tuple[str, str] | None:
    """Return new module and name of what `from module import name` meant; None if it is there."""
    modules, names = moves()
    if (module, name) in names:
        return names[module, name]
    if f"{module}.{name}" in modules:
        package, _, last = modules[f"{module}.{name}"].rpartition(".")
        return package, last
    moved = new_module(module)
    return (moved, name) if moved else None


class MovedFinder:
    """The last finder: it finds nothing, and explains an import of what has moved."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        """Raise an ImportError that names the new place, if `name` is an old one."""
        told = _explain(name, sys._getframe(1)) if name.startswith(f"{HERE}.") else ""
        if told:
            raise ImportError(told, name=name)


def _explain(missing: str, frame: FrameType | None) -> str:
    """Return the sentence for a missing module, in the terms of the statement that asks for it."""
    while frame and str(frame.f_globals.get("__name__")).partition(".")[0] in MACHINERY:
        frame = frame.f_back
    module, names = _statement(frame) if frame else ("", ())
    if not f"{module}.".startswith(f"{missing}."):  # from course_lib import zero_lab; import_module
        package, _, last = missing.rpartition(".")
        module, names = (package, (last,)) if package == module else (missing, ())
    new = new_module(module)
    places = [place for name in names if (place := new_place(module, name))]
    if not new and not places:
        return ""
    asked = module if new else missing
    if frame and frame.f_globals.get("__name__") == "runpy":
        return f"{asked} has moved: run `python -m {new}`."
    by_module: dict[str, list[str]] = {}
    for there, name in places:
        by_module.setdefault(there, []).append(name)
    lists = [f"{', '.join(found)} from {there}" for there, found in by_module.items()]
    told = f"{asked} has moved: import {' and '.join(lists) or new}."
    return f"{told} In your notebooks, `course update` does it for you."


def _statement(frame: FrameType) -> tuple[str, tuple[str, ...]]:
    """Return module and names of the import statement that a frame is at; empty if at none."""
    import dis  # only when an import has failed

    if frame.f_globals.get("__name__") == "runpy":
        return str(frame.f_locals.get("mod_name", "")), ()
    names: tuple[str, ...] = ()
    for step in dis.get_instructions(frame.f_code):
        if step.offset == frame.f_lasti:
            return (str(step.argval), names or ()) if step.opname == "IMPORT_NAME" else ("", ())
        if step.opname == "LOAD_CONST":
            names = step.argval
    return "", ()


sys.meta_path.append(MovedFinder)
