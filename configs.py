"""A run is one value: a frozen `Config`. Named configs are functions that return one; `override` sets fields by name.

Nothing else in the program holds a default; functions take `cfg` and read what they need from it.
To add a config, write a function and put it in CONFIGS. To add a field, give it a line here and read it where it acts.
"""
import dataclasses
import difflib
import typing
from dataclasses import dataclass, replace
from math import prod
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Axes:
    """Devices along each mesh axis; one of them may be -1, which takes all devices that the others leave."""

    stage: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for axis, size in sizes.items():
            if size < 1 and size != -1:
                raise ValueError(f"{axis}={size}: a mesh axis has 1 device or more, or -1: those left over")
        fill = [axis for axis, size in sizes.items() if size == -1]
        if len(fill) > 1:
            raise ValueError(f"{' and '.join(fill)} are -1: only one axis can take the devices left over")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that a run depends on. Sizes count elements, `batch` whole sequences, `steps` optimizer steps."""

    # model: one block, of which fields choose the C4, GPT-3 or Llama form
    vocab: int = 256
    seq: int = 128                 # tokens in a sequence (the context length)
    layers: int = 4
    d_model: int = 128
    heads: int = 4
    kv_heads: int = 4              # fewer than heads: grouped-query attention
    d_head: int = 32
    d_ff: int = 384
    positions: Literal["rope", "sinusoidal", "learned"] = "rope"
    rope_theta: float = 10_000.0
    position_rows: int = 16_384    # rows of the learned position table
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    activation: Literal["swiglu", "gelu", "relu"] = "swiglu"
    tied: bool = True              # the unembedding is the embedding
    embed_scale: bool = False      # embeddings times sqrt(d_model)
    query_scale: Literal["fixed", "learned"] = "fixed"  # d_head^-1/2, or times a learned softplus per dimension
    attention_bias: bool = False
    ffn_bias: bool = False
    softmax_bias: bool = False
    attention_cap: float = 0.0     # cap * tanh(x / cap) on attention scores; 0 is off
    logit_cap: float = 0.0         # the same on logits
    init: Literal["fan_in", "xavier", "normal"] = "fan_in"
    init_std: float = 0.02         # of init=normal
    dropout: float = 0.0

    # precision, memory, layout
    dtype: Literal["float32", "bfloat16"] = "float32"          # of compute; parameters and moments stay float32
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"   # of the FSDP gradient reduce-scatter
    remat: Literal["nothing", "dots", "dots_no_batch", "qkv_out_proj", "context", "out_proj", "context_and_out_proj",
                   "mlperf_200b", "dots_except_logits_ffn1", "dots_except_logits",
                   "everything"] = "everything"                # what a layer keeps for its backward pass
    unroll: bool = True            # layers as straight code: a faster step, a slower compile
    rounds: int = 1                # layers are stacked (rounds, layers // rounds, ...)
    ici: Axes = Axes(data=-1)      # devices inside a slice
    dcn: Axes = Axes()             # slices
    topology: str = "any"          # the devices that the config was made for

    # data
    data: str = "python"           # text, a folder of tokens, a URL, FILE.py:CLASS, A:0.7,B:0.3: see data.py
    tokenizer: str = ""            # of text: bytes (also ""), chars, FILE.model, tokenizer.json; of tokens: as they say
    packing: Literal["concat", "pack", "single"] = "concat"  # documents cut each seq, fitted into rows, or one in a row
    epochs: int = 0                # of the data; 0 (inf) is without end
    eval_data: str = ""            # "": a part of data that is left out of training
    eval_batches: int = 0          # that an evaluation reads; 0 (all) is all there are
    eval_reset: bool = True        # each evaluation begins at the first of them, not where the last one ended
    data_timeout: float = 60.0     # seconds for which a URL that does not answer is asked again
    batch: int = 16                # global sequences a step
    accum: int = 1                 # micro-batches a step

    # optimizer
    steps: int = 400
    learning_rate: float = 3e-3
    schedule: Literal["cosine", "exponential", "wsd", "constant"] = "cosine"
    warmup_steps: int = 50
    decay_start: int = 0           # 0: at the end of warm-up (wsd: the last fifth of the steps)
    decay_end: int = 0             # 0: at `steps`
    min_ratio: float = 0.1         # of the peak rate, from decay_end on
    schedule_start: int = 1        # what the schedule counts the first update as; Pax says 0, whose first rate is 0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    eps_root: float = 0.0
    rms_cap: float = 0.0           # caps the RMS of Adam's update, per tensor and layer; 0 is off
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"  # what is decayed: not norms and biases, or (as Pax) everything
    clip: float = 1.0              # global gradient norm; 0 is off
    frozen: str = ""               # a regex: parameters whose name it matches do not train
    ema_decay: float = 0.0         # moving average of the parameters; 0 is off
    eval_ema: bool = True          # evaluate, sample with the average, where there is one
    max_bad_steps: int = 10        # so many in a row without a finite gradient end the run

    # the run
    seed: int = 0
    log_every: int = 10
    eval_every: int = 200
    checkpoint_every: int = 1000   # and at the last step, and where a signal stops the run
    keep_newest: int = 3           # checkpoints that stay: so many of the newest,
    keep_every: int = 0            # those of steps that this divides (0: none),
    keep_best: int = 0             # and so many with the least log_pplx of the first evaluation (0: none)
    init_from: str = ""            # DIR[@STEP]: the run begins with the parameters of another
    rules: str = ""                # a JSON file that says which of its parameters are which: see docs/checkpoints.md
    sample_tokens: int = 240       # generated at the end; 0 is none
    temperature: float = 0.8

    def axis(self, name):
        """Devices along mesh axis `name`, ICI times DCN."""
        return getattr(self.ici, name) * getattr(self.dcn, name)

    def __post_init__(self):
        check(self)


FRACTIONS = ("dropout", "ema_decay", "beta1", "beta2")  # in [0, 1)
# Other whole numbers are sizes, of 1 or more.
NO_LIMIT = {"epochs": "inf", "eval_batches": "all"}  # what a command line may call their 0
MAY_BE_ZERO = ("decay_start", "decay_end", "schedule_start", "warmup_steps", "seed", "sample_tokens", "keep_every",
               "keep_best", *NO_LIMIT)
# What a run keeps for life: with another value the parameters would be those of another function of other sequences.
LASTING = ("vocab", "seq", "layers", "d_model", "heads", "kv_heads", "d_head", "d_ff", "positions", "rope_theta",
           "position_rows", "norm", "norm_eps", "activation", "tied", "embed_scale", "query_scale", "attention_bias",
           "ffn_bias", "softmax_bias", "attention_cap", "logit_cap")


def check(cfg):
    """Raises ValueError, with both numbers, for sizes that cannot be or do not fit each other."""
    for f in dataclasses.fields(cfg):
        value = getattr(cfg, f.name)
        if typing.get_origin(f.type) is Literal:
            if value not in typing.get_args(f.type):
                raise ValueError(f"{f.name}={value}: did you mean {nearest(value, typing.get_args(f.type))}? "
                                 f"One of: {', '.join(typing.get_args(f.type))}")
        elif f.type in (int, float):
            if isinstance(value, bool) or not isinstance(value, (f.type, int)):
                raise ValueError(f"{f.name}={value!r} is not {KIND[f.type]}")
            if f.type is int and not (f.name not in MAY_BE_ZERO) <= value < 2**31:  # the arrays that count are int32
                raise ValueError(f"{f.name}={value}: it is {0 if f.name in MAY_BE_ZERO else 1} or more, and below 2^31")
            if not 0 <= value < 3e38:
                raise ValueError(f"{f.name}={value} is not a number from 0 to what float32 holds")
            if f.name in FRACTIONS and value >= 1:
                raise ValueError(f"{f.name}={value} is not below 1")

    def divides(what, size, by, count):
        if size % count:
            raise ValueError(f"{what}={size} is not divisible by {by}={count}")

    if cfg.rules and not cfg.init_from:
        raise ValueError(f"rules={cfg.rules} are for init_from=DIR, which is not set")
    if not cfg.eval_reset and not cfg.eval_batches:
        raise ValueError("eval_reset=false goes on where the last evaluation ended: say how far, eval_batches=N")
    divides("layers", cfg.layers, "rounds", cfg.rounds)
    divides("batch", cfg.batch, "accum", cfg.accum)
    divides("heads", cfg.heads, "kv_heads", cfg.kv_heads)
    if cfg.positions == "rope":
        divides("d_head", cfg.d_head, "2 (rope turns pairs)", 2)
    if cfg.positions == "sinusoidal":
        divides("d_model", cfg.d_model, "2 (a sine and a cosine each)", 2)
    if cfg.positions == "learned" and cfg.seq > cfg.position_rows:
        raise ValueError(f"seq={cfg.seq} is longer than the position table, position_rows={cfg.position_rows}")
    if not 0 <= cfg.min_ratio <= 1 or cfg.schedule == "exponential" and not cfg.min_ratio:
        raise ValueError(f"min_ratio={cfg.min_ratio} is a share of the peak: at most 1, and above 0 if exponential")
    if cfg.positions == "rope" and not cfg.rope_theta:
        raise ValueError(f"rope_theta={cfg.rope_theta} is not above 0")
    if cfg.decay_end and cfg.decay_end < max(cfg.decay_start, cfg.warmup_steps):
        raise ValueError(f"decay_end={cfg.decay_end} is before decay_start={cfg.decay_start} or "
                         f"warmup_steps={cfg.warmup_steps}")
    for axis in ("stage", "context"):
        if cfg.axis(axis) != 1:
            raise ValueError(f"{axis}={cfg.axis(axis)}: layers are split over fsdp and tensor only; {axis} must be 1")

    # An axis that still is to take the devices left over counts as 1 here; `resolve` brings it back with its size.
    size = {axis: max(getattr(cfg.ici, axis), 1) * max(getattr(cfg.dcn, axis), 1) for axis in Axes.__slots__}
    divides("batch / accum", cfg.batch // cfg.accum, "data x fsdp", size["data"] * size["fsdp"])
    divides("seq", cfg.seq, "context x tensor", size["context"] * size["tensor"])
    divides("d_model", cfg.d_model, "fsdp", size["fsdp"])
    divides("heads", cfg.heads, "tensor", size["tensor"])
    divides("d_ff", cfg.d_ff, "tensor", size["tensor"])
    if cfg.kv_heads % size["tensor"] and size["tensor"] % cfg.kv_heads:
        raise ValueError(f"kv_heads={cfg.kv_heads} and tensor={size['tensor']}: one must divide the other")


def resolve(cfg, devices):
    """Fills each -1 so that ICI x DCN makes up `devices` (a count). Raises ValueError where it cannot."""
    ici, dcn = dataclasses.asdict(cfg.ici), dataclasses.asdict(cfg.dcn)
    known = prod(size for level in (ici, dcn) for size in level.values() if size != -1)
    fill = [(level, axis) for level in (dcn, ici) for axis, size in level.items() if size == -1]
    for level, axis in fill:  # with a -1 on both levels ICI takes the devices: DCN has one slice
        level[axis] = 1 if (level is dcn and len(fill) > 1) else max(devices // known, 1)
        known *= level[axis]
    if known != devices:
        levels = (("ici", ici), ("dcn", dcn))
        wide = {f"{level}.{axis}": size for level, sizes in levels for axis, size in sizes.items() if size != 1}
        raise ValueError(
            f"the mesh ({' '.join(f'{a}={s}' for a, s in wide.items()) or 'every axis 1'}) wants {known} devices, and "
            f"here there {'is' if devices == 1 else 'are'} {devices}: compile it here with --mode=compile, or run it, "
            f"if it fits here, with {' '.join(f'{a}=1' for a in wide) or 'ici.data=-1'} and your text, data=PATH")
    return replace(cfg, ici=Axes(**ici), dcn=Axes(**dcn))


# ---- the command line ----------------------------------------------------------------------------------------------

KIND = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}


def nearest(word, names):
    """The name that `word` most likely stands for; `lr` is nearest to `learning_rate` by its initials."""
    names = list(names)
    initials = {"".join(part[0] for part in n.replace(".", "_").split("_")): n for n in names if "_" in n}
    likeness = lambda name: difflib.SequenceMatcher(None, str(word).lower(), name.lower()).ratio()
    return initials.get(str(word).lower()) or max(names, key=likeness)


def parse(name, text, kind):
    """`text` as a value of type `kind`. Raises ValueError naming the field."""
    if typing.get_origin(kind) is Literal:
        return text  # `check` knows the choices
    if text == NO_LIMIT.get(name, "0"):
        return 0
    try:
        return {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{name}={text}: {name} is {KIND[kind]}, and {text!r} is not") from error


def override(cfg, words):
    """`cfg` with each `field=value` of `words` set. Raises ValueError for what is not a field or not of its type."""
    kinds = {f.name: f.type for f in dataclasses.fields(Config)}
    names = [n for n in kinds if kinds[n] is not Axes]
    names += [f"{n}.{axis.name}" for n in kinds if kinds[n] is Axes for axis in dataclasses.fields(Axes)]
    changes, axes = {}, {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in names:
            raise ValueError(f"{word!r}: no field is called {name!r}; did you mean {nearest(name, names)}?")
        if not equals or not text and kinds.get(name) is not str:
            raise ValueError(f"{word!r}: a field is set as {name}=value")
        if name in changes or name in {f"{level}.{axis}" for level, sizes in axes.items() for axis in sizes}:
            raise ValueError(f"{word!r}: {name} is set twice")
        if "." in name:
            level, axis = name.split(".")
            axes.setdefault(level, {})[axis] = parse(name, text, int)
        else:
            changes[name] = parse(name, text, kinds[name])
    for level, sizes in axes.items():
        sizes_now = dataclasses.asdict(getattr(cfg, level))
        if sum(s == -1 for s in sizes.values()) == 1:  # asking for another axis to fill moves the -1 there
            sizes_now = {a: 1 if s == -1 else s for a, s in sizes_now.items()}
        try:
            changes[level] = Axes(**sizes_now | sizes)
        except ValueError as error:
            raise ValueError(f"{level}.{error}") from error
    return replace(cfg, **changes)


def command_line(argv, flags):
    """(flags, words): `--name=value` for each name in `flags` (a dict of defaults), and the `field=value` words.

    Raises ValueError for an unknown flag, a flag without a value, text after `--`, and words that are no assignment.
    """
    values, words = dict(flags), []
    for i, word in enumerate(argv):
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--":
            raise ValueError(f"'--' (before {' '.join(argv[i + 1:]) or 'nothing'}) has no meaning here; leave it out")
        if not word.startswith("-"):
            if name in flags:
                raise ValueError(f"{word!r}: {name} is a flag: --{name}={value or '...'}")
            words.append(word)
        elif word.startswith("--") and name in flags:
            if not value:
                raise ValueError(f"--{name} needs a value: --{name}=...")
            values[name] = value
        else:
            name = name.lstrip("-")
            fields = [f.name for f in dataclasses.fields(Config)]
            guess = nearest(name, [*fields, *flags])
            raise ValueError(f"{word!r} is not a flag; did you mean " + (f"--{guess}=..." if guess in flags else
                             f"{guess}={value or '...'} (fields have no dashes)") + "?")
    return values, words


# ---- the named configs ---------------------------------------------------------------------------------------------


def tiny():
    """the default: learns Python's own source code, on a CPU in about two minutes"""
    return Config()


