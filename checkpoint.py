"""A state is saved by name, and restored to any mesh.

    python checkpoint.py DIR[@STEP]        the steps of a run, and the arrays of its newest step, or of STEP

Orbax writes in the background and commits a step whole or not at all. Each array has a digest of its bits, taken on the
devices, which says at restore whether they are still those. A step that is not what was saved is set aside, loudly, and
the one before it is taken. Stacked layers are stored as (layers, ...), whatever `rounds` folds them into.
"""
import collections
import json
import math
import os
import re
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata as packages
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath  # paths of folders and of buckets alike; Orbax's own
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec as P
from orbax.checkpoint import v1 as ocp

SUMS = "sums.json"    # beside the arrays of a step: the sizes and checksums of its files
CHECKED = 2**24       # bytes; of larger files the size only: their arrays have digests
VERSIONS = ("jax", "jaxlib", "orbax-checkpoint", "optax", "numpy")


class Damaged(Exception):
    """A step is not what was saved."""


class SaveFailed(Exception):
    """A step could not be written."""


# ---- a state by name -----------------------------------------------------------------------------------------------


class Leaf(NamedTuple):
    """One array of a state: as the run holds it, as it is stored, and its stored shape without padding."""

    held: Any     # ShapeDtypeStruct with a sharding
    stored: Any   # the same, (layers, ...) where the run holds (rounds, layers // rounds, ...)
    size: tuple


def row(path, shape, table):
    """The row of `table` whose parameter the array at `path` belongs to (itself, a moment, an average), or None."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey) and key.key in table]
    return table[names[-1]] if names and shape == table[names[-1]].shape else None


def layout(state, table):
    """{name: Leaf} of a state (ShapeDtypeStructs with shardings), such as `params/layers/wq` and `opt/1/mu/embed`.

    `table` has a row for each parameter, of which `shape` and `size` (the shape without padding) are read here.
    """
    def leaf(path, x):
        p = row(path, x.shape, table)
        if p is None or len(p.size) == len(p.shape):
            return Leaf(x, x, p.size if p else x.shape)
        spec = P(x.sharding.spec[1], *x.sharding.spec[2:])
        return Leaf(x, jax.ShapeDtypeStruct(p.size, x.dtype, sharding=NamedSharding(x.sharding.mesh, spec)), p.size)

    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf(path, x)
            for path, x in jax.tree_util.tree_leaves_with_path(state)}


@cache
def reshape(structs):
    """A jitted function of a list of arrays, in whose own memory it gives them these shapes."""
    return jax.jit(lambda xs: [x.reshape(s.shape) for x, s in zip(xs, structs)], donate_argnums=0,
                   out_shardings=[s.sharding for s in structs])


def reshaped(named, structs):
    """`named` with the shapes of `structs` ({name: ShapeDtypeStruct}). What changes is donated: never two copies."""
    names = [n for n, x in named.items() if x.shape != structs[n].shape]
    return named | dict(zip(names, reshape(tuple(structs[n] for n in names))([named[n] for n in names])))


def bits(x):
    """The bits of each element as a uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


@cache
def digests_of(sizes, everywhere):
    """A jitted function of a list of arrays: for each the sum of bits x (2 i + 1), modulo 2^32, where i numbers the
    elements of an array of these sizes. A flipped bit always changes it; sharding and padding (of zeros) never do."""
    def one(x, size):
        i = jnp.zeros(x.shape, jnp.uint32)
        for d in range(x.ndim):
            i += jax.lax.broadcasted_iota(jnp.uint32, x.shape, d) * np.uint32(math.prod(size[d + 1:]) % 2**32)
        return jnp.sum(bits(x) * (2 * i + 1), dtype=jnp.uint32)
    return jax.jit(lambda xs: jnp.stack([one(x, size) for x, size in zip(xs, sizes)]), out_shardings=everywhere)


def digests(named, leaves):
    """{name: digest as an int} of stored arrays."""
    mesh = next(iter(leaves.values())).stored.sharding.mesh
    run = digests_of(tuple(leaves[n].size for n in named), NamedSharding(mesh, P()))
    return dict(zip(named, np.asarray(run(list(named.values()))).tolist()))


# ---- what lies in a folder -----------------------------------------------------------------------------------------


