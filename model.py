"""Parameters as a table, and the forward pass as one device sees it.

The table says for each parameter its shape, where it lives, how it starts and whether it decays; all else about
parameters is a map over it. Between sublayers every token is on exactly one device: rows are split over data and fsdp,
the sequence over tensor. So a sum over devices is a sum over tokens, and losses and gradients need no factor.

Dimensions, capitals global, lower case this device's:  B batch  T sequence  D d_model  H heads  K kv_heads  h d_head
F d_ff  V vocabulary (padded)  L layers  R rounds
"""
import math
import zlib
from functools import cache, partial
from statistics import NormalDist
from typing import Callable, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P

from mesh import BATCH, SEQUENCE, gather, largest, scatter, smallest, unshard


class Param(NamedTuple):
    """One row of the table. `size` is the shape without padding: what is counted and initialised; the rest is zeros."""

    shape: tuple
    spec: P
    init: Callable  # (key, shape) -> float32 array
    decay: bool
    size: tuple


class Task(NamedTuple):
    """What the training loop knows of a model: pure functions of the config.

    params(cfg) -> {name: Param};  batch(cfg) -> {name: PartitionSpec} of one micro-batch;
    loss(cfg, params, batch, step) -> (sum, {metric: (sum, weight)}) over this device's tokens, dropout with a step;
    logits(cfg, params, batch, last=) -> logits of what follows column `last`;  flops(cfg) -> training FLOPs a token.
    """

    params: Callable
    batch: Callable
    loss: Callable
    logits: Callable
    flops: Callable


# ---- what the table is mapped to -----------------------------------------------------------------------------------


def count(table):
    """Parameters, without padding."""
    return sum(math.prod(p.size) for p in table.values())


def init_params(table, seed):
    """{name: float32 array}: the same values on every mesh, for every `rounds`, whatever other parameters there are."""
    def one(name, p):
        x = p.init(jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode())), p.size)
        if len(p.size) < len(p.shape):  # (L, ...) to (R, L // R, ...)
            return x.reshape(p.shape)
        return jnp.pad(x, [(0, full - real) for full, real in zip(p.shape, p.size)])
    return {name: one(name, p) for name, p in table.items()}