def shakespeare_char():
    """nanoGPT's CPU setting: 4 layers of 128, context 64, on tinyshakespeare.txt"""
    return Config(data="tinyshakespeare.txt", tokenizer="chars", vocab=65, seq=64, batch=12, steps=2000,
                  layers=4, d_model=128, heads=4, kv_heads=4, d_head=32, d_ff=344, warmup_steps=100, min_ratio=0.01)


def c4_1b():
    """Pax's C4Spmd1BAdam4Replicas"""
    return Config(
        vocab=32_000, seq=1024, layers=13, d_model=2560, heads=20, kv_heads=20, d_head=128, d_ff=10_240,
        positions="sinusoidal", norm="layernorm", activation="gelu", embed_scale=True, query_scale="learned",
        ffn_bias=True, softmax_bias=True, attention_cap=50.0, logit_cap=30.0, init="xavier",
        dtype="bfloat16", remat="nothing", unroll=False, data="c4", batch=128, ici=Axes(fsdp=4), topology="v4-8",
        learning_rate=1e-3, schedule="exponential", warmup_steps=4000, decay_start=4001, decay_end=300_000,
        schedule_start=0,
        beta2=0.99, eps=1e-6, rms_cap=1.0, weight_decay=1e-3, decay="all", clip=5.0, steps=10_000_000,
        log_every=10, eval_every=100, checkpoint_every=1000)


CONFIGS = {f.__name__: f for f in (tiny, shakespeare_char, c4_1b)}