def place(folder):
    """`folder` as a path, of a bucket too. Raises ValueError with the pip command for what a bucket needs."""
    path = epath.Path(folder if "://" in folder else os.path.abspath(folder))  # Orbax wants it absolute
    try:
        path.exists()
    except ImportError as error:
        package = {"gs": "gcsfs", "s3": "s3fs"}.get(str(folder).partition("://")[0], "fsspec")
        raise ValueError(f"{folder}: pip install {package} ({error})") from error
    return path


def steps_in(folder):
    """The numbers of the steps in a folder, whole or not, newest first."""
    return sorted((int(p.name) for p in folder.iterdir() if re.fullmatch("[0-9]+", p.name)), reverse=True) \
        if folder.exists() else []


def newest(folder):
    """The path of the newest step whose files are those that were written, or None."""
    for number in steps_in(folder):
        try:
            examine(folder / str(number))
        except Damaged:
            continue
        return folder / str(number)
    return None


def files_of(step):
    """{path in the step's folder: path} of all its files but SUMS."""
    found, folders = {}, [step]
    for folder in folders:
        for p in folder.iterdir():
            if p.is_dir():
                folders.append(p)
            elif p.name != SUMS:
                found[str(p.relative_to(step))] = p
    return found


def checksum(path):
    """[bytes, CRC-32] of a file, None for the CRC-32 of a large one."""
    size = path.stat().length
    return [size, zlib.crc32(path.read_bytes()) if size <= CHECKED else None]


def seal(step):
    """Writes the sums of a committed step's files into its folder. (Half of the flips that a step can suffer hit bytes
    that no array is read from: they do no harm, but a disk that flips bits should be known.)"""
    part = step / f"{SUMS}.part"
    part.write_text(json.dumps({name: checksum(path) for name, path in files_of(step).items()}))
    part.rename(step / SUMS)


def fingerprint(facts):
    return zlib.crc32(json.dumps(facts, sort_keys=True).encode())


def examine(step):
    """The facts that were saved beside a step. Raises Damaged, if its files are not those that were written."""
    try:
        facts = ocp.metadata(step).custom_metadata
        sums = json.loads((step / SUMS).read_text()) if (step / SUMS).exists() else {}
        now = {name: checksum(path) for name, path in files_of(step).items()} if sums else {}
    except Exception as error:  # Orbax and the file system raise all kinds for a folder that is no step
        raise Damaged(f"it is not complete ({type(error).__name__}: {short(error)})") from error
    for name in {**sums, **now}:
        if sums.get(name) != now.get(name):
            raise Damaged(f"its file {name} is {of_file(now.get(name))}, and was {of_file(sums.get(name))}")
    told = {name: value for name, value in (facts or {}).items() if name != "fingerprint"}
    if not told or facts.get("fingerprint") != fingerprint(told):
        raise Damaged("what is saved beside its arrays is missing or not what was written")
    return told


def of_file(sums):
    return "absent" if sums is None else f"of {sums[0]:,} bytes" + (f" (CRC-32 {sums[1]:08x})" if sums[1] else "")


def short(error):
    return " ".join(str(error).split())[:200]


def set_aside(step, reason):
    """Renames a step that cannot be used, so that the step can be saved again, and says so."""
    other, n = step.parent / f"{step.name}.damaged", 1
    while other.exists():
        n += 1
        other = step.parent / f"{step.name}.damaged-{n}"
    step.rename(other)
    print(f"WARNING: checkpoint {step} cannot be used: {reason}. It is now {other}", file=sys.stderr, flush=True)


def from_first(work):
    """work() of process 0, in every process: (JSON value, None), or (None, reason) where it raised Damaged."""
    answer = b""
    if jax.process_index() == 0:
        try:
            answer = json.dumps((work(), None)).encode()
        except Damaged as error:
            answer = json.dumps((None, str(error))).encode()
    if jax.process_count() > 1:
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(answer))))
        answer = bytes(multihost_utils.broadcast_one_to_all(np.frombuffer(answer.ljust(size), np.uint8)))
    return json.loads(answer)


# ---- restore -------------------------------------------------------------------------------------------------------


def describe(leaf):
    return "absent" if leaf is None else f"{tuple(leaf[0])} {leaf[1]}"


def compare(facts, leaves):
    """Raises ValueError that lists every array which is not the same there (in `facts`) and here."""
    there = {name: [leaf["size"], leaf["dtype"]] for name, leaf in facts["arrays"].items()}
    here = {name: [list(leaf.size), leaf.stored.dtype.name] for name, leaf in leaves.items()}
    differ = [f"{name} is {describe(there.get(name))} there, {describe(here.get(name))} here"
              for name in sorted({*there, *here}) if there.get(name) != here.get(name)]
    if differ:
        raise ValueError(f"{len(differ)} arrays differ: {'; '.join(differ)}")