@cache
def quantiles():
    """The standard normal's inverse distribution function at 2^16 even points."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**16)])


# Both draw integers and round once, so that a value is the same bits on every mesh and compiler: the arithmetic of
# `jax.random.normal` is not, where shards are so small that a compiler vectorizes them in another way.
def normal(std):
    return lambda key, shape: jnp.asarray(std * quantiles(), jnp.float32)[jax.random.bits(key, shape, jnp.uint16)]


def uniform(limit):
    def draw(key, shape):
        whole = (jax.random.bits(key, shape) >> 8).astype(jnp.int32) - 2**23  # exact in float32
        return whole.astype(jnp.float32) * (limit / 2**23)
    return draw


def constant(value):
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


# ---- the transformer: parameters -----------------------------------------------------------------------------------


def padded_vocab(cfg):
    """V: a multiple of 128 (one tile of a matrix unit, and most tensor axes), so that meshes agree on the shape."""
    return -cfg.vocab % math.lcm(128, cfg.axis("tensor")) + cfg.vocab


def transformer_params(cfg):
    """{name: Param}. Scales of LayerNorm are stored as s of (1 + s), so that decay pulls them to 1, as in Pax."""
    D, H, K, h, F = cfg.d_model, cfg.heads, cfg.kv_heads, cfg.d_head, cfg.d_ff
    L, R, V = cfg.layers, cfg.rounds, padded_vocab(cfg)
    kv = "tensor" if K % cfg.axis("tensor") == 0 else None  # fewer heads than devices: each has all and uses one

    def row(shape, *spec, init=constant(0.0), decay=True, size=None):
        return Param(shape, P(*spec), init, decay, size or shape)

    def layer(shape, *spec, init=constant(0.0), decay=True):
        return Param((R, L // R, *shape), P(None, "stage", *spec), init, decay, (L, *shape))

    def norm(name, make):
        if cfg.norm == "rmsnorm":
            return {f"{name}/scale": make((D,), None, init=constant(1.0), decay=False)}
        return {f"{name}/{part}": make((D,), None, decay=False) for part in ("scale", "bias")}

    def weight(fan_in, xavier, residual=False):
        """`xavier` is fan_in + fan_out as Pax has it: of shape (..., m, n), the product of what leads times m + n. Its
        query, key and value are one (3, D, H, h), so theirs is 3 D (H + h)."""
        if cfg.init == "normal":
            return normal(cfg.init_std)
        if cfg.init == "xavier":
            return uniform(math.sqrt(6 / xavier))
        return normal(fan_in**-0.5 / (math.sqrt(2 * L) if residual else 1))  # 2 L branches add up to the residual

    vectors = normal(cfg.init_std if cfg.init == "normal" else D**-0.5)
    table = {"embed": row((V, D), "tensor", "fsdp", init=vectors, size=(cfg.vocab, D))}
    if cfg.positions == "learned":
        table["positions"] = row((cfg.position_rows, D), None, "fsdp", init=vectors)
    table |= norm("layers/attention_norm", layer)
    table |= {
        "layers/wq": layer((D, H, h), "fsdp", "tensor", None, init=weight(D, 3 * D * (H + h))),
        "layers/wk": layer((D, K, h), "fsdp", kv, None, init=weight(D, 3 * D * (H + h))),
        "layers/wv": layer((D, K, h), "fsdp", kv, None, init=weight(D, 3 * D * (H + h))),
        "layers/wo": layer((H, h, D), "tensor", None, "fsdp", init=weight(H * h, D * (H + h), residual=True)),
    }
    if cfg.attention_bias:
        table |= {
            "layers/bq": layer((H, h), "tensor", None, decay=False),
            "layers/bk": layer((K, h), kv, None, decay=False),
            "layers/bv": layer((K, h), kv, None, decay=False),
            "layers/bo": layer((D,), None, decay=False),
        }
    if cfg.query_scale == "learned":
        table["layers/query_scale"] = layer((h,), None, decay=False)
    table |= norm("layers/ffn_norm", layer)
    table["layers/w_up"] = layer((D, F), "fsdp", "tensor", init=weight(D, D + F))
    if cfg.activation == "swiglu":
        table["layers/w_gate"] = layer((D, F), "fsdp", "tensor", init=weight(D, D + F))
    table["layers/w_down"] = layer((F, D), "tensor", "fsdp", init=weight(F, D + F, residual=True))
    if cfg.ffn_bias:
        table |= {"layers/b_up": layer((F,), "tensor", decay=False), "layers/b_down": layer((D,), None, decay=False)}
    table |= norm("final_norm", row)
    if not cfg.tied:
        table["unembed"] = row((V, D), "tensor", "fsdp", init=vectors, size=(cfg.vocab, D))
    if cfg.softmax_bias:
        table["softmax_bias"] = row((V,), "tensor", decay=False, size=(cfg.vocab,))
    return table


def transformer_batch(cfg):
    """A micro-batch: `rows` (B,) is each row's number in the step, for dropout; all else is (B, T).

    `weights` are the loss's, 0 where there is no target. `segments` number a row's documents, `positions` count from 0
    in each.
    """
    tokens = dict.fromkeys(("tokens", "targets", "weights", "segments", "positions"), P(BATCH, SEQUENCE))
    return {"rows": P(BATCH), **tokens}


def transformer_flops(cfg):
    """Training FLOPs a token: 6 a weight that multiplies, and causal attention, of which half the scores count."""
    table = transformer_params(cfg)
    lookups = {"positions"} if cfg.tied else {"positions", "embed"}
    weights = count({n: p for n, p in table.items() if p.decay and n not in lookups})
    return 6 * weights + 6 * cfg.layers * cfg.heads * cfg.d_head * cfg.seq


# ---- the transformer: one device's forward pass --------------------------------------------------------------------


def normalize(cfg, x, w, name):
    """LayerNorm or RMSNorm over D, statistics in float32."""
    y = x.astype(jnp.float32)
    if cfg.norm == "layernorm":
        y = y - y.mean(-1, keepdims=True)
    y = y * lax.rsqrt((y * y).mean(-1, keepdims=True) + cfg.norm_eps)
    y = y * w[f"{name}/scale"] if cfg.norm == "rmsnorm" else y * (1 + w[f"{name}/scale"]) + w[f"{name}/bias"]
    return y.astype(cfg.dtype)


def biased(x, bias):
    return (x + bias).astype(x.dtype)


def soft_cap(x, cap):
    return cap * jnp.tanh(x / cap) if cap else x


def sinusoids(positions, d):
    """(b, t) to (b, t, d): all sines, then all cosines, of wavelengths 2 pi to 2 pi 10^4, in float32."""
    rates = jnp.exp(-math.log(10_000) / max(d // 2 - 1, 1) * jnp.arange(d // 2, dtype=jnp.float32))
    phases = positions[..., None].astype(jnp.float32) * rates
    return jnp.concatenate([jnp.sin(phases), jnp.cos(phases)], -1)


def rope(cfg, positions):
    """(b, T) to the (cos, sin) that `rotate` takes, float32 (b, T, 1, h / 2)."""
    rates = cfg.rope_theta ** (-jnp.arange(0, cfg.d_head, 2, dtype=jnp.float32) / cfg.d_head)
    phases = positions[..., None, None].astype(jnp.float32) * rates
    return jnp.cos(phases), jnp.sin(phases)


def rotate(x, phases):
    """Turns each pair (x[i], x[i + h / 2]) of (b, T, heads, h) by its phase."""
    if phases is None:
        return x
    (cos, sin), (a, b) = phases, jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def dropout(cfg, batch, step, layer, site, x):
    """Drops elements of (b, t, D). Each token's mask hangs on seed, step, layer, site, global row and column alone."""
    if step is None or not cfg.dropout:
        return x
    key = jax.random.fold_in(jax.random.key(cfg.seed), zlib.crc32(b"dropout"))
    for number in (step, layer, site):
        key = jax.random.fold_in(key, number)
    t = x.shape[1]
    columns = lax.axis_index(SEQUENCE) * t + jnp.arange(t)
    token = lambda row, column: jax.random.fold_in(jax.random.fold_in(key, row), column)
    keys = jax.vmap(jax.vmap(token, (None, 0)), (0, None))(batch["rows"], columns)
    keep = jax.vmap(jax.vmap(lambda k: jax.random.bernoulli(k, 1 - cfg.dropout, x.shape[2:])))(keys)
    return jnp.where(keep, x / (1 - cfg.dropout), 0).astype(x.dtype)


