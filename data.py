"""An example is a function of its index: tokens in one array, windows of it in a seeded order, nothing to remember.

The only state of the data is how many sequences have been consumed, so a run resumes at any step, with any batch size.
`data=python` is the text of the standard library that runs this program: on every machine, about 12 MB.
Files follow each other in one stream of tokens, as in nanoGPT: a window may hold the end of one and the next's start.
"""
import glob
import os
import sysconfig
import zipfile
import zlib
from pathlib import Path
from typing import Callable, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

VALID_SHARE = 0.1
PYTHON_VALID_SHARE = 0.025  # less, so that evaluating `tiny` on a laptop takes seconds


class Corpus(NamedTuple):
    """Token ids, and how to read and write them."""

    train: np.ndarray   # (tokens,) unsigned
    valid: np.ndarray
    encode: Callable    # str -> list of ids
    decode: Callable    # ids -> str


# ---- text to tokens ------------------------------------------------------------------------------------------------


def find(data):
    """{name: path} of the files that `data` means, in an order that depends on nothing but their names."""
    if not data:
        raise ValueError("data= names no text; give data=PATH")
    if data == "python":
        root = Path(sysconfig.get_paths()["stdlib"])
        skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        paths = [p for p in root.rglob("*.py") if not skip & set(p.relative_to(root).parts)]
    elif Path(data).is_dir():
        root = Path(data)
        hidden = lambda p: any(part[0] == "." for part in p.relative_to(root).parts)
        paths = [p for p in root.rglob("*") if p.is_file() and not hidden(p)]
    else:
        names = [data] if os.path.isfile(data) else glob.glob(data, recursive=True)
        paths = [Path(name) for name in {os.path.realpath(name) for name in names} if os.path.isfile(name)]
        root = Path(os.path.commonpath([p.parent for p in paths])) if paths else None
    if not paths:
        raise ValueError(f"data={data}: there is no such file, no file in such a folder, none for such a glob; "
                         f"give data=PATH")
    paths = [p for p in paths if p.stat().st_size] or paths  # an empty file is no document
    return {p.relative_to(root).as_posix(): p for p in sorted(paths)}


def split(files, share):
    """(train, valid) of {name: text}: of one file the beginning and the rest, of several whole files, by name."""
    if len(files) == 1:
        [(name, text)] = files.items()
        cut = int(len(text) * (1 - share))
        return {name: text[:cut]}, {name: text[cut:]}
    left, valid = share * sum(map(len, files.values())), {}
    for name in sorted(files, key=lambda n: zlib.crc32(n.encode())):
        if len(files[name]) <= left:
            valid[name] = files[name]
            left -= len(files[name])
    if not any(valid.values()):  # no text fits: the smallest file that holds some
        name = min((n for n in files if files[n]), key=lambda n: len(files[n]), default=next(iter(files)))
        valid = {name: files[name]}
    return {name: text for name, text in files.items() if name not in valid}, valid


def bytes_of(path, several):
    """A file's bytes; of several files, each ends in byte 0, which is in no text, to say where the next begins."""
    text = path.read_bytes()
    if 0 in text:
        raise ValueError(f"{path} is not a text file: byte {text.index(0)} is 0; "
                         f"data='FOLDER/*.txt' takes some files of a folder")
    return text + b"\0" * several


def load(cfg):
    """The Corpus of cfg.data. Raises ValueError, with file and remedy, for no text, too little, or beyond vocab."""
    files = find(cfg.data)
    corpus = (load_bytes if cfg.tokenizer == "bytes" else load_characters)(cfg, files)
    for name, tokens, least in (("train", corpus.train, 2 * cfg.seq), ("valid", corpus.valid, 2)):
        if len(tokens) < least:
            raise ValueError(f"data={cfg.data}: its {name} part is {len(tokens)} tokens, too few for seq={cfg.seq}: "
                             f"give more text or a smaller seq")
    return corpus


def load_bytes(cfg, files):
    """A token is a byte."""
    share = PYTHON_VALID_SHARE if cfg.data == "python" else VALID_SHARE

    def make():
        parts = split({name: bytes_of(path, len(files) > 1) for name, path in files.items()}, share)
        return [np.frombuffer(b"".join(part.values()), np.uint8) for part in parts]

    train, valid = cached(files, make) if cfg.data == "python" else make()
    if max(train.max(initial=0), valid.max(initial=0)) >= cfg.vocab:
        refuse_byte(cfg, files)
    decode = lambda ids: b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids).decode(errors="replace")
    return Corpus(train, valid, lambda text: list(text.encode()), decode)


def load_characters(cfg, files):
    """A token is a character; ids number the characters that there are, in the order of their codes."""
    parts = split({name: characters(path, bytes_of(path, len(files) > 1)) for name, path in files.items()}, VALID_SHARE)
    codes = [np.frombuffer("".join(part.values()).encode("utf-32-le"), np.uint32) for part in parts]
    alphabet = np.unique(np.concatenate(codes))
    if len(alphabet) > cfg.vocab:
        raise ValueError(f"data={cfg.data} has {len(alphabet)} different characters, more than vocab={cfg.vocab}; "
                         f"say vocab={len(alphabet)}")
    dtype = np.uint16 if len(alphabet) <= 2**16 else np.uint32
    train, valid = (np.searchsorted(alphabet, c).astype(dtype) for c in codes)
    number = {chr(c): i for i, c in enumerate(alphabet)}
    decode = lambda ids: "".join(chr(alphabet[i]) if i < len(alphabet) else "\ufffd" for i in ids)
    return Corpus(train, valid, lambda text: [number[c] for c in text], decode)