def agree(problem):
    """The first of what is wrong in any process, in all of them; "" where nothing is."""
    told = np.zeros(1000, np.uint8)
    text = problem.encode()[:1000]
    told[:len(text)] = list(text)
    rows = multihost_utils.process_allgather(told) if jax.process_count() > 1 else [told]
    return next(filter(None, (bytes(row).rstrip(b"\0").decode(errors="replace") for row in np.asarray(rows))), "")


def load(step, facts, leaves):
    """{name: array, as it is stored} of `leaves`; others are not read.

    Raises Damaged, in every process, for what is not what was saved.
    """
    wanted = {name: leaves[name].stored if name in leaves else ocp.PLACEHOLDER for name in facts["arrays"]}
    # Each process reads its own shards and waits for none: where one fails, the others hear of it from `agree`.
    alone, problem, context = jax.process_index(), "", ocp.Context()
    context.multiprocessing.primary_host, context.multiprocessing.active_processes = alone, {alone}
    context.multiprocessing.barrier_sync_key_prefix = f"process{alone}"
    # A vocabulary may be padded to another multiple here: by zeros, which compare and the digests leave out.
    context.array.loading.enable_padding_and_truncation = any(
        facts["arrays"][name]["shape"] != list(leaf.stored.shape) for name, leaf in leaves.items())
    try:
        with context:
            named = ocp.load(step, wanted)
    except (jax.errors.JaxRuntimeError, MemoryError):  # the device's trouble, not the file's
        raise
    except Exception as error:  # of all kinds, by what is damaged
        problem = f"it does not load ({type(error).__name__}: {short(error)})"
    if problem := agree(problem):
        raise Damaged(problem)
    named = {name: named[name] for name in leaves}
    wrong = [name for name, digest in digests(named, leaves).items() if digest != facts["arrays"][name]["digest"]]
    if wrong:
        raise Damaged(f"{len(wrong)} arrays have other bits than when they were saved: {', '.join(wrong)}")
    return named


def restore(folder, state, leaves, accept=lambda facts: None):
    """(state, facts) of the newest step in `folder` that is what was saved, or None where there is no step.

    state: its ShapeDtypeStructs, with the shardings that are wanted; leaves: its layout. Process 0 looks for the step.
    accept(facts) may raise ValueError to refuse it. Raises ValueError too for arrays that differ (all are listed), and
    where there are steps of which none can be used.
    """
    steps, _ = from_first(lambda: steps_in(folder))
    for number in steps:
        step = folder / str(number)
        facts, reason = from_first(lambda: examine(step))
        if facts:
            accept(facts)
            compare(facts, leaves)
            try:
                named = reshaped(load(step, facts, leaves), {name: leaf.held for name, leaf in leaves.items()})
            except Damaged as error:
                reason = str(error)
            else:
                if jax.process_index() == 0 and not (step / SUMS).exists():  # killed before it was sealed
                    seal(step)
                return jax.tree.unflatten(jax.tree.structure(state), named.values()), facts
        if jax.process_index() == 0:
            set_aside(step, reason)
    if steps:
        raise ValueError(f"none of the {len(steps)} steps in {folder} can be used; they are set aside there. To begin "
                         f"again, take another --workdir")
    return None


# ---- save ----------------------------------------------------------------------------------------------------------