EMBED, ATTENTION, FFN = range(3)  # the sites of dropout


def attention(cfg, y, w, mask, phases):
    """All tokens y (b, T, D) through this device's heads: its share of the sum that makes the output, (b, T, D)."""
    tensor = lax.axis_size("tensor")
    if cfg.kv_heads % tensor:  # this device's query heads share one of the kv_heads: take it
        mine = lax.axis_index("tensor") * cfg.kv_heads // tensor
        axis = {"wk": 1, "wv": 1, "bk": 0, "bv": 0}
        w = w | {n: lax.dynamic_slice_in_dim(w[n], mine, 1, axis[n]) for n in axis if n in w}
    q, k, v = (jnp.einsum("btd,dhk->bthk", y, w[n]) for n in ("wq", "wk", "wv"))
    if cfg.attention_bias:
        q, k, v = q + w["bq"], k + w["bk"], v + w["bv"]
    q, k, v = (checkpoint_name(x, f"{n}_proj") for x, n in ((q, "query"), (k, "key"), (v, "value")))
    q, k = rotate(q, phases), rotate(k, phases)
    if cfg.query_scale == "learned":  # 1 / log(2) makes it exactly d_head^-1/2 where the parameter is 0
        q = (q * (math.log2(math.e) * cfg.d_head**-0.5 * jax.nn.softplus(w["query_scale"]))).astype(q.dtype)
    else:
        q = q * cfg.d_head**-0.5
    q = q.reshape(*k.shape[:3], -1, cfg.d_head)  # query heads in the order of the kv_head that they share
    scores = jnp.einsum("btngk,bsnk->bngts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], soft_cap(scores, cfg.attention_cap), -0.7 * jnp.finfo(jnp.float32).max)
    weights = jax.nn.softmax(scores).astype(v.dtype)
    context = jnp.einsum("bngts,bsnk->btngk", weights, v).reshape(*y.shape[:2], -1, cfg.d_head)
    return jnp.einsum("bthk,hkd->btd", checkpoint_name(context, "context"), w["wo"])


def ffn(cfg, y, w):
    """All tokens y (b, T, D) through this device's hidden units: its share of the sum, (b, T, D)."""
    up = jnp.einsum("btd,df->btf", y, w["w_up"])
    up = checkpoint_name(biased(up, w["b_up"]) if cfg.ffn_bias else up, "ffn1")
    if cfg.activation == "swiglu":
        hidden = jax.nn.silu(checkpoint_name(jnp.einsum("btd,df->btf", y, w["w_gate"]), "ffn1_gate")) * up
    else:
        hidden = jax.nn.relu(up) if cfg.activation == "relu" else jax.nn.gelu(up)
    return jnp.einsum("btf,fd->btd", hidden, w["w_down"])


def block(cfg, x, w, mask, phases, drop):
    """One layer, (b, t, D) to (b, t, D): twice x + scatter(f(gather(norm(x)))). Biases come after the sum, so once."""
    y = gather(normalize(cfg, x, w, "attention_norm"), "tensor", 1)
    y = checkpoint_name(scatter(attention(cfg, y, w, mask, phases), "tensor", 1), "out_proj")
    x = x + drop(ATTENTION, biased(y, w["bo"]) if cfg.attention_bias else y)
    y = gather(normalize(cfg, x, w, "ffn_norm"), "tensor", 1)
    y = checkpoint_name(scatter(ffn(cfg, y, w), "tensor", 1), "ffn2")
    return x + drop(FFN, biased(y, w["b_down"]) if cfg.ffn_bias else y)


QKV = ("query_proj", "key_proj", "value_proj")
SAVED = {  # Pax's SAVE_* policies: the named tensors that a layer keeps
    "qkv_out_proj": (*QKV, "out_proj"),
    "context": ("context",),
    "out_proj": ("out_proj",),
    "context_and_out_proj": ("context", "out_proj"),
    "mlperf_200b": (*QKV, "context", "out_proj"),
    "dots_except_logits_ffn1": (*QKV, "context", "out_proj", "ffn2"),
    "dots_except_logits": (*QKV, "context", "out_proj", "ffn1", "ffn1_gate", "ffn2"),
}


def remat(cfg, layer):
    """`layer`, of which the backward pass finds kept what cfg.remat names, and computes the rest again."""
    policies = jax.checkpoint_policies
    if cfg.remat == "everything":
        return layer
    policy = {"nothing": policies.nothing_saveable, "dots": policies.dots_saveable,
              "dots_no_batch": policies.dots_with_no_batch_dims_saveable}.get(cfg.remat)
    policy = policy or policies.save_only_these_names(*SAVED[cfg.remat])
    return jax.checkpoint(layer, policy=policy, prevent_cse=cfg.unroll)  # a scan's body is apart already


def full(cfg, params):
    """Parameters gathered along fsdp and ready for compute; of the layers' stack, the one layer that `params` holds."""
    table = transformer_params(cfg)
    def one(name, w):
        spec = table[name].spec[-w.ndim:]  # of a layer, without those of the stack
        return unshard(w, spec, cfg.dtype if w.ndim > 1 else jnp.float32, cfg.reduce_dtype)  # vectors act in float32
    return {name.removeprefix("layers/"): one(name, w) for name, w in params.items()}


def vocabulary(rows):
    """The ids that this device's `rows` of the vocabulary stand for."""
    return lax.axis_index("tensor") * len(rows) + jnp.arange(len(rows))


def embed(cfg, w, batch):
    """This device's tokens (b, t) as vectors (b, t, D): each device looks all of them up in its rows of the table."""
    here = gather(batch["tokens"], "tensor", 1) - vocabulary(w["embed"])[0]
    held = (here >= 0) & (here < len(w["embed"]))
    x = scatter(jnp.where(held[..., None], w["embed"][jnp.where(held, here, 0)], 0), "tensor", 1)
    if cfg.embed_scale:
        x = x * math.sqrt(cfg.d_model)
    if cfg.positions == "sinusoidal":
        x = x + sinusoids(batch["positions"], cfg.d_model)
    if cfg.positions == "learned":
        x = x + w["positions"][batch["positions"]]
    return x.astype(cfg.dtype)


def unembed(cfg, w, y):
    """Hidden states (..., D) to float32 logits of this device's part of the vocabulary, (..., v); of padding, -inf."""
    rows = w["embed" if cfg.tied else "unembed"]
    logits = jnp.einsum("...d,vd->...v", y, rows, preferred_element_type=jnp.float32)
    if cfg.softmax_bias:
        logits = logits + w["softmax_bias"]
    return jnp.where(vocabulary(rows) < cfg.vocab, soft_cap(logits, cfg.logit_cap), -jnp.inf)


def forward(cfg, params, batch, step=None, last=slice(None)):
    """Logits (b, T, v) of this device's rows and part of the vocabulary; with `last`, of that column only.

    Without a step there is no dropout.
    """
    positions, segments = (gather(batch[n], "tensor", 1) for n in ("positions", "segments"))
    mask = (segments[:, :, None] == segments[:, None, :]) & (positions[:, :, None] >= positions[:, None, :])
    phases = rope(cfg, positions) if cfg.positions == "rope" else None

    def layer(x, inputs):
        index, shards = inputs
        drop = partial(dropout, cfg, batch, step, index)
        return block(cfg, x, full(cfg, shards), mask, phases, drop), None

    stack = {n: p.reshape(-1, *p.shape[2:]) for n, p in params.items() if n.startswith("layers/")}
    w = full(cfg, {n: p for n, p in params.items() if n not in stack})
    x = dropout(cfg, batch, step, 0, EMBED, embed(cfg, w, batch))
    x, _ = lax.scan(remat(cfg, layer), x, (jnp.arange(cfg.layers), stack), unroll=cfg.unroll)
    return unembed(cfg, w, gather(normalize(cfg, x, w, "final_norm"), "tensor", 1)[:, last])


def transformer_loss(cfg, params, batch, step=None):
    """(sum of weighted cross-entropies in nats, metrics) over this device's tokens.

    Each device has the logits of all its rows' tokens for its part of the vocabulary. What it adds to a token's sum of
    exponentials, target logit and hit is summed into the one device that keeps the token, which takes the logarithm.
    """
    logits = forward(cfg, params, batch, step)
    targets = gather(batch["targets"], "tensor", 1)
    ids = vocabulary(logits[0, 0])
    mine = lax.stop_gradient(logits)
    top = largest(mine.max(-1), "tensor")  # cancels in the loss, so needs no gradient
    # The argmax over all parts, of equal logits the first id.
    best = smallest(jnp.where(mine.max(-1) == top, ids[0] + mine.argmax(-1), jnp.iinfo(jnp.int32).max), "tensor")
    is_target = targets[..., None] == ids
    shifted = logits - top[..., None]
    parts = [jnp.exp(shifted).sum(-1), jnp.where(is_target, shifted, 0).sum(-1), is_target.any(-1) & (best == targets)]
    exponentials, target, hit = scatter(jnp.stack(parts), "tensor", 2)
    weights = batch["weights"]
    nll = jnp.sum(weights * (jnp.log(exponentials) - target))
    return nll, {"loss": (nll, weights.sum()), "accuracy": (jnp.sum(weights * hit), weights.sum())}


transformer = Task(transformer_params, transformer_batch, transformer_loss, forward, transformer_flops)
