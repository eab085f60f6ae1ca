"""Equivalences, not golden numbers: each result is reached in two ways that share as little as they can.

    python test_all.py [--all] [--soak] [--bench] [pytest arguments]

Eight CPU devices stand for a pod. `--all` runs every combination of what the ordinary run covers in pairs, `--soak`
what takes minutes; `--bench` prints ratios of times instead. Without arguments two processes share the tests.
"""

import dataclasses
import gzip
import http.server
import importlib.util
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import typing
from functools import cache, partial
from pathlib import Path

FLAGS = ("--all", "--soak", "--bench")
ASKED = os.environ.setdefault("TESTS_ASKED", " ".join(a for a in sys.argv if a in FLAGS)).split()  # workers inherit it
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
)  # compile fast, run slow
import jax  # noqa: E402  before any backend starts:

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "highest")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tenfold" / f"tests-jax-{jax.__version__}"
jax.config.update("jax_compilation_cache_dir", str(CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec as P  # noqa: E402

import checkpoint  # noqa: E402
import configs  # noqa: E402
import data  # noqa: E402
import mesh as mesh_module  # noqa: E402
import model  # noqa: E402
import train  # noqa: E402
from configs import Axes, Config  # noqa: E402
from mesh import AXES, local, make_mesh, missing, total  # noqa: E402

HERE = Path(__file__).parent
SHAKESPEARE = HERE.parent / "shared" / "data" / "tinyshakespeare.txt"

# Small, odd in every size, with all that a family has. eps is large because the gradient of some leaves is zero but for
# rounding (a bias on keys shifts all scores alike), and Adam divides by its size.
SMALL = dict(
    vocab=61,
    seq=16,
    layers=2,
    d_model=16,
    heads=8,
    kv_heads=8,
    d_head=4,
    d_ff=24,
    batch=32,
    steps=10,
    warmup_steps=2,
    eps=1e-3,
    learning_rate=1e-3,
    unroll=False,
    ici=Axes(),
)
FAMILIES = {
    "c4": dict(
        positions="sinusoidal",
        norm="layernorm",
        activation="gelu",
        embed_scale=True,
        query_scale="learned",
        ffn_bias=True,
        softmax_bias=True,
        attention_cap=5.0,
        logit_cap=3.0,
        init="xavier",
        schedule="exponential",
        decay="all",
        rms_cap=0.5,
        weight_decay=0.1,
    ),
    "gpt3": dict(
        positions="learned",
        position_rows=20,
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu",
        init="normal",
        init_std=0.3,
        attention_bias=True,
        ffn_bias=True,
    ),
    "llama": dict(kv_heads=4, tied=False),
}


def family(name, **changes):
    return Config(**SMALL | FAMILIES[name] | changes)


def mesh_of(cfg):
    ici, dcn = dataclasses.astuple(cfg.ici), dataclasses.astuple(cfg.dcn)
    return make_mesh(ici, dcn, jax.devices()[: math.prod(ici) * math.prod(dcn)])


def shardings(mesh, table):
    return {name: NamedSharding(mesh, p.spec) for name, p in table.items()}


@cache
def first_state(cfg, noise):
    """The initial state on one device, with noise on the parameters so that no scale is 1 and no bias 0."""
    table = model.transformer_params(cfg)

    def shake(name, p):
        real = jax.random.normal(jax.random.fold_in(jax.random.key(7), len(name)), table[name].size)
        return p + 0.1 * (
            real.reshape(p.shape)
            if name.startswith("layers/")
            else jnp.pad(real, [(0, a - b) for a, b in zip(p.shape, real.shape)])
        )

    state = jax.jit(partial(train.init_state, cfg, table, train.make_optimizer(cfg, table)))()
    return state._replace(params={n: shake(n, p) for n, p in state.params.items()}) if noise else state


def start(cfg, noise=True):
    """(mesh, tx, state) to begin with."""
    mesh, table = mesh_of(cfg), model.transformer_params(cfg)
    tx = train.make_optimizer(cfg, table)
    fields = [f.name for f in dataclasses.fields(Config)]
    matters = [*fields[: fields.index("dropout")], "seed", "rounds", "frozen", "ema_decay"]  # to the first state
    state = first_state(Config(**SMALL | {name: getattr(cfg, name) for name in matters}), noise)
    shapes = jax.eval_shape(partial(train.init_state, cfg, table, tx))

    def widen(x, to):  # where the vocabulary is padded further; always a copy, which the step may take
        return np.pad(x, [(0, full - real) for full, real in zip(to.shape, x.shape)]) if x.ndim else np.array(x)

    return (
        mesh,
        tx,
        jax.tree.map(
            jax.device_put, jax.tree.map(widen, state, shapes), train.places(train.abstract_state(cfg, mesh, table, tx))
        ),
    )


def one_document_a_row(text):
    """{name: (B, T)} of (B, T + 1) ids."""
    positions = np.broadcast_to(np.arange(text.shape[1], dtype=np.int32), text.shape)
    batch = data.as_batch(text.astype(np.int32), np.ones(text.shape, np.int32), positions, np.arange(len(text)), 1)
    return {name: x[0].copy() for name, x in batch.items()}


def packed(cfg, seed):
    """A batch of rows that hold several documents, of weights that differ, with rows and ends that weigh nothing."""
    rng = np.random.default_rng(seed)
    b, t = cfg.batch, cfg.seq
    batch = one_document_a_row(rng.integers(0, cfg.vocab, (b, t + 1)))
    batch["weights"] = (rng.random((b, t)) * (rng.random((b, t)) < 0.7)).astype(np.float32)
    for row in range(b):
        for cut in sorted(rng.choice(np.arange(1, t), 2, replace=False)):
            batch["segments"][row, cut:] += 1
            batch["positions"][row, cut:] = np.arange(t - cut)
    batch["weights"][: b // 4] = 0
    batch["weights"][-1, t // 2 :] = 0
    return batch


def split(cfg, batch):
    return {name: x.reshape(cfg.accum, cfg.batch // cfg.accum, *x.shape[1:]) for name, x in batch.items()}


def put(cfg, mesh, batch, task=model.transformer):
    micro = cfg.batch // cfg.accum
    return data.put(mesh, task.batch(cfg), split(cfg, batch), np.arange(micro), micro)


def close(a, b, what="", tolerance=1e-5):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert a.shape == b.shape, (what, a.shape, b.shape)
    assert np.isfinite(a).all(), what
    assert np.abs(a - b).max(initial=0) < tolerance, (what, np.abs(a - b).max())


# ---- the machine that the tests run on -----------------------------------------------------------------------------


def test_there_are_eight_devices():
    assert jax.device_count() == 8


def test_axes_have_one_order():
    assert AXES == tuple(f.name for f in dataclasses.fields(Axes))


# ---- the model, written again in plain jnp -------------------------------------------------------------------------


def reference_loss(cfg, params, batch):
    """Mean cross-entropy of (B, T) arrays: no mesh, scan or padding, head by head. After the papers, not model.py."""
    p = {n: (x.reshape(-1, *x.shape[2:]) if n.startswith("layers/") else x) for n, x in params.items()}
    B, T = batch["tokens"].shape
    embedding = p["embed"][: cfg.vocab]

    def norm(x, scale, bias):
        if cfg.norm == "rmsnorm":
            return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + cfg.norm_eps) * scale
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + cfg.norm_eps) * (1 + scale) + bias

    def turn(x):  # rope, on complex numbers
        if cfg.positions != "rope":
            return x
        half = cfg.d_head // 2
        angle = batch["positions"][..., None] * cfg.rope_theta ** (-2 * jnp.arange(half) / cfg.d_head)
        z = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
        return jnp.concatenate([z.real, z.imag], -1)

    x = jax.nn.one_hot(batch["tokens"], cfg.vocab) @ embedding * (cfg.d_model**0.5 if cfg.embed_scale else 1)
    if cfg.positions == "sinusoidal":
        half = cfg.d_model // 2
        step = math.log(10_000) / (half - 1)
        for i in range(half):
            angle = batch["positions"] * math.exp(-i * step)
            x = x.at[..., i].add(jnp.sin(angle)).at[..., half + i].add(jnp.cos(angle))
    if cfg.positions == "learned":
        x = x + jax.nn.one_hot(batch["positions"], cfg.position_rows) @ p["positions"]

    may_see = jnp.stack(
        [
            jnp.stack([(batch["segments"][:, i] == batch["segments"][:, j]) & (j <= i) for j in range(T)], -1)
            for i in range(T)
        ],
        -2,
    )
    for i in range(cfg.layers):
        w = {n.removeprefix("layers/"): x[i] for n, x in p.items() if n.startswith("layers/")}
        zero = lambda name: w.get(name, 0.0)
        y = norm(x, w["attention_norm/scale"], zero("attention_norm/bias"))
        out = 0.0
        for head in range(cfg.heads):
            shared = head // (cfg.heads // cfg.kv_heads)
            bias = lambda name, n: w[name][n] if name in w else 0.0
            q = turn(y @ w["wq"][:, head] + bias("bq", head))
            k = turn(y @ w["wk"][:, shared] + bias("bk", shared))
            v = y @ w["wv"][:, shared] + bias("bv", shared)
            q = q / cfg.d_head**0.5
            if cfg.query_scale == "learned":
                q = q * jnp.log1p(jnp.exp(w["query_scale"])) / math.log(2)
            scores = q @ k.swapaxes(1, 2)
            if cfg.attention_cap:
                scores = cfg.attention_cap * jnp.tanh(scores / cfg.attention_cap)
            out = out + jax.nn.softmax(jnp.where(may_see, scores, -jnp.inf)) @ v @ w["wo"][head]
        x = x + out + zero("bo")
        y = norm(x, w["ffn_norm/scale"], zero("ffn_norm/bias"))
        up = y @ w["w_up"] + zero("b_up")
        if cfg.activation == "swiglu":
            gate = y @ w["w_gate"]
            hidden = gate / (1 + jnp.exp(-gate)) * up
        else:
            hidden = 0.5 * up * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)))
        x = x + hidden @ w["w_down"] + zero("b_down")
    x = norm(x, p["final_norm/scale"], p.get("final_norm/bias", 0.0))
    logits = x @ (embedding if cfg.tied else p["unembed"][: cfg.vocab]).T
    if cfg.softmax_bias:
        logits = logits + p["softmax_bias"][: cfg.vocab]
    if cfg.logit_cap:
        logits = cfg.logit_cap * jnp.tanh(logits / cfg.logit_cap)
    nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
    return jnp.sum(nll * batch["weights"]) / jnp.sum(batch["weights"])


@cache
def update_of(cfg):
    """Optax on one device. (The step on a mesh has a test of its own.)"""
    tx = train.make_optimizer(cfg, model.transformer_params(cfg))
    return jax.jit(
        lambda grads, opt, params: (lambda u, opt: (optax.apply_updates(params, u), opt))(
            *tx.update(grads, opt, params)
        )
    )


def three_steps(cfg):
    """[(parameters, loss, gradients)] of three steps: gradients on cfg's mesh, updates on one device."""
    mesh, _, state = start(cfg)
    places = shardings(mesh, model.transformer_params(cfg))
    gradients = jax.jit(train.make_gradients(cfg, mesh, model.transformer))
    params, opt = jax.device_get((state.params, state.opt))
    out = []
    for seed in range(3):
        grads, metrics = gradients(jax.device_put(params, places), put(cfg, mesh, packed(cfg, seed)), seed)
        loss, weight = metrics["loss"]
        grads = jax.device_get(grads)
        out.append((params, float(loss / weight), grads))
        params, opt = jax.device_get(update_of(dataclasses.replace(cfg, ici=Axes(), accum=1))(grads, opt, params))
    return out


@cache
def on_one_device(name):
    return three_steps(family(name))


@cache
def reference(name):
    """[(loss, gradients)] by plain jnp, at the parameters that one device has before each step."""
    cfg = family(name)
    f = jax.jit(jax.value_and_grad(partial(reference_loss, cfg)))
    return [jax.device_get(f(on_one_device(name)[seed][0], packed(cfg, seed))) for seed in range(3)]


SIZES = [(d, f, t) for d, f, t in itertools.product((1, 2, 4, 8), repeat=3) if d * f * t <= 8]


def pairwise(*choices, allowed=lambda *_: True):
    """Rows that hold every pair of values that any allowed row holds: greedily, the row with most pairs missing."""
    rows = [row for row in itertools.product(*choices) if allowed(*row)]
    pairs = lambda row: set(itertools.combinations(enumerate(row), 2))
    wanted, chosen = set().union(*map(pairs, rows)), []
    while wanted:
        chosen.append(max(rows, key=lambda row: len(pairs(row) & wanted)))
        wanted -= pairs(chosen[-1])
    return chosen


def cover():
    if "--all" in ASKED:
        return [(d, f, t, name, accum) for d, f, t in SIZES for name in FAMILIES for accum in (1, 4)]
    return pairwise(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8), tuple(FAMILIES), (1, 4), allowed=lambda d, f, t, *_: d * f * t <= 8
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_one_device_equals_the_reference(name):
    for (_, loss, grads), (expected_loss, expected) in zip(on_one_device(name), reference(name)):
        close(loss, expected_loss)
        for leaf in expected:
            close(grads[leaf], expected[leaf], leaf)


@pytest.mark.parametrize("d,f,t,name,accum", cover())
def test_a_mesh_equals_one_device(d, f, t, name, accum):
    cfg = family(name, ici=Axes(data=d, fsdp=f, tensor=t), accum=accum)
    for mine, one, (expected_loss, expected) in zip(three_steps(cfg), on_one_device(name), reference(name)):
        close(mine[1], one[1])
        close(mine[1], expected_loss)
        for leaf in expected:
            close(mine[0][leaf], one[0][leaf], leaf)
            close(mine[2][leaf], one[2][leaf], leaf)
            close(mine[2][leaf], expected[leaf], leaf)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_step_is_gradients_then_optax(name):
    """Also: one compile, bad_steps stay 0, `step` counts, the reported norm is numpy's before clipping."""
    cfg = family(name, ici=Axes(fsdp=2, tensor=2), accum=2, clip=0.1)
    mesh, tx, state = start(cfg)
    step, expected = train.make_step(cfg, mesh, model.transformer, tx), three_steps(cfg)
    for seed, (params, loss, grads) in enumerate(expected):
        for leaf in params:
            close(state.params[leaf], params[leaf], leaf)
        state, report = step(state, put(cfg, mesh, packed(cfg, seed)))
        close(report["loss"][0] / report["loss"][1], loss)
        close(report["grad_norm"], math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values())))
        close(report["learning_rate"], train.make_schedule(cfg)(seed), tolerance=1e-9)
    assert int(state.step) == 3 and int(state.bad_steps) == 0
    assert step._cache_size() == 1


def test_initial_parameters_are_bit_equal_on_every_mesh():
    for name, meshes in (("c4", [(2, 2, 2), (1, 8, 1)]), ("llama", [(1, 2, 4)])):
        one = jax.device_get(
            jax.jit(
                partial(model.init_params, model.transformer_params(family(name)), 0),
                compiler_options={"xla_backend_optimization_level": 3},
            )()
        )
        for rounds, (d, f, t) in enumerate(meshes):
            cfg = family(name, rounds=1 + rounds % 2, ici=Axes(data=d, fsdp=f, tensor=t))
            table = model.transformer_params(cfg)
            init = jax.jit(
                partial(model.init_params, table, cfg.seed),
                out_shardings=shardings(mesh_of(cfg), table),
                compiler_options={"xla_backend_optimization_level": 3},
            )  # as outside these tests: fused and vectorized
            for leaf, p in jax.device_get(init()).items():
                assert np.array_equal(one[leaf].ravel(), p.ravel()), leaf


def test_draws_have_their_moments():
    draw = np.asarray(model.normal(0.5)(jax.random.key(0), (1000, 1000)), np.float64) / 0.5
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        close((draw**power).mean(), moment, tolerance=0.02)
    draw = np.asarray(model.uniform(0.3)(jax.random.key(0), (1000, 1000)), np.float64) / 0.3
    assert -1 <= draw.min() < -0.999 and 0.999 < draw.max() < 1
    close([draw.mean(), (draw**2).mean()], [0, 1 / 3], tolerance=0.005)


def losses_and_gradients(cfg, batch, step=0):
    mesh, _, state = start(cfg)
    grads, metrics = jax.jit(train.make_gradients(cfg, mesh, model.transformer))(
        state.params, put(cfg, mesh, batch), step
    )
    return jax.device_get({"loss": metrics["loss"][0] / metrics["loss"][1], **{n: g.ravel() for n, g in grads.items()}})


def same(a, b):
    assert a.keys() == b.keys()
    for leaf in a:
        close(a[leaf], b[leaf], leaf)


def test_remat_rounds_and_unroll_change_nothing():
    plain = losses_and_gradients(family("llama"), packed(family("llama"), 0))
    for change in (
        {"remat": "nothing"},
        {"remat": "mlperf_200b"},
        {"remat": "dots"},
        {"rounds": 2, "unroll": True, "remat": "context"},
    ):
        same(plain, losses_and_gradients(family("llama", **change), packed(family("llama"), 0)))


def test_remat_recomputes_what_its_name_says():
    """Matmuls in the gradient, from none kept to all kept; a policy of named tensors lies between."""

    def dots(policy):
        cfg = family("llama", remat=policy, layers=1, unroll=True)
        mesh, _, state = start(cfg)
        text = str(
            jax.make_jaxpr(train.make_gradients(cfg, mesh, model.transformer))(
                state.params, put(cfg, mesh, packed(cfg, 0)), 0
            )
        )
        return text.count("dot_general")

    count = {
        p: dots(p)
        for p in ("nothing", "context_and_out_proj", "mlperf_200b", "dots_except_logits", "dots", "everything")
    }
    assert count["nothing"] > count["context_and_out_proj"] > count["mlperf_200b"] > count["dots_except_logits"]
    assert count["dots_except_logits"] >= count["dots"] == count["everything"], count


def test_check_vma_off_gives_the_same_numbers(monkeypatch):
    cfg = family("llama", ici=Axes(data=2, fsdp=2, tensor=2))
    on = losses_and_gradients(cfg, packed(cfg, 0))
    monkeypatch.setattr(jax, "shard_map", partial(jax.shard_map, check_vma=False))
    same(on, losses_and_gradients(cfg, packed(cfg, 0)))


def test_a_forgotten_gradient_sum_is_an_error_while_tracing(monkeypatch):
    cfg = family("llama", ici=Axes(data=2))
    monkeypatch.setattr(train, "missing", lambda spec: tuple(a for a in missing(spec) if a != "data"))
    with pytest.raises(Exception, match="data"):
        losses_and_gradients(cfg, packed(cfg, 0))


def test_gradient_of_a_replicated_scalar_inside_shard_map():
    """w = 3, x = 0..7 over 4 devices, loss = sum of (w x)^2: 1260, gradient 2 w sum x^2 = 840. `local` and `total` give
    it with and without the check; a sum under the gradient, or none after it, gives 24, 3360 or an error."""
    mesh, w, x = mesh_of(Config(ici=Axes(data=4))), jnp.float32(3), jnp.arange(8.0)

    def run(f, check, out=P()):
        return jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=out, check_vma=check)(w, x)

    loss = lambda w, x: jnp.sum((w * x) ** 2)
    ours = lambda w, x: total(jnp.stack(jax.value_and_grad(loss)(local(w, P()), local(x, P("data")))))
    for check in (True, False):
        assert run(ours, check).tolist() == [1260, 840]
    unmarked = lambda w, x: jax.lax.psum(jax.grad(loss)(w, x), "data")
    assert (
        float(run(unmarked, False)) == 840 and float(run(unmarked, True)) == 3360
    )  # the check sums w's gradient itself
    inside = lambda w, x: jax.grad(lambda w: jax.lax.psum(loss(w, x), "data"))(w)
    assert float(run(inside, True)) == 840 and float(run(inside, False)) == 24  # silently wrong
    for check in (True, False):  # a gradient taken outside is right either way
        summed = lambda w, x: jax.lax.psum(loss(w, x), "data")
        f = jax.shard_map(summed, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=check)
        assert float(f(w, x)) == 1260 and float(jax.grad(f)(w, x)) == 840
    with pytest.raises(Exception, match="data"):
        run(lambda w, x: jax.grad(loss)(local(w, P()), x), True)