class Saves:
    """Writes steps to a folder in the background. One save runs at a time; the next waits for it.

    cfg: keep_newest, keep_every and keep_best say which steps stay. Errors are SaveFailed, raised by the next save, by
    `wait`, or where the context ends.
    """

    def __init__(self, folder, leaves, cfg):
        keep = ocp.training.preservation_policies
        kept = [keep.LatestN(cfg.keep_newest)]
        if cfg.keep_every:
            kept.append(keep.EveryNSteps(cfg.keep_every))
        if cfg.keep_best:
            kept.append(keep.BestN(get_metric_fn=lambda metrics: metrics["log_pplx"], reverse=True, n=cfg.keep_best,
                                   keep_checkpoints_without_metrics=False))
        self.folder, self.leaves, self.step = folder, leaves, max(steps_in(folder), default=0)
        self.orbax = ocp.training.Checkpointer(
            folder, save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=keep.AnyPreservationPolicy(kept), cleanup_tmp_directories=True)
        self.behind, self.pending = ThreadPoolExecutor(1), None

    def save(self, step, state, facts, metrics=None):
        """Starts to save `state` as `step`, with `facts` and `metrics` (JSON) beside it; the state, whose memory is
        borrowed meanwhile. Raises SaveFailed."""
        self.wait()
        named = reshaped(dict(zip(self.leaves, jax.tree.leaves(state))), {n: x.stored for n, x in self.leaves.items()})
        sums = digests(named, self.leaves)
        facts = facts | {"versions": {name: packages.version(name) for name in VERSIONS}, "arrays": {
            n: {"shape": leaf.stored.shape, "size": leaf.size, "dtype": leaf.stored.dtype.name, "digest": sums[n]}
            for n, leaf in self.leaves.items()}}
        self.step = step
        try:
            saving = self.orbax.save_async(step, named, custom_metadata=facts | {"fingerprint": fingerprint(facts)},
                                           metrics=metrics)
        except Exception as error:  # of all kinds, by what fails
            raise self.failed(error) from error
        self.pending = self.behind.submit(self.finish, step, saving)
        named = reshaped(named, {n: leaf.held for n, leaf in self.leaves.items()})
        return jax.tree.unflatten(jax.tree.structure(state), named.values())

    def finish(self, step, saving):
        """Runs in a thread: waits until a step is on disk, whole, and seals it."""
        saving.result()
        if jax.process_index() == 0:
            seal(self.folder / str(step))

    def wait(self):
        """Returns when the last save is on disk. Raises SaveFailed."""
        pending, self.pending = self.pending, None
        try:
            if pending:
                pending.result()
        except Exception as error:
            raise self.failed(error) from error

    def failed(self, error):
        return SaveFailed(f"step {self.step} could not be written ({type(error).__name__}: {short(error)})")

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        failure = value
        try:
            self.wait()
        except SaveFailed as error:
            failure = error
        self.behind.shutdown()
        try:
            self.orbax.close()
        except Exception as error:  # of a save that failed, Orbax tells here once more
            failure = failure or self.failed(error)
        if failure is not value:
            raise failure


# ---- another run's parameters --------------------------------------------------------------------------------------


def read_rules(path):
    """(rules, ignored) of a JSON file {"rules": [[regex, replacement], ...], "ignore": [regex, ...]}.

    Raises ValueError for what is not that.
    """
    try:
        said = json.loads(epath.Path(path).read_text())
        rules = [(re.compile(pattern), replacement) for pattern, replacement in said["rules"]]
        ignored = [re.compile(pattern) for pattern in said["ignore"]]
        unknown = set(said) - {"rules", "ignore"}
    except (OSError, ValueError, KeyError, TypeError, re.error) as error:
        raise ValueError(f'rules={path} is not {{"rules": [[regex, replacement], ...], "ignore": [regex, ...]}}: '
                         f"{type(error).__name__}: {short(error)}") from error
    if unknown:
        raise ValueError(f"rules={path}: {', '.join(sorted(unknown))} is neither rules nor ignore")
    return rules, ignored


def renamed(here, there, rules, ignored):
    """{name here: name there} of parameters: the first rule whose regex matches a whole name here names it there.

    Says which. Raises ValueError that lists every rule that is never used, and every name on either side that no rule
    matches and that is not ignored.
    """
    sources, lines, problems, used = {}, [], [], set()
    for name in here:
        skipped = [p.pattern for p in ignored if p.fullmatch(name)]
        match, replacement = next(((m, r) for p, r in rules if (m := p.fullmatch(name))), (None, ""))
        used |= {*skipped[:1], *([match.re.pattern] if match and not skipped else [])}
        if skipped:
            lines.append(f"{name} begins anew (ignore {skipped[0]})")
        elif match:
            sources[name] = match.expand(replacement)
            lines.append(f"{name} from {sources[name]} (rule {match.re.pattern})")
        else:
            problems.append(f"{name} here matches no rule")
    for name, source in sources.items():
        if source not in there:
            problems.append(f"{name} here is to come from {source}, which is not there")
    for name in sorted({*there} - {*sources.values()}):
        skipped = [p.pattern for p in ignored if p.fullmatch(name)]
        used |= {*skipped[:1]}
        if not skipped:
            problems.append(f"{name} there is not used")
    problems += [f"{p.pattern} matches nothing" for p in (*(p for p, _ in rules), *ignored) if p.pattern not in used]
    if problems:
        raise ValueError("; ".join(problems))
    return sources, lines