def refuse_byte(cfg, files):
    for path in files.values():
        for offset, byte in enumerate(path.read_bytes()):
            if byte >= cfg.vocab:
                raise ValueError(f"{path}: byte {byte} at offset {offset} is not in the vocabulary, vocab={cfg.vocab}; "
                                 f"say vocab=256")


def characters(path, text):
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is {text[error.start]:#x}; "
                         f"tokenizer=bytes takes it") from error


def cached(files, make):
    """make()'s two arrays, kept in the user's cache folder under a name that tells these very files."""
    stamp = zlib.crc32(repr([(n, p.stat().st_size, p.stat().st_mtime_ns) for n, p in files.items()]).encode())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tenfold"
    path = folder / f"python-{stamp:08x}.npz"
    try:
        with np.load(path) as kept:
            return kept["train"], kept["valid"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):  # not there, or cut short: make it (again)
        train, valid = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.npz")  # renamed when whole: another run sees all of it or nothing
        np.savez(part, train=train, valid=valid)
        os.replace(part, path)
    except OSError as error:
        print(f"not kept for the next run: {error}")
    return train, valid


# ---- tokens to examples, by index ----------------------------------------------------------------------------------


def mix(x):
    """A hash of uint64 arrays (the finalizer of splitmix64, Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        x = (np.asarray(x, np.uint64) + np.uint64(0x9E3779B97F4A7C15))
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def permute(index, n, key):
    """Where each of `index` (array, below n) stands in the permutation of range(n) that its `key` (array) picks.

    No memory: a Feistel network over the least even number of bits that hold n, walked until it lands below n
    (Black and Rogaway 2002).
    """
    half = np.uint64(max(1, -(-(n - 1).bit_length() // 2)))
    low = (np.uint64(1) << half) - np.uint64(1)
    x, out = np.asarray(index, np.uint64), np.ones(len(index), bool)
    while out.any():
        left, right = x >> half, x & low
        for turn in range(4):
            left, right = right, left ^ (mix(right ^ mix(key + np.uint64(turn))) & low)
        x = np.where(out, left << half | right, x)
        out = x >= n
    return x.astype(np.int64)


def windows(tokens, seq):
    """Windows in an epoch: they tile the tokens from a start that each epoch draws, so that cuts fall elsewhere."""
    return (len(tokens) - seq) // seq


def rows(cfg, tokens, first):
    """(batch, seq + 1) tokens: the sequences number first, first + 1, ... of the run, a pure function of cfg.seed."""
    n = windows(tokens, cfg.seq)
    index = first + np.arange(cfg.batch)
    key = mix(mix(cfg.seed) ^ (index // n).astype(np.uint64))
    starts = permute(index % n, n, key) * cfg.seq + (key % np.uint64(cfg.seq)).astype(np.int64)
    return tokens[starts[:, None] + np.arange(cfg.seq + 1)]


def as_batch(text, weights, accum):
    """(batch, seq + 1) tokens and (batch, seq) weights of their targets to arrays of (accum, batch / accum, seq)."""
    b, t = weights.shape
    arrays = {
        "rows": np.arange(b, dtype=np.int32),
        "tokens": text[:, :-1].astype(np.int32),
        "targets": text[:, 1:].astype(np.int32),
        "weights": weights.astype(np.float32),
        "segments": np.ones((b, t), np.int32),
        "positions": np.broadcast_to(np.arange(t, dtype=np.int32), (b, t)),
    }
    return {name: x.reshape(accum, b // accum, *x.shape[1:]) for name, x in arrays.items()}


def blank(cfg):
    """A batch of nothing, for its shapes."""
    return as_batch(np.zeros((cfg.batch, cfg.seq + 1), np.uint8), np.zeros((cfg.batch, cfg.seq)), cfg.accum)


def put(mesh, specs, batch):
    """Arrays of (accum, rows, ...) onto the mesh; each device is sent its own part only."""
    def one(x, spec):
        sharding = NamedSharding(mesh, P(None, *spec))
        if jax.process_count() == 1:
            return jax.device_put(x, sharding)
        return jax.make_array_from_callback(x.shape, sharding, lambda where: x[where])
    return {name: one(x, specs[name]) for name, x in batch.items()}


def stream(cfg, tokens, first):
    """Batches without end, from sequence number `first` on."""
    while True:
        yield as_batch(rows(cfg, tokens, first), np.ones((cfg.batch, cfg.seq)), cfg.accum)
        first += cfg.batch


def once(cfg, tokens):
    """Batches that hold each token of `tokens`, after the first, as a target once; what fills up the last weighs 0."""
    n = -(-(len(tokens) - 1) // cfg.seq)
    n += -n % cfg.batch
    padded = np.zeros(n * cfg.seq + 1, tokens.dtype)
    padded[:len(tokens)] = tokens
    targets = np.arange(1, n * cfg.seq + 1).reshape(n, cfg.seq)
    for i in range(0, n, cfg.batch):
        where = targets[i:i + cfg.batch]
        text = padded[np.concatenate([where[:, :1] - 1, where], 1)]
        yield as_batch(text, where < len(tokens), cfg.accum)
