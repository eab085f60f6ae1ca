"""One step, one loop, one command line.

    python train.py --config=NAME [--workdir=DIR] [--mode=train|compile] [--topology=cpu] [field=value ...]
        --coordinator=HOST:PORT --processes=N --process=I, or --coordinator=auto: one process a host;
        --heartbeat=SECONDS

The step: each device takes its part of the batch through loss and gradient (`make_gradients`), then Optax updates
global arrays (`make_step`). The loop launches a step before it reads what the one before it reported.
"""
import collections
import contextlib
import dataclasses
import datetime
import fcntl
import json
import math
import os
import re
import signal
import sys
import textwrap
import threading
import time
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec as P

import checkpoint
import configs
import data
import pgle
from mesh import AXES, anywhere, local, make_mesh, missing, total
from model import count, init_params, transformer


class State(NamedTuple):
    """All that a step changes. `bad_steps` are those that moved nothing but `step`: no finite gradient, or no token."""

    step: Any        # steps taken; so the optimizer's own count is step - bad_steps
    params: Any      # {name: float32 array}
    opt: Any
    ema: Any         # like params, or None
    bad_steps: Any
    bad_in_a_row: Any


# ---- the optimizer -------------------------------------------------------------------------------------------------


def make_schedule(cfg):
    """The learning rate of an update, by the updates before it.

    With t = updates before + schedule_start: t / warmup_steps of the peak until warmup_steps, the peak until
    decay_start, then down to min_ratio of it at decay_end: on a half cosine, geometrically, or (wsd) on a line.
    """
    last_fifth = cfg.steps - cfg.steps // 5
    start = cfg.decay_start or (max(cfg.warmup_steps, last_fifth) if cfg.schedule == "wsd" else cfg.warmup_steps)
    end = max(cfg.decay_end or cfg.steps, start + 1)
    fall = {"constant": lambda p: 1.0,
            "cosine": lambda p: cfg.min_ratio + (1 - cfg.min_ratio) * 0.5 * (1 + jnp.cos(math.pi * p)),
            "exponential": lambda p: cfg.min_ratio**p,
            "wsd": lambda p: 1 - (1 - cfg.min_ratio) * p}[cfg.schedule]

    def rate(count):
        t = jnp.asarray(count + cfg.schedule_start, jnp.float32)
        warm = jnp.minimum(t / cfg.warmup_steps, 1) if cfg.warmup_steps else 1
        return cfg.learning_rate * warm * fall(jnp.clip((t - start) / (end - start), 0, 1))
    return rate


def cap_rms(cap, table):
    """Scales updates to a root mean square of at most `cap`: each tensor, each layer of a stack, padding left out."""
    def one(path, u):
        size = table[path[0].key].size
        stacked = u.ndim - len(size)  # (R, L // R, ...) of (L, ...)
        axes = tuple(range(2 * stacked, u.ndim))
        rms = jnp.sqrt(jnp.sum(u * u, axes, keepdims=True) / math.prod(size[stacked:]))
        return u / jnp.maximum(1, rms / cap)
    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(one, updates))


def is_frozen(cfg, table):
    """{name: whether its name matches cfg.frozen}. Raises ValueError for a pattern that is none or matches nothing."""
    try:
        names = {name: bool(cfg.frozen and re.search(cfg.frozen, name)) for name in table}
    except re.error as error:
        raise ValueError(f"frozen={cfg.frozen} is not a regular expression: {error}") from error
    if cfg.frozen and not any(names.values()):
        raise ValueError(f"frozen={cfg.frozen} matches no parameter; nearest is {configs.nearest(cfg.frozen, table)}")
    return names


def make_optimizer(cfg, table):
    """Clip by global norm, Adam, cap, decay, rate: an Optax transformation of {name: array}."""
    decayed = {name: cfg.decay == "all" or p.decay for name, p in table.items()}
    tx = optax.chain(
        optax.clip_by_global_norm(cfg.clip) if cfg.clip else optax.identity(),
        optax.scale_by_adam(cfg.beta1, cfg.beta2, cfg.eps, cfg.eps_root),
        cap_rms(cfg.rms_cap, table) if cfg.rms_cap else optax.identity(),
        optax.add_decayed_weights(cfg.weight_decay, decayed),
        optax.scale_by_learning_rate(make_schedule(cfg)),
    )
    if not cfg.frozen:
        return tx
    labels = {name: "frozen" if frozen else "trained" for name, frozen in is_frozen(cfg, table).items()}
    return optax.partition({"trained": tx, "frozen": optax.set_to_zero()}, labels)  # no moments for the frozen


# ---- the step ------------------------------------------------------------------------------------------------------