def begin_from(source, rules, leaves, tell):
    """{parameter: array as the run holds it} from `source`, DIR[@STEP] of another run; what is ignored is left out.

    leaves: {parameter: Leaf}. Without `rules` (the path of a file) the names must be the same. tell(line) is told what
    comes from where. Raises ValueError for what is not there, damaged, or does not fit.
    """
    folder, step = find(source)
    facts, reason = from_first(lambda: examine(step))
    if reason:
        raise ValueError(f"init_from={source}: {step} cannot be used: {reason}; name an older one, {folder}@STEP")
    there = {n.removeprefix("params/"): value for n, value in facts["arrays"].items() if n.startswith("params/")}
    try:
        sources, paired = {name: name for name in leaves}, there
        if rules:
            sources, lines = renamed(leaves, there, *read_rules(rules))
            paired = {name: there[source] for name, source in sources.items()}
            for line in lines:
                tell(f"init_from: {line}")
        wanted = {name: leaves[name] for name in sources}
        compare({"arrays": paired}, wanted)
        named = load(step, facts, {f"params/{source}": leaves[name] for name, source in sources.items()})
    except (ValueError, Damaged) as error:
        raise ValueError(f"init_from={source}{rules and f' rules={rules}'}: {step}: {error}") from error
    tell(f"begins with the parameters of {step}")
    uses = collections.Counter(sources.values())
    stored = {name: jnp.copy(named[f"params/{source}"]) if uses[source] > 1 else named[f"params/{source}"]
              for name, source in sources.items()}
    return reshaped(stored, {name: leaf.held for name, leaf in wanted.items()})


# ---- the command line ----------------------------------------------------------------------------------------------


def find(said):
    """(folder of steps, path of a step) of DIR[@STEP], DIR a run's folder or its `checkpoints`; else the newest step.

    Raises ValueError for what is not there.
    """
    name, _, number = str(said).rpartition("@") if re.search(r"@\d+$", str(said)) else (str(said), "", "")
    folder = place(name)
    folder = folder / "checkpoints" if (folder / "checkpoints").exists() else folder
    steps = steps_in(folder)
    if not steps:
        raise ValueError(f"{said}: there are no checkpoints in {folder}")
    if number and int(number) not in steps:
        raise ValueError(f"{said}: there is no step {number}; there are {', '.join(map(str, reversed(steps)))}")
    return folder, folder / (number or str(steps[0]))


def show(said):
    """Prints the steps of a run, oldest first, and of one the arrays, each read and compared with its digest."""
    folder, chosen = find(said)
    for number in reversed(steps_in(folder)):
        step = folder / str(number)
        try:
            facts = examine(step)
            size = sum(path.stat().length for path in files_of(step).values())
            print(f"step {number}  {size:,} bytes  {facts['sequences']:,} sequences  "
                  f"{'files as written' if (step / SUMS).exists() else 'files without sums'}")
        except Damaged as error:
            print(f"step {number}  DAMAGED: {error}")
    for path in folder.iterdir():
        if not path.name.isdecimal():
            print(f"{path.name}  {'a save that was cut off' if 'tmp' in path.name else 'set aside'}")
    try:
        arrays = examine(chosen)["arrays"]
    except Damaged:
        return
    print(f"\nthe arrays of step {chosen.name}")
    one = NamedSharding(jax.make_mesh((1,), ("all",)), P())
    width = max(map(len, arrays))
    for name, array in arrays.items():
        struct = jax.ShapeDtypeStruct(array["shape"], array["dtype"], sharding=one)
        try:
            load(chosen, {"arrays": arrays}, {name: Leaf(struct, struct, tuple(array["size"]))})
            state = "as saved"
        except Damaged as error:
            state = f"DAMAGED: {error}"
        print(f"{name:{width}}  {' x '.join(map(str, array['shape'])) or 'scalar':20}  {array['dtype']:8} "
              f"{math.prod(array['shape']) * struct.dtype.itemsize:>15,} bytes  {array['digest']:08x} {state}")


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise SystemExit(__doc__)
    logging.set_verbosity(logging.FATAL)  # Orbax narrates
    jax.config.update("jax_platforms", "cpu")
    try:
        show(argv[0])
    except (ValueError, OSError) as error:
        raise SystemExit(f"checkpoint.py: {short(error)}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