# ---- what the compiled step moves ----------------------------------------------------------------------------------


def group_size(attributes):
    """Devices in a group of a collective: {{0,1},{2,3}} written out, [2,2]<=[4] counted, or axes of a mesh named."""
    written = re.search(r"replica_groups=\{\{([\d,]*)\}", attributes)
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", attributes)
    named = re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", attributes)
    if named:
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
    if counted or written:
        return int(counted[1]) if counted else len(written[1].split(","))
    return jax.device_count()  # {}: all of them


def collectives(text):
    """{kind: arrays moved} of compiled HLO, of groups of more than one device."""
    out = dict.fromkeys(("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"), 0)
    for shapes, kind, rest in re.findall(
        r"^\s*(?:ROOT )?\S+ = (.*?) (%s)(?:-start)?\((.*)$" % "|".join(out), text, re.M
    ):
        if kind == "collective-permute" or group_size(rest) > 1:
            out[kind] += shapes.count("[")
    return {kind: n for kind, n in out.items() if n}


@cache
def compiled(cfg, step=False):
    """HLO of the loss-and-gradient part, or of the whole step."""
    mesh, tx, state = start(cfg)
    batch = put(cfg, mesh, packed(cfg, 0))
    if step:
        return train.make_step(cfg, mesh, model.transformer, tx).lower(state, batch).compile().as_text()
    gradients = jax.jit(train.make_gradients(cfg, mesh, model.transformer))
    return gradients.lower(state.params, batch, state.step).compile().as_text()


METRICS = 3  # loss, accuracy and their weight, each summed once


def test_data_parallel_gradients_move_one_sum_a_leaf():
    for name in FAMILIES:
        for accum in (1, 4):
            cfg = family(name, ici=Axes(data=2), accum=accum)
            assert collectives(compiled(cfg)) == {"all-reduce": len(model.transformer_params(cfg)) + METRICS}


def test_fsdp_gathers_and_scatters_each_sharded_leaf_once():
    for name in FAMILIES:
        cfg = family(name, ici=Axes(fsdp=2))
        table = model.transformer_params(cfg)
        sharded = sum("fsdp" in p.spec for p in table.values())
        assert collectives(compiled(cfg)) == {
            "all-gather": sharded,
            "reduce-scatter": sharded,
            "all-reduce": len(table) - sharded + METRICS,
        }
        again = sum("fsdp" in p.spec for n, p in table.items() if n.startswith("layers/"))  # for the recomputed layer
        assert collectives(compiled(dataclasses.replace(cfg, remat="nothing")))["all-gather"] == sharded + again


def test_tensor_parallelism_gathers_and_scatters_the_stream():
    """Forward: tokens, targets, segments, positions; the norms' outputs before attention, FFN and logits; sums after
    embedding, attention, FFN and loss. Backward: their transposes. And the largest logit with its place."""
    for name in FAMILIES:
        cfg = family(name, ici=Axes(tensor=2))
        shared = sum("tensor" not in p.spec for p in model.transformer_params(cfg).values())
        assert collectives(compiled(cfg)) == {
            "all-gather": 4 + 3 + 4,
            "reduce-scatter": 4 + 3,
            "all-reduce": shared + METRICS + 2,
        }


def test_the_optimizer_adds_scalar_or_per_layer_sums_only():
    for name in ("c4", "llama"):
        cfg = family(name, ici=Axes(data=2, fsdp=2, tensor=2), rms_cap=0.5)
        gradients, step = collectives(compiled(cfg)), collectives(compiled(cfg, step=True))
        assert {k: v for k, v in step.items() if k != "all-reduce"} == {
            k: v for k, v in gradients.items() if k != "all-reduce"
        }
        shapes = lambda text: re.findall(r"^\s*(?:ROOT )?\S+ = (.*?) all-reduce(?:-start)?\(", text, re.M)
        sizes = lambda text: sorted(
            math.prod(int(n) for n in dims.split(",") if n)
            for line in shapes(text)
            for dims in re.findall(r"\w\d+\[([\d,]*)\]", line)
        )
        extra = sizes(compiled(cfg, step=True))
        for size in sizes(compiled(cfg)):
            extra.remove(size)
        assert all(size <= cfg.layers for size in extra), extra


# ---- sums and weights: a task whose loss can be read off its data ----------------------------------------------------


def stub(cfg):
    """A Task of one parameter w, a vector of 2 that starts at 1: a token's loss is w . (value of the token, 0), or with
    segment 2, w . (0, value); `positions` hold the values in hundredths."""

    def loss(cfg, params, batch, step=None):
        value = batch["positions"] / 100
        each = jnp.where(batch["segments"] == 2, params["w"][1], params["w"][0]) * value
        nll = jnp.sum(each * batch["weights"])
        return nll, {"loss": (nll, batch["weights"].sum()), "accuracy": (0 * nll, batch["weights"].sum())}

    table = lambda cfg: {"w": model.Param((2,), P(None), model.constant(1.0), True, (2,))}
    return model.Task(table, model.transformer_batch, loss, None, lambda cfg: 0)


def stub_batch(values, weights, second=()):
    """(B, T) of values and weights; rows in `second` act on w[1]."""
    values, weights = np.asarray(values, np.float32), np.asarray(weights, np.float32)
    batch = one_document_a_row(np.zeros((len(values), values.shape[1] + 1))) | {"weights": weights}
    batch["positions"] = np.round(100 * values).astype(np.int32)
    batch["segments"][list(second)] = 2
    return batch


def stub_run(batch, taken=1, **changes):
    """(reports, state) of the real step on the stub task."""
    b, t = batch["tokens"].shape
    cfg = Config(**SMALL | dict(batch=b, seq=t, clip=0.0, weight_decay=0.0) | changes)
    mesh, task = mesh_of(cfg), stub(cfg)
    tx = train.make_optimizer(cfg, task.params(cfg))
    places = train.places(train.abstract_state(cfg, mesh, task.params(cfg), tx))
    state = jax.jit(partial(train.init_state, cfg, task.params(cfg), tx), out_shardings=places)()
    step, reports = train.make_step(cfg, mesh, task, tx), []
    for _ in range(taken):
        state, report = step(state, put(cfg, mesh, batch, task))
        reports.append(jax.device_get(report))
    return reports, jax.device_get(state)


def mean_and_gradient(batch, **changes):
    [report], state = stub_run(batch, **changes)
    gradient = state.opt[1].mu["w"] / (1 - 0.9)  # Adam's first moment after one step
    return report["loss"][0] / report["loss"][1], gradient.tolist()


def test_micro_batches_are_weighted_by_their_tokens():
    """2 tokens of loss 1 and 8 of loss 3 are 2.6 a token, not the mean of means, 2."""
    batch = stub_batch([[1] * 8, [3] * 8], [[1, 1, 0, 0, 0, 0, 0, 0], [1] * 8])
    for accum in (1, 2):
        loss, gradient = mean_and_gradient(batch, accum=accum)
        close([loss, *gradient], [2.6, 2.6, 0])


def test_devices_are_weighted_by_their_tokens():
    """1, 2, 3, 10 tokens of losses 1, 2, 3, 4: 54 / 16."""
    rows = [[v] * 16 for v in (1, 2, 3, 4)] * 2
    weights = [[1] * n + [0] * (16 - n) for n in (1, 2, 3, 10)] + [[0] * 16] * 4
    for axes in (Axes(), Axes(data=4), Axes(fsdp=8), Axes(data=2, tensor=4), Axes(data=4, fsdp=2)):
        loss, gradient = mean_and_gradient(stub_batch(rows, weights), ici=axes)
        close([loss, *gradient], [3.375, 3.375, 0])


def test_a_device_without_tokens_adds_nothing_and_a_batch_without_tokens_moves_nothing():
    rows, some = [[5] * 4] * 4, [[1] * 4, [1] * 4, [1] * 4, [0] * 4]
    for changes in (dict(ici=Axes(data=4)), dict(accum=4)):
        loss, gradient = mean_and_gradient(stub_batch(rows, some), **changes)
        close([loss, *gradient], [5, 5, 0])
        [report], state = stub_run(stub_batch(rows, np.zeros((4, 4))), weight_decay=0.1, **changes)
        assert report["loss"] == (0, 0) and report["grad_norm"] == 0
        assert state.step == 1 and state.bad_steps == 1 and state.opt[1].count == 0 and (state.params["w"] == 1).all()


def test_clipping_comes_once_after_the_mean():
    """Gradients [10, 0] and [0, 0.1] at norm 1: the mean [5, 0.05] becomes [0.99995, 0.0099995], not [0.5, 0.05]."""
    batch = stub_batch([[10], [0.1]], [[1], [1]], second=[1])
    for changes in (dict(), dict(accum=2), dict(ici=Axes(data=2))):
        [report], state = stub_run(batch, clip=1.0, **changes)
        close(state.opt[1].mu["w"] / 0.1, [0.99995, 0.0099995], tolerance=1e-6)
        close(report["grad_norm"], math.hypot(5, 0.05))


def test_norm_of_sharded_and_replicated_leaves_counts_each_value_once():
    """[3, 0, ..., 0, 4] over 4 devices clips to [0.6, ..., 0.8]; a replicated 3 and one 4 have norm 5, not sqrt(52)."""
    mesh = mesh_of(Config(ici=Axes(fsdp=4), batch=4))
    sharded = jax.device_put(jnp.array([3.0, 0, 0, 0, 0, 0, 0, 4]), NamedSharding(mesh, P("fsdp")))
    clip = optax.clip_by_global_norm(1.0)
    close(jax.jit(lambda g: clip.update(g, clip.init(g))[0])({"a": sharded})["a"], [0.6, 0, 0, 0, 0, 0, 0, 0.8])
    replicated = jax.device_put(jnp.array([3.0]), NamedSharding(mesh, P()))
    close(jax.jit(optax.tree.norm)({"a": replicated, "b": sharded - jnp.array([3.0, 0, 0, 0, 0, 0, 0, 0])}), 5)
    grads = on_one_device("llama")[0][2]
    norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    for axes in (Axes(), Axes(fsdp=4), Axes(fsdp=2, tensor=2), Axes(tensor=4)):  # and of the model's own leaves
        cfg = family("llama", ici=axes, clip=0.5)
        mesh, tx, state = start(cfg)
        state, report = train.make_step(cfg, mesh, model.transformer, tx)(state, put(cfg, mesh, packed(cfg, 0)))
        close(report["grad_norm"], norm)
        for leaf, mu in state.opt[1].mu.items():
            close(mu / 0.1, grads[leaf] * 0.5 / norm, leaf)


# ---- bad steps -----------------------------------------------------------------------------------------------------


def test_a_step_that_is_not_finite_moves_only_the_step():
    """A NaN and an overflow, on one device and on eight; then good steps go on as if nothing had been."""
    batch = stub_batch([[1, 2]] * 8, [[1, 1]] * 8)
    for axes, bad in itertools.product((Axes(), Axes(data=4, tensor=2)), (math.nan, math.inf)):
        cfg = Config(**SMALL | dict(batch=8, seq=2, ema_decay=0.9, max_bad_steps=2, ici=axes))
        mesh, task = mesh_of(cfg), stub(cfg)
        tx = train.make_optimizer(cfg, task.params(cfg))
        places = train.places(train.abstract_state(cfg, mesh, task.params(cfg), tx))
        state = jax.jit(partial(train.init_state, cfg, task.params(cfg), tx), out_shardings=places)()
        step, poisoned = train.make_step(cfg, mesh, task, tx), {**batch, "weights": batch["weights"].copy()}
        poisoned["weights"][3, 1] = bad
        good = lambda state: step(state, put(cfg, mesh, batch, task))
        state, first = good(state)
        before = jax.device_get(state)
        state, report = step(state, put(cfg, mesh, poisoned, task))
        after = jax.device_get(state)
        assert after.step == 2 and after.bad_steps == 1 and report["bad_in_a_row"] == 1
        for leaf, other in zip(jax.tree.leaves(before[1:4]), jax.tree.leaves(after[1:4])):
            assert np.array_equal(leaf, other)
        state, report = good(state)
        assert int(state.bad_in_a_row) == 0 and int(state.opt[1].count) == 2
        close(report["learning_rate"], train.make_schedule(cfg)(1), tolerance=1e-9)  # the optimizer's second update
        for _ in range(2):
            state, _ = step(state, put(cfg, mesh, poisoned, task))
        state, report = good(state)  # two in a row ended the run: a look after it still sees that
        assert report["bad_in_a_row"] == 2


# ---- dropout -------------------------------------------------------------------------------------------------------