def init_state(cfg, table, tx, loaded=()):
    """The State before the first step. `loaded`: {name: array} for parameters that are not drawn."""
    params = init_params(table, cfg.seed) | dict(loaded)
    zero = jnp.zeros((), jnp.int32)
    ema = jax.tree.map(jnp.copy, params) if cfg.ema_decay else None
    return State(zero, params, tx.init(params), ema, zero, zero)


def abstract_state(cfg, mesh, table, tx):
    """The State as shapes with shardings: the optimizer's and the average's arrays lie where their parameters do."""
    def one(path, x):
        row = checkpoint.row(path, x.shape, table)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, row.spec if row else P()))
    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(partial(init_state, cfg, table, tx)))


def places(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def step_specs(cfg, task):
    """PartitionSpecs of the parameters and of a batch, whose arrays are (accum, ...)."""
    return ({name: p.spec for name, p in task.params(cfg).items()},
            {name: P(None, *spec) for name, spec in task.batch(cfg).items()})


def make_gradients(cfg, mesh, task):
    """(params, batch, step) -> (mean gradients, metrics as (sum, weight)), both global, over the whole batch."""
    table = task.params(cfg)
    frozen, specs, batch_specs = is_frozen(cfg, table), *step_specs(cfg, task)

    def device(params, batch, step):  # what one device does
        params, batch, step = local((params, batch, step), (specs, batch_specs, P()))

        def loss(params, micro):
            params = {n: jax.lax.stop_gradient(p) if frozen[n] else p for n, p in params.items()}
            return task.loss(cfg, params, micro, step)

        def add(grads, micro):
            (_, metrics), g = jax.value_and_grad(loss, has_aux=True)(params, micro)
            return jax.tree.map(jnp.add, grads, g), metrics

        zeros = local(jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params), dict.fromkeys(params, P()))
        grads, metrics = jax.lax.scan(add, zeros, batch)
        metrics = total(jax.tree.map(lambda x: x.sum(0), metrics))
        weight = metrics["loss"][1]
        return {n: total(g, missing(specs[n])) / jnp.where(weight > 0, weight, 1) for n, g in grads.items()}, metrics

    return jax.shard_map(device, mesh=mesh, in_specs=(specs, batch_specs, P()), out_specs=(specs, P()))


def make_step(cfg, mesh, task, tx):
    """(state, batch) -> (state, report). The state is donated; what is not finite leaves all but `step` as it was."""
    gradients, rate = make_gradients(cfg, mesh, task), make_schedule(cfg)

    def step(state, batch):
        grads, metrics = gradients(state.params, batch, state.step)
        loss, weight = metrics["loss"]
        norm = optax.tree.norm(grads)
        updates, opt = tx.update(grads, state.opt, state.params)
        params = optax.apply_updates(state.params, updates)
        good = (weight > 0) & jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(optax.tree.norm(params))

        ema = None
        if cfg.ema_decay:
            decay = jnp.minimum(cfg.ema_decay, (1.0 + state.step) / (10.0 + state.step))  # short at first, as in Pax
            ema = jax.tree.map(lambda average, p: decay * average + (1 - decay) * p, state.ema, params)

        before = state.params, state.opt, state.ema
        params, opt, ema = jax.tree.map(partial(jnp.where, good), (params, opt, ema), before)
        bad = 1 - good.astype(jnp.int32)
        # Once the limit is reached the count stays: the loop, which looks at logged steps only, must not miss it.
        over = state.bad_in_a_row >= cfg.max_bad_steps
        in_a_row = jnp.where(over, state.bad_in_a_row, (state.bad_in_a_row + 1) * bad)
        new = State(state.step + 1, params, opt, ema, state.bad_steps + bad, in_a_row)
        return new, metrics | {"grad_norm": norm, "learning_rate": rate(state.step - state.bad_steps),
                               "bad_steps": new.bad_steps, "bad_in_a_row": in_a_row}

    where = places(abstract_state(cfg, mesh, task.params(cfg), tx))
    return jax.jit(step, donate_argnums=0, out_shardings=(where, None))


def make_eval(cfg, mesh, task):
    """(params, batch) -> metrics as (sum, weight), without dropout."""
    specs = step_specs(cfg, task)

    def device(params, batch):
        params, batch = local((params, batch), specs)
        _, metrics = jax.lax.scan(lambda _, micro: ((), task.loss(cfg, params, micro)[1]), (), batch)
        return total(jax.tree.map(lambda x: x.sum(0), metrics))

    return jax.jit(jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=P()))


