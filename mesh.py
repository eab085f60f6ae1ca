"""Everything that moves between devices has a name here.

Inside the step each device runs the same code on its own shards (`jax.shard_map`), and bytes move only where one of
these is called. `gather` and `scatter` are each other's transpose and `unshard` carries its own, so gradients need no
repair; `total` sums over devices after the gradient is taken.
"""
from functools import cache, partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

# Outermost first. data: a copy of the model each. fsdp: a share of every weight, gathered layer by layer. tensor: a
# share of heads, hidden units and vocabulary. Only stage and data should cross slices (DCN). stage and context are 1.
AXES = ("stage", "data", "fsdp", "context", "tensor")
BATCH = ("data", "fsdp")          # the axes that split the rows of a batch
SEQUENCE = ("context", "tensor")  # the axes that split the tokens of a row, between sublayers


def make_mesh(ici, dcn, devices):
    """A Mesh of `devices` over AXES, of sizes `ici` x `dcn` (two tuples in the order of AXES).

    Neighbours along an axis are neighbours in a slice; a DCN axis steps from slice to slice. Devices that know no
    slice (CPU, GPU) are cut into prod(dcn) equal runs, in the order they come. Raises ValueError for another count.
    """
    if prod(ici) * prod(dcn) != len(devices):
        raise ValueError(f"a mesh of {ici} x {dcn} needs {prod(ici) * prod(dcn)} devices, not {len(devices)}")
    if hasattr(devices[0], "slice_index"):
        array = mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=True)
    else:
        slices = np.array(devices, dtype=object).reshape(prod(dcn), -1)
        array = np.stack([mesh_utils.create_device_mesh(ici, list(s), allow_split_physical_axes=True) for s in slices])
        array = array.reshape(*dcn, *ici)  # interleave: axis i of the mesh is (dcn[i], ici[i])
        order = [i + level * len(ici) for i in range(len(ici)) for level in (0, 1)]
        array = array.transpose(order).reshape([d * i for d, i in zip(dcn, ici)])
    return Mesh(array, AXES)


def local(tree, specs):
    """Marks every leaf as this device's own, to be differentiated apart from the other devices' copies.

    Called once, where the step enters the devices; `total` over the `missing` axes, where it leaves, is the other half.
    """
    def mark(x, spec):
        return lax.pcast(x, missing(spec), to="varying") if missing(spec) else x
    return jax.tree.map(mark, tree, specs)


def missing(spec):
    """The axes that a PartitionSpec does not name: its array is a copy over them, its gradient yet to be summed."""
    named = [a for entry in spec if entry for a in (entry if isinstance(entry, tuple) else (entry,))]
    return tuple(a for a in AXES if a not in named)


def total(tree, axes=AXES):
    """Sums every leaf over `axes`: an all-reduce. Never under a gradient, whose sum it would count again."""
    return lax.psum(tree, axes)


def anywhere(mesh, flag):
    """Whether `flag` is true in any process: an array of one bool on every device, to be read later."""
    flags = jax.make_array_from_callback((mesh.size,), NamedSharding(mesh, P(AXES)), lambda _: np.array([flag]))
    return _any(mesh)(flags)


@cache
def _any(mesh):
    return jax.jit(jnp.any, out_shardings=NamedSharding(mesh, P()))


def gather(x, axis, dim):
    """All devices' shards along `axis`, joined along dimension `dim`. Backward: `scatter`."""
    return x if lax.axis_size(axis) == 1 else lax.all_gather(x, axis, axis=dim, tiled=True)


def scatter(x, axis, dim):
    """Sums over `axis`, of which each device keeps its share of dimension `dim`. Backward: `gather`."""
    return x if lax.axis_size(axis) == 1 else lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def largest(x, axis):
    """The elementwise maximum over `axis`, on every device. Of what is not differentiated."""
    return x if lax.axis_size(axis) == 1 else lax.pmax(x, axis)


def smallest(x, axis):
    """The elementwise minimum over `axis`, on every device. Of what is not differentiated."""
    return x if lax.axis_size(axis) == 1 else lax.pmin(x, axis)


def unshard(w, spec, dtype, reduce_dtype):
    """A parameter's shard (float32) to its full size along fsdp, in the compute dtype.

    The gather moves `dtype`; its own backward reduce-scatters in `reduce_dtype`, since the transpose of a bfloat16
    gather would sum the gradients of all devices in bfloat16.
    """
    if "fsdp" not in spec or lax.axis_size("fsdp") == 1:
        return w.astype(dtype)
    return _gather_weight(w, spec.index("fsdp"), dtype, reduce_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather_weight(w, dim, dtype, reduce_dtype):
    return gather(w.astype(dtype), "fsdp", dim)


def _gather_weight_backward(dim, dtype, reduce_dtype, _, g):
    return (scatter(g.astype(reduce_dtype), "fsdp", dim).astype("float32"),)


_gather_weight.defvjp(lambda w, *static: (_gather_weight(w, *static), None), _gather_weight_backward)