def masks(cfg, step=0, layer=0, site=1):
    """What dropout does to ones, gathered to (B, T, D)."""

    def device(rows):
        ones = jnp.ones((len(rows), cfg.seq // cfg.axis("tensor"), 6))
        return model.dropout(cfg, {"rows": rows}, step, layer, site, ones)

    f = jax.shard_map(
        device, mesh=mesh_of(cfg), in_specs=P(mesh_module.BATCH), out_specs=P(mesh_module.BATCH, mesh_module.SEQUENCE)
    )
    return np.asarray(jax.jit(f)(jnp.arange(cfg.batch)))


def test_dropout_masks_differ_by_token_step_layer_and_site_and_not_by_mesh():
    one = masks(family("llama", dropout=0.5))
    assert set(np.unique(one)) == {0, 2} and abs(one.mean() - 1) < 0.1
    tokens = one.reshape(-1, one.shape[-1])
    assert len(np.unique(tokens, axis=0)) > 60  # of 64 patterns of 6 bits, over 512 tokens
    for axes in (Axes(data=4), Axes(tensor=4), Axes(data=2, fsdp=2, tensor=2)):
        assert np.array_equal(one, masks(family("llama", dropout=0.5, ici=axes)))
    for change in (dict(step=1), dict(layer=1), dict(site=2)):
        assert (one != masks(family("llama", dropout=0.5), **change)).mean() > 0.4
    assert (one != masks(family("llama", dropout=0.5, seed=1))).mean() > 0.4


def test_dropout_gives_one_gradient_on_every_mesh_accumulation_and_remat():
    cfg = lambda **changes: family("llama", dropout=0.3, **changes)
    plain = losses_and_gradients(cfg(), packed(cfg(), 0), step=5)
    for change in (dict(ici=Axes(data=2, tensor=2), accum=4), dict(ici=Axes(fsdp=4), remat="nothing")):
        same(plain, losses_and_gradients(cfg(**change), packed(cfg(), 0), step=5))
    assert abs(plain["loss"] - losses_and_gradients(cfg(), packed(cfg(), 0), step=6)["loss"]) > 1e-4


# ---- optimizer -----------------------------------------------------------------------------------------------------


def test_what_is_decayed():
    """One update of zero gradients at rate 0.1, decay 0.1: decayed leaves shrink by 1%, others stay, stacked or not."""
    for name, everything in (("gpt3", False), ("llama", False), ("c4", True)):
        cfg = family(name, learning_rate=0.1, weight_decay=0.1, schedule="constant", warmup_steps=0)
        table = model.transformer_params(cfg)
        _, tx, state = start(cfg)
        updates, _ = jax.jit(tx.update)(jax.tree.map(jnp.zeros_like, state.params), state.opt, state.params)
        for leaf, p in table.items():
            vector = leaf.split("/")[-1] in (
                "scale",
                "bias",
                "bq",
                "bk",
                "bv",
                "bo",
                "b_up",
                "b_down",
                "query_scale",
                "softmax_bias",
            )
            close(
                updates[leaf],
                -0.01 * state.params[leaf] if everything or not vector else 0 * state.params[leaf],
                leaf,
                1e-7,
            )


def test_adam_with_capped_updates_is_pax():
    """Against the update written out in numpy, per layer of a stack; padding of the vocabulary counts for nothing."""
    cfg = family("c4", clip=0.0, rms_cap=0.2, schedule="constant", warmup_steps=0, eps=1e-6)
    table = model.transformer_params(cfg)
    _, tx, state = start(cfg)
    rng = np.random.default_rng(0)
    m = v = dict.fromkeys(table, 0.0)
    params, opt = jax.device_get(state.params), state.opt
    for t in range(1, 4):
        grads = {
            n: np.where(params[n] == 0, 0, rng.normal(size=p.shape) * rng.gamma(0.3)).astype(np.float32)
            for n, p in table.items()
        }
        updates, opt = tx.update(jax.tree.map(jnp.asarray, grads), opt, jax.tree.map(jnp.asarray, params))
        m = {n: 0.9 * m[n] + 0.1 * g for n, g in grads.items()}
        v = {n: 0.99 * v[n] + 0.01 * g**2 for n, g in grads.items()}
        for n, p in table.items():
            u = m[n] / (1 - 0.9**t) / (np.sqrt(v[n] / (1 - 0.99**t)) + 1e-6)
            layers = u.reshape(cfg.layers if n.startswith("layers/") else 1, -1)
            real = math.prod(p.size) // len(layers)
            rms = np.sqrt((layers**2).sum(1, keepdims=True) / real)
            expected = -cfg.learning_rate * ((layers / np.maximum(1, rms / 0.2)).reshape(u.shape) + 0.1 * params[n])
            close(updates[n], expected, n, 1e-7)


@pytest.mark.parametrize("schedule", typing.get_args(Config.__annotations__["schedule"]))
def test_schedules_begin_rise_and_end_where_they_should(schedule):
    rate = train.make_schedule(Config(schedule=schedule, warmup_steps=4, steps=10, learning_rate=1e-3, min_ratio=0.1))
    rates = [float(rate(i)) for i in range(10)]
    close(rates[:4], [0.25e-3, 0.5e-3, 0.75e-3, 1e-3], tolerance=1e-9)  # the first update moves
    if schedule == "constant":
        return close(rates[4:], [1e-3] * 6, tolerance=1e-9)
    assert rates.count(max(rates)) == (5 if schedule == "wsd" else 1) and max(rates) == rates[3]
    close(rates[9], 1e-4, tolerance=1e-9)  # the last is the end, not past it
    assert all(a > b for a, b in zip(rates[7:], rates[8:]))
    for edge in (
        dict(warmup_steps=0),
        dict(steps=1),
        dict(warmup_steps=10),
        dict(warmup_steps=20),
        dict(decay_start=9),
        dict(min_ratio=1.0),
    ):
        rate = train.make_schedule(
            Config(**dict(schedule=schedule, warmup_steps=4, steps=10, learning_rate=1e-3) | edge)
        )
        assert all(0 < float(rate(i)) < 1.001e-3 for i in range(10)), edge


def test_the_documented_rates_are_the_applied_ones():
    rows = re.findall(
        r"^\| (cosine|exponential|wsd|constant)(?:, `schedule_start=(\d)`)? \|((?: [\d.]+ \|){10})$",
        (HERE / "docs/schedules.md").read_text(),
        re.M,
    )
    assert [row[0] for row in rows] == ["cosine", "exponential", "wsd", "constant", "cosine"]
    for schedule, begin, rates in rows:
        cfg = Config(
            schedule=schedule,
            warmup_steps=4,
            steps=10,
            learning_rate=1.0,
            min_ratio=0.1,
            schedule_start=int(begin or 1),
        )
        close(
            [float(r) for r in rates.split("|")[:-1]], [train.make_schedule(cfg)(i) for i in range(10)], tolerance=6e-4
        )


def test_pax_schedules():
    """LinearRampupExponentialDecay and its cosine: 0 first, 1 from warm-up to decay_start, min_ratio from decay_end."""
    for schedule, middle in (("exponential", 0.1**0.5), ("cosine", 0.55)):
        cfg = Config(
            schedule=schedule,
            warmup_steps=4000,
            decay_start=5000,
            decay_end=300_000,
            schedule_start=0,
            learning_rate=2.0,
        )
        rate = train.make_schedule(cfg)
        close(
            [rate(i) for i in (0, 1000, 4000, 4500, 5000, 152_500, 300_000, 10_000_000)],
            [0, 0.5, 2, 2, 2, 2 * middle, 0.2, 0.2],
            tolerance=1e-6,
        )


def test_applied_rates_are_the_schedule():
    """Adam of a constant gradient moves by the rate itself: ten changes of a parameter give the table back."""
    batch = stub_batch([[1]], [[1]])
    changes = dict(steps=10, warmup_steps=4, min_ratio=0.0, learning_rate=1e-3, eps=1e-12)
    cfg = Config(**SMALL | dict(batch=1, seq=1) | changes)
    w = [1.0, *(stub_run(batch, n, **changes)[1].params["w"][0] for n in range(1, 11))]
    moved, logged = -np.diff(w), [report["learning_rate"] for report in stub_run(batch, 10, **changes)[0]]
    close(moved, [train.make_schedule(cfg)(i) for i in range(10)], tolerance=1e-6)
    close(logged, moved, tolerance=1e-6)


def test_frozen_parameters_stay_and_have_no_moments():
    cfg = family("llama", frozen="^embed|w_up$", weight_decay=0.1, ici=Axes(fsdp=2))
    mesh = mesh_of(cfg)
    table = model.transformer_params(cfg)
    tx = train.make_optimizer(cfg, table)
    places = train.places(train.abstract_state(cfg, mesh, table, tx))
    state = jax.jit(partial(train.init_state, cfg, table, tx), out_shardings=places)()
    moments = {path[-1].key for path, x in jax.tree_util.tree_leaves_with_path(state.opt) if x.ndim}
    assert moments == set(table) - {"embed", "layers/w_up"}
    before = jax.device_get(state.params)
    state, _ = train.make_step(cfg, mesh, model.transformer, tx)(state, put(cfg, mesh, packed(cfg, 0)))
    for leaf, p in jax.device_get(state.params).items():
        assert np.array_equal(p, before[leaf]) == (leaf in ("embed", "layers/w_up")), leaf
    for pattern, what in (("w_upp", "matches no parameter; nearest is layers/w_up"), ("(", "not a regular expression")):
        with pytest.raises(ValueError, match=what):
            train.is_frozen(family("llama", frozen=pattern), table)


def test_moving_average_of_parameters():
    batch = stub_batch([[1]], [[1]])
    average, changes = np.float32(1), dict(ema_decay=0.3, warmup_steps=0, schedule="constant")
    for n in range(1, 4):
        _, state = stub_run(batch, n, **changes)
        decay = min(0.3, n / (9 + n))  # (1 + steps before) / (10 + steps before)
        average = decay * average + (1 - decay) * state.params["w"][0]
        close(state.ema["w"][0], average, tolerance=1e-6)
    assert train.averaged(Config(ema_decay=0.3), state) is state.ema
    assert train.averaged(Config(ema_decay=0.3, eval_ema=False), state) is state.params


def test_no_two_leaves_of_the_state_share_memory():
    cfg = family("llama", ema_decay=0.9)
    table = model.transformer_params(cfg)
    tx = train.make_optimizer(cfg, table)
    state = jax.jit(partial(train.init_state, cfg, table, tx))()
    where = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(where)) == len(where)


def test_master_parameters_and_moments_stay_float32():
    """bfloat16 has no number between 1 and 1 - 1/256: 100 updates of 1e-3 still bring a parameter from 1 to 0.9."""
    batch = stub_batch([[1]], [[1]])
    _, state = stub_run(batch, 100, dtype="bfloat16", schedule="constant", warmup_steps=0, eps=1e-12)
    close(state.params["w"][0], 0.9, tolerance=1e-3)
    cfg = family("llama", dtype="bfloat16")
    mesh, tx, state = start(cfg)
    state, _ = train.make_step(cfg, mesh, model.transformer, tx)(state, put(cfg, mesh, packed(cfg, 0)))
    assert {str(x.dtype) for x in jax.tree.leaves(state)} == {"float32", "int32"}


# ---- precision -----------------------------------------------------------------------------------------------------


def test_cross_entropy_is_float32_under_bfloat16_compute():
    """Logits of size 5, 40 and 160 from bfloat16 states and weights: loss and gradients like a float64 oracle's."""
    for size in (5, 40, 160):
        cfg = family("llama", dtype="bfloat16", tied=True)
        rng = np.random.default_rng(size)
        y = jnp.asarray(rng.normal(size=(2, 16, 16)), jnp.bfloat16)
        rows = (
            jnp.zeros((128, 16), jnp.bfloat16)
            .at[:61]
            .set(jnp.asarray(size / 4 * rng.normal(size=(61, 16)), jnp.bfloat16))
        )
        targets = rng.integers(0, 61, (2, 16))

        def loss(rows, y):
            logits = jax.shard_map(
                lambda r, y: model.unembed(cfg, {"embed": r}, y),
                mesh=mesh_of(cfg),
                in_specs=(P("tensor"), P()),
                out_specs=P(None, None, "tensor"),
            )(rows, y)
            assert logits.dtype == jnp.float32
            nll = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
            return nll.mean()

        value, (d_rows, d_y) = jax.jit(jax.value_and_grad(loss, (0, 1)))(rows, y)
        e, h = np.asarray(rows, np.float64)[:61], np.asarray(y, np.float64)
        logits = h @ e.T
        log_p = logits - logits.max(-1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
        close(value / -np.take_along_axis(log_p, targets[..., None], -1).mean(), 1, tolerance=1e-3)
        d = (np.exp(log_p) - np.eye(61)[targets]) / targets.size
        for mine, oracle in ((d_rows[:61], d.reshape(-1, 61).T @ h.reshape(-1, 16)), (d_y, d @ e)):
            close(np.asarray(mine, np.float64) / np.abs(oracle).max(), oracle / np.abs(oracle).max(), tolerance=1e-2)


def test_the_logits_matmul_of_the_step_gives_float32():
    cfg = family("llama", dtype="bfloat16")
    mesh, _, state = start(cfg)
    text = str(
        jax.make_jaxpr(train.make_gradients(cfg, mesh, model.transformer))(
            state.params, put(cfg, mesh, packed(cfg, 0)), 0
        )
    )
    assert re.search(r"f32\[32,16,128\]\S* = dot_general", text)
    assert not re.search(r"bf16\[32,16,128\]\S* = dot_general", text)


def test_position_phases_are_float32():
    """cos and sin of rope and of the sinusoids at far positions, against float64, under bfloat16 compute."""
    positions = np.array([[0, 255, 257, 2049, 4095, 16383]])
    cfg = Config(d_head=128, dtype="bfloat16")
    angle = positions[..., None] * 10_000.0 ** (-np.arange(64) * 2 / 128)
    cos, sin = model.rope(cfg, jnp.asarray(positions))
    close(cos[:, :, 0], np.cos(angle), tolerance=2e-3)  # float32 holds 16383 radians to 1e-3
    close(sin[:, :, 0], np.sin(angle), tolerance=2e-3)
    angle = positions[..., None] * np.exp(-np.arange(64) * math.log(10_000) / 63)
    close(
        model.sinusoids(jnp.asarray(positions), 128), np.concatenate([np.sin(angle), np.cos(angle)], -1), tolerance=2e-3
    )


def test_bfloat16_gradients_are_reduced_in_float32():
    """What each of two FSDP devices has is added in float32; in bfloat16 1 + 2^-8 would be 1."""
    mesh = mesh_of(Config(ici=Axes(fsdp=2)))

    def device(w, x, dtype):
        w, x = local((w, x), (P("fsdp"), P("fsdp")))
        return jax.grad(lambda w: jnp.sum(mesh_module.unshard(w, P("fsdp"), "bfloat16", dtype).astype("float32") * x))(
            w
        )

    for dtype, expected in (("float32", 1 + 2.0**-8), ("bfloat16", 1)):
        f = jax.shard_map(
            partial(device, dtype=dtype),
            mesh=mesh,
            in_specs=(P("fsdp"), P("fsdp")),
            out_specs=P("fsdp"),
            check_vma=False,
        )
        grads = jax.jit(f)(jnp.ones(4), jnp.array([1, 1, 1, 1, 2.0**-8, 2.0**-8, 2.0**-8, 2.0**-8]))
        assert grads.tolist() == [expected] * 4


# ---- the vocabulary ------------------------------------------------------------------------------------------------


def test_padding_of_the_vocabulary_takes_no_part():
    """All real logits -1 (from a bias), padding at 0: the loss is ln 5, ids stay below 5, padding gets and keeps 0."""
    base = dict(sample_tokens=8, vocab=5, softmax_bias=True, tied=False, decay="all", weight_decay=0.1)
    for tensor in (1, 2, 4):
        cfg = family("llama", **base, ici=Axes(tensor=tensor))
        mesh, tx, state = start(cfg, noise=False)
        params = dict(
            state.params, softmax_bias=state.params["softmax_bias"].at[:5].set(-1), unembed=0 * state.params["unembed"]
        )
        state = jax.tree.map(
            jax.device_put,
            state._replace(params=params),
            train.places(train.abstract_state(cfg, mesh, model.transformer_params(cfg), tx)),
        )
        batch = packed(cfg, 0)
        state, report = train.make_step(cfg, mesh, model.transformer, tx)(state, put(cfg, mesh, batch))
        close(report["loss"][0] / report["loss"][1], math.log(5))
        # all logits alike: the first id is the answer, right where the target is 0
        close(report["accuracy"][0], (batch["weights"] * (batch["targets"] == 0)).sum(), tolerance=1e-4)
        for leaf in ("embed", "unembed", "softmax_bias"):
            assert not np.asarray(state.opt[1].mu[leaf])[5:].any() and not np.asarray(state.params[leaf])[5:].any(), (
                leaf
            )
    ids = train.make_sampler(cfg, mesh, model.transformer)(state.params, jnp.array([1, 2]), jax.random.key(0))
    assert max(ids) < 5 and len(ids) == 2 + cfg.sample_tokens


def test_a_tensor_axis_of_three_pads_further():
    cfg = dict(seq=18, d_model=18, heads=6, kv_heads=3, d_ff=24, rms_cap=0.5)
    one, three = (
        losses_and_gradients(family("llama", **cfg, ici=Axes(tensor=t)), packed(family("llama", **cfg), 0))
        for t in (1, 3)
    )
    for leaf in one:  # 128 rows and 384
        n = min(one[leaf].size, three[leaf].size)
        close(one[leaf].ravel()[:n], three[leaf].ravel()[:n], leaf)
        assert not three[leaf].ravel()[n:].any()


def test_fewer_kv_heads_than_tensor_devices():
    plain = losses_and_gradients(family("llama", kv_heads=2, attention_bias=True), packed(family("llama"), 0))
    same(
        plain,
        losses_and_gradients(
            family("llama", kv_heads=2, attention_bias=True, ici=Axes(tensor=4, fsdp=2)), packed(family("llama"), 0)
        ),
    )


# ---- evaluation and sampling ---------------------------------------------------------------------------------------


def test_evaluation_is_the_same_for_any_batch_and_mesh():
    tokens = np.random.default_rng(0).integers(0, 61, 403).astype(np.uint8)
    results = []
    for changes in (dict(batch=4), dict(batch=32), dict(batch=16, accum=2, ici=Axes(data=2, fsdp=2, tensor=2))):
        cfg = family("gpt3", **changes)
        mesh = mesh_of(cfg)
        params = jax.tree.map(
            jax.device_put,
            first_state(family("gpt3"), True).params,
            shardings(mesh, model.transformer_params(cfg)),
        )
        source, micro = whole(cfg, data.Memory("tokens", tokens, np.array([0, 403]))), cfg.batch // cfg.accum
        own, specs = np.arange(micro), model.transformer.batch(cfg)
        batches = (data.put(mesh, specs, b, own, micro) for b in data.eval_batches(cfg, source, "", own, 0))
        results.append(train.evaluate(train.make_eval(cfg, mesh, model.transformer), params, batches))
    cfg = family("gpt3")
    nll = 0.0
    for i in range(0, 402, 16):  # by the reference, window by window
        window = tokens[i : i + 17].astype(np.int32)[None]
        n = window.shape[1] - 1
        batch = {
            "tokens": window[:, :-1],
            "targets": window[:, 1:],
            "weights": np.ones((1, n)),
            "segments": np.ones((1, n), np.int32),
            "positions": np.arange(n)[None],
        }
        nll += n * float(reference_loss(cfg, jax.device_get(first_state(cfg, True).params), batch))
    assert [r["num_predictions"] for r in results] == [402] * 3
    for r in results:
        close(r["log_pplx"], nll / 402, tolerance=1e-5)
        close(r["accuracy"], results[0]["accuracy"], tolerance=1e-9)


def test_sampling_follows_the_model_on_any_mesh():
    """Greedy ids are the argmax of full forward passes; a draw is the same on one device and on eight."""
    out = []
    for axes in (Axes(), Axes(data=2, fsdp=2, tensor=2)):
        for temperature in (0.0, 1.0):
            cfg = family("llama", ici=axes, temperature=temperature, sample_tokens=16)
            mesh, _, state = start(cfg)
            ids = train.make_sampler(cfg, mesh, model.transformer)(
                state.params, jnp.array([3, 1, 4]), jax.random.key(0)
            )
            out.append(ids.tolist())
    assert out[0] == out[2] and out[1] == out[3] and out[0] != out[1]
    cfg, params = family("llama"), jax.device_get(first_state(family("llama"), True).params)
    tokens = [3, 1, 4]

    @jax.jit
    def losses(window, n):  # of each id as the target after the first n tokens
        ones = jnp.ones(cfg.seq, jnp.int32)
        batch = {
            "tokens": window,
            "segments": ones,
            "weights": 1.0 * (jnp.arange(cfg.seq) == n - 1),
            "positions": jnp.arange(cfg.seq),
        }
        one = lambda i: reference_loss(cfg, params, {k: v[None] for k, v in (batch | {"targets": i * ones}).items()})
        return jax.lax.map(one, jnp.arange(61))

    for _ in range(16):  # by the reference: the likeliest next token is the target of least loss
        window = np.array(tokens[-cfg.seq :])
        tokens.append(int(losses(np.pad(window, (0, cfg.seq - len(window))), len(window)).argmin()))
    assert tokens == out[0]


# ---- configs and the command line ----------------------------------------------------------------------------------


def test_parameter_counts_are_the_published_ones():
    counts = {name: model.count(model.transformer_params(make())) for name, make in configs.CONFIGS.items()}
    assert counts["c4_1b"] == 1_104_619_904
    llama = dict(vocab=32_000, seq=4096, tied=False, d_head=128)
    for size, want in (
        (dict(layers=32, d_model=4096, heads=32, kv_heads=32, d_ff=11_008), 6_738_415_616),
        (dict(layers=80, d_model=8192, heads=64, kv_heads=8, d_ff=28_672), 68_976_648_192),
    ):
        assert model.count(model.transformer_params(Config(**llama | size))) == want
    gpt3 = dict(
        vocab=50_257,
        seq=2048,
        positions="learned",
        norm="layernorm",
        activation="gelu",
        attention_bias=True,
        ffn_bias=True,
    )
    size = dict(layers=96, d_model=12_288, heads=96, kv_heads=96, d_head=128, d_ff=49_152)
    assert model.count(model.transformer_params(Config(**gpt3 | size))) == 174_780_420_096


def test_training_flops_count_half_of_the_attention():
    """llama2-7b at 8192 tokens, 4 sequences: 1510.11 TFLOP, of which attention is 211.11."""
    cfg = Config(
        vocab=32_000, seq=8192, layers=32, d_model=4096, heads=32, kv_heads=32, d_head=128, d_ff=11_008, tied=False
    )
    close(model.transformer_flops(cfg) * 4 * 8192 / 1e12, 1510.11, tolerance=0.01)


def test_every_field_is_read_outside_configs():
    source = "".join(
        (HERE / f"{name}.py").read_text() for name in ("mesh", "model", "data", "checkpoint", "pgle", "train")
    )
    for field in dataclasses.fields(Config):
        assert re.search(rf"\bcfg\.{field.name}\b", source), field.name


def test_flipping_a_field_changes_what_is_computed():
    """The step, the parameter table, the sampler or the data: something must differ for every field of the math."""
    rng = np.random.default_rng(0)
    store = data.Memory("tokens", rng.integers(0, 59, 4000).astype(np.uint8), np.arange(0, 4001, 10))

    def views(cfg):  # the cheap ones first
        mesh, table = mesh_of(cfg), model.transformer_params(cfg)
        tx = train.make_optimizer(cfg, table)
        batch = jax.eval_shape(partial(data.blank, cfg))
        yield model.transformer_flops(cfg), [p[:2] for p in table.values()], batch
        shuffled = data.Shuffled(data.Documents(cfg, store, 0, 4000), cfg.seed, "tokens")
        yield data.build(cfg, shuffled, 0, np.arange(cfg.batch // cfg.accum))["tokens"].tolist()
        init = partial(train.init_state, cfg, table, tx)
        yield jax.eval_shape(init)
        state = jax.eval_shape(init)
        yield re.sub(
            "0x[0-9a-f]+", "", str(jax.make_jaxpr(train.make_step(cfg, mesh, model.transformer, tx))(state, batch))
        )
        yield str(jax.make_jaxpr(init)())
        yield model.init_params({"embed": table["embed"]}, cfg.seed)["embed"].tolist()
        yield str(
            jax.make_jaxpr(train.make_sampler(cfg, mesh, model.transformer))(
                state.params, jnp.zeros(3, jnp.int32), jax.random.key(0)
            )
        )

    def differ(cfg, other):
        return any(a != b for a, b in zip(views(cfg), views(other)))

    base = family("llama", ici=Axes(fsdp=2))
    flips = dict(
        vocab=59,
        seq=8,
        layers=4,
        d_model=32,
        heads=4,
        kv_heads=2,
        d_head=6,
        d_ff=32,
        positions="sinusoidal",
        rope_theta=500.0,
        norm="layernorm",
        norm_eps=1e-3,
        activation="gelu",
        tied=True,
        embed_scale=True,
        query_scale="learned",
        attention_bias=True,
        ffn_bias=True,
        softmax_bias=True,
        attention_cap=5.0,
        logit_cap=3.0,
        init="xavier",
        dropout=0.1,
        dtype="bfloat16",
        remat="dots",
        unroll=True,
        rounds=2,
        ici=Axes(tensor=2),
        dcn=Axes(data=2),
        batch=16,
        accum=2,
        steps=11,
        learning_rate=0.5,
        schedule="wsd",
        warmup_steps=3,
        decay_start=4,
        decay_end=20,
        min_ratio=0.3,
        schedule_start=0,
        beta1=0.5,
        beta2=0.5,
        eps=1e-5,
        eps_root=1e-4,
        rms_cap=0.5,
        weight_decay=0.3,
        decay="all",
        clip=0.5,
        frozen="embed",
        ema_decay=0.5,
        max_bad_steps=3,
        seed=1,
        temperature=0.3,
        sample_tokens=3,
        packing="pack",
    )
    assert not differ(base, family("llama", ici=Axes(fsdp=2)))
    for name, value in flips.items():
        assert differ(base, dataclasses.replace(base, **{name: value})), name
    for name, value, on in (
        ("init_std", 0.5, dict(init="normal")),
        ("position_rows", 30, dict(positions="learned")),
        ("reduce_dtype", "bfloat16", dict(dtype="bfloat16")),
    ):
        base_on = dataclasses.replace(base, **on)
        assert differ(base_on, dataclasses.replace(base_on, **{name: value})), name
    told = {
        "topology",
        "data",
        "tokenizer",
        "epochs",
        "eval_data",
        "eval_batches",
        "eval_reset",
        "data_timeout",
        "keep_newest",
        "keep_every",
        "keep_best",
        "init_from",
        "rules",
        "eval_ema",
        "log_every",
        "eval_every",
        "checkpoint_every",
    }  # tested by what a run leaves
    assert {f.name for f in dataclasses.fields(Config)} == set(flips) | {
        "init_std",
        "position_rows",
        "reduce_dtype",
    } | told


BAD = [  # words, and what the one line must name
    ("--stepz=5", "--stepz=5.*steps=5"),
    ("stepz=5", "stepz.*steps"),
    ("--steps=5", "--steps=5.*steps=5.*no dashes"),
    ("-- steps=5", "'--'.*steps=5"),
    ("--config=c4_1B", "c4_1B.*c4_1b"),
    ("--mode=trian", "trian.*train"),
    ("--lr=abc", "--lr=abc.*learning_rate"),
    ("lr=3", "lr.*learning_rate"),
    ("steps=1e3", "steps=1e3.*whole number"),
    ("batch=0", "batch=0"),
    ("steps=-5", "steps=-5"),
    ("layers", "layers=value"),
    ("learning_rate=fast", "learning_rate=fast.*number"),
    ("learning_rate=nan", "learning_rate=nan"),
    ("tied=yes", "tied=yes.*true or false"),
    ("ici.fdsp=2", "ici.fdsp.*ici.fsdp"),
    ("ici=4", "ici"),
    ("ici.fsdp=0", "fsdp=0"),
    ("ici.fsdp=-1 ici.data=-1", "data and fsdp"),
    ("norm=rms", "norm=rms.*rmsnorm"),
    ("remat=some", "remat=some.*nothing"),
    ("heads=3", "heads=3.*kv_heads=4"),
    ("accum=3", "batch=16.*accum=3"),
    ("rounds=3", "layers=4.*rounds=3"),
    ("ici.data=1 ici.tensor=3", "seq=128.*3"),
    ("ici.data=3", "16.*3"),
    ("ici.data=1 ici.stage=2", "stage=2"),
    ("d_head=31", "d_head=31"),
    ("positions=learned position_rows=64", "seq=128.*position_rows=64"),
    ("dropout=1", "dropout=1"),
    ("extra", "'extra'"),
    ("steps=5 steps=6", "steps is set twice"),
    ("ici.data=1 ici.data=2", "ici.data is set twice"),
    ("config=tiny", "--config=tiny"),
    ("seed=4294967297", "seed=4294967297.*2.31"),
    ("learning_rate=1e39", "learning_rate=1e.39.*float32"),
    ("min_ratio=1.5", "min_ratio=1.5"),
    ("schedule=exponential min_ratio=0", "min_ratio=0.*exponential"),
    ("rope_theta=0", "rope_theta=0"),
    ("dcn.data=0", "dcn.data=0"),
    ("ici.tensor=2 heads=3 kv_heads=3", "heads=3.*tensor=2"),
    ("ici.fsdp=2 d_model=127", "d_model=127.*fsdp=2"),
    ("--config=lsit", "lsit.*list"),
    ("data=", "data="),
    ("--mode=compile ici.fsdp=3 d_model=129", "batch / accum=16.*=3"),
    ("--workdir", "--workdir"),
    ("--topology=v9", "v9.*cpu"),
    ("frozen=wqq", "frozen=wqq.*wq"),
    ("seq=", "seq=value"),
    ("data=/nowhere/at.all", "data=/nowhere/at.all.*data=PATH"),
    ("vocab=100", r"\.py: byte \d+ at offset \d+.*vocab=100.*vocab=256"),
    ("decay_start=9 decay_end=5", "decay_end=5.*decay_start=9"),
]


@pytest.mark.parametrize("words,expected", BAD)
def test_what_is_wrong_stops_the_run_in_one_line(words, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax, "devices", lambda: jax.local_devices(backend="cpu")[:1])
    with pytest.raises(SystemExit) as stop:
        train.main(words.split())
    assert re.search(expected, str(stop.value)) and "\n" not in str(stop.value), stop.value
    assert not list(tmp_path.iterdir())


def run(*words, devices=1, cwd=HERE, **kwargs):
    """train.py as a person starts it."""
    env = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices), "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
    return subprocess.run(
        [sys.executable, str(HERE / "train.py"), *words], env=env, cwd=cwd, capture_output=True, text=True, **kwargs
    )


def test_a_typo_is_answered_before_anything_starts():
    since = time.perf_counter()
    out = run("--stepz=5")
    assert out.returncode != 0 and out.stderr.count("\n") == 1 and "steps=5" in out.stderr
    assert time.perf_counter() - since < 10  # 1 s on a machine that is not busy


def test_a_config_for_a_pod_says_what_it_wants_on_a_laptop():
    out = run("--config=c4_1b")
    assert out.returncode != 0 and out.stderr.count("\n") == 1
    for word in ("4 devices", "--mode=compile", "ici.fsdp=1", "data="):
        assert word in out.stderr


def test_the_list_of_configs(capsys):
    train.main(["--config=list"])
    lines = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    assert (
        set(lines) == set(configs.CONFIGS) and lines["c4_1b"][:2] == ["1104619904", "v4-8"] and len(lines["tiny"]) > 3
    )


def test_the_step_of_c4_1b_compiles_on_devices_that_are_not_here():
    out = run("--config=c4_1b", "--mode=compile", "--topology=cpu")
    assert out.returncode == 0, out.stderr
    assert "parameters: 1104619904" in out.stdout
    arguments = int(re.search(r"arguments per device: (\d+)", out.stdout)[1])
    state, batch = 3 * 4 * 1_104_619_904 // 4, 128 * 1024 * 5 * 4 // 4
    assert state + batch < arguments < 1.02 * (state + batch)  # the norms and biases are on every device


def test_meshes_must_multiply_out():
    for words, devices, sizes in (
        ((), 8, (1, 8, 1, 1, 1)),
        (("ici.fsdp=-1",), 8, (1, 1, 8, 1, 1)),
        (("ici.fsdp=4",), 8, (1, 2, 4, 1, 1)),
        (("ici.data=2", "dcn.data=-1"), 8, (1, 8, 1, 1, 1)),
    ):
        cfg = configs.resolve(configs.override(configs.tiny(), words), devices)
        assert tuple(cfg.axis(a) for a in AXES) == sizes
        assert mesh_of(cfg).devices.shape == sizes
    for words, devices in (
        (("ici.data=1", "ici.tensor=4"), 8),
        (("ici.data=2",), 8),
        (("ici.data=4",), 1),
        (("ici.fsdp=4",), 2),
    ):
        with pytest.raises(ValueError, match=f"{devices}"):
            configs.resolve(configs.override(configs.tiny(), words), devices)
    with pytest.raises(ValueError, match="3 x 1|needs 3 devices"):
        make_mesh((1, 3, 1, 1, 1), (1,) * 5, jax.devices())


def test_dcn_axes_step_from_slice_to_slice():
    mesh = make_mesh((1, 1, 2, 1, 2), (1, 2, 1, 1, 1), jax.devices())
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    assert set(ids[:, 0].ravel()) == {0, 1, 2, 3} and set(ids[:, 1].ravel()) == {4, 5, 6, 7}


# ---- data ----------------------------------------------------------------------------------------------------------


def test_the_order_is_a_permutation_that_a_key_picks():
    for n in (1, 2, 3, 7, 64, 1000, 97_656):
        one, other = (data.permute(np.arange(n), n, np.full(n, key, np.uint64)) for key in (1, 2))
        assert sorted(one) == list(range(n))
        assert n < 7 or (one != other).any()
    n = 10**12  # no memory
    far = data.permute(np.arange(n - 1000, n), n, np.full(1000, 1, np.uint64))
    assert len(set(far)) == 1000 and 0 <= far.min() and far.max() < n
    big = data.permute(np.arange(50_000), 50_000, np.full(50_000, 3, np.uint64))
    assert abs(np.corrcoef(np.arange(50_000), big)[0, 1]) < 0.02
    assert abs(np.diff(big).astype(float).std() / (50_000 / 6**0.5) - 1) < 0.02  # as of independent draws


def memory(lengths, seed=0, vocab=50):
    """A store of random documents."""
    starts = np.cumsum([0, *lengths]).astype(np.int64)
    ids = np.random.default_rng(seed).integers(0, vocab, starts[-1])
    return data.Memory("documents", ids.astype(np.uint16), starts)


def whole(cfg, store):
    return data.Documents(cfg, store, 0, len(store.tokens))


def test_batches_are_a_function_of_seed_and_index():
    cfg = Config(seq=16, batch=8, vocab=2000)
    source = whole(cfg, data.Memory("count", np.arange(2000).astype(np.uint16), np.array([0, 2000])))
    n, order, own = len(source), data.Shuffled(source, 0, ""), np.arange(8)
    assert n == 125
    build = lambda first, cfg=cfg, order=order: data.build(cfg, order, first, np.arange(cfg.batch // cfg.accum))
    rows = np.concatenate([build(first)["tokens"][0] for first in range(0, 2 * n + 8, 8)])
    corpus = data.Corpus(order, {}, None, lambda: None)
    for first in (0, 8, 240):  # seeking is another first; so is another batch size
        stream = data.stream(cfg, corpus, first, own)
        for i in range(2 if first < 240 else 1):
            assert np.array_equal(next(stream)["tokens"][0], rows[first + 8 * i : first + 8 * i + 8])
        stream.close()
    small = dataclasses.replace(cfg, batch=4)
    assert np.array_equal(np.concatenate([build(i, small)["tokens"][0] for i in (0, 4)]), rows[:8])
    for epoch in (0, 1):  # an epoch's rows tile the text: no token twice
        seen = rows[epoch * n : (epoch + 1) * n]
        assert sorted(seen[seen.any(1)].ravel()) == sorted(np.arange(2000))
    assert (rows[:n] != rows[n : 2 * n]).any()
    assert (build(0, order=data.Shuffled(source, 1, ""))["tokens"][0] != rows[:8]).any()
    batch = build(0, dataclasses.replace(cfg, accum=2))
    assert batch["tokens"].shape == (2, 4, 16)
    assert np.array_equal(batch["targets"][:, :, :-1], batch["tokens"][:, :, 1:])
    assert batch["rows"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_seeking_costs_nothing():
    cfg = Config(seq=16, batch=64, vocab=50)
    order = data.Shuffled(whole(cfg, memory([40] * 5000)), 0, "")
    for first in (0, 64 * 10**6, 10**12):
        since = time.perf_counter()
        data.build(cfg, order, first, np.arange(64))
        assert time.perf_counter() - since < 0.1


LENGTHS = (3, 1, 16, 17, 18, 33, 34, 5, 0, 100, 2, 2, 7)


def by_hand(cfg, store, pieces):
    """A row of (document, first token, tokens), written with nothing of data.py."""
    row = {name: [] for name in ("tokens", "targets", "weights", "segments", "positions")}
    text = [(store.tokens[store.starts[d] + a + i], s + 1, i) for s, (d, a, n) in enumerate(pieces) for i in range(n)]
    text += [(0, 0, None)] * (cfg.seq + 1 - len(text))
    for (token, segment, position), (target, following, _) in itertools.pairwise(text):
        row["tokens"].append(int(token))
        row["targets"].append(int(target))
        row["weights"].append(float(segment == following != 0))
        row["segments"].append(segment)
        row["positions"].append(position)
    return row


@pytest.mark.parametrize("packing", typing.get_args(Config.__dataclass_fields__["packing"].type))
def test_rows_are_those_made_by_hand(packing):
    """All of a row, in each packing; and each token of a document but its first is a target once."""
    cfg = Config(seq=16, batch=4, packing=packing, vocab=50)
    store = memory(LENGTHS)
    source = whole(cfg, store)
    document = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    batch = data.as_batch(*data.assemble(cfg, source, np.arange(len(source)), len(source)), np.arange(len(source)), 1)
    seen = []
    for r in range(len(source)):
        start, length, _ = source.parts(np.array([r]))
        places = [p for a, n in zip(start.tolist(), length.tolist()) for p in range(a, a + n)]
        seen += places
        pieces = [
            (d, group[0] - store.starts[d], len(group))
            for (d, _), g in itertools.groupby(enumerate(places), key=lambda p: (document[p[1]], p[1] - p[0]))
            for group in [[p for _, p in g]]
        ]
        expected = by_hand(cfg, store, pieces)
        real = np.array(expected["segments"]) > 0
        for name, values in expected.items():
            mine, theirs = batch[name][0, r], np.array(values, object)
            assert (mine[real] == theirs[real]).all(), (packing, r, name)
            assert name == "positions" or (mine[~real] == 0).all()
        assert packing == "concat" or packing == "pack" or len(pieces) == 1
    assert set(seen) == set(range(sum(LENGTHS)))  # nothing is dropped
    assert batch["weights"].sum() == sum(max(n - 1, 0) for n in LENGTHS)
    if packing == "concat":
        assert len(source) == -(-(sum(LENGTHS) - 1) // 16)


def test_the_end_of_a_document_predicts_nothing():
    """[1,2,3,E] [4,5,E] pad: weights 1,1,1,0,1,1,0,0; also where a document ends on the last column."""
    for lengths, weights in (((4, 3), [1, 1, 1, 0, 1, 1, 0, 0]), ((8, 3), [1] * 7 + [0]), ((9,), [1] * 8)):
        cfg = Config(seq=8, packing="concat", vocab=50)
        batch = data.as_batch(*data.assemble(cfg, whole(cfg, memory(lengths)), np.array([0]), 1), [0], 1)
        assert batch["weights"][0, 0].tolist() == weights
    assert batch["segments"][0, 0].tolist() == [1] * 8


def test_best_fit_is_best_fit():
    """As many rows, as full, as by the book: one piece at a time, longest first."""
    rng = np.random.default_rng(0)
    for space in (5, 17, 64):
        lengths = rng.integers(1, space + 1, 300)
        row, rows = data.best_fit(lengths, space)
        free = []
        for n in sorted(lengths.tolist(), reverse=True):
            fits = [i for i, room in enumerate(free) if room >= n]
            i = min(fits, key=lambda i: free[i], default=len(free))
            free[i : i + 1] = [(free[i] if fits else space) - n]
        filled = np.bincount(row, lengths, minlength=rows)
        assert rows == len(free) and filled.max() <= space
        assert sorted(filled) == sorted(space - room for room in free)


def test_validation_holds_each_token_once():
    """Whatever the batch; the last one is filled up with rows that weigh nothing."""
    for n in (2, 16, 17, 18, 129, 300):
        cfg = Config(seq=16, batch=4, vocab=400)
        source = whole(cfg, data.Memory("count", np.arange(1, n + 1).astype(np.uint16), np.array([0, n])))
        batches = list(data.eval_batches(cfg, source, "valid", np.arange(4), 0))
        targets = np.concatenate([b["targets"][b["weights"] == 1] for b in batches])
        assert targets.tolist() == list(range(2, n + 1)) and {b["tokens"].shape for b in batches} == {(1, 4, 16)}
        assert all((b["tokens"] + 1 == b["targets"])[b["weights"] == 1].all() for b in batches)


def test_evaluations_begin_again_or_go_on():
    cfg = Config(seq=16, batch=4, vocab=2000, eval_batches=3)
    source = whole(cfg, data.Memory("count", np.arange(1, 641).astype(np.uint16), np.array([0, 640])))  # 10 batches
    firsts = lambda cfg, turn: [
        int(b["tokens"][0, 0, 0]) for b in data.eval_batches(cfg, source, "", np.arange(4), turn)
    ]
    assert [firsts(cfg, turn) for turn in (0, 1)] == [[1, 65, 129]] * 2
    rolling = dataclasses.replace(cfg, eval_reset=False)
    assert [firsts(rolling, turn) for turn in (0, 1, 3)] == [[1, 65, 129], [193, 257, 321], [577, 1, 65]]
    with pytest.raises(ValueError, match="eval_reset=false.*eval_batches=N"):
        dataclasses.replace(cfg, eval_reset=False, eval_batches=0)


def test_a_mixture_is_exact_and_a_function_of_its_index():
    cfg = Config(seq=16, vocab=50)
    parts = [data.Shuffled(whole(cfg, memory([n], seed)), seed, str(n)) for seed, n in enumerate((16_000, 4_000, 800))]
    mixture = data.Mixture(parts, [7, 2, 1], 0)
    part, which = mixture.index(np.arange(30_000))
    for block in range(3):
        assert np.bincount(part[block * 10_000 :][:10_000]).tolist() == [7000, 2000, 1000]
    for p in range(3):  # each part's sequences come once
        assert sorted(which[part == p]) == list(range(sum(part == p)))
    assert abs(np.mean(part[:500] == 0) - 0.7) < 0.1  # and mixed
    far = np.arange(10**9, 10**9 + 5)
    assert all(np.array_equal(a, b) for a, b in zip(mixture.examples(far).ids, [mixture.example(i).ids for i in far]))
    ends = [mixture.end(epochs) for epochs in (1, 2)]
    for epochs, end in zip((1, 2), ends):  # the first part to be used up: all of it, nothing twice
        used = [max(which[:end][part[:end] == p]) + 1 for p in range(3)]
        assert all(n <= epochs * len(source) for n, source in zip(used, parts))
        p = part[end]
        assert which[end] >= epochs * len(parts[p])
    assert mixture.end(0) == 0 and len(mixture) == ends[0]


def test_where_data_ends():
    cfg = Config(seq=16, batch=4, vocab=50, epochs=3)
    corpus = data.Corpus(data.Shuffled(whole(cfg, memory([16 * 10 + 1])), 0, ""), {}, None, None)
    assert data.last_step(cfg, corpus, 0, 0) == 7  # 30 rows, 4 a step
    assert data.last_step(cfg, corpus, 3, 20) == 5
    assert data.last_step(dataclasses.replace(cfg, epochs=0), corpus, 0, 0) == math.inf


def test_what_goes_wrong_ahead_is_raised_at_once():
    def work(i):
        if i == 2:
            raise ValueError("file, offset")
        return i

    seen = []
    with pytest.raises(ValueError, match="file, offset"):
        for x in data.ahead(work, itertools.count()):
            seen.append(x)
            time.sleep(0.05)
    assert seen in ([0], [])


def corpus(tmp_path, **files):
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(tmp_path)


def ids_of(corpus):
    """The ids that train, and those that validate."""
    return corpus.train.source.store.tokens, corpus.valid["valid"].store.tokens


def test_text_becomes_tokens_and_back(tmp_path):
    text = "The quick brown fox. Ünïcode! " * 40
    file = corpus(tmp_path, a=text) + "/a"
    for tokenizer, vocab in (("bytes", 256), ("chars", len(set(text)))):
        c = data.load(Config(data=file, tokenizer=tokenizer, vocab=vocab, seq=16))
        parts = ids_of(c)
        both = np.concatenate(parts)
        assert c.tokenizer.decode(both) == text and c.tokenizer.encode([text])[0].tolist() == both.tolist()
        assert abs(len(parts[0]) / len(both) - 0.9) < 0.01
    parts = {f"d__{i}": f"file {i} " * 30 for i in range(20)}
    folder = corpus(tmp_path, **parts) + "/d"
    for where in (folder, folder + "/*"):
        c = data.load(Config(data=where, seq=16))
        train, valid = (bytes(x).split(b"\0")[:-1] for x in ids_of(c))
        assert sorted(train + valid) == sorted(t.encode() for t in parts.values()) and 1 <= len(valid) <= 4
        again = data.load(Config(data=where, seq=16))
        assert all(map(np.array_equal, ids_of(c), ids_of(again)))


def test_ids_beyond_the_text_decode_to_a_mark(tmp_path):
    file = corpus(tmp_path, a="abc" * 200) + "/a"
    assert data.load(Config(data=file, tokenizer="chars", seq=16)).tokenizer.decode([0, 200, 2]) == "a\ufffdc"
    assert data.load(Config(data=file, vocab=300, seq=16)).tokenizer.decode([97, 299, 99]) == "a\ufffdc"


def test_validation_is_near_its_share_of_files(tmp_path):
    sizes = lambda parts: [sum(map(len, part.values())) for part in parts]
    assert sizes(data.split({"train.txt": b"x" * 100_000, "valid.txt": b"y" * 1000}, 0.1)) == [100_000, 1000]
    assert sizes(data.split({"a": b"x" * 7000, "b": b"", "c": b"y" * 900}, 0.1)) == [7000, 900]
    file = corpus(tmp_path, full="some text. " * 200, empty="")
    assert len(ids_of(data.load(Config(data=file, seq=16)))[1]) == 220
    train, valid = sizes(data.split({str(i): b"x" * (i % 50) for i in range(1000)}, 0.1))
    assert abs(valid / (train + valid) - 0.1) < 0.005


@pytest.mark.parametrize(
    "files,fields,expected",
    [
        ({"a": "abcdz" * 99}, dict(vocab=122), "a: byte 122 at offset 4 .*vocab=122.*vocab=256"),
        ({"a": "abcd" * 99}, dict(vocab=3, tokenizer="chars"), "4.*vocab=3.*vocab=4"),
        ({"a": b"abc\0" * 99}, {}, "a is not a text file: byte 3"),
        ({"a": b"abc\xff" * 99}, dict(tokenizer="chars"), "a is not UTF-8: byte 3"),
        ({"a": "abc"}, {}, "too few for seq=128"),
        ({"a": ""}, {}, "too few for seq=128"),
    ],
)
def test_bad_text_is_named(tmp_path, files, fields, expected):
    file = corpus(tmp_path, **files) + "/a"
    with pytest.raises(ValueError, match=expected):
        data.load(Config(data=file, **fields))


def test_the_standard_library_is_split_by_file():
    c = data.load(configs.tiny())
    train_ids, valid_ids = ids_of(c)
    assert 5e6 < len(train_ids) < 5e7 and 1e5 < len(valid_ids) < 1e6
    files, ends = data.find("python"), [c.train.source.store.starts, c.valid["valid"].store.starts]
    assert sum(len(e) - 1 for e in ends) == len(files)  # whole files, each with an end
    assert len(train_ids) + len(valid_ids) == sum(path.stat().st_size + 1 for path in files.values())


# ---- prepared data -------------------------------------------------------------------------------------------------

SHARED = HERE.parent / "shared" / "data"
needs_c4 = pytest.mark.skipif(not SHARED.exists(), reason="samples of C4 and tokenizers are not beside the checkout")
DOCUMENTS = [
    "The first.\nTwo lines.",
    "",
    'ünïcode ☃ and \\ "quotes"',
    "x" * 300,
    "a b c",
    "last, with a null \0 in it",
]


def prepare(out, pattern, **flags):
    """data.prepare in this process; flags as on the command line, `-` as `_`."""
    given = {name.replace("_", "-"): str(value) for name, value in flags.items()}
    data.prepare(
        data.PREPARE | {"workers": "1", "tokenizer": "bytes"} | given | {"input": str(pattern), "out": str(out)}
    )
    return data.Shards(str(out), 5)


def documents_of(shards):
    """The ids of each document."""
    ends = [np.asarray(x) for x in (shards.starts[:-1], shards.starts[1:])]
    return [shards.read(np.array([a]), np.array([b]))[0] if a < b else np.zeros(0, int) for a, b in zip(*ends)]


def write_lines(path, documents=DOCUMENTS, key="text"):
    lines = "".join(json.dumps({key: text, "url": "u"}) + "\n" for text in documents).encode()
    pack = {".gz": gzip.compress, ".zst": lambda b: pytest.importorskip("zstandard").compress(b)}.get(
        path.suffix, bytes
    )
    path.write_bytes(pack(lines))
    return path


@needs_c4
@pytest.mark.parametrize("file", ["sentencepiece_32000.model", "tokenizer_neox.json"])
def test_c4_is_tokenized_as_the_library_does(file, tmp_path):
    """In two processes, by the command; equal to one process, and to the library text by text."""
    library = pytest.importorskip({"model": "sentencepiece", "json": "tokenizers"}[file.rpartition(".")[2]])
    paths = sorted(SHARED.glob("c4-sample.*.json.gz"))
    texts = [json.loads(line)["text"] for path in paths for line in gzip.open(path, "rt")]
    if file.endswith("model"):
        model = library.SentencePieceProcessor(model_file=str(SHARED / file))
        expected, decode = [model.encode(text) for text in texts], model.decode
    else:
        model = library.Tokenizer.from_file(str(SHARED / file))
        expected, decode = [model.encode(text).ids for text in texts], model.decode
        assert [decode(ids) for ids in expected] == texts  # this one is lossless
    command = [
        sys.executable,
        HERE / "data.py",
        "prepare",
        f"--input={SHARED}/c4-sample.*.json.gz",
        "--workers=2",
        f"--tokenizer={SHARED / file}",
        f"--out={tmp_path / 'two'}",
        "--shard-tokens=5000",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "documents/s" in done.stdout and "30 documents" in done.stdout
    shards = prepare(tmp_path / "one", SHARED / "c4-sample.*.json.gz", tokenizer=SHARED / file, shard_tokens=5000)
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    ids = documents_of(shards)
    assert [x[:-1].tolist() for x in ids] == expected
    assert {x[-1] for x in ids} == {shards.index["eos"]}  # as many ends as documents
    assert [shards.tokenizer().decode(x[:-1]) for x in ids] == [decode(x) for x in expected]
    assert shards.index["tokens"] == sum(map(len, expected)) + 30 and shards.index["documents"] == 30
    assert len(shards.counts) == 3 and shards.dtype == np.uint16
    without = prepare(tmp_path / "plain", SHARED / "c4-sample.*.json.gz", tokenizer=SHARED / file, eos="false")
    assert without.index["tokens"] == sum(map(len, expected)) and not without.index["add_eos"]


def test_every_kind_of_file_gives_the_same_tokens(tmp_path):
    """Lines of JSON plain and packed (also in two members), Parquet, ids in JSON, flat ids; texts a file each."""
    expected = [list(text.encode()) + [0] for text in DOCUMENTS]
    for name in ("a.jsonl", "a.json", "a.jsonl.gz", "a.json.zst"):
        shards = prepare(tmp_path / f"out-{name}", write_lines(tmp_path / name))
        assert [x.tolist() for x in documents_of(shards)] == expected, name
    twice = tmp_path / "twice.jsonl.gz"
    twice.write_bytes((tmp_path / "a.jsonl.gz").read_bytes() * 2)
    assert [x.tolist() for x in documents_of(prepare(tmp_path / "out-twice", twice))] == expected * 2
    arrow = pytest.importorskip("pyarrow")
    arrow.parquet = pytest.importorskip("pyarrow.parquet")
    arrow.parquet.write_table(arrow.table({"text": DOCUMENTS}), tmp_path / "a.parquet", row_group_size=4)
    assert [x.tolist() for x in documents_of(prepare(tmp_path / "out-p", tmp_path / "a.parquet"))] == expected
    ids = np.concatenate([*map(np.array, expected)])
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"ids": x}) + "\n" for x in expected))
    flat = [x for x in expected if x[:-1]]  # (\0 in a text is an end in a flat file)
    for name, save in (("b.npy", np.save), ("b.bin", lambda path, x: x.astype(np.uint32).tofile(path))):
        save(tmp_path / name, ids)
        got = documents_of(prepare(tmp_path / f"out-{name}", tmp_path / name, dtype="uint32"))
        assert np.array_equal(np.concatenate(got), ids) and all(x[-1] == 0 and 0 not in x[:-1] for x in got)
        assert [x.tolist() for x in got][:3] == [expected[0], [0], expected[2]] and flat
    assert [
        x.tolist() for x in documents_of(prepare(tmp_path / "out-ids", tmp_path / "ids.jsonl", key="ids"))
    ] == expected
    for i, text in enumerate(DOCUMENTS):
        (tmp_path / f"t{i}.txt").write_text(text)
    assert [x.tolist() for x in documents_of(prepare(tmp_path / "out-txt", tmp_path / "t*.txt"))] == expected


def test_a_long_text_is_one_document_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PIECE", 64)
    monkeypatch.setattr(data, "LONGEST", 50)
    text = "".join(f"line {i} of a long text, ünd so weiter\n" * (i % 3) for i in range(60)) + "ü" * 500 + "\n\nend"
    (tmp_path / "a.txt").write_text(text)
    write_lines(tmp_path / "b.jsonl", [text, text])
    for name, n in (("a.txt", 1), ("b.jsonl", 2)):
        ids = documents_of(prepare(tmp_path / f"out{n}", tmp_path / name))
        assert [x.astype(np.uint8).tobytes().decode() for x in ids] == [text + "\0"] * n


def test_a_killed_prepare_goes_on(tmp_path, capsys, monkeypatch):
    """Cut off at each shard in turn: the same bytes as in one go; no start reads what is unfinished."""
    write_lines(tmp_path / "in.jsonl", [f"document {i} " * (i % 7) for i in range(200)])
    prepare(tmp_path / "whole", tmp_path / "in.jsonl", shard_tokens=1000)
    capsys.readouterr()
    close_shard = data.Writer.close_shard

    def cut_off(self, *place):
        close_shard(self, *place)
        raise KeyboardInterrupt

    monkeypatch.setattr(data.Writer, "close_shard", cut_off)
    while not (tmp_path / "parts/index.json").exists():
        try:
            prepare(tmp_path / "parts", tmp_path / "in.jsonl", shard_tokens=1000)
        except KeyboardInterrupt:
            with pytest.raises(ValueError, match="parts: its `data.py prepare` is not finished; the same command"):
                data.load(Config(data=str(tmp_path / "parts")))
    assert "goes on after 3,000 tokens" in capsys.readouterr().out
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "parts" / path.name).read_bytes(), path.name
    monkeypatch.undo()
    prepare(tmp_path / "parts", tmp_path / "in.jsonl", shard_tokens=1000)
    assert "is finished: " in capsys.readouterr().out
    for other in (dict(shard_tokens=999), dict(eos="false"), dict(tokenizer="300")):
        with pytest.raises(
            ValueError, match="parts holds tokens of other input, tokenizer or flags: give another --out"
        ):
            prepare(tmp_path / "parts", tmp_path / "in.jsonl", **{"shard_tokens": 1000, **other})


def test_prepare_survives_sigkill(tmp_path):
    write_lines(tmp_path / "in.jsonl", [f"document {i} " * (i % 99) for i in range(20_000)])
    prepare(tmp_path / "whole", tmp_path / "in.jsonl", shard_tokens=10**6)
    out, kills = tmp_path / "parts", 0
    flags = [f"--input={tmp_path}/in.jsonl", f"--out={out}", "--tokenizer=bytes", "--shard-tokens=1000000"]
    while not (out / "index.json").exists():
        workers, shards = 1 + kills % 2, len(list(out.glob("tokens-*.bin")))
        command = [sys.executable, "data.py", "prepare", *flags, f"--workers={workers}"]
        process = subprocess.Popen(command, cwd=HERE)
        while process.poll() is None and len(list(out.glob("tokens-*.bin"))) < shards + 3:
            time.sleep(0.001)
        process.kill()  # which lets its workers neither hold the lock nor live on
        kills += process.wait() == -signal.SIGKILL
        assert kills < 9
    assert kills > 1
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes(), path.name


def test_a_tokenizer_is_trained(tmp_path):
    library = pytest.importorskip("tokenizers")
    write_lines(tmp_path / "in.jsonl", [f"the {word} of the {word} " * 5 for word in ("cat", "dog", "house", "mouse")])
    for out in "ab":
        shards = prepare(tmp_path / out, tmp_path / "in.jsonl", tokenizer="", train_tokenizer=265)
    model = library.Tokenizer.from_file(str(tmp_path / "a/tokenizer.json"))
    assert shards.vocab == model.get_vocab_size() == 265
    assert model.decode(documents_of(shards)[3]) == "the mouse of the mouse " * 5
    assert all(path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() for path in (tmp_path / "a").iterdir())
    with pytest.raises(ValueError, match="--train-tokenizer=9000: this text makes 2.*--train-tokenizer=2"):
        prepare(tmp_path / "c", tmp_path / "in.jsonl", tokenizer="", train_tokenizer=9000)


GZ = gzip.compress(b'{"text": "whole"}\n' * 9999, 1)


@pytest.mark.parametrize(
    "name,content,flags,expected",
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"txt": "y"}\n',
            {},
            r"a.jsonl, line 2, from 14 on: there is no key 'text'.*\['txt'\]",
        ),
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', {}, "a.jsonl, line 2.*'text' is '3', neither text nor ids"),
        ("a.jsonl", b'{"text": "x"}\n\n["y"]\n', {}, "a.jsonl, line 3, from 15.*a line is to be an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', {}, "a.jsonl, line 2.*is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', {}, "a.jsonl, line 2, from 14 on: byte 10 .*0xff.*not UTF-8"),
        ("a.txt", b"abc\n\xff", {}, "a.txt, from 0 on: byte 4 .*0xff.*not UTF-8"),
        ("a.jsonl", b'{"text": [1, 2, 256]}\n', {}, "a.jsonl, line 1.*id 256, number 2 there, is not one of the 256"),
        ("a.jsonl", b'{"text": [1, -2]}\n', {}, "a.jsonl, line 1.*id -2, number 1"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "a.jsonl, line 1.*surrogate"),
        ("a.json.gz", GZ[: len(GZ) // 2], {}, "a.json.gz: after [1-9].*cannot be read.*Fetch it again"),
        ("a.json.gz", GZ[:-40] + b"x" * 40, {}, "a.json.gz: after .*cannot be read"),
        ("a.json.gz", b"not packed", {}, "a.json.gz: after 0 bytes.*cannot be read"),
        ("a.json.gz", GZ + b"tail", {}, "a.json.gz: after [1-9].*cannot be read"),
        ("a.parquet", b"PAR1 is not enough", {}, "a.parquet"),
        ("a.csv", b"x", {}, "a.csv: what kind of file.*.jsonl"),
        ("a.bin", b"123", dict(dtype="uint16"), "a.bin: its 3 bytes are no whole number of uint16"),
        ("a.bin", b"12", {}, "a.bin: --dtype=uint16"),
        (
            "a.bin",
            np.array([65535, 65536, 70000], np.uint32).tobytes(),
            dict(dtype="uint32", tokenizer="65536"),
            "a.bin, from 0 on: id 65536, number 1 there, is not one of the 65536",
        ),
        ("b.txt", b"x", dict(tokenizer="none.model"), "none.model: there is no such file"),
        ("b.txt", b"x", dict(tokenizer="gpt2"), "tokenizer=gpt2: it is bytes"),
        ("b.txt", b"x", dict(tokenizer="300"), "b.txt.*is text, and --tokenizer=300 is for ids"),
        ("b.txt", b"x", dict(bos="true"), "--bos=true: bytes has no bos"),
        ("b.txt", b"x", dict(workers="0"), "--workers=0: a whole number"),
        ("b.txt", b"x", dict(tokenizer=""), "give one of --tokenizer"),
    ],
)
def test_bad_input_is_named(name, content, flags, expected, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=expected):
        prepare(tmp_path / "out", tmp_path / "*.*", **flags)
    assert not (tmp_path / "out/index.json").exists()


def test_zstandard_that_is_cut_short_is_named(tmp_path):
    content = pytest.importorskip("zstandard").compress(b'{"text": "whole"}\n' * 9999)
    for n in (len(content) - 1, len(content) // 2):
        (tmp_path / "a.jsonl.zst").write_bytes(content[:n])
        with pytest.raises(ValueError, match="a.jsonl.zst: after .*cannot be read"):
            prepare(tmp_path / "out", tmp_path / "a.jsonl.zst")


def test_an_empty_glob_is_named(tmp_path):
    with pytest.raises(ValueError, match="--input=.*no file has such a name"):
        prepare(tmp_path / "out", tmp_path / "*.jsonl")


def flip(path, at, bit=1):
    content = bytearray(path.read_bytes())
    content[at] ^= bit
    path.write_bytes(content)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def tokens(tmp_path):
    """200 documents of ids below 300 in uint16, in files of 1000."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, 300, n).tolist() for n in rng.integers(1, 60, 200)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"ids": x}) + "\n" for x in ids))
    prepare(tmp_path / "tokens", tmp_path / "ids.jsonl", key="ids", tokenizer="300", shard_tokens=1000)
    return tmp_path / "tokens"


PLANT = np.array([300], np.uint16).tobytes()


@pytest.mark.parametrize(
    "damage,expected",
    [
        (
            lambda d: flip(d / "tokens-00001.bin", 77),
            "tokens-00001.bin: bytes 0 to 2000 are not those that were written",
        ),
        (lambda d: flip(d / "tokens-00001.bin", 77, 128), "tokens-00001.bin: id 3.* at byte 76 is not one of the 300"),
        (lambda d: flip(d / "documents.bin", 9), "documents.bin: bytes 0 to 1608 are not those"),
        (
            lambda d: os.truncate(d / "tokens-00002.bin", 1001),
            "tokens-00002.bin has 1001 bytes.*1000 x uint16 = 2000.*cut short",
        ),
        (lambda d: (d / "tokens-00002.bin").unlink(), "tokens-00002.bin is missing"),
        (lambda d: (d / "documents.bin").unlink(), "documents.bin is missing"),
        (lambda d: edit(d / "index.json", dtype="uint32"), "tokens-00000.bin has 2000 bytes.*1000 x uint32 = 4000"),
        (lambda d: edit(d / "index.json", tokens=5), "do not add up to 5"),
        (
            lambda d: edit(d / "index.json", sha256="0" * 64),
            "index.json: its tokenizer is '300', and its sha256 is of another",
        ),
        (lambda d: (d / "index.json").write_text("{"), "index.json is damaged"),
        (lambda d: (d / "index.json").write_text("{}"), "index.json is damaged"),
        (lambda d: (d / "index.json").rename(d / "progress.json"), "is not finished; the same command"),
    ],
)
def test_damaged_tokens_are_refused(damage, expected, tokens, tmp_path):
    cfg = Config(data=str(tokens), seq=16, vocab=300)
    data.load(cfg)
    damage(tokens)
    with pytest.raises(ValueError, match=expected):
        data.load(cfg)


def test_ids_beyond_the_vocabulary_are_refused(tokens, tmp_path, capsys):
    with pytest.raises(ValueError, match="has 300 different ids in its tokenizer, more than vocab=299; say vocab=300"):
        data.load(Config(data=str(tokens), seq=16, vocab=299))
    corpus = data.load(Config(data=str(tokens), seq=16, vocab=300))
    small = Config(data=str(tokens), seq=16, vocab=200)  # (as if index.json lied)
    with pytest.raises(ValueError, match=r"tokens-0000\d.bin, byte \d+: id 2\d\d is not in the vocabulary, vocab=200"):
        data.build(small, corpus.train, 0, np.arange(16))
    with pytest.raises(ValueError, match="made by a tokenizer whose .* begins with 300.*tokenizer=bytes is bytes"):
        data.load(Config(data=str(tokens), seq=16, vocab=300, tokenizer="bytes"))


def test_large_data_is_verified_behind_the_run(tokens, monkeypatch):
    monkeypatch.setattr(data, "VERIFIED_FIRST", 0)
    flip(tokens / "tokens-00003.bin", 4)
    cfg = Config(data=str(tokens), seq=16, vocab=300)
    stream = data.stream(cfg, data.load(cfg), 0, np.arange(16))
    with pytest.raises(ValueError, match="tokens-00003.bin: bytes 0 to 2000"):
        for _ in range(1000):
            next(stream)
            time.sleep(0.01)


@needs_c4
def test_another_tokenizer_is_refused(tmp_path):
    pytest.importorskip("sentencepiece")
    model = SHARED / "sentencepiece_32000.model"
    prepare(tmp_path / "out", SHARED / "c4-sample.01.json.gz", tokenizer=model)
    cfg = Config(data=str(tmp_path / "out"), seq=16, vocab=32101)
    data.load(dataclasses.replace(cfg, tokenizer=str(model)))
    edit(tmp_path / "out/index.json", sha256="0" * 64)
    with pytest.raises(ValueError, match="tokenizer.model is not the tokenizer that index.json says"):
        data.load(cfg)
    (tmp_path / "out/tokenizer.model").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="tokenizer.model is not the tokenizer"):
        data.load(cfg)


def test_rows_of_token_files_are_those_of_memory(tokens):
    """Through memory maps, over the ends of files, with the plan of rows made and found again."""
    shards = data.Shards(str(tokens), 5)
    store = data.Memory(
        "", np.concatenate([np.fromfile(tokens / name, np.uint16) for name in shards.names]), shards.starts
    )
    for packing in ("concat", "pack", "single"):
        cfg = Config(seq=16, vocab=300, packing=packing)
        a, b, c = (data.Documents(cfg, s, 40, 4900) for s in (store, shards, shards))
        for other in (b, c):
            assert len(a) == len(other)
            for x, y in zip(*(data.assemble(cfg, s, np.arange(len(a)), len(a)) for s in (a, other))):
                assert np.array_equal(x, y)
    assert len(list(tokens.glob("rows-*"))) == 4  # of pack and single, pieces and ends


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder by byte ranges; `fault` makes an answer wrong."""

    def __init__(self, folder):
        self.folder, self.fault, self.asked, self.lock = folder, lambda n: None, 0, threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        with self.server.lock:
            self.server.asked += 1
            fault = self.server.fault(self.server.asked)
        path = self.server.folder / self.path.lstrip("/")
        if fault == 503 or not path.is_file():
            return self.send_error(503 if fault == 503 else 404)
        size, asked = path.stat().st_size, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        a, b = (int(asked[1]), min(int(asked[2] or size - 1), size - 1)) if asked else (0, size - 1)
        with open(path, "rb") as file:
            file.seek(a)
            content = file.read(b + 1 - a)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {a}-{b}/{size}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if fault == "slow":
            time.sleep(5)
        self.wfile.write(content[: len(content) // 2] if fault == "short" else content)
        if fault == "short":
            self.close_connection = True


@pytest.fixture
def server(tokens):
    with Server(tokens) as server:
        yield server
        server.shutdown()


@pytest.mark.parametrize("packing", ["concat", "pack"])
def test_a_url_gives_the_batches_of_the_folder(packing, tokens, server, tmp_path, monkeypatch):
    """Over file:// and HTTP, also where every third answer is a 503 and every fifth is cut short."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cfg = Config(seq=16, vocab=300, packing=packing, data_timeout=20, data=str(tokens))
    corpus = data.load(cfg)
    server.fault = lambda n: 503 if n % 3 == 0 else "short" if n % 5 == 0 else None
    for url in (f"file://{tokens}/", server.url):
        other = data.load(dataclasses.replace(cfg, data=url))
        assert len(other.train) == len(corpus.train) and other.valid.keys() == corpus.valid.keys()
        for first in (0, 16, 4000):
            a, b = (data.build(cfg, c.train, first, np.arange(16)) for c in (corpus, other))
            assert all(np.array_equal(a[name], b[name]) for name in a)
    assert server.asked > 20


@pytest.mark.parametrize("fault,expected", [(503, "503"), ("short", "partial|bytes"), ("slow", "no answer")])
def test_a_server_that_fails_is_named(fault, expected, server):
    cfg = Config(seq=16, vocab=300, data=server.url, data_timeout=1)
    corpus = data.load(cfg)
    server.fault = lambda n: fault
    since = time.monotonic()
    with pytest.raises(
        ValueError, match=rf"{server.url}/tokens-0000\d.bin, bytes \d+ to \d+: .*({expected}).*tried again for 1 s"
    ):
        data.build(cfg, corpus.train, 0, np.arange(16))
    assert time.monotonic() - since < 4


def test_what_is_not_there_is_named(server, tokens):
    flip(tokens / "tokens-00001.bin", 3)
    for url, expected in (
        ("http://127.0.0.1:9/tokens", "127.0.0.1:9/tokens/index.json.*onnect.*data_timeout"),
        (server.url + "/none", "none/index.json: there is no such file"),
        ("ftp://host/tokens", "ftp://host/tokens cannot be opened.*gs://"),
        (server.url, "tokens-00001.bin: bytes 0 to 2000 are not those that were written"),
    ):
        with pytest.raises(ValueError, match=expected):
            data.load(Config(data=url, seq=16, vocab=300, data_timeout=0.5))


# ---- sources by name -----------------------------------------------------------------------------------------------

SOURCE = """
import numpy as np
class Source:
    def __init__(self, cfg): self.seq = cfg.seq
    def __len__(self): return 40
    def example(self, i):
        if i == 7: FAULT
        return np.full(1 + i % (self.seq + 1), i)
class Empty(Source):
    def __len__(self): return 0
class Short: pass
"""


def test_a_source_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE.replace("FAULT", "pass"))
    cfg = Config(seq=16, batch=8, vocab=50, data=f"{path}:Source", epochs=1)
    corpus = data.load(cfg)
    batches = [data.build(cfg, corpus.train, first, np.arange(8)) for first in range(0, 40, 8)]
    assert data.last_step(cfg, corpus, 0, 0) == 5 and corpus.valid == {}
    seen = {int(row[0]): int(weights.sum()) for b in batches for row, weights in zip(b["tokens"][0], b["weights"][0])}
    assert seen == {i: i % 17 for i in range(40)}
    for change, fields, expected in (
        ("1 / 0", {}, r"mine.py:Source, example\(7\): ZeroDivisionError"),
        ("return [1.5]", {}, r"mine.py:Source, example\(7\): .*not float64"),
        ("return [99]", {}, r"mine.py:Source, example 7, column 0: id 99 is not in the vocabulary, vocab=50"),
        ("return [-1]", {}, "example 7, column 0: id -1 is not in the vocabulary"),
        ("return []", {}, "example.7.*"),
        ("return [1] * 18", {}, "example 7.*18 ids; 1 to 17"),
        ("pass", dict(data=f"{path}:Empty"), "Empty: its length is 0"),
        ("pass", dict(data=f"{path}:Short"), "mine.py:Short: a class with"),
        ("pass", dict(data=f"{path}:None_"), "None_: a class with"),
        ("pass", dict(data=f"{path}x.py:Source"), "there is no file"),
        ("import nothing_at_all", {}, "nothing_at_all"),
    ):
        path.write_text(SOURCE.replace("FAULT", change))
        with pytest.raises(ValueError, match=expected):
            bad = dataclasses.replace(cfg, **fields)
            corpus = data.load(bad)
            [data.build(bad, corpus.train, first, np.arange(8)) for first in range(0, 40, 8)]


def test_data_by_weight_and_synthetic_data(tokens, tmp_path):
    cfg = Config(seq=16, batch=8, vocab=300, data=f"{tokens}:3,synthetic:1,{tokens}:0.5e0")
    corpus = data.load(cfg)
    assert [part.name for part in corpus.train.parts] == [str(tokens), "synthetic", str(tokens)]
    rows = np.concatenate([data.build(cfg, corpus.train, i, np.arange(8))["tokens"][0] for i in range(0, 800, 8)])
    assert abs(np.mean((rows == 1).all(1)) - 1 / 4.5) < 0.05
    other = data.build(
        dataclasses.replace(cfg, seed=1), data.load(dataclasses.replace(cfg, seed=1)).train, 0, np.arange(8)
    )
    assert (other["tokens"][0] != rows[:8]).any()
    for words, expected in (
        (f"{tokens}:1,{tokens}:0", "each weight is a number above 0"),
        (f"{tokens}:1,{tokens}:0.00001", "below 1 in 10000"),
        (f"{tokens}:1,{tmp_path}/nowhere:1", "nowhere: there is no such file"),
    ):
        with pytest.raises(ValueError, match=expected):
            data.load(dataclasses.replace(cfg, data=words))
    (tmp_path / "text.txt").write_text("some text. " * 99)
    with pytest.raises(ValueError, match="different tokenizers"):
        data.load(dataclasses.replace(cfg, data=f"{tokens}:1,{tmp_path}/text.txt:1"))
    synthetic = dataclasses.replace(cfg, data="synthetic", eval_data=str(tokens))
    corpus = data.load(synthetic)
    assert (data.build(synthetic, corpus.train, 0, np.arange(8))["targets"] == 1).all()
    assert len(corpus.valid["valid"]) * 16 >= data.Shards(str(tokens), 1).index["tokens"] - 1  # all of it


def test_a_run_evaluates_each_part_of_a_mixture(tokens, tmp_path):
    """Two folders of one name, too: each has its own rows, events and line in the picture."""
    shutil.copytree(tokens, tmp_path / "other" / "tokens")
    out = run("--config=tiny", f"--workdir={tmp_path / 'run'}", f"data={tokens}:1,{tmp_path}/other/tokens:2", "seq=16",
              "layers=1", "d_model=16", "heads=4", "d_ff=16", "batch=8", "steps=2", "eval_every=2", "sample_tokens=0")
    assert out.returncode == 0, out.stderr
    rows = train.read_metrics(tmp_path / "run")
    a, b = ([row[key] for row in rows if key in row] for key in (f"eval/tokens_{i}/log_pplx" for i in (0, 1)))
    assert len(a) == 1 and a == b  # the same data
    assert (tmp_path / "run" / "summaries" / "eval_test_tokens_1").is_dir()


@pytest.mark.parametrize("what", ("full", "killed", "file"))
def test_a_prepare_that_cannot_write_says_so_and_goes_on(what, tmp_path):
    """A full disk, a killed worker, a file in the folder's place: one line, and the same command later finishes."""
    (tmp_path / "text.txt").write_text("hello world of text\n" * 100_000)
    out = tmp_path / ("text.txt" if what == "file" else "out")
    words = f"prepare --input={tmp_path}/text.txt --tokenizer=bytes --out={out} --workers=2 --shard-tokens=500000"
    kill = "data.encode = lambda *a: os._exit(1)\n" if what == "killed" else ""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (900_000,) * 2)\n" if what == "full" else ""
    program = f"import os, resource, sys, data\n{kill}{limit}try: data.main(sys.argv[1:])\n" \
              "except ValueError as error: sys.exit(str(error))"
    done = subprocess.run([sys.executable, "-c", program, *words.split()], cwd=HERE, capture_output=True, text=True)
    assert done.returncode and done.stderr.count("\n") == 1 and "goes on where it was" in done.stderr, done.stderr
    if what == "file":
        return
    data.main(words.split())
    assert data.Shards(str(out), 1).index["tokens"] == 2_000_001


def test_what_validates_does_not_train(tokens):
    """Whole documents from the end, a tenth of the tokens."""
    cfg = Config(seq=16, vocab=300, data=str(tokens))
    corpus = data.load(cfg)
    train, valid = corpus.train.source, corpus.valid["valid"]
    total = data.Shards(str(tokens), 1).index["tokens"]
    assert train.first == 0 and train.last == valid.first and valid.last == total
    assert valid.first in train.starts and abs((total - valid.first) / total - 0.1) < 0.03


# ---- who sees what -------------------------------------------------------------------------------------------------


def test_show_prints_what_a_person_checks(tokens, capsys):
    words = [f"--data={tokens}", "--step=3", "seq=16", "batch=8", "accum=2", "packing=single"]
    data.main(["show", *words, "--rows=8"])
    whole = capsys.readouterr().out
    assert "sequences 16 to 23" in whole and whole.count("\nrow ") == 8
    for word in ("segment 1", "position", "token", "target", "weight", "tokens-0000", "padding"):
        assert word in whole, word
    both = []
    for host in "01":
        data.main(["show", *words, f"--host={host}/2", "--rows=8"])
        both += re.findall(r"\nrow (\d+): .*", capsys.readouterr().out)
    assert sorted(both) == [str(i) for i in range(8)] and both[:2] == ["0", "1"]
    for bad, expected in (
        (["--host=2/2"], "--host=2/2"),
        (["--step=0"], "--step=0"),
        (["stepz=1"], "stepz.*steps"),
        (["--hots=1/2"], "--hots"),
        (["--host=0/3"], "not divisible by 3 hosts"),
    ):
        with pytest.raises(ValueError, match=expected):
            data.main(["show", *words, *bad])
    data.main(["verify", f"--data={tokens}"])
    assert "as they were written" in capsys.readouterr().out


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("packing", ["concat", "pack", "single"])
def test_another_document_leaves_logits_bit_equal(name, packing):
    """Rows with document 2 changed: every other document's logits are the same bits."""
    cfg = family(name, packing=packing, batch=8)
    store = memory([5, 6, 4, 9, 12, 3, 16], vocab=61)
    changed = store._replace(
        tokens=np.where((np.arange(55) >= 11) & (np.arange(55) < 15), (store.tokens + 1) % 61, store.tokens)
    )
    source = whole(cfg, store)
    mesh, _, state = start(cfg)
    specs, _ = train.step_specs(cfg, model.transformer)
    logits = jax.jit(
        jax.shard_map(
            lambda p, b: model.forward(cfg, *local((p, b), (specs, model.transformer_batch(cfg)))),
            mesh=mesh,
            in_specs=(specs, model.transformer_batch(cfg)),
            out_specs=P(("data", "fsdp"), None, "tensor"),
            check_vma=False,
        )
    )
    a, b = (
        logits(
            state.params,
            {
                n: x[0]
                for n, x in data.build(cfg, data.Straight(whole(cfg, s), ""), 0, np.arange(8), len(source)).items()
            },
        )
        for s in (store, changed)
    )
    other = np.zeros((8, 16), bool)  # columns of other documents
    touched = other.copy()
    for r in range(len(source)):
        start_, length, _ = source.parts(np.array([r]))
        places = np.concatenate([np.arange(p, p + n) for p, n in zip(start_, length)])[:16]
        inside = (places >= 11) & (places < 15)
        other[r, : len(places)], touched[r, : len(places)] = ~inside, inside
    assert np.array_equal(np.asarray(a)[other], np.asarray(b)[other]) and other.sum() > 30
    assert (np.asarray(a)[touched] != np.asarray(b)[touched]).any()


TWO = """
import sys, jax, numpy as np, json
sys.path.insert(0, {here!r})
jax.config.update("jax_num_cpu_devices", 2)
rank = int(sys.argv[1])
jax.distributed.initialize("localhost:{port}", 2, rank)
import configs, data, train
from model import transformer
cfg = configs.Config(**{fields})
cfg, mesh = train.on_devices(cfg)
hosts = data.hosts(cfg, mesh, transformer.batch(cfg)["rows"])
corpus = data.load(cfg)
end = data.last_step(cfg, corpus, 0, 0)
out = []
with __import__("contextlib").closing(data.stream(cfg, corpus, 0, hosts[rank])) as batches:
    for step in range(end):
        batch = next(batches)
        put = data.put(mesh, transformer.batch(cfg), batch, hosts[rank], cfg.batch // cfg.accum)
        total = jax.jit(lambda b: {{name: x.astype("float32").sum() for name, x in b.items()}})(put)
        out.append([batch["rows"].tolist(), batch["tokens"].tolist(), {{n: float(x) for n, x in total.items()}}])
evals = [b["weights"].sum().item() for b in data.eval_batches(cfg, corpus.valid["valid"], "valid", hosts[rank], 0)]
print("RESULT", json.dumps([end, out, evals, data.describe(cfg, corpus, end, hosts)]))
"""


def in_two_processes(program, **values):
    """RESULT of each of two processes that jax.distributed joins."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    program = program.format(here=str(HERE), port=port, **values)
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [p.communicate(timeout=120) for p in both]
    assert not any(p.returncode for p in both), "\n".join(err[-2000:] for _, err in said)
    return [json.loads(re.search("RESULT (.*)", out)[1]) for out, _ in said]


@pytest.mark.parametrize("where", ["folder", "file", "http"])
def test_two_hosts_read_what_one_does(where, tokens, server):
    """Disjoint rows, of which the global arrays are made; all ends at the same step; evaluations are as long."""
    place = {"folder": str(tokens), "file": f"file://{tokens}", "http": server.url}[where]
    fields = dict(data=place, seq=16, vocab=300, batch=8, accum=2, epochs=1, eval_data=str(tokens))
    (end, a, evals, told), (end_b, b, evals_b, _) = in_two_processes(TWO, fields=fields)
    cfg = Config(**fields)
    corpus = data.load(cfg)
    assert end == end_b == data.last_step(cfg, corpus, 0, 0) and len(a) == len(b) == end
    assert "host 0 reads rows 0-1 of 4; host 1 reads rows 2-3 of 4" in told and f"data ends with step {end}" in told
    for step in range(end):
        batch = data.build(cfg, corpus.train, 8 * step, np.arange(4))
        (rows_a, tokens_a, total_a), (rows_b, tokens_b, total_b) = a[step], b[step]
        assert np.array_equal(np.concatenate([rows_a, rows_b], 1), batch["rows"])
        assert np.array_equal(np.concatenate([tokens_a, tokens_b], 1), batch["tokens"])
        assert total_a == total_b == {name: float(x.astype(np.float64).sum()) for name, x in batch.items()}
    assert len(evals) == len(evals_b) == -(-len(corpus.valid["valid"]) // 8)
    assert sum(evals) + sum(evals_b) == corpus.valid["valid"].targets - 199  # 200 documents


def test_a_run_trains_on_tokens_and_stops_where_they_end(tokens, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = (f"data={tokens}", "--workdir=w", "batch=64", "packing=pack", "sample_tokens=3")
    with pytest.raises(SystemExit, match="data ends with step 5, before steps=6: say steps=5, or more epochs"):
        start_run(*words, "epochs=1")
    assert not (tmp_path / "w/metrics.jsonl").exists()
    start_run(*words, "epochs=2", "eval_batches=1", "eval_reset=false")
    out = capsys.readouterr().out
    assert "vocab=300" in out and "epochs=2: data ends with step 11" in out and "host 0 reads rows 0-63 of 64" in out
    evaluated = [
        row["eval/valid/num_predictions"]
        for row in train.read_metrics(tmp_path / "w")
        if "eval/valid/num_predictions" in row
    ]
    assert len(evaluated) == 2
    with pytest.raises(SystemExit, match="has 300 different ids.*more than vocab=256"):
        start_run(*words, "vocab=256")
    with pytest.raises(SystemExit, match="eval_batches=99: valid has .* batches of 64; say eval_batches=all"):
        start_run(*words, "eval_batches=99")


# ---- a whole run ---------------------------------------------------------------------------------------------------

FEW = [
    "seq=16",
    "d_model=16",
    "heads=8",
    "kv_heads=4",
    "d_head=4",
    "d_ff=24",
    "layers=2",
    "batch=16",
    "steps=6",
    "log_every=2",
    "eval_every=3",
    "checkpoint_every=3",
    "sample_tokens=4",
    "warmup_steps=1",
]


def start_run(*words):
    """train.main with FEW, some of them replaced by `words`."""
    names = {word.split("=")[0] for word in words}
    train.main([*(word for word in FEW if word.split("=")[0] not in names), *words])


@pytest.fixture
def text(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return f"data={corpus(tmp_path, **{'words.txt': 'to be, or not to be: that is the question. ' * 60})}/words.txt"


def test_a_run_leaves_what_a_person_wants_to_see(text, capsys, tmp_path):
    start_run(text, "--workdir=w", "ici.fsdp=2", "ici.tensor=2", "ema_decay=0.5")
    out, rows = capsys.readouterr().out, train.read_metrics(tmp_path / "w")
    for word in (
        "layers/wq",
        "fsdp, tensor",
        "tokens a step",
        "MiB",
        "step 6/6",
        "MFU unknown",
        "learning rate",
        "left",
        "compiled in",
        "loss.png",
    ):
        assert word in out, word
    trained, evaluated = ([r for r in rows if key in r] for key in ("loss", "eval/valid/log_pplx"))
    assert [r["step"] for r in trained] == [1, 2, 4, 6] and [r["step"] for r in evaluated] == [3, 6]
    assert all(
        {"step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "mfu", "step_time"} <= set(r)
        for r in trained
    )
    assert trained[-1]["tokens"] == 6 * 16 * 16 and trained[-1]["mfu"] is None and "eval/valid/accuracy" in evaluated[0]
    assert json.loads((tmp_path / "w/config.json").read_text())["ici.tensor"] == 2
    assert (tmp_path / "w/loss.png").read_bytes()[1:4] == b"PNG" and (tmp_path / "w/checkpoints/6").is_dir()
    assert list((tmp_path / "w/summaries/train").glob("events*")) and list(
        (tmp_path / "w/summaries/eval_test_valid").glob("events*")
    )


def test_tensorboard_reads_the_events(text, tmp_path):
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install tensorboard"
    )
    start_run(text, "--workdir=w")
    damage(tmp_path / "w/checkpoints/6", "truncated")
    start_run(text, "--workdir=w")  # from step 3: what was written after it is dropped
    rows = train.read_metrics(tmp_path / "w")
    for folder, tag, key in (
        ("train", "loss", "loss"),
        ("train", "learning/lr", "learning_rate"),
        ("train", "learning/raw_grad_norm", "grad_norm"),
        ("eval_test_valid", "Metrics/log_pplx", "eval/valid/log_pplx"),
    ):
        events = reader.EventAccumulator(str(tmp_path / "w/summaries" / folder))
        events.Reload()
        expected = [(r["step"], r[key]) for r in rows if key in r]
        scalars = [(e.step, e.value) for e in events.Scalars(tag)]
        assert [step for step, _ in scalars] == [step for step, _ in expected]
        close(scalars, expected)


def test_a_run_goes_on_where_it_was_and_says_when_it_is_done(text, capsys, tmp_path):
    """Six steps at once, or in two parts on other meshes: the same losses. A third start does nothing."""
    start_run(text, "--workdir=whole", "ici.data=1", "ici.fsdp=8", "rounds=2")
    start_run(text, "--workdir=parts", "ici.data=1", "ici.fsdp=8", "rounds=2", "steps=3", "decay_end=6")
    with (tmp_path / "parts/metrics.jsonl").open("a") as rows:  # what a kill and a power failure leave
        rows.write('{"step": 4, "loss": 0}\n\0\0\0\n{"step": 5, "lo')
    start_run(text, "--workdir=parts", "ici.data=4", "ici.tensor=2", "accum=2", "decay_end=6", "log_every=1")
    assert "metrics.jsonl line 6 is no row" in capsys.readouterr().err
    whole, parts = (train.read_metrics(tmp_path / name) for name in ("whole", "parts"))
    for key in ("loss", "eval/valid/log_pplx"):
        a, b = ({r["step"]: r[key] for r in rows if key in r} for rows in (whole, parts))
        close([a[step] for step in a], [b[step] for step in a])
    assert [r["step"] for r in parts if "loss" in r] == [1, 2, 3, 4, 5, 6]
    capsys.readouterr()
    before = (tmp_path / "parts/metrics.jsonl").read_bytes()
    start_run(text, "--workdir=parts", "decay_end=6")
    assert "nothing to do" in capsys.readouterr().out and before == (tmp_path / "parts/metrics.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="of another model: d_model=16 there, 32 here; d_ff=24 there, 48 here"):
        start_run(text, "--workdir=parts", "d_model=32", "d_ff=48")


def test_a_run_of_bad_steps_stops_and_keeps_finite_checkpoints(text, capsys, tmp_path):
    """At a rate of 1e30 each update would overflow: none is taken, three in a row end the run, saves are finite."""
    start_run(text, "--workdir=w", "steps=3", "decay_end=9")
    reckless = ("steps=40", "learning_rate=1e30", "clip=0", "checkpoint_every=1", "eval_every=100")
    with pytest.raises(SystemExit, match="3 steps in a row.*max_bad_steps"):
        start_run(text, "--workdir=w", "max_bad_steps=3", *reckless)
    out = capsys.readouterr().out
    assert "bad steps" in out and "changed since the last start: learning_rate=0.003 is now 1e+30" in out
    assert train.read_metrics(tmp_path / "w")[-1]["bad_steps"] >= 3
    newest = int(checkpoint.newest(checkpoint.place(str(tmp_path / "w/checkpoints"))).name)
    assert newest > 3
    start_run(text, "--workdir=w", f"steps={newest + 1}", "decay_end=9")  # another start, another chance
    assert train.read_metrics(tmp_path / "w")[-1]["eval/valid/log_pplx"] < 10


def test_a_checkpoint_of_another_state_is_refused_by_name(text, tmp_path):
    start_run(text, "--workdir=w", "steps=1")
    for change, name in (
        ("ema_decay=0.9", r"ema/embed is absent there, \(256, 16\) float32 here"),
        ("frozen=embed", r"mu/embed is \(256, 16\) float32 there, absent here"),
        ("layers=4", "layers=2 there, 4 here"),
        ("attention_cap=5", "attention_cap=0.0 there, 5.0 here"),
    ):
        with pytest.raises(SystemExit, match=name):
            start_run(text, "--workdir=w", change)
    assert json.loads((tmp_path / "w/config.json").read_text())["layers"] == 2  # as the run was


def damage(step, how):
    """Harms a step's folder as a disk, a kill or a person may."""
    largest = max((p for p in step.rglob("*") if p.is_file() and "/d/" in str(p)), key=lambda p: p.stat().st_size)
    if how == "flipped":
        flip(largest, largest.stat().st_size // 2)
    elif how == "flipped, unsealed":  # killed before the sums were written: only the digests can tell
        (step / checkpoint.SUMS).unlink()
        for at in range(100, largest.stat().st_size, 500):
            flip(largest, at)
    elif how == "truncated":
        os.truncate(largest, 100)
    elif how == "deleted":
        largest.unlink()
    elif how == "facts":
        path = step / "_CHECKPOINT_METADATA"
        path.write_text(path.read_text().replace('"sequences": 96', '"sequences": 97'))
        (step / checkpoint.SUMS).unlink()
    elif how == "empty":
        shutil.rmtree(step)
        step.mkdir()


@pytest.mark.parametrize("how", ["flipped", "flipped, unsealed", "truncated", "deleted", "facts", "empty"])
def test_a_damaged_step_is_set_aside_and_the_one_before_it_taken(how, text, capsys, tmp_path):
    start_run(text, "--workdir=w", "sample_tokens=0")
    folder = tmp_path / "w/checkpoints"
    whole = train.read_metrics(tmp_path / "w")
    damage(folder / "6", how)
    capsys.readouterr()
    start_run(text, "--workdir=w", "sample_tokens=0")
    said = capsys.readouterr()
    assert "continues from step 3" in said.out and re.search("WARNING: .*/6 cannot be used.*6.damaged", said.err)
    again = train.read_metrics(tmp_path / "w")
    for key in ("loss", "grad_norm", "eval/valid/log_pplx"):
        assert [r[key] for r in whole if key in r] == [r[key] for r in again if key in r]  # bit for bit
    assert {p.name for p in folder.iterdir()} == {"3", "6", "6.damaged"}


def test_single_bit_flips_anywhere_in_a_step_are_detected(text, tmp_path):
    start_run(text, "--workdir=w", "steps=1", "sample_tokens=0")
    step = checkpoint.place(str(tmp_path / "w/checkpoints/1"))
    files = [tmp_path / "w/checkpoints/1" / name for name in sorted(checkpoint.files_of(step))]
    checkpoint.examine(step)
    rng = np.random.default_rng(0)
    sizes = np.array([p.stat().st_size for p in files])
    for path in rng.choice(files, 20, p=sizes / sizes.sum()):
        at, bit = int(rng.integers(path.stat().st_size)), 1 << int(rng.integers(8))
        flip(path, at, bit)
        with pytest.raises(checkpoint.Damaged):
            checkpoint.examine(step)
        flip(path, at, bit)
    checkpoint.examine(step)


def test_steps_of_which_none_is_good_stop_the_run(text, tmp_path):
    start_run(text, "--workdir=w", "steps=1", "sample_tokens=0")
    damage(tmp_path / "w/checkpoints/1", "truncated")
    with pytest.raises(SystemExit, match="none of the 1 steps .* can be used"):
        start_run(text, "--workdir=w", "steps=2")


def test_digests_see_a_bit_and_no_sharding_or_padding():
    x = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    i = np.arange(x.size, dtype=np.uint32).reshape(x.shape)
    expected = int(np.sum(x.view(np.uint32) * (2 * i + 1), dtype=np.uint32))
    mesh = make_mesh((1, 2, 2, 1, 2), (1,) * 5, jax.devices())
    for spec in (P(), P("fsdp"), P("tensor", "fsdp"), P(None, ("data", "tensor"))):
        for array in (x, np.pad(x, ((0, 8), (0, 0))), np.pad(x, ((0, 0), (0, 16)))):
            here = NamedSharding(mesh, spec)
            struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=here)
            leaves = {"x": checkpoint.Leaf(struct, struct, x.shape)}
            assert checkpoint.digests({"x": jax.device_put(array, here)}, leaves) == {"x": expected}


def test_a_checkpoint_fits_every_mesh_bit_for_bit(tmp_path):
    """Padding to another multiple (tensor=3), rounds and shardings change; values and placements are those asked."""
    meshes = (dict(ici=Axes(fsdp=8), rounds=2), dict(ici=Axes(tensor=4)), dict(), dict(ici=Axes(tensor=3)))
    fields = dict(heads=12, kv_heads=12, d_ff=24, seq=24, tied=False, ema_decay=0.5)

    def parts(cfg):
        mesh, table = mesh_of(cfg), model.transformer_params(cfg)
        target = train.abstract_state(cfg, mesh, table, train.make_optimizer(cfg, table))
        return target, checkpoint.layout(target, table), table, mesh

    cfg = family("llama", **fields | meshes[0])
    target, leaves, table, mesh = parts(cfg)
    init = partial(train.init_state, cfg, table, train.make_optimizer(cfg, table))
    state = jax.jit(init, out_shardings=train.places(target))()
    before = {n: np.asarray(x) for n, x in zip(leaves, jax.tree.leaves(state))}
    folder = checkpoint.place(str(tmp_path / "c"))
    with checkpoint.Saves(folder, leaves, cfg) as saves:
        state = saves.save(1, state, {"sequences": 0})
    for name, x in zip(leaves, jax.tree.leaves(state)):
        assert np.array_equal(x, before[name]), name
    for changes in meshes:
        target, leaves, *_ = parts(family("llama", **fields | changes))
        got, _ = checkpoint.restore(folder, target, leaves)
        for (name, leaf), x in zip(leaves.items(), jax.tree.leaves(got)):
            real = tuple(slice(n) for n in leaf.size)
            assert x.sharding == leaf.held.sharding and x.shape == leaf.held.shape, name
            a, b = (v.reshape(-1, *v.shape[-(len(leaf.size) - 1):]) if v.ndim > len(leaf.size) else v
                    for v in (np.asarray(x), before[name]))
            assert np.array_equal(a[real], b[real]), name


def test_another_run_begins_with_its_parameters(text, capsys, tmp_path):
    start_run(text, "--workdir=a", "steps=1", "sample_tokens=0")
    with pytest.raises(SystemExit, match="unembed is absent there"):
        start_run(text, "--workdir=b", "init_from=a", "tied=false")
    rules = tmp_path / "rules.json"
    rules.write_text(json.dumps({"rules": [["(layers/.*)", r"\1"], ["(.*)", r"\1"]], "ignore": ["unembed"]}))
    start_run(text, "--workdir=b", "init_from=a@1", f"rules={rules}", "tied=false", "steps=1", "learning_rate=0")
    out = capsys.readouterr().out
    assert "layers/wq from layers/wq (rule (layers/.*))" in out and "unembed begins anew (ignore unembed)" in out
    digests = [checkpoint.examine(checkpoint.place(str(tmp_path / f"{n}/checkpoints/1")))["arrays"] for n in "ab"]
    for name in digests[0]:
        if name.startswith("params/"):
            assert digests[0][name] == digests[1][name], name
    rules.write_text(json.dumps({"rules": [["layers/(.*)", r"blocks/\1"]], "ignore": ["nothing"]}))
    with pytest.raises(SystemExit) as stop:
        start_run(text, "--workdir=c", "init_from=a", f"rules={rules}")
    for word in ("embed here matches no rule", "come from blocks/wq, which is not there", "layers/wq there is not used",
                 "nothing matches nothing"):
        assert word in str(stop.value), word


LOAD_LIBTPU = """
import os, sys
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_ACCELERATOR_TYPE": "v4-8",
               "TPU_WORKER_HOSTNAMES": "localhost"}
from jax.experimental import topologies
topologies.get_topology_desc("v4:2x2x1", platform="tpu")  # from here on SIGTERM is libtpu's
"""


@pytest.mark.parametrize("number, libtpu", [(signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGTERM, True)])
def test_a_signal_saves_and_stops_and_the_same_command_goes_on(number, libtpu, long_text, tmp_path):
    if libtpu:
        pytest.importorskip("libtpu", reason="pip install libtpu")
    program = f"import sys; sys.path.insert(0, {str(HERE)!r})\n{LOAD_LIBTPU * libtpu}"
    program += "import train; train.main(sys.argv[1:])"
    for _ in range(2):
        run = Run(tmp_path, long_text, "steps=200000", "checkpoint_every=1000000", "eval_every=1000000",
                  program=["-c", program])
        assert run.until(lambda: "step 1" in run.said())
        run.processes[0].send_signal(number)
        assert run.wait() == [75], run.errors()
        step = int(re.search("stopped at step ([0-9]+) of 200000, saved in", run.said())[1])
        assert (tmp_path / f"w/checkpoints/{step}/sums.json").exists()
    assert "continues from step" in run.said()


@pytest.mark.parametrize("scheme, package", [("gs", "gcsfs"), ("s3", "s3fs")])
def test_a_bucket_without_its_package_names_the_pip_command(scheme, package, text):
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(SystemExit, match=f"{scheme}://bucket/run: pip install {package}"):
        start_run(text, f"--workdir={scheme}://bucket/run")


def test_a_checkpoint_with_a_field_of_a_later_version_is_refused():
    with pytest.raises(ValueError, match="colour=blue there, no field here"):
        train.check_lasting(Config(), {"config": {"colour": "blue"}})
    train.check_lasting(Config(), {"config": {}})  # of an earlier one: a field that is newer had its default


def test_each_command_has_a_folder_of_its_own():
    folder = train.default_workdir
    assert folder("tiny", []) == "runs/tiny" and folder("tiny", ["steps=5"]) == "runs/tiny,steps=5"
    assert folder("tiny", ["seed=1", "steps=5"]) == folder("tiny", ["steps=5", "seed=1"])
    names = [folder("tiny", [f"data={path}"]) for path in ("a/b", "a_b", "a/*", "a/**", "x" * 300, "x" * 301)]
    assert len(set(names)) == 6 and all(re.fullmatch(r"runs/[\w.,=-]{,170}", name) for name in names)


def test_the_loop_compiles_once_and_waits_only_where_it_logs(text, monkeypatch):
    """Reports are fetched at logged steps alone, each after the next step was launched."""
    events, make_step = [], train.make_step

    def watched(*args):
        step = make_step(*args)

        def call(state, batch):
            events.append("launch")
            return step(state, batch)

        watched.step = step
        return call

    get = jax.device_get
    monkeypatch.setattr(train, "make_step", watched)
    monkeypatch.setattr(jax, "device_get", lambda x: (events.append("fetch"), get(x))[1])
    rare = ("eval_every=100", "checkpoint_every=100", "sample_tokens=0")
    start_run(text, "--workdir=w", "steps=8", "log_every=3", *rare)
    assert watched.step._cache_size() == 1
    expected = ["launch", "launch", "fetch", *["launch"] * 2, "fetch", *["launch"] * 3, "fetch", "launch", "fetch"]
    assert events[: len(expected)] == expected and "launch" not in events[len(expected) :]


@pytest.mark.skipif(not SHAKESPEARE.exists(), reason="tinyshakespeare.txt is not beside the checkout")
def test_shakespeare_is_what_nanogpt_trains_on():
    c = data.load(dataclasses.replace(configs.shakespeare_char(), data=str(SHAKESPEARE)))
    train_ids, valid_ids = ids_of(c)
    assert (len(train_ids), len(valid_ids)) == (1_003_854, 111_540) and int(train_ids.max()) == 64


# ---- killed, and started again -------------------------------------------------------------------------------------

KILLED = [  # slow evaluations, a save every other step: each phase can be met
    *(w for w in FEW if not w.startswith(("steps", "log_every", "eval_every", "checkpoint_every", "sample"))),
    *("steps=24", "log_every=1", "eval_every=6", "checkpoint_every=4", "sample_tokens=0", "ici.fsdp=4", "ici.data=-1"),
]
PHASES = ("compile", "step", "save", "eval", "shutdown")


class Run:
    """`python train.py` in as many processes as are asked for, of 4 devices each, started at once in folder `at`."""

    def __init__(self, at, *words, processes=1, program=(str(HERE / "train.py"),)):
        self.at, self.folder = at, at / "w/checkpoints"
        flags = [[]]
        if processes > 1:
            with socket.socket() as s:
                s.bind(("localhost", 0))
                port = s.getsockname()[1]
            flags = [[f"--coordinator=localhost:{port}", f"--processes={processes}", f"--process={i}", "--heartbeat=10"]
                     for i in range(processes)]
        names = {word.split("=")[0] for word in words}
        command = [sys.executable, *program, "--workdir=w", *words,
                   *(w for w in (f"eval_batches={60 // processes**2}", *KILLED) if w.split("=")[0] not in names)]
        env = {**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
        self.processes = []
        for i, more in enumerate(flags):
            with open(at / f"out{i}", "w") as out, open(at / f"err{i}", "w") as err:
                self.processes.append(subprocess.Popen([*command, *more], cwd=at, env=env, stdout=out, stderr=err))

    def said(self):
        return (self.at / "out0").read_text()

    def errors(self):
        return "".join((self.at / f"err{i}").read_text() for i in range(len(self.processes)))

    def phase(self):
        """What it is at, by what it has said and what lies in its folder; "" where that cannot be told."""
        said = self.said()
        last = re.findall(r"step (\d+)/(\d+)  (\w+)", said)
        if self.folder.exists() and any("tmp" in p.name for p in self.folder.iterdir()):
            return "save" if not last or last[-1][0] != last[-1][1] else "shutdown"
        if "a step\n" in said and not last:
            return "compile"
        if last:
            step, steps, what = last[-1]
            if step == steps and what != "loss":
                return "shutdown"
            return "eval" if what == "loss" and int(step) % 6 == 0 else "step"
        return ""

    def until(self, reached, seconds=120):
        """Waits until reached() is true; returns whether it was before all was over."""
        end = time.monotonic() + seconds
        while not reached():
            if all(p.poll() is not None for p in self.processes):
                return False
            if time.monotonic() > end:
                for p in self.processes:
                    p.kill()
                raise TimeoutError(self.said() + self.errors())
            time.sleep(0.002)
        return True

    def wait(self, seconds=120):
        """The exit statuses."""
        self.until(lambda: False, seconds)
        return [p.returncode for p in self.processes]


def kill_at(run, phase, victims, delay):
    """Kills processes of a run in a phase, and returns the phase that it was in when they died."""
    if run.until(lambda: run.phase() == phase):
        time.sleep(delay)
    running = run.processes[0].poll() is None
    for i in victims:
        run.processes[i].kill()
    run.wait(60)  # the others end by themselves
    return run.phase() if running else "ended"


def arrays_and_rows(at):
    """What a run left: the digests of its last step, and the rows of metrics.jsonl without times."""
    facts = checkpoint.examine(checkpoint.place(str(at / "w/checkpoints/24")))
    rows = train.read_metrics(at / "w")
    times = ("step_time", "tokens_per_second", "steps_per_second")
    return facts["arrays"], [{k: v for k, v in r.items() if k not in times} for r in rows]


def kill_and_compare(folder, text, processes, phases, victims, rng):
    """Runs to the end once, and again with kills of `victims` in `phases`. Returns the phases that were hit."""
    hit = []
    for name in ("whole", "killed"):
        (folder / name).mkdir()
        for phase, killed in zip(phases, victims) if name == "killed" else ():
            run = Run(folder / name, text, processes=processes)
            hit.append(kill_at(run, phase, killed, rng.uniform(0, 0.3)))
        run = Run(folder / name, text, processes=processes)
        assert run.wait() == [0] * processes, run.said() + run.errors()
    whole, killed = (arrays_and_rows(folder / name) for name in ("whole", "killed"))
    assert whole == killed  # bit for bit
    return hit


@pytest.mark.parametrize("phases, victims", [(PHASES, [[0]] * 5), (("save", "step"), [[0, 1], [0]])])
def test_killed_anywhere_a_run_ends_with_the_same_bits(phases, victims, long_text, tmp_path):
    processes = 1 + (len(phases) == 2)
    hit = kill_and_compare(tmp_path, long_text, processes, phases, victims, np.random.default_rng())  # other moments
    assert "ended" not in hit[:-1], hit


@pytest.mark.skipif("--soak" not in ASKED, reason="--soak: minutes of kills")
def test_fifty_kills(long_text, tmp_path):
    rng, hits = np.random.default_rng(), {1: [], 2: []}
    for turn in range(40):
        processes = 1 + turn % 2
        (tmp_path / str(turn)).mkdir()
        phases = [*rng.permutation(PHASES[:4]), "shutdown"]
        victims = rng.permutation(5) % 3 if processes == 2 else np.zeros(5, int)
        victims = [[[0], [1], [0, 1]][who] for who in victims]  # a process that is left ends when it misses the other
        hits[processes] += kill_and_compare(tmp_path / str(turn), long_text, processes, phases, victims, rng)
        counts = {p: sum(h.count(p) for h in hits.values()) for p in PHASES}
        print(f"turn {turn}: killed {counts}", flush=True)
        if all(sum(h.count(p) for p in PHASES) >= 25 for h in hits.values()) and min(counts.values()) >= 5:
            return
    raise AssertionError(f"some phase was hardly hit: {counts}")


@pytest.fixture
def long_text(tmp_path):
    return f"data={corpus(tmp_path, **{'words.txt': 'to be, or not to be: that is the question. ' * 4000})}/words.txt"


def test_a_signal_to_one_of_two_processes_stops_both_and_any_number_goes_on(long_text, tmp_path):
    """Two processes, then one, then two: the losses of a run in one that nothing stopped. Each stop is a signal."""
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    words = [long_text, "eval_batches=1", "ici.fsdp=-1"]
    assert Run(tmp_path / "whole", *words, "ici.data=1").wait() == [0]
    for processes, at in ((2, 3), (1, 12), (2, 99)):
        run = Run(tmp_path / "parts", *words, "ici.data=1", processes=processes)
        if run.until(lambda: f"step {at}/24" in run.said()):
            run.processes[-1].send_signal(signal.SIGTERM)
        assert run.wait() == [75 if at < 24 else 0] * processes, run.said() + run.errors()
        assert at > 24 or "the same command goes on" in run.said()
    whole, parts = (train.read_metrics(tmp_path / name / "w") for name in ("whole", "parts"))
    for key in ("loss", "grad_norm", "eval/valid/log_pplx"):
        a, b = ([(r["step"], r[key]) for r in rows if key in r] for rows in (whole, parts))
        close(a, b, key)


def test_a_signal_during_the_compile_acts_after_it_and_a_second_one_at_once(long_text, tmp_path):
    run = Run(tmp_path, long_text)
    run.until(lambda: run.phase() == "compile")
    run.processes[0].send_signal(signal.SIGTERM)
    assert run.wait() == [75] and "stopped at step" in run.said()
    run = Run(tmp_path, long_text, "steps=100000")
    run.until(lambda: "step 1/" in run.said())
    for _ in range(2):
        run.processes[0].send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert run.wait() == [128 + signal.SIGTERM] and "a second signal" in run.errors()


def test_an_evaluation_that_a_signal_cuts_off_comes_again(long_text, monkeypatch, tmp_path):
    """In the second of two evaluation sets: no row of the first is there twice."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more.txt").write_text("it was the best of times, it was the worst of times. " * 4000)
    words = f"{long_text}:0.5,{tmp_path}/more.txt:0.5", "sample_tokens=0", "eval_batches=4"
    start_run(*words, "--workdir=whole")
    evaluate, asked = train.evaluate, []

    def interrupted(run, params, batches, stop):
        def now():
            asked.append(0)
            if len(asked) == 6:  # the first set asks four times
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)
            return stop()
        return evaluate(run, params, batches, now)

    monkeypatch.setattr(train, "evaluate", interrupted)
    with pytest.raises(SystemExit, match="75"):  # without a name for it, whose traceback would hold the run's lock
        start_run(*words, "--workdir=parts")
    assert len(asked) == 6
    start_run(*words, "--workdir=parts")
    whole, parts = (train.read_metrics(tmp_path / name) for name in ("whole", "parts"))
    keys = {key for row in whole for key in row if key == "loss" or key.endswith("log_pplx")}
    assert len(keys) == 3
    for key in keys:
        a, b = ([(r["step"], r[key]) for r in rows if key in r] for rows in (whole, parts))
        assert a == [(step, value) for step, value in b if step in dict(a)], key  # a stop logs its step too
        assert len(dict(b)) == len(b), key


def test_where_one_process_cannot_read_a_step_all_walk_back(tmp_path):
    program = """
import json, sys, jax, jax.numpy as jnp
sys.path.insert(0, {here!r})
jax.config.update("jax_num_cpu_devices", 2)
rank = int(sys.argv[1])
jax.distributed.initialize("localhost:{port}", 2, rank)
import checkpoint, configs
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ("data",))
target = {{"x": jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, P("data")))}}
leaves, folder = checkpoint.layout(target, {{}}), checkpoint.place({folder!r})
make = jax.jit(lambda k: {{"x": jnp.arange(8.0) + k}}, out_shardings={{"x": target["x"].sharding}})
with checkpoint.Saves(folder, leaves, configs.Config()) as saves:
    for step in (1, 2):
        saves.save(step, make(step), {{"sequences": step}})
whole = checkpoint.ocp.load
def load(step, wanted):
    if rank and step.name == "2":
        raise OSError("the disk of process 1 is gone")
    return whole(step, wanted)
checkpoint.ocp.load = load
state, facts = checkpoint.restore(folder, target, leaves)
first = float(jnp.sum(state["x"]) - 28) / 8
print("RESULT", json.dumps([facts["sequences"], first, sorted(p.name for p in folder.iterdir())]))
"""
    assert in_two_processes(program, folder=str(tmp_path / "c")) == [[1, 1.0, ["1", "2.damaged"]]] * 2


def test_every_array_that_differs_is_listed(tmp_path):
    """Missing, extra, reshaped and retyped, each with both shapes and dtypes; nothing is cast or left out."""
    here = NamedSharding(make_mesh((1, 8, 1, 1, 1), (1,) * 5, jax.devices()), P())

    def target(**arrays):
        structs = {n: jax.ShapeDtypeStruct(shape, dtype, sharding=here) for n, (shape, dtype) in arrays.items()}
        return structs, checkpoint.layout(structs, {})

    folder = checkpoint.place(str(tmp_path / "c"))
    there, leaves = target(a=((4,), "float32"), b=((2, 3), "float32"), c=((), "int32"), d=((5,), "float32"))
    with checkpoint.Saves(folder, leaves, Config()) as saves:
        saves.save(1, {n: jax.device_put(np.full(s.shape, 16777217, s.dtype), here) for n, s in there.items()},
                   {"sequences": 0})
    got, _ = checkpoint.restore(folder, there, leaves)
    assert int(got["c"]) == 16777217 and got["c"].dtype == np.int32
    other = target(a=((4,), "bfloat16"), b=((3, 2), "float32"), c=((), "float32"), e=((1,), "float32"))
    with pytest.raises(ValueError) as stop:
        checkpoint.restore(folder, *other)
    for line in ("5 arrays differ", "a is (4,) float32 there, (4,) bfloat16 here",
                 "c is () int32 there, () float32 here",
                 "b is (2, 3) float32 there, (3, 2) float32 here", "d is (5,) float32 there, absent here",
                 "e is absent there, (1,) float32 here"):
        assert line in str(stop.value), line


def test_steps_are_those_taken_and_the_last_is_saved(text, capsys, tmp_path):
    words = (text, "--workdir=w", "steps=10", "checkpoint_every=4", "eval_every=2", "keep_newest=9", "sample_tokens=0")
    start_run(*words)
    folder = tmp_path / "w/checkpoints"
    assert sorted(int(p.name) for p in folder.iterdir()) == [4, 8, 10]
    capsys.readouterr()
    start_run(*words)
    assert "steps=10 are taken: nothing to do" in capsys.readouterr().out
    shutil.rmtree(folder / "10")  # as if it was killed while that was saved
    (folder / "10.orbax-checkpoint-tmp").mkdir()
    (folder / "11").mkdir()
    start_run(*words)
    said = capsys.readouterr()
    assert "continues from step 8" in said.out and re.search("WARNING: .*/11 cannot be used", said.err)
    assert {"4", "8", "10", "11.damaged"} <= {p.name for p in folder.iterdir()}


def test_which_steps_stay(text, tmp_path):
    start_run(text, "--workdir=w", "steps=9", "checkpoint_every=1", "eval_every=1", "sample_tokens=0", "keep_newest=2",
              "keep_every=4", "keep_best=1", "learning_rate=0.01", "schedule=constant")
    rows = train.read_metrics(tmp_path / "w")
    evaluations = {r["step"]: r["eval/valid/log_pplx"] for r in rows if "eval/valid/log_pplx" in r}
    kept = {int(p.name) for p in (tmp_path / "w/checkpoints").iterdir()}
    assert kept == {4, 8, 9, min(evaluations, key=evaluations.get)}


def test_a_full_disk_ends_the_run_and_the_step_before_is_good(long_text, tmp_path):
    few = ("eval_batches=1", "d_model=64", "d_ff=200", "checkpoint_every=4")
    assert Run(tmp_path, long_text, *few, "steps=4").wait() == [0]
    largest = max(p.stat().st_size for p in (tmp_path / "w/checkpoints").rglob("*") if p.is_file())
    import resource
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest // 2, before[1]))  # a process inherits it
    try:
        run = Run(tmp_path, long_text, *few)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert run.wait() == [1]
    last = run.errors().strip().splitlines()[-1]
    assert re.search("step 8 .*checkpoints/4 is good, and the same command goes on from it", last), last
    run = Run(tmp_path, long_text, *few)
    assert run.wait() == [0] and "continues from step 4" in run.said(), run.errors()


def test_a_folder_that_cannot_be_written_is_named(text, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="file"):
        start_run(text, "--workdir=file/w")
    (tmp_path / "w").mkdir()
    (tmp_path / "w/checkpoints").write_text("")
    with pytest.raises(SystemExit, match="checkpoints"):
        start_run(text, "--workdir=w")
    lock = train.claim(tmp_path / "w")
    with pytest.raises(SystemExit, match="another run writes to w"):
        start_run(text, "--workdir=w")
    lock.close()


def test_an_error_in_the_loop_waits_for_the_save(text, capsys, monkeypatch, tmp_path):
    seal, trained = checkpoint.seal, train.Journal.trained

    def slow(step):
        time.sleep(1)
        seal(step)

    def broken(self, step, *rest):
        if step > 3:
            raise RuntimeError("a bug")
        return trained(self, step, *rest)

    monkeypatch.setattr(checkpoint, "seal", slow)
    monkeypatch.setattr(train.Journal, "trained", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        start_run(text, "--workdir=w", "log_every=1")
    assert (tmp_path / "w/checkpoints/3/sums.json").exists()
    assert capsys.readouterr().err.strip().endswith("checkpoints/3")


# ---- --bench: ratios of times, each of one run -----------------------------------------------------------------------


def fastest(work, turns=5, calls=1):
    """Milliseconds of `work`, the mean of some calls, the least of some turns."""
    times = []
    for _ in range(turns):
        since = time.perf_counter()
        for _ in range(calls):  # none of the results is kept: fresh memory would be what is measured
            work()
        times.append((time.perf_counter() - since) / calls * 1000)
    return min(times)


def bench_tokenizers(folder, documents=60_000):
    """`data.py prepare` in two processes beside the bare library on two cores, both from texts to ids."""
    lines = [line for p in sorted(SHARED.glob("c4-sample.*.json.gz")) for line in gzip.open(p, "rt")]
    lines = list(itertools.islice(itertools.cycle(lines), documents))
    (folder / "c4.jsonl").write_text("".join(lines))
    texts = [json.loads(line)["text"] for line in lines]
    kilobytes = sum(len(text.encode()) for text in texts) / 1000  # a millisecond: MB a second
    for name in ("sentencepiece_32000.model", "tokenizer_neox.json"):
        if name.endswith(".json"):
            library = data.extra("tokenizers").Tokenizer.from_file(str(SHARED / name))
            bare = lambda: library.encode_batch_fast(texts, add_special_tokens=False)
        else:
            library = data.extra("sentencepiece").SentencePieceProcessor(model_file=str(SHARED / name))
            bare = lambda: library.encode(texts, num_threads=2)
        out = (folder / f"{name}-{turn}" for turn in itertools.count())
        ours = fastest(lambda: prepare(next(out), folder / "c4.jsonl", tokenizer=str(SHARED / name), workers="2"), 2)
        os.environ.pop("TOKENIZERS_PARALLELISM", None)  # which prepare has turned off
        theirs = fastest(bare, 2)
        print(
            f"prepare, {name}: {kilobytes / ours:.1f} MB/s, the bare library {kilobytes / theirs:.1f} MB/s: ratio "
            f"{theirs / ours:.2f}",
            flush=True,
        )


def bench_loader(folder):
    """A batch of 64 x 2049 uint16 tokens beside the bare gather of its rows, and over HTTP beside bare byte ranges."""
    tokens = np.random.default_rng(0).integers(0, 32_000, 50_000_000).astype(np.uint16)
    tokens.tofile(folder / "tokens.bin")
    prepare(folder / "tokens", folder / "tokens.bin", tokenizer="32000", dtype="uint16")
    cfg = Config(data=str(folder / "tokens"), seq=2048, batch=64, vocab=32_000)
    order, own, turns = data.load(cfg).train, np.arange(64), itertools.count()
    flat = np.memmap(folder / "tokens.bin", np.uint16, "r")
    rows = lambda i: order.index(np.arange(64 * i, 64 * i + 64)) * 2048
    starts = itertools.cycle([rows(i) for i in range(100)])
    gather = lambda: flat[next(starts)[:, None] + np.arange(2049)]
    many = partial(fastest, calls=100)
    bare = many(gather)
    read = many(lambda: order.examples(np.arange(64) + 64 * (next(turns) % 100)))
    whole = many(lambda: data.build(cfg, order, 64 * (next(turns) % 100), own))
    print(f"64 rows of 2049 tokens: bare gather {bare:.2f} ms, read {read:.2f} ms: ratio {read / bare:.2f}")
    print(
        f"a whole batch, with segments, positions, targets, weights: {whole:.2f} ms: ratio {whole / bare:.2f}",
        flush=True,
    )

    with Server(folder / "tokens") as server:
        far = data.load(dataclasses.replace(cfg, data=server.url)).train
        import tensorstore

        store = tensorstore.KvStore.open(server.url + "/").result()
        name = far.source.store.names[0]

        def ranges():
            asked = [store.read(name, byte_range=slice(2 * a, 2 * a + 4098)) for a in next(starts)]
            return [np.frombuffer(answer.result().value, np.uint16) for answer in asked]

        bare = fastest(ranges, calls=20)
        ours = fastest(lambda: data.build(cfg, far, 64 * (next(turns) % 100), own), calls=20)
        print(
            f"over HTTP: bare byte ranges {bare:.1f} ms, a whole batch {ours:.1f} ms: ratio {bare / ours:.2f}",
            flush=True,
        )
        server.shutdown()


def bench_checkpoints(folder):
    """Saves and restores of 512 MiB beside bare Orbax; training that saves beside training that does not."""
    everywhere = NamedSharding(make_mesh((1, 8, 1, 1, 1), (1,) * 5, jax.devices()), P("data"))
    structs = {f"x{i}": jax.ShapeDtypeStruct((2**21, 8), np.float32, sharding=everywhere) for i in range(8)}
    leaves, ocp = checkpoint.layout(structs, {}), checkpoint.ocp
    state = {n: jax.jit(partial(jax.random.normal, shape=s.shape), out_shardings=everywhere)(jax.random.key(i))
             for i, (n, s) in enumerate(structs.items())}
    home, numbers, blocked = checkpoint.place(str(folder / "saves")), itertools.count(1), []

    def save():
        since = time.perf_counter()
        saves.save(next(numbers), state, {"sequences": 0})
        blocked.append(1000 * (time.perf_counter() - since))
        saves.wait()

    digests = fastest(lambda: checkpoint.digests(state, leaves))
    bare = fastest(lambda: ocp.save(checkpoint.place(str(folder / f"bare{next(numbers)}")), state), 3)
    with checkpoint.Saves(home, leaves, Config(keep_newest=1)) as saves:
        whole = fastest(save, 3)
    blocked = min(blocked) - digests
    print(f"512 MiB: written in {whole:.0f} ms, by bare Orbax in {bare:.0f} ms; the loop is blocked {blocked:.1f} ms: "
          f"ratio {blocked / bare:.3f}; and {digests:.0f} ms by the digest", flush=True)
    newest = checkpoint.newest(home)
    bare = fastest(lambda: ocp.load(newest, structs), 3)
    whole = fastest(lambda: checkpoint.restore(home, structs, leaves), 3)
    print(f"restored in {whole:.0f} ms, {digests:.0f} ms of them the digest, by bare Orbax in {bare:.0f} ms: ratio "
          f"{(whole - digests) / bare:.2f}", flush=True)

    lap, ends = train.Journal.lap, []
    train.Journal.lap = lambda *args: ends.append(time.perf_counter()) or lap(*args)
    os.chdir(folder)
    (folder / "words.txt").write_text("to be, or not to be: that is the question. " * 4000)
    seconds = {10: [], 1000: []}
    for turn in range(3):
        for every, times in seconds.items():
            ends.clear()
            start_run("data=words.txt", f"--workdir=w{every}-{turn}", "seq=128", "d_model=128", "batch=64", "steps=61",
                      "ici.fsdp=8", f"checkpoint_every={every}", "log_every=1", "eval_every=1000", "sample_tokens=0")
            times.append(ends[-1] - ends[1])  # from the first step's report to the last's
    step = checkpoint.newest(checkpoint.place(str(folder / "w10-0/checkpoints")))
    structs = {name: jax.ShapeDtypeStruct(leaf["shape"], leaf["dtype"], sharding=NamedSharding(everywhere.mesh, P()))
               for name, leaf in checkpoint.examine(step)["arrays"].items()}
    state = ocp.load(step, structs)
    write = fastest(lambda: ocp.save(checkpoint.place(str(folder / f"bare{next(numbers)}")), state), 3) / 1000
    saving, plain = min(seconds[10]), min(seconds[1000])
    print(f"60 steps in {plain:.2f} s, saving every 10 in {saving:.2f} s: tokens/s ratio {plain / saving:.3f}; ten "
          f"steps are {plain / 6 / write:.0f} synchronous saves of {1000 * write:.0f} ms; all {seconds}", flush=True)


# ---- python test_all.py --------------------------------------------------------------------------------------------

if __name__ == "__main__":
    if "--bench" in ASKED:
        for name, bench in [(name, thing) for name, thing in globals().items() if name.startswith("bench_")]:
            if not sys.argv[2:] or name in sys.argv:
                with tempfile.TemporaryDirectory() as folder:
                    bench(Path(folder))
        raise SystemExit
    arguments = [a for a in sys.argv[1:] if a not in FLAGS] or ["-n", "2"]
    raise SystemExit(pytest.main([str(HERE / "test_all.py"), "-q", "-p", "no:cacheprovider", *arguments]))