def make_sampler(cfg, mesh, task):
    """(params, prompt ids, key) -> the prompt and cfg.sample_tokens more, each from a pass over the last seq ids."""
    specs, _ = step_specs(cfg, task)
    batch_specs = task.batch(cfg)

    def device(params, batch, last):
        params, batch = local((params, batch), (specs, batch_specs))
        return task.logits(cfg, params, batch, last=last)

    # The same row on every device: each has its logits, for its part of the vocabulary.
    copies = tuple(axis for axis in AXES if axis != "tensor")
    rows = cfg.axis("data") * cfg.axis("fsdp")
    logits = jax.shard_map(device, mesh=mesh, in_specs=(specs, batch_specs, P()), out_specs=P(copies, "tensor"))

    def sample(params, prompt, key):
        start, n = len(prompt), cfg.sample_tokens

        def one(i, tokens):
            first = jnp.maximum(0, i - cfg.seq)
            window = jax.lax.dynamic_slice(tokens, (first,), (cfg.seq,))
            row = {"tokens": window, "targets": window, "weights": jnp.ones(cfg.seq), "segments": jnp.ones_like(window),
                   "positions": jnp.arange(cfg.seq), "rows": jnp.int32(0)}
            batch = {name: jnp.broadcast_to(x, (rows, *x.shape)) for name, x in row.items()}
            scores = logits(params, batch, i - 1 - first)[0]
            if cfg.temperature:  # the largest of logits plus Gumbel noise is a draw from their softmax
                scores = scores / cfg.temperature + jax.random.gumbel(jax.random.fold_in(key, i), scores.shape)
            return tokens.at[i].set(scores.argmax())

        tokens = jnp.zeros(max(start + n, cfg.seq), jnp.int32).at[:start].set(prompt)
        return jax.lax.fori_loop(start, start + n, one, tokens)[:start + n]

    return jax.jit(sample)


# ---- what a person sees --------------------------------------------------------------------------------------------


def overview(cfg, table, state):
    """The parameters, a line each: name, shape, placement, count; then totals, and what a device holds of the state."""
    mesh = state.step.sharding.mesh
    here = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state))
    tokens = f"{cfg.batch:,} sequences x {cfg.seq:,} = {cfg.batch * cfg.seq:,} tokens a step"
    rows = [(n, " x ".join(map(str, p.shape)), ", ".join(str(axis or "-") for axis in p.spec), f"{math.prod(p.size):,}")
            for n, p in table.items()]
    rows.insert(0, ("parameter", "shape", "placement", "count"))
    a, b, c, d = (max(map(len, column)) for column in zip(*rows))
    text = [f"{name:{a}}  {shape:{b}}  {spec:{c}}  {n:>{d}}" for name, shape, spec, n in rows]
    text.append(f"{count(table):,} parameters; {here / 2**20:,.1f} MiB of state (parameters, moments) on each device")
    text.append(f"mesh {' x '.join(f'{axis} {mesh.shape[axis]}' for axis in AXES)} = {mesh.size} "
                f"{mesh.devices.flat[0].device_kind}; {tokens}")
    return "\n".join(text)


def clock(seconds):
    return str(datetime.timedelta(seconds=round(seconds)))


PAX_TAGS = {  # TensorBoard tags that Pax's users know
    "loss": ("loss", "Metrics/log_pplx"), "log_pplx": ("loss", "Metrics/log_pplx"),
    "learning_rate": ("lr", "learning/lr"), "grad_norm": ("learning/raw_grad_norm",),
    "accuracy": ("Metrics/fraction_of_correct_next_step_preds",), "num_predictions": ("Metrics/num_predictions",),
    "steps_per_second": ("Steps/sec",),
}


