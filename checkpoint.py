"""A state is saved by name and restored to any mesh.

Stacked layers are stored as (layers, ...) whatever `rounds` folds them into, so a checkpoint fits every mesh.
Orbax writes in the background and commits a step whole or not at all.
"""
import os
from functools import partial

import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp


def checkpoints(folder, keep=3):
    """Orbax's Checkpointer on `folder`, which keeps the newest `keep` steps. Leaving its context waits for saves."""
    return ocp.training.Checkpointer(
        os.path.abspath(folder), save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
        preservation_policy=ocp.training.preservation_policies.LatestN(keep))


def is_stacked(path):
    return any(isinstance(key, jax.tree_util.DictKey) and str(key.key).startswith("layers/") for key in path)


def unfold(state):
    """(rounds, layers // rounds, ...) to (layers, ...), of every stacked leaf."""
    one = lambda path, x: x.reshape(-1, *x.shape[2:]) if is_stacked(path) else x
    return jax.tree_util.tree_map_with_path(one, state)


def shapes(state):
    """{name: shape as it is stored} of every array."""
    leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(unfold, state))
    return {jax.tree_util.keystr(path): list(x.shape) for path, x in leaves}


def save(saves, step, state, facts):
    """Starts to save `state` as `step`, with `facts` (JSON) beside it. Errors of an earlier save are raised here."""
    saves.save_async(step, jax.jit(unfold)(state), custom_metadata=facts | {"shapes": shapes(state)})


def facts(saves):
    """What was saved beside the newest step."""
    return saves.metadata(saves.latest.step).custom_metadata


def restore(saves, target):
    """The state of the newest step. `target` is the state as ShapeDtypeStructs with the shardings that are wanted.

    Raises ValueError that lists every array that is not the same there and here.
    """
    there, here = facts(saves)["shapes"], shapes(target)
    differ = [f"{name} {there.get(name, 'absent')} there, {here.get(name, 'absent')} here"
              for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differ:
        raise ValueError(f"the checkpoint of step {saves.latest.step} is of another state: {'; '.join(differ)}")

    def stored(path, x):
        if not is_stacked(path):
            return x
        sharding = NamedSharding(x.sharding.mesh, P(*x.sharding.spec[1:]))
        return jax.ShapeDtypeStruct((x.shape[0] * x.shape[1], *x.shape[2:]), x.dtype, sharding=sharding)

    @partial(jax.jit, donate_argnums=0, out_shardings=jax.tree.map(lambda x: x.sharding, target))
    def fold(state):
        return jax.tree.map(lambda x, t: x.reshape(t.shape), state, target)

    return fold(saves.load(saves.latest.step, jax.tree_util.tree_map_with_path(stored, target)))
