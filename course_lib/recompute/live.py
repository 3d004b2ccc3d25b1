"""What recomputation frees, and what it computes again. Notebook 03_recompute."""

from dataclasses import replace

from course_lib.core.live import Drawing, Live
from course_lib.cost.flops import RECOMPUTE, train_step_flop
from course_lib.memory.calculator import Setup
from course_lib.memory.live import bars_of


def recompute_drawing(model: str, seq: int, batch: int, unfused: bool, dp: int) -> Drawing:
    """Return a bar for each way, named with the FLOP that it adds; states are in ZeRO-3 shards."""
    same = Setup(model=model, seq=seq, batch=batch, unfused=unfused, dp=dp, zero=3 if dp > 1 else 0)
    setups = {way: replace(same, recompute=way) for way in RECOMPUTE}
    spec = setups["none"].spec
    plain = train_step_flop(spec, batch, seq)
    more = {way: train_step_flop(spec, batch, seq, recompute=way) / plain - 1 for way in RECOMPUTE}
    named = {f"{way}, +{more[way]:.1%} FLOP": setup for way, setup in setups.items()}
    fitting = [way for way, setup in setups.items() if setup.fits]
    words = f"{model}, {batch} x {seq} tokens on an {setups['none'].device.name}: "
    words += f"fits with {fitting[0]}" if fitting else "fits in no way"
    words += f"; full keeps 1 byte of {_kept(setups):.3g} of its activations at the peak"
    return Drawing(finding=words, panels=[bars_of(named)])


def _kept(setups: dict[str, Setup]) -> float:
    """Return how often the activations of `full` fit into those of `none`, each at its most."""
    most = {way: max(one.fullest.bytes_by_kind["activations"]) for way, one in setups.items()}
    return most["none"] / most["full"]


RECOMPUTATION = Live(
    name="recompute_explorer",
    lesson="03_recompute",
    question="How much memory does recomputation free, for how much more arithmetic?",
    choices={
        "model": (["gpt2-xl", "llama-1b", "llama-8b", "llama-70b"], "llama-8b"),
        "seq": ([1024, 2048, 4096, 8192, 16384, 32768], 8192),
        "batch": ([1, 2, 4, 8, 16], 4),
        "unfused": False,
        "dp": ([1, 8, 64, 512], 8),
    },
    compute=recompute_drawing,
)