class Journal:
    """What a run tells: lines on the terminal; in its workdir metrics.jsonl, TensorBoard events and loss.png."""

    def __init__(self, cfg, mesh, task, workdir, step, evaluated, about, evals):
        """Keeps rows up to `step`, its evaluations where they were all `evaluated`: what a run that was cut off wrote
        after its last checkpoint comes again. `evals` are the names of what is evaluated, each a word.
        """
        self.cfg, self.workdir, self.devices = cfg, workdir, mesh.size
        self.flops, self.peak = task.flops(cfg), pgle.PEAK_FLOPS.get(mesh.devices.flat[0].device_kind)
        self.bad_steps, self.step, self.time, self.file, self.writers = 0, step, time.perf_counter(), None, {}
        if jax.process_index():  # process 0 alone writes
            return
        from tensorboardX import SummaryWriter
        kept = [row for row in read_metrics(workdir)
                if row["step"] < step or row["step"] == step and (evaluated or "loss" in row)]
        (workdir / "metrics.part").write_text("".join(json.dumps(row) + "\n" for row in kept))
        os.replace(workdir / "metrics.part", workdir / "metrics.jsonl")  # whole, whenever the run is killed
        self.file = open(workdir / "metrics.jsonl", "a", buffering=1)
        anew = {"train": step + 1} | {f"eval_test_{name}": step + evaluated for name in evals}
        folder = workdir / "summaries"
        self.writers = {name: SummaryWriter(str(folder / name), purge_step=first) for name, first in anew.items()}
        self.writers["train"].add_text("parameters", "    " + about.replace("\n", "\n    "), step)

    def lap(self, step):
        """(seconds, steps) since the last lap; the next row's rates count from now."""
        now = time.perf_counter()
        passed = now - self.time, step - self.step
        self.time, self.step = now, step
        return passed

    def trained(self, step, report, tokens):
        """Reads what a step reported (this waits for the step), and tells it. Ends the run after too many bad steps.

        `tokens` are all that have been trained on by then.
        """
        report = jax.tree.map(float, jax.device_get(report))
        cfg, (loss, weight) = self.cfg, report["loss"]
        seconds, steps = self.lap(step)
        step_time = seconds / steps
        rate = cfg.batch * cfg.seq / step_time
        row = {"step": step, "loss": loss / (weight or 1), "accuracy": report["accuracy"][0] / (weight or 1),
               "grad_norm": report["grad_norm"], "learning_rate": report["learning_rate"], "num_predictions": weight,
               "tokens": tokens, "tokens_per_second": rate, "step_time": step_time,
               "mfu": self.peak and rate * self.flops / (self.peak * self.devices),
               "bad_steps": int(report["bad_steps"])}
        self.write("train", row | {"steps_per_second": 1 / step_time})
        print(f"step {step}/{cfg.steps}  loss {row['loss']:.4f}  learning rate {row['learning_rate']:.2e}  "
              f"gradient norm {row['grad_norm']:.3f}  {rate:,.0f} tokens/s  "
              f"MFU {'unknown' if row['mfu'] is None else format(row['mfu'], '.1%')}  "
              f"{clock((cfg.steps - step) * step_time)} left", flush=True)
        if row["bad_steps"] > self.bad_steps:
            why = "with 0 valid tokens" if not weight else "whose loss, gradient or update is not finite"
            print(f"step {step}: {row['bad_steps']} bad steps by now, {why}: they moved nothing", flush=True)
            self.bad_steps = row["bad_steps"]
        if report["bad_in_a_row"] >= cfg.max_bad_steps:
            raise SystemExit(f"train.py: stopped at step {step}: {cfg.max_bad_steps} steps in a row (max_bad_steps) "
                             f"had no finite gradient or no token; the checkpoints before are good")

    def evaluated(self, step, name, result):
        self.write(f"eval_test_{name}", {"step": step} | result, prefix=f"eval/{name}/")
        print(f"step {step}/{self.cfg.steps}  {name}: log_pplx {result['log_pplx']:.4f} nats per token, accuracy "
              f"{result['accuracy']:.4f}, over {result['num_predictions']:,.0f} tokens", flush=True)
        if self.file:
            plot(self.workdir)

    def write(self, folder, row, prefix=""):
        """`row` as a line of JSON, its keys but `step` with `prefix`; in TensorBoard's `folder` under Pax's tags."""
        if not self.file:
            return
        finite = {key: value if value is None or math.isfinite(value) else None for key, value in row.items()}
        line = {key if key == "step" else prefix + key: value for key, value in finite.items()}
        self.file.write(json.dumps(line) + "\n")
        for key, value in finite.items():
            for tag in PAX_TAGS.get(key, ()) if value is not None else ():
                self.writers[folder].add_scalar(tag, value, row["step"])

    def close(self):
        if self.file:
            self.file.close()
        for writer in self.writers.values():
            writer.close()


def read_metrics(workdir):
    """The rows of metrics.jsonl. What is no row is left out, loudly but for a last line that a kill cut short."""
    path, rows = workdir / "metrics.jsonl", []
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        if line.endswith(b"\n"):
            try:
                row = json.loads(line)
                rows.append({"step": int(row["step"])} | row)
            except (ValueError, KeyError, TypeError):
                print(f"WARNING: {path} line {number} is no row and left out: {line[:60]}", file=sys.stderr)
    return rows


def plot(workdir):
    """Draws loss.png: the loss on the batches trained on and on the validation split, against steps."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    rows = read_metrics(workdir)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=110)
    evals = sorted({key for row in rows for key in row if key.endswith("/log_pplx")})
    lines = [("loss", "train", {"linewidth": 1}), *((key, key.split("/")[1], {"marker": "o"}) for key in evals)]
    for key, label, style in lines:
        points = [(row["step"], row[key]) for row in rows if key in row and row[key] is not None]
        if points:
            axes.plot(*zip(*points), label=f"{label} (last {points[-1][1]:.3f})", **style)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=workdir.name)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    part = workdir / "loss.part.png"  # renamed when whole
    figure.savefig(part)
    os.replace(part, workdir / "loss.png")
    pyplot.close(figure)


# ---- the loop ------------------------------------------------------------------------------------------------------


class Interrupt:
    """A context in which SIGTERM and SIGINT ask the run to save and stop; a second one ends the process at once.

    A thread hears of them, also while the main thread compiles; a signal to one of many processes stops all. It takes
    the place of other handlers, such as that of libtpu, so it is entered after devices are there.
    """

    def __init__(self, mesh):
        self.mesh, self.signal, self.launched = mesh, None, collections.deque()

    def __enter__(self):
        self.read, self.write = os.pipe()
        os.set_blocking(self.write, False)
        self.before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGTERM, signal.SIGINT)}
        self.wakeup = signal.set_wakeup_fd(self.write)
        threading.Thread(target=self.listen, daemon=True).start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():  # None: one that is not Python's, and can't be put back
            signal.signal(number, handler or signal.SIG_DFL)
        os.close(self.write)  # ends the thread

    def listen(self):
        with open(self.read, "rb", buffering=0) as pipe:
            for number in iter(lambda: pipe.read(1), b""):
                if number[0] in self.before and self.signal:
                    os.write(2, b"\ntrain.py: a second signal: ends at once\n")
                    os._exit(128 + number[0])
                if number[0] in self.before:
                    self.signal = signal.Signals(number[0]).name
                    os.write(2, f"\ntrain.py: {self.signal}: saves and stops; another ends it at once\n".encode())

    def asked(self):
        """Whether any process is to stop: the same answer in all, which call this equally often; one call late, so
        that they do not wait for each other."""
        if jax.process_count() == 1:
            return bool(self.signal)
        self.launched.append(anywhere(self.mesh, bool(self.signal)))
        return len(self.launched) > 1 and bool(self.launched.popleft())


def evaluate(run, params, batches, asked=lambda: False):
    """{log_pplx, accuracy, num_predictions} over batches that lie on the mesh; host sums in float64.

    None once asked() says to stop.
    """
    sums, launched = collections.defaultdict(lambda: np.zeros(2)), collections.deque()

    def read(result):
        for name, pair in jax.device_get(result).items():
            sums[name] += np.float64(pair)

    for batch in batches:
        launched.append(run(params, batch))
        if asked():
            return None
        if len(launched) > 2:  # read behind, as in training
            read(launched.popleft())
    for result in launched:
        read(result)
    (loss, weight), (hits, _) = sums["loss"], sums["accuracy"]
    return {"log_pplx": float(loss / weight), "accuracy": float(hits / weight), "num_predictions": float(weight)}


def averaged(cfg, state):
    """The parameters to evaluate: their moving average, where there is one and cfg.eval_ema says so."""
    return state.ema if cfg.ema_decay and cfg.eval_ema else state.params


def check_lasting(cfg, facts):
    """Raises ValueError that lists the fields which a run keeps for life and which a checkpoint has otherwise."""
    then, now = flat(configs.Config()) | facts["config"], flat(cfg)  # a field that is newer had its default
    unknown = [f"{key}={then[key]} there, no field here" for key in then if key not in now]
    differ = unknown + [f"{key}={then[key]} there, {now[key]} here" for key in configs.LASTING if then[key] != now[key]]
    if differ:
        raise ValueError(f"the checkpoint is of another model: {'; '.join(differ)}")


def first_state(cfg, table, tx, target, leaves, folder):
    """(state, facts) of the newest checkpoint in `folder`, or a new one: from init_from=, or drawn.

    facts: the config, the sequences consumed, and whether what was to be evaluated at that step has been.
    """
    found = checkpoint.restore(folder, target, leaves, partial(check_lasting, cfg))
    if found:
        state, facts = found
        return state._replace(bad_in_a_row=0 * state.bad_in_a_row), facts  # started again: a new chance
    loaded = {}
    if cfg.init_from:
        wanted = {name: leaves[f"params/{name}"] for name in table}
        loaded = checkpoint.begin_from(cfg.init_from, cfg.rules, wanted, print)
    init = jax.jit(partial(init_state, cfg, table, tx), donate_argnums=0, out_shardings=places(target))
    return init(loaded), {"config": flat(cfg), "sequences": 0, "evaluated": True}


def train(cfg, mesh, task, corpus, workdir, home):
    """Trains to cfg.steps, from the newest checkpoint in `home`, if there is one; files that tell of it in `workdir`.

    Returns what to say at the end and the exit status.
    """
    table = task.params(cfg)
    tx = make_optimizer(cfg, table)
    hosts = data.hosts(cfg, mesh, task.batch(cfg)["rows"])
    target = abstract_state(cfg, mesh, table, tx)
    leaves, folder = checkpoint.layout(target, table), home / "checkpoints"
    about = overview(cfg, table, target)
    print(about, flush=True)
    with Interrupt(mesh) as interrupt:
        try:
            state, facts = first_state(cfg, table, tx, target, leaves, folder)
        except (ValueError, OSError) as error:
            refuse(f"{error}; go on as that run was, or begin in another --workdir")
        first = int(state.step)
        if first:
            print(f"continues from step {first}, found in {folder}")
            tell_changes(cfg, facts)
        if first > cfg.steps or first == cfg.steps and facts["evaluated"]:
            return print(f"steps={cfg.steps} are taken: nothing to do. To go on: --workdir={workdir} steps=N")
        end = data.last_step(cfg, corpus, first, facts["sequences"])
        print(data.describe(cfg, corpus, end, hosts), flush=True)
        if end < cfg.steps:
            refuse(f"data ends with step {end}, before steps={cfg.steps}: say steps={end}, or more epochs")
        keep_config(cfg, workdir)
        failure = ""
        try:
            with (contextlib.closing(Journal(cfg, mesh, task, workdir, first, facts["evaluated"], about,
                                             corpus.valid)) as journal,
                  checkpoint.Saves(folder, leaves, cfg) as saves):
                state, step, finished = loop(cfg, mesh, task, tx, corpus, hosts[jax.process_index()], state, facts,
                                             saves, journal, interrupt)
        except (checkpoint.SaveFailed, OSError) as error:
            failure = f"{type(error).__name__}: {error}"
        except BaseException:
            print(f"train.py: the newest checkpoint is {checkpoint.newest(folder)}", file=sys.stderr)
            raise
        if failure:
            state = None  # what is read back takes its place
            refuse(f"{failure}. {usable(folder, target, leaves)}")
    if not finished:
        saved = f", saved in {folder / str(step)}" if step else ", before there was anything to save"
        print(f"stopped at step {step} of {cfg.steps}{saved}; the same command goes on", flush=True)
        sys.exit(STOPPED)
    if cfg.sample_tokens:
        show_sample(cfg, mesh, task, corpus, averaged(cfg, state))
    print(f"{workdir / 'loss.png'}, beside it metrics.jsonl and TensorBoard events; step {step} is "
          f"{folder / str(step)}")


def loop(cfg, mesh, task, tx, corpus, own, state, facts, saves, journal, interrupt):
    """(state, its step, whether all is done): at cfg.steps, or where the run was asked to stop.

    `facts` are those of `state`; `own` are this host's rows of a micro-batch.
    """
    run_step, run_eval = make_step(cfg, mesh, task, tx), make_eval(cfg, mesh, task)
    on_mesh = partial(data.put, mesh, task.batch(cfg), own=own, micro=cfg.batch // cfg.accum)
    first, sequences, running, unread = int(state.step), facts["sequences"], collections.deque(), None

    def evaluations(step):
        """log_pplx of the first evaluation, None where there is none or the run was asked to stop; and whether that."""
        results = []
        for name, source in corpus.valid.items():
            inputs = map(on_mesh, data.eval_batches(cfg, source, name, own, (step - 1) // cfg.eval_every))
            result = evaluate(run_eval, averaged(cfg, state), inputs, interrupt.asked)
            if not result:
                return None, False
            journal.evaluated(step, name, result)
            results.append({"log_pplx": result["log_pplx"]})
        return next(iter(results), None), True

    with contextlib.closing(data.stream(cfg, corpus, sequences, own)) as batches:
        for step in range(first, cfg.steps + 1):  # the first is taken, but an evaluation may have been cut off
            consumed, last, metrics, evaluated = sequences + (step - first) * cfg.batch, step == cfg.steps, None, True
            logs, evaluates, saving = (step > first and (last or step % every == 0)
                                       for every in (cfg.log_every, cfg.eval_every, cfg.checkpoint_every))
            if step > first:
                state, report = run_step(state, on_mesh(next(batches)))
                running.append(report)
            if step == first + 1:
                print(f"compiled in {journal.lap(first)[0]:.1f} s", flush=True)
            if unread:  # a report is read when the step after it is under way
                journal.trained(*unread)
            unread = (step, report, consumed * cfg.seq) if logs or step == 1 != first else None
            stopping = interrupt.asked()
            if unread and (evaluates or saving or stopping):
                journal.trained(*unread)
                unread = None
            if evaluates or not facts["evaluated"] and step == first:
                metrics, evaluated = (None, False) if stopping else evaluations(step)
                stopping = not evaluated
            if (saving or stopping) and step > saves.step:
                said = {"config": flat(cfg), "sequences": consumed, "evaluated": evaluated}
                state = saves.save(step, state, said, metrics)
            if evaluates or saving:
                journal.lap(step)  # their time is not the steps'
            if stopping:
                break
            if len(running) > 2:  # the host stays two steps ahead: more would only hold more batches
                jax.block_until_ready(running.popleft())
    return state, step, last and evaluated


def usable(folder, target, leaves):
    """Says which checkpoint is still good, after it is read back (by one of several processes: its files checked)."""
    try:
        if jax.process_count() == 1:
            checkpoint.restore(folder, target, leaves)
        newest = checkpoint.newest(folder)
    except (ValueError, OSError) as error:
        return f"There is no good checkpoint: {error}"
    return f"The checkpoint {newest} is good, and the same command goes on from it" if newest else "No step was saved"


def show_sample(cfg, mesh, task, corpus, params):
    """Prints what the model writes after the beginning of the validation data."""
    source = next(iter(corpus.valid.values()), corpus.train)
    prompt = np.asarray(source.example(0).ids[:min(32, cfg.seq)], np.int32)
    ids = make_sampler(cfg, mesh, task)(params, prompt, jax.random.key(cfg.seed))
    decode = corpus.tokenizer.decode
    print(f"---- from {decode(prompt)!r} the model goes on:\n{decode(np.asarray(ids)[len(prompt):])}\n----")


# ---- the command line ----------------------------------------------------------------------------------------------

FLAGS = {"config": "tiny", "workdir": "", "mode": "train", "topology": "",
         "coordinator": "", "processes": "", "process": "", "heartbeat": "100"}
TASK = transformer
STOPPED = os.EX_TEMPFAIL  # 75, the exit status of a run that a signal stopped, and the same command continues


def refuse(reason):
    """Ends the program with one line."""
    raise SystemExit(f"train.py: {' '.join(str(reason).split())}")


def show_configs():
    """A line a config: name, parameters, topology, what it is."""
    for name, make in configs.CONFIGS.items():
        cfg = make()
        print(f"{name:20} {count(TASK.params(cfg)):>16}  {cfg.topology:12} {make.__doc__}")


def flat(cfg):
    """{field: value}, mesh axes as `ici.fsdp`, as a command line would say them."""
    out = {}
    for key, value in dataclasses.asdict(cfg).items():
        out |= {f"{key}.{axis}": size for axis, size in value.items()} if isinstance(value, dict) else {key: value}
    return out


def on_devices(cfg):
    """(cfg, mesh) for the devices that are here. Raises ValueError where the config wants others."""
    cfg = configs.resolve(cfg, len(jax.devices()))
    return cfg, make_mesh(dataclasses.astuple(cfg.ici), dataclasses.astuple(cfg.dcn), jax.devices())


def compile_step(cfg, mesh, task):
    """Compiles the training step from shapes alone; prints parameters and bytes per device."""
    tx = make_optimizer(cfg, task.params(cfg))
    shapes, (_, specs) = jax.eval_shape(partial(data.blank, cfg)), step_specs(cfg, task)
    batch = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, specs[name]))
             for name, x in shapes.items()}
    state = abstract_state(cfg, mesh, task.params(cfg), tx)
    print(overview(cfg, task.params(cfg), state), flush=True)
    since = time.perf_counter()
    compiled = make_step(cfg, mesh, task, tx).lower(state, batch).compile()
    print(f"compiled in {time.perf_counter() - since:.1f} s for {mesh.size} {mesh.devices.flat[0].device_kind} devices")
    print(f"parameters: {count(task.params(cfg))}")
    for what, size in pgle.report(compiled).items():
        print(f"{what} per device: {size} bytes ({size / 2**30:.2f} GiB)")


def main(argv):
    if {"-h", "--help"} & set(argv):
        fields = " ".join(f"{key}={value}" for key, value in flat(configs.Config()).items())
        return print(f"{__doc__}\nFields and their defaults:\n{textwrap.fill(fields, 120)}")
    try:
        flags, words = configs.command_line(argv, FLAGS)
        name, mode = flags["config"], flags["mode"]
        if name == "list":
            return show_configs()
        for flag, known in (("config", [*configs.CONFIGS, "list"]), ("mode", MODES), ("topology", ["cpu"])):
            word = flags[flag]
            if word and word not in known:
                raise ValueError(f"--{flag}={word}: no such {flag}; did you mean {configs.nearest(word, known)}? "
                                 f"There are: {', '.join(known)}")
        cfg = configs.override(configs.CONFIGS[name](), words)
        join(flags)
        is_frozen(cfg, TASK.params(cfg))
        if mode == "train" and not any(word.startswith("vocab=") for word in words):
            cfg = data.fitting(cfg)
    except ValueError as error:
        refuse(error)
    logging.set_verbosity(logging.FATAL)  # Orbax narrates, and its errors are raised too
    MODES[mode](name, cfg, flags["workdir"] or default_workdir(name, words))


def default_workdir(name, words):
    """runs/NAME, with the fields that were set: the same command finds its folder again, another has another."""
    said = ",".join([name, *sorted(words)])
    plain = re.sub(r"[^\w.,=+-]", "_", said)[:150]
    return f"runs/{plain}" + (f"-{zlib.crc32(said.encode()):08x}" if plain != said else "")


def join(flags):
    """Joins the processes of a run, one a host: --coordinator=HOST:PORT (that of process 0) --processes=N --process=I,
    or --coordinator=auto where TPU, Slurm or MPI tell them. A process that is silent for --heartbeat=SECONDS is dead,
    and ends the others. Raises ValueError for flags that do not say this."""
    asked = {name: flags[name] for name in ("processes", "process", "heartbeat")}
    numbers = {name: int(value) for name, value in asked.items() if value.isdecimal()}
    if not flags["coordinator"]:
        if asked["processes"] or asked["process"]:
            raise ValueError("--processes and --process need --coordinator=HOST:PORT")
        return
    where = {}
    if flags["coordinator"] != "auto":
        if numbers.keys() != asked.keys() or not numbers["process"] < numbers["processes"] or \
                not re.fullmatch(r".+:\d+", flags["coordinator"]):
            said = " ".join(f"--{name}={value}" for name, value in asked.items())
            raise ValueError(f"--coordinator={flags['coordinator']} {said}: it is --coordinator=HOST:PORT "
                             f"--processes=N --process=I, with I from 0 to N - 1, or --coordinator=auto; --heartbeat "
                             f"is in seconds")
        where = dict(coordinator_address=flags["coordinator"], num_processes=numbers["processes"],
                     process_id=numbers["process"])
    jax.config.update("jax_enable_preemption_service", False)  # Interrupt hears of signals, also of SIGINT
    try:
        jax.distributed.initialize(**where, heartbeat_timeout_seconds=numbers["heartbeat"])
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--coordinator={flags['coordinator']}: {error}") from error
    if jax.default_backend() == "cpu":  # jax 0.12 hangs where one process loads a step that another compiles
        jax.config.update("jax_enable_compilation_cache", False)
    if jax.process_index():
        sys.stdout = open(os.devnull, "w")  # process 0 alone tells


def run_training(name, cfg, workdir):
    try:  # what is wrong with devices, data or folders ends the run in one line, before any compile
        cfg, mesh = on_devices(cfg)
        corpus = data.load(cfg)
        home = checkpoint.place(workdir)
        workdir = Path(workdir) if "://" not in workdir else Path("runs", re.sub(r"[^\w.,=+-]", "_", workdir))
        workdir.mkdir(parents=True, exist_ok=True)
        lock = claim(workdir)  # noqa: F841  held while this runs
    except (ValueError, OSError) as error:
        refuse(f"{name}: {error}")
    said = " ".join(f"{key}={value}" for key, value in flat(cfg).items())
    print(textwrap.fill(f"{name}: {said}", 120, subsequent_indent="  "))
    train(cfg, mesh, TASK, corpus, workdir, home)


def claim(workdir):
    """Locks a run's folder, for as long as the file that is returned is open. Raises ValueError if another run has."""
    if jax.process_index():
        return None
    lock = open(workdir / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another run writes to {workdir}; wait for its end, or take another --workdir") from error
    return lock


def tell_changes(cfg, facts):
    """Prints what is not as it was in the run that is being continued."""
    then, now = facts["config"], flat(cfg)
    for key in sorted({*then, *now}):
        if then.get(key) != now.get(key):
            print(f"changed since the last start: {key}={then.get(key)} is now {now.get(key)}")


def keep_config(cfg, workdir):
    """Writes config.json."""
    if not jax.process_index():
        part = workdir / "config.part"
        part.write_text(json.dumps(flat(cfg), indent=1))
        os.replace(part, workdir / "config.json")


def run_compile(name, cfg, workdir):
    """On CPU devices that are made here, as many as the config's mesh has."""
    wanted = math.prod(size for level in (cfg.ici, cfg.dcn) for size in dataclasses.astuple(level) if size != -1)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", wanted)
    try:
        cfg, mesh = on_devices(cfg)
    except ValueError as error:
        refuse(f"{name}: {error}")
    compile_step(cfg, mesh, TASK)


MODES = {"train": run_training, "compile": run_compile}

if __name__ == "__main__":
    main(sys.argv[1:])
