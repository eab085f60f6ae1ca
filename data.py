"""An example is a function of its index: rows of documents, in a seeded order, nothing to remember.

The only state of the data is how many sequences have been consumed, so a run resumes at any step, with any batch size,
on any number of hosts. `data=` names text (a file, a folder, a glob; `python`: the standard library that runs this
program), token files that `python data.py prepare` wrote, local or behind a URL, `synthetic`, a class in a file of
yours (`mine.py:Source`), or a mixture of these (`A:0.7,B:0.3`).
"""
import collections
import fcntl
import glob
import hashlib
import importlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import sys
import sysconfig
import threading
import time
import zlib
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cache, lru_cache, partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any, Callable, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

VALID_SHARE = 0.1           # of the data validates, unless eval_data names other data ...
VALID_TOKENS = 2**20        # ... of token files at most so much
PYTHON_VALID_SHARE = 0.025  # less, so that evaluating `tiny` on a laptop takes seconds


def extra(module):
    """A module that not every run needs. Raises ValueError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"this needs {module}, which is not installed: pip install {module}") from error


def cache_folder():
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tenfold"


# ---- tokenizers ----------------------------------------------------------------------------------------------------


class Tokenizer(NamedTuple):
    """Text to ids and back. bos, eos and pad are ids, or None where the tokenizer has no such token."""

    name: str         # its file; or bytes, chars, or a number: ids without text
    sha256: str       # of its file
    vocab: int
    bos: int | None
    eos: int | None
    pad: int | None
    adds_bos: bool    # whether it puts a bos before every text by itself
    encode: Callable  # list of str -> list of id sequences, without bos and eos
    decode: Callable  # ids -> str


def of_known(vocab, decode):
    """`decode`, which gets known ids only: any other becomes a mark."""
    groups = lambda ids: itertools.groupby(map(int, ids), lambda i: 0 <= i < vocab)
    return lambda ids: "".join(decode(list(g)) if known else "\ufffd" * len(list(g)) for known, g in groups(ids))


@cache
def open_tokenizer(name):
    """The Tokenizer of `bytes`, FILE.model (SentencePiece), FILE.json (Hugging Face), or NUMBER (ids without text)."""
    if name == "bytes":
        encode = lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts]
        return Tokenizer(name, name, 256, None, 0, None, False, encode,
                         of_known(256, lambda ids: bytes(ids).decode(errors="replace")))
    if name.isdigit():
        return Tokenizer(name, name, int(name), None, None, None, False, None, lambda ids: " ".join(map(str, ids)))
    path = Path(name)
    if path.suffix not in (".model", ".json"):
        raise ValueError(f"tokenizer={name}: it is bytes, chars (of text that a run reads), a SentencePiece FILE.model "
                         f"or a Hugging Face tokenizer.json")
    if not path.is_file():
        raise ValueError(f"tokenizer={name}: there is no such file")
    return (open_sentencepiece if path.suffix == ".model" else open_huggingface)(name, sha256(path.read_bytes()))


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def open_sentencepiece(name, digest):
    try:
        model = extra("sentencepiece").SentencePieceProcessor(model_file=name)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"tokenizer={name} is not a SentencePiece model: {error}") from error
    bos, eos, pad = (i if i >= 0 else None for i in (model.bos_id(), model.eos_id(), model.pad_id()))
    encode = partial(getattr(model, "encode_as_numpy", model.encode), num_threads=1)  # arrays since 0.2.2
    vocab = model.vocab_size()
    return Tokenizer(name, digest, vocab, bos, eos, pad, False, encode, of_known(vocab, model.decode))


def open_huggingface(name, digest):
    library = extra("tokenizers")
    try:
        model = library.Tokenizer.from_file(name)
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"tokenizer={name} is not a tokenizer.json of Hugging Face: {error}") from error
    vocab = max(model.get_vocab().values()) + 1
    with_specials, plain = model.encode("a").ids, model.encode("a", add_special_tokens=False).ids
    named = lambda *words: next((i for i in map(model.token_to_id, words) if i is not None), None)
    adds_bos, adds_eos = with_specials[:1] != plain[:1], with_specials[-1:] != plain[-1:]
    bos = with_specials[0] if adds_bos else named("<s>", "<bos>", "<|begin_of_text|>", "[CLS]")
    eos = with_specials[-1] if adds_eos else named("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]")
    encode = lambda texts: [e.ids for e in model.encode_batch_fast(texts, add_special_tokens=False)]
    decode = partial(model.decode, skip_special_tokens=False)
    return Tokenizer(name, digest, vocab, bos, eos, named("<|padding|>", "<pad>", "[PAD]"), adds_bos, encode,
                     of_known(vocab, decode))


# ---- prepare: files of text to files of tokens ---------------------------------------------------------------------

KINDS = (".txt", ".jsonl", ".json", ".parquet", ".bin", ".npy")
PACKERS = (".gz", ".zst")
PIECE = 2**20       # bytes of text that are read at a time
LONGEST = 2**22     # characters that a tokenizer is given at once: longer documents are cut where a line ends
CHECKED = 2**22     # bytes of a token file that share a checksum


class Record(NamedTuple):
    """What is tokenized at once: a line of JSON, a row, a piece of a text, or ids. `line` is 0 where there are none."""

    data: Any      # bytes, str or an array of ids
    line: int
    offset: int    # in bytes of the unpacked file; of ids, in ids
    begins: bool   # a document
    ends: bool


def where(path, record):
    return f"{path}, " + (f"line {record.line}, " if record.line else "") + f"from {record.offset} on"


def kind(path):
    """The suffix of a file's name without that of its compression."""
    return path.with_suffix("").suffix if path.suffix in PACKERS else path.suffix


def inputs(pattern):
    """The files of a glob, a folder or a path, sorted by name. Raises ValueError for none, or one of no known kind."""
    names = glob.glob(str(Path(pattern) / "**") if os.path.isdir(pattern) else pattern, recursive=True)
    paths = [Path(name) for name in sorted(names) if os.path.isfile(name)]
    if not paths:
        raise ValueError(f"--input={pattern}: no file has such a name")
    for path in paths:
        if kind(path) not in KINDS or kind(path) in (".parquet", ".bin", ".npy") and path.suffix in PACKERS:
            raise ValueError(f"{path}: what kind of file is it? {', '.join(KINDS[:3])}, each also with .gz or .zst, "
                             f"and {', '.join(KINDS[3:])} can be read; --input='*.txt' takes some files of a folder")
    return paths


class Unpacked(io.RawIOBase):
    """A gzip or Zstandard file as a file. EOFError where it is cut short, which Zstandard's own reader lets pass."""

    def __init__(self, raw, suffix):
        self.raw, self.frame, self.held = raw, None, b""
        zstandard = suffix == ".zst" and extra("zstandard")
        self.new = zstandard.ZstdDecompressor().decompressobj if zstandard else partial(zlib.decompressobj, 31)

    def readable(self):
        return True

    def readinto(self, target):
        while not self.held:
            ended = self.frame is None or self.frame.eof
            packed = (self.frame.unused_data if ended and self.frame else b"") or self.raw.read(2**17)
            if ended and not packed.strip(b"\0"):  # nothing, or what fills up a block of a tape
                return 0
            if not packed:
                raise EOFError("it ends inside what was packed")
            self.frame = self.new() if ended else self.frame
            self.held = self.frame.decompress(packed)
        n = min(len(target), len(self.held))
        target[:n], self.held = self.held[:n], self.held[n:]
        return n


def pieces(file):
    """A text as Records: one document, in pieces that end where a line does, or at least between two characters."""
    held, offset, begins = file.read(PIECE), 0, True
    while held or begins:
        more = file.read(PIECE)
        cut = held.rfind(b"\n") + 1 if more else len(held)
        while more and not cut and len(held) < LONGEST and (block := more):  # a line longer than a piece: go on
            held, more = held + block, file.read(PIECE)
            cut = held.rfind(b"\n") + 1 if more else len(held)
        if more and not cut:
            cut = max(i for i in range(len(held) - 4, len(held)) if held[i] & 0xC0 != 0x80 or i == len(held) - 4)
        yield Record(held[:cut], 0, offset, begins, not held[cut:] and not more)
        offset, held, begins = offset + cut, held[cut:] + more, False


def flat_ids(path, dtype, eos):
    """A file of ids as Records: documents end with each eos, if there is one, else with the file."""
    if path.suffix == ".npy":
        ids = np.load(path, mmap_mode="r")
    else:
        if not dtype:
            raise ValueError(f"{path}: --dtype=uint16 (or another) says how its ids are stored")
        if path.stat().st_size % np.dtype(dtype).itemsize:
            raise ValueError(f"{path}: its {path.stat().st_size} bytes are no whole number of {dtype}")
        ids = np.memmap(path, dtype, "r") if path.stat().st_size else np.zeros(0, dtype)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(f"{path} holds {ids.dtype} of shape {ids.shape}; ids are a flat array of whole numbers")
    begins = True
    for first in range(0, len(ids), PIECE):
        block = np.array(ids[first:first + PIECE])
        ends = np.flatnonzero(block == eos) + 1 if eos is not None else np.zeros(0, int)
        for a, b in itertools.pairwise(sorted({0, *ends.tolist(), len(block)})):
            last = b in ends or first + b == len(ids)
            yield Record(block[a:b], 0, first + a, begins, last)
            begins = last


def records(path, settings):
    """(bytes of the file read by now, Record) of what a file holds, in order. Raises ValueError where it is damaged."""
    offset = line = 0
    try:
        if kind(path) in (".bin", ".npy"):
            size = path.stat().st_size
            yield from ((size, record) for record in flat_ids(path, settings["dtype"], settings["eos"]))
        elif kind(path) == ".parquet":
            table, key = extra("pyarrow.parquet").ParquetFile(path), settings["key"]
            if key not in table.schema_arrow.names:
                raise ValueError(f"{path} has no column {key!r}; --key= names one of {table.schema_arrow.names}")
            for batch in table.iter_batches(1024, columns=[key]):
                for text in batch.column(0).to_pylist():
                    line += 1
                    read = path.stat().st_size * line // table.metadata.num_rows
                    yield read, Record(text, line, 0, True, True)
        else:
            with open(path, "rb") as raw:
                file = io.BufferedReader(Unpacked(raw, path.suffix), 2**18) if path.suffix in PACKERS else raw
                if kind(path) == ".txt":
                    for record in pieces(file):
                        offset += len(record.data)
                        yield raw.tell(), record
                    return
                for text in file:
                    line += 1
                    if text.strip():  # an empty line is no document
                        yield raw.tell(), Record(text, line, offset, True, True)
                    offset += len(text)
    except Exception as error:  # whatever a library makes of a damaged file
        if str(path) in str(error):
            raise
        raise ValueError(f"{path}: after {offset} bytes of text it cannot be read: {str(error) or 'it is cut short'}; "
                         f"is the file whole? Fetch it again") from error


def parse(path, record, key):
    """The text, or the array of ids, of a Record. Raises ValueError naming file, place and remedy."""
    value = record.data
    try:
        value = value.decode() if isinstance(value, bytes) else value
        row = json.loads(value) if kind(path) in (".json", ".jsonl") else {key: value}
    except UnicodeDecodeError as error:
        raise ValueError(f"{where(path, record)}: byte {error.start} from there is {error.object[error.start]:#x}, "
                         f"which is not UTF-8; convert the file, as with iconv") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where(path, record)}: it is not JSON, an object a line: {error}") from error
    if not isinstance(row, dict) or key not in row:
        raise ValueError(f"{where(path, record)}: there is no key {key!r}; " + (
            f"--key= names one of {sorted(row)}" if isinstance(row, dict) else "a line is to be an object"))
    value = row[key]
    if isinstance(value, list) and all(type(i) is int for i in value):
        return np.array(value, np.int64)
    if not isinstance(value, (str, np.ndarray)):
        raise ValueError(f"{where(path, record)}: {key!r} is {str(value)[:40]!r}, neither text nor ids; --key= names "
                         f"another")
    return value


def cuts(text):
    """A text as parts of at most LONGEST characters, which end where a line does if they can."""
    while len(text) > LONGEST:
        cut = text.rfind("\n", 0, LONGEST) + 1 or LONGEST
        yield text[:cut]
        text = text[cut:]
    yield text


def encode(settings, path, chunk):
    """(the ids of a list of Records of a file as bytes, how many each has). What a worker does."""
    tokenizer, stored = open_tokenizer(settings["tokenizer"]), settings["stored"]
    values = [parse(path, record, settings["key"]) for record in chunk]
    texts = [(i, part) for i, value in enumerate(values) if isinstance(value, str) for part in cuts(value)]
    if texts and not tokenizer.encode:
        raise ValueError(f"{where(path, chunk[0])}: it is text, and --tokenizer={tokenizer.name} is for ids; name one "
                         f"for text")
    try:
        encoded = tokenizer.encode([part for _, part in texts]) if texts else ()
    except Exception as error:  # of libraries that have one for everything
        i = next((i for i, part in texts if re.search("[\ud800-\udfff]", part)), texts[0][0])
        raise ValueError(f"{where(path, chunk[i])}: {tokenizer.name} cannot encode it, which for half a surrogate pair "
                         f"is right: {error!r}") from error
    ids = [[] if isinstance(value, str) else [value] for value in values]
    bos, eos = (np.array([settings[name]] if settings[f"add_{name}"] else [], np.int64) for name in ("bos", "eos"))
    for (i, _), part in zip(texts, encoded):
        ids[i].append(part if isinstance(part, np.ndarray) else np.fromiter(part, np.int64, len(part)))
    for record, value, parts in zip(chunk, values, ids):
        if isinstance(value, str):  # ids are taken as they are
            parts[:0], parts[len(parts):] = [bos] * record.begins, [eos] * record.ends
    lengths = np.array([sum(map(len, parts)) for parts in ids])
    flat = np.concatenate([np.zeros(0, np.int64), *(x for parts in ids for x in parts)])
    bad = np.flatnonzero((flat < 0) | (flat >= tokenizer.vocab))
    if len(bad):
        i = np.searchsorted(np.cumsum(lengths), bad[0], "right")
        raise ValueError(f"{where(path, chunk[i])}: id {flat[bad[0]]}, number {bad[0] - lengths[:i].sum()} there, is "
                         f"not one of the {tokenizer.vocab} of {tokenizer.name}")
    return flat.astype(stored).tobytes(), lengths


class Writer:
    """Writes token files of `shard_tokens` each, the starts of documents, and what it takes to go on after a kill."""

    def __init__(self, out, settings):
        self.out, self.settings, self.size = out, settings, settings["shard_tokens"]
        self.progress = read_json(out / "progress.json") or {
            "settings": settings, "file": 0, "record": 0, "skip": 0, "tokens": 0, "documents": 0, "shards": []}
        self.tokens, self.documents, self.skip = (self.progress[key] for key in ("tokens", "documents", "skip"))
        self.starts = open(out / "documents.bin", "r+b" if (out / "documents.bin").exists() else "w+b")
        self.starts.truncate(8 * self.documents)
        self.starts.seek(8 * self.documents)
        self.shard = open(out / "tokens.part", "wb")

    def add(self, file, first, begins, lengths, ids):
        """The ids of records first, first + 1, ... of input `file`, of which the first may be written in part."""
        ends = self.tokens - self.skip + np.cumsum(lengths)
        starts = ends - lengths
        begun = starts[begins & (starts >= self.tokens)]
        self.starts.write(begun.tobytes())
        ids, self.skip, before = ids[self.skip:], 0, self.documents
        while len(ids):
            part = ids[:self.size - self.tokens % self.size]
            self.shard.write(part.tobytes())
            self.tokens, ids = self.tokens + len(part), ids[len(part):]
            if self.tokens % self.size == 0:
                self.documents = before + int(np.searchsorted(begun, self.tokens))
                i = int(np.searchsorted(ends, self.tokens))
                whole = ends[i] == self.tokens
                self.close_shard(file, first + i + int(whole), 0 if whole else int(self.tokens - starts[i]))
                self.shard = open(self.out / "tokens.part", "wb")
        self.documents = before + len(begun)

    def close_shard(self, file, record, skip):
        """Names the token file when it is on the disk, and then says in progress.json where to go on."""
        name, done = f"tokens-{len(self.progress['shards']):05d}.bin", self.progress
        for written in (self.shard, self.starts):
            written.flush()
            os.fsync(written.fileno())
        self.shard.close()
        os.replace(self.out / "tokens.part", self.out / name)
        shard = {"file": name, "tokens": self.tokens - done["tokens"], "documents": self.documents - done["documents"],
                 "checksum": checksums(self.out / name)}
        self.progress = {**done, "file": file, "record": record, "skip": skip, "tokens": self.tokens,
                         "documents": self.documents, "shards": [*done["shards"], shard]}
        write_json(self.out / "progress.json", self.progress)

    def finish(self, files):
        """The last shard, then index.json: where it stands, all is whole."""
        if self.tokens > self.progress["tokens"]:
            self.close_shard(files, 0, 0)
        self.starts.write(np.int64(self.tokens).tobytes())  # where the last one ends
        self.starts.flush()
        os.fsync(self.starts.fileno())
        s = self.settings
        keys = "vocab", "bos", "eos", "pad", "add_bos", "add_eos", "sha256", "shard_tokens", "key", "inputs"
        write_json(self.out / "index.json", {
            "dtype": s["stored"], "tokens": self.tokens, "documents": self.documents, "tokenizer": s["kept"],
            **{key: s[key] for key in keys}, "shards": self.progress["shards"], "checked_bytes": CHECKED,
            "documents_checksum": checksums(self.out / "documents.bin")})
        for name in ("tokens.part", "progress.json"):
            (self.out / name).unlink(missing_ok=True)


def checksums(path):
    """CRC-32 of each CHECKED bytes of a file."""
    with open(path, "rb") as file:
        return [zlib.crc32(block) for block in iter(partial(file.read, CHECKED), b"")]


def read_json(path):
    return json.loads(path.read_text()) if path.exists() else None


def write_json(path, value):
    """Whole or not at all."""
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(value, indent=1))
    os.replace(part, path)


def chunks(paths, settings, progress):
    """(file, number of the first record, Records of about PIECE / 2, bytes read by now), from where `progress` says."""
    before = sum(path.stat().st_size for path in paths[:progress["file"]])
    for file in range(progress["file"], len(paths)):
        chunk, size, first = [], 0, progress["record"] if file == progress["file"] else 0
        for read, record in itertools.islice(records(paths[file], settings), first, None):
            chunk.append(record)
            size += 0 if record.data is None else len(record.data)
            if size >= PIECE // 2:
                yield file, first, chunk, before + read
                chunk, size, first = [], 0, first + len(chunk)
        before += paths[file].stat().st_size
        if chunk:
            yield file, first, chunk, before


def end_with_parent(lock):
    """What a worker does first: lets go of the folder's lock, and sees to it that it ends when its parent is killed."""
    lock.close()
    threading.Thread(target=lambda: (parent_process().join(), os._exit(1)), daemon=True).start()


def in_parallel(work, items, workers, lock):
    """(item, work(*item)) in order; at most 2 workers + 1 of them are held at once."""
    if workers == 1:
        yield from ((item, work(*item)) for item in items)
        return
    pending, fork = collections.deque(), get_context("fork")  # no accelerator is in use, and spawn is slow
    with ProcessPoolExecutor(workers, fork, end_with_parent, (lock,)) as pool:
        try:
            for item in items:
                pending.append((item, pool.submit(work, *item)))
                if len(pending) > 2 * workers:
                    item, result = pending.popleft()
                    yield item, result.result()
            for item, result in pending:
                yield item, result.result()
        finally:
            pool.shutdown(cancel_futures=True)


def encode_chunk(settings, paths, file, first, chunk, read):
    return encode(settings, paths[file], chunk)


def train_tokenizer(paths, settings, path, size=2**30):
    """A byte-level BPE of settings["train"] ids, learnt from the first `size` characters, as tokenizer.json."""
    library = extra("tokenizers")
    byte_level = library.pre_tokenizers.ByteLevel
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer, model.decoder = byte_level(add_prefix_space=False), library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(vocab_size=settings["train"], special_tokens=["<|endoftext|>"],
                                          initial_alphabet=byte_level.alphabet(), show_progress=False)

    def texts(left):
        for p in paths:
            for _, record in records(p, settings | {"eos": None}):
                text = parse(p, record, settings["key"])
                if isinstance(text, np.ndarray):
                    raise ValueError(f"{where(p, record)}: ids, of which no tokenizer is trained")
                yield from cuts(text)
                left -= len(text)
                if left < 0:
                    return
    model.train_from_iterator(texts(size), trainer)
    if model.get_vocab_size() != settings["train"]:
        raise ValueError(f"--train-tokenizer={settings['train']}: this text makes {model.get_vocab_size()} ids (all "
                         f"bytes and an end of text are 257); say --train-tokenizer={model.get_vocab_size()}")
    model.save(str(path.with_suffix(".part")))
    os.replace(path.with_suffix(".part"), path)


PREPARE = {"input": "", "tokenizer": "", "out": "", "workers": str(os.cpu_count()), "key": "text", "dtype": "",
           "shard-tokens": str(10**8), "train-tokenizer": "", "bos": "", "eos": ""}


def settings_of(flags, paths):
    """What the token files depend on, from the command line. Raises ValueError for what cannot be."""
    for flag in ("workers", "shard-tokens", "train-tokenizer"):
        if flags[flag] and not (flags[flag].isdigit() and int(flags[flag])):
            raise ValueError(f"--{flag}={flags[flag]}: a whole number, 1 or more")
    for flag in ("bos", "eos"):
        if flags[flag] not in ("", "true", "false"):
            raise ValueError(f"--{flag}={flags[flag]}: true or false")
    if bool(flags["tokenizer"]) == bool(flags["train-tokenizer"]):
        raise ValueError("give one of --tokenizer=bytes|FILE.model|tokenizer.json|NUMBER and --train-tokenizer=NUMBER")
    return {"inputs": [[path.name, path.stat().st_size] for path in paths],
            "key": flags["key"], "dtype": flags["dtype"], "shard_tokens": int(flags["shard-tokens"]),
            "train": int(flags["train-tokenizer"] or 0)}


def prepare(flags):
    """Tokenizes files into a folder that `data=` takes. Goes on where a killed run was; says so if all is there."""
    if not flags["out"] or not flags["input"]:
        raise ValueError("give --input=GLOB and --out=DIR")
    paths, out = inputs(flags["input"]), Path(flags["out"])
    settings = settings_of(flags, paths)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the processes are the parallelism
    out.mkdir(parents=True, exist_ok=True)
    lock = open(out / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise ValueError(f"{out}: another process is preparing it") from error
    source = flags["tokenizer"]
    if settings["train"]:
        source = str(out / "tokenizer.json")
        if not Path(source).exists():
            train_tokenizer(paths, settings, Path(source))
    tokenizer = open_tokenizer(source)
    add = {"add_bos": flags["bos"] == "true" or not flags["bos"] and tokenizer.adds_bos,
           "add_eos": flags["eos"] == "true" or not flags["eos"] and tokenizer.eos is not None}
    for name in ("bos", "eos"):
        if add[f"add_{name}"] and getattr(tokenizer, name) is None:
            raise ValueError(f"--{name}=true: {tokenizer.name} has no {name}")
    settings |= add | {name: getattr(tokenizer, name) for name in ("vocab", "bos", "eos", "pad", "sha256")}
    kept = f"tokenizer{Path(source).suffix}" if Path(source).suffix else source  # what index.json calls it
    settings |= {"stored": "uint16" if tokenizer.vocab <= 2**16 else "uint32", "kept": kept}
    index, progress = read_json(out / "index.json"), read_json(out / "progress.json")
    before = index and {**settings, **{key: index[key] for key in ("inputs", "key", "shard_tokens", "sha256", *add)}}
    if index and before == settings:
        print(f"{out} is finished: {index['tokens']:,} tokens of {index['documents']:,} documents")
        return
    if index or progress and progress["settings"] != settings:
        raise ValueError(f"{out} holds {'tokens' if index else 'an unfinished run'} of other input, tokenizer or "
                         f"flags: give another --out, or remove it")
    if kept != source and not (out / kept).exists():
        write_bytes(out / kept, Path(source).read_bytes())
    write_shards(paths, out, settings | {"tokenizer": source}, Writer(out, settings), int(flags["workers"]), lock)


def write_bytes(path, content):
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(content)
    os.replace(part, path)


def write_shards(paths, out, settings, writer, workers, lock):
    """Tokenizes in `workers` processes and writes in order, so that the bytes do not depend on how many they are."""
    if writer.progress["shards"]:
        print(f"goes on after {writer.tokens:,} tokens of {writer.documents:,} documents")
    total, since, told, first, read = sum(p.stat().st_size for p in paths), time.time(), time.time(), None, 0
    text = empty = 0
    before = writer.documents

    def told_of():
        seconds = max(time.time() - since, 1e-3)
        speed = (read - first) / seconds
        left = f"{(total - read) / speed / 60:.1f} min left" if speed else ""
        print(f"{writer.documents:,} documents, {writer.tokens:,} tokens; {(writer.documents - before) / seconds:,.0f} "
              f"documents/s, {text / seconds / 1e6:.2f} MB/s of text, {left}", flush=True)

    work = partial(encode_chunk, settings, paths)
    todo = chunks(paths, settings, writer.progress)
    for (file, number, chunk, read), (ids, lengths) in in_parallel(work, todo, workers, lock):
        first = read if first is None else first
        begins = np.array([record.begins for record in chunk])
        writer.add(file, number, begins, lengths, np.frombuffer(ids, settings["stored"]))
        text += sum(len(record.data) for record in chunk)
        added = settings["add_bos"] + settings["add_eos"]
        empty += sum(r.begins and r.ends and n <= added for r, n in zip(chunk, lengths))
        if time.time() - told > 5:
            told = time.time()
            told_of()
    first = first or 0
    read = total
    told_of()
    writer.finish(len(paths))
    print(f"{out} is finished: {writer.tokens:,} tokens of {writer.documents:,} documents ({empty} of them empty) in "
          f"{len(writer.progress['shards'])} files; train with data={out}")


# ---- stores: flat ids, and where documents begin -------------------------------------------------------------------


class Memory(NamedTuple):
    """Ids of a text that a run tokenizes by itself. `starts` are those of its documents, then the end of the last."""

    name: str
    tokens: np.ndarray
    starts: np.ndarray
    folder: None = None  # nothing is kept beside it

    def read(self, starts, stops):
        return [self.tokens[a:b] for a, b in zip(starts.tolist(), stops.tolist())]

    def where(self, position):
        return f"{self.name}, token {position}"


class Remote:
    """Byte ranges of the files under a URL, by TensorStore, many at once."""

    def __init__(self, url, patience):
        """What fails is tried again, after longer and longer pauses, for `patience` seconds."""
        import tensorstore  # comes with Orbax
        self.url, self.patience, self.library = url.rstrip("/") + "/", patience, tensorstore
        once = {"max_retries": 1, "initial_delay": "10ms", "max_delay": "10ms"}
        context = {f"{kind}_request_retries": once for kind in ("http", "gcs", "s3")}
        try:
            self.store = tensorstore.KvStore.open(self.url, context=tensorstore.Context(context)).result(patience)
        except (ValueError, TimeoutError) as error:
            raise ValueError(f"{url} cannot be opened: {str(error) or 'no answer'}; gs://, s3://, http(s):// and "
                             f"file:// can") from error

    def read(self, ranges):
        """The bytes of each (file, start, stop); stop None is the end. Raises ValueError with file and bytes."""
        done, deadline, pause = {}, time.monotonic() + self.patience, 0.1
        while len(done) < len(set(ranges)):
            with self.library.Batch() as batch:
                asked = {one: self.store.read(one[0], byte_range=slice(*one[1:]), batch=batch)
                         for one in ranges if one not in done}
            problem = None
            for one, future in asked.items():
                name, start, stop = one
                try:
                    answer = future.result(max(deadline - time.monotonic(), 0.1))
                    if answer.state == "missing":
                        raise ValueError(f"{self.url}{name}: there is no such file")
                    if stop is not None and len(answer.value) != stop - start:
                        raise TimeoutError(f"{len(answer.value)} bytes came")
                    done[one] = answer.value
                except (ValueError, TimeoutError) as error:
                    if "no such file" in str(error):
                        raise
                    problem = f"{self.url}{name}, bytes {start} to {stop}: {str(error) or 'no answer'}"
                    if any(word in str(error) for word in ("ignored by server", "PERMISSION", "UNAUTH")):
                        raise ValueError(problem) from error
            if problem and time.monotonic() + pause > deadline:
                raise ValueError(f"{problem}; tried again for {self.patience:g} s (data_timeout=)")
            if problem:
                time.sleep(pause)
                pause *= 2
        return [done[one] for one in ranges]


class Shards:
    """Token files that `prepare` wrote: local ones by memory map, those behind a URL by byte ranges.

    Raises ValueError, with file, offset and remedy, for what is missing, unfinished, or not as it was written.
    """

    def __init__(self, place, patience):
        self.name, self.folder = place, None if "://" in place else Path(place)
        self.remote = None if self.folder else Remote(place, patience)
        if self.folder and not (self.folder / "index.json").exists():
            raise ValueError(f"{place}: " + (
                "its `data.py prepare` is not finished; the same command goes on where it was"
                if (self.folder / "progress.json").exists() else "it holds no index.json"))
        try:
            content = (self.folder / "index.json").read_bytes() if self.folder else self.fetch("index.json")
            self.index, self.stamp = json.loads(content), zlib.crc32(content)
            self.dtype, self.size = np.dtype(self.index["dtype"]), self.index["shard_tokens"]
            self.names = [shard["file"] for shard in self.index["shards"]]
            self.counts = [shard["tokens"] for shard in self.index["shards"]]
            self.vocab, self.sha256, self.checked = (self.index[k] for k in ("vocab", "sha256", "checked_bytes"))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{place}/index.json is damaged ({error!r}): prepare the data again") from error
        if self.counts != [min(self.size, self.index["tokens"] - i * self.size) for i in range(len(self.counts))] \
                or sum(self.counts) != self.index["tokens"]:
            raise ValueError(f"{place}/index.json: its files' tokens, {self.counts}, do not add up to "
                             f"{self.index['tokens']}: prepare the data again")
        self.files = [self.open(name, n, self.dtype) for name, n in zip(self.names, self.counts)]
        self.starts = self.open("documents.bin", self.index["documents"] + 1, np.dtype(np.int64))
        if self.folder is None:
            self.starts = self.kept_starts()

    def fetch(self, name, start=0, stop=None):
        return self.remote.read([(name, start, stop)])[0]

    def open(self, name, count, dtype):
        """A local file as an array; of a remote one nothing yet."""
        if self.folder is None:
            return None
        path, wanted = self.folder / name, count * dtype.itemsize
        if not path.is_file():
            raise ValueError(f"{path} is missing: fetch it again, or prepare the data again")
        if path.stat().st_size != wanted:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, and index.json says {count} x {dtype} = "
                             f"{wanted}: it is cut short, or of another dtype; fetch it again, or prepare the data "
                             f"again")
        return np.asarray(np.memmap(path, dtype, "r")) if count else np.zeros(0, dtype)

    def kept_starts(self):
        """documents.bin of a URL, in the user's cache folder."""
        path, wanted = cache_folder() / f"documents-{self.stamp:08x}.bin", 8 * (self.index["documents"] + 1)
        if not path.exists() or path.stat().st_size != wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            blocks = range(0, wanted, self.checked)
            write_bytes(path, b"".join(self.fetch("documents.bin", a, min(a + self.checked, wanted)) for a in blocks))
        return np.asarray(np.memmap(path, np.int64, "r"))

    def read(self, starts, stops):
        """The ids from each of `starts` to its stop, both arrays of positions."""
        files = starts // self.size
        if self.folder and (files == (stops - 1) // self.size).all():
            spans = zip(files.tolist(), (starts % self.size).tolist(), (stops - starts).tolist())
            return [self.files[i][a:a + n] for i, a, n in spans]
        parts = [[(i, max(a - i * self.size, 0), min(b - i * self.size, self.size))
                  for i in range(a // self.size, -(-b // self.size))] for a, b in zip(starts.tolist(), stops.tolist())]
        if self.folder:
            content = iter([self.files[i][a:b] for part in parts for i, a, b in part])
        else:
            width = self.dtype.itemsize
            content = self.remote.read([(self.names[i], a * width, b * width) for part in parts for i, a, b in part])
            content = iter([np.frombuffer(c, self.dtype) for c in content])
        return [np.concatenate([next(content) for _ in part]) for part in parts]

    def where(self, position):
        i = position // self.size
        return f"{self.name}/{self.names[i]}, byte {(position - i * self.size) * self.dtype.itemsize}"

    def verify(self, shards):
        """Compares the checksums of the documents and of some of the files. Raises ValueError with file and bytes."""
        entries = [(s["file"], s["tokens"] * self.dtype.itemsize, s["checksum"]) for s in shards]
        entries += [("documents.bin", 8 * len(self.starts), self.index["documents_checksum"])]
        for name, size, checksum in entries:
            for block, (a, expected) in enumerate(zip(range(0, size, self.checked), checksum, strict=True)):
                b = min(a + self.checked, size)
                content = self.fetch(name, a, b) if self.folder is None else \
                    np.memmap(self.folder / name, np.uint8, "r", offset=a, shape=(b - a,))
                if zlib.crc32(content) != expected:
                    raise ValueError(f"{self.name}/{name}: {self.damage(content, name, a, b)}: fetch the file again, "
                                     f"or prepare the data again")

    def damage(self, content, name, a, b):
        ids = np.frombuffer(content, self.dtype)
        bad = np.flatnonzero(ids >= self.vocab) if name in self.names else ()
        if len(bad):
            offset = a + bad[0] * self.dtype.itemsize
            return f"id {ids[bad[0]]} at byte {offset} is not one of the {self.vocab} of its tokenizer"
        return f"bytes {a} to {b} are not those that were written, their checksum says"

    def tokenizer(self):
        """The tokenizer that is kept with the files; one that cannot be opened for want of a library shows numbers."""
        kept = self.index["tokenizer"]
        if Path(kept).suffix:
            path = self.folder / kept if self.folder else cache_folder() / f"{self.sha256}{Path(kept).suffix}"
            if self.folder is None and not path.exists():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, self.fetch(kept))
            if not path.is_file():
                raise ValueError(f"{path} is missing: copy the tokenizer of the data there")
            if sha256(path.read_bytes()) != self.sha256:
                raise ValueError(f"{path} is not the tokenizer that index.json says: its SHA-256 does not begin with "
                                 f"{self.sha256[:12]}; the ids would mean other text")
            kept = str(path)
        elif self.sha256 != kept:
            raise ValueError(f"{self.name}/index.json: its tokenizer is {kept!r}, and its sha256 is of another")
        try:
            return open_tokenizer(kept)
        except ValueError as error:
            if "pip install" not in str(error):
                raise
            print(f"text will be shown as numbers: {error}", flush=True)
            return open_tokenizer(str(self.vocab))._replace(sha256=self.sha256)


VERIFIED_FIRST = 2**28  # bytes that are verified before a run starts; of more, a run goes on meanwhile


def verify(shards):
    """Checks the files of a run: small ones now, large local ones behind it, each host its share.

    Returns a function that raises what was found by then.
    """
    found, entries = [], shards.index["shards"]
    total = sum(shards.counts) * shards.dtype.itemsize
    if total <= VERIFIED_FIRST:
        shards.verify(entries)
    elif shards.folder is None:
        print(f"{shards.name}: {total / 1e9:.1f} GB are not compared with their checksums now; "
              f"`python data.py verify --data={shards.name}` does", flush=True)
    else:
        def behind():
            try:
                shards.verify(entries[jax.process_index()::jax.process_count()])
            except Exception as error:  # whatever it is, `raise_found` raises it in the loop
                found.append(error)
        threading.Thread(target=behind, daemon=True).start()

    def raise_found():
        if found:
            raise found[0]
    return raise_found


# ---- text that a run tokenizes by itself ---------------------------------------------------------------------------


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
    if not share:
        return files, {}
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


def bytes_of(path):
    text = path.read_bytes()
    if 0 in text:
        raise ValueError(f"{path} is not a text file: byte {text.index(0)} is 0; "
                         f"data='FOLDER/*.txt' takes some files of a folder")
    return text


def characters(path, text):
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.start} is {text[error.start]:#x}; "
                         f"tokenizer=bytes takes it") from error


def text_stores(cfg, data, share):
    """(train, valid, tokenizer) of text. Of several files each is a document, with an end-of-text token behind it."""
    files = find(data)
    texts, in_bytes = {name: bytes_of(path) for name, path in files.items()}, cfg.tokenizer in ("", "bytes")
    if not in_bytes:
        texts = {name: characters(files[name], text) for name, text in texts.items()}
    parts = split(texts, PYTHON_VALID_SHARE if share and data == "python" else share)
    if cfg.tokenizer == "chars":
        tokenizer = alphabet([*texts.values(), "\0" * (len(files) > 1)])
    else:
        tokenizer = open_tokenizer(cfg.tokenizer or "bytes")
    dtype = np.min_scalar_type(tokenizer.vocab - 1)
    eos = 0 if in_bytes else tokenizer.eos
    end = [eos] if len(files) > 1 and eos is not None else []

    def ids(text):
        pieces = [np.frombuffer(text, np.uint8)] if in_bytes else tokenizer.encode(list(cuts(text)))
        return np.concatenate([np.asarray(x, dtype) for x in (*pieces, end)])

    def store(name, part):
        rows = [ids(text) for text in part.values()]
        starts = np.cumsum([0, *map(len, rows)], dtype=np.int64)
        return Memory(f"data={data} ({name})", np.concatenate([np.zeros(0, dtype), *rows]), starts)

    return store("train", parts[0]), store("valid", parts[1]), tokenizer


def alphabet(texts):
    """The Tokenizer whose ids number the characters that there are, in the order of their codes; \\0 ends a text."""
    codes = np.unique(np.concatenate([np.frombuffer(t.encode("utf-32-le"), np.uint32) for t in texts]))
    number = {chr(c): i for i, c in enumerate(codes)}
    encode = lambda texts: [np.searchsorted(codes, np.frombuffer(t.encode("utf-32-le"), np.uint32)) for t in texts]
    decode = of_known(len(codes), lambda ids: "".join(chr(codes[i]) for i in ids))
    return Tokenizer("chars", sha256(codes.tobytes()), len(codes), None, number.get("\0"), None, False, encode, decode)


# ---- sources: classes with a length and example(i) -----------------------------------------------------------------


class Row(NamedTuple):
    """An example: at most seq + 1 ids, and where in them documents begin, after the first."""

    ids: np.ndarray
    cuts: Any = ()


class Rows(NamedTuple):
    """Examples: the ids of each; the cuts of all, and how many each has."""

    ids: list
    cuts: np.ndarray
    counts: np.ndarray


PIECES = np.dtype([("start", np.int64), ("length", np.int32)])


def best_fit(lengths, space):
    """(row of each piece, rows): longest first, each into the fullest row that still holds it (best-fit decreasing).

    All pieces of a length, and all rows with equal room, go at once.
    """
    row, rows, done = np.empty(len(lengths), np.int64), 0, 0
    order, counts = np.argsort(-lengths, kind="stable"), np.bincount(lengths, minlength=space + 1)
    room, rooms = collections.defaultdict(list), 0  # room -> arrays of rows; bit r of `rooms`: there are some of room r

    def give(r, ids):
        nonlocal rooms
        if len(ids) and r:
            room[r].append(ids)
            rooms |= 1 << r

    for length in range(space, 0, -1):
        mine = order[done:done + counts[length]]
        done += len(mine)
        while len(mine):
            fits = rooms >> length
            if fits:
                r = length + (fits & -fits).bit_length() - 1
                ids, rooms = np.concatenate(room.pop(r)), rooms & ~(1 << r)
            else:
                r = space
                ids = np.arange(rows, rows - (-len(mine) // (space // length)))
                rows += len(ids)
            each = r // length
            filled = np.repeat(ids[:-(-len(mine) // each)], each)[:len(mine)]
            row[mine[:len(filled)]] = filled
            full, last = divmod(len(filled), each)
            give(r - each * length, ids[:full])
            give(r - last * length, ids[full:full + bool(last)])
            give(r, ids[full + bool(last):])
            mine = mine[len(filled):]
    return row, rows


def plan(starts, seq, packing, window=2**22):
    """Yields (pieces, pieces of each row): documents, those longer than seq + 1 in pieces, in rows of at most seq + 1.

    A piece begins with the last token of the one before, so that each token of a document but its first is a target
    once. `pack` fits documents into rows, `window` of them at a time; `single` gives each piece its own row.
    """
    for first in range(0, len(starts) - 1, window):
        begin = starts[first:first + window]
        length = starts[first + 1:first + window + 1] - begin[:len(starts) - 1 - first]
        begin = begin[:len(length)]
        begin, length = begin[length > 0], length[length > 0]
        many = np.maximum(1, -(-(length - 1) // seq))
        nth = np.arange(many.sum()) - np.repeat(np.cumsum(many) - many, many)
        pieces = np.empty(len(nth), PIECES)
        pieces["start"] = np.repeat(begin, many) + nth * seq
        pieces["length"] = np.minimum(seq + 1, np.repeat(length, many) - nth * seq)
        row, rows = best_fit(pieces["length"], seq + 1) if packing == "pack" else (np.arange(len(pieces)), len(pieces))
        yield pieces[np.argsort(row, kind="stable")], np.bincount(row, minlength=rows)


class Documents:
    """Source: the documents of a store from token `first` to token `last`, as rows, packed as cfg.packing says.

    concat: the stream of tokens, cut each seq; pack: whole documents, fitted into rows; single: one in a row.
    """

    def __init__(self, cfg, store, first, last):
        self.seq, self.store, self.first, self.last = cfg.seq, store, first, last
        self.packing, self.starts = cfg.packing, store.starts
        self.targets = last - first - 1
        if cfg.packing != "concat":
            inside = self.starts[np.searchsorted(self.starts, first, "right"):np.searchsorted(self.starts, last)]
            starts = np.concatenate([[first], inside, [last]])
            self.pieces, self.ends = self.kept_plan(starts)

    def kept_plan(self, starts):
        """The plan's pieces, and where in them each row ends: memory-mapped from beside the store, made if need be."""
        made = plan(starts, self.seq, self.packing)
        if not isinstance(self.store, Shards):
            pieces, counts = zip((np.empty(0, PIECES), np.empty(0, np.int64)), *made)
            return np.concatenate(pieces), np.cumsum(np.concatenate(counts))
        name = f"rows-{self.packing}-{self.seq}-{self.first}-{self.last}-{self.store.stamp:08x}"
        folder = self.store.folder
        if folder is None or not os.access(folder, os.W_OK) and not (folder / f"{name}.ends").exists():
            folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.{part}" for part in ("pieces", "ends")]
        if not paths[1].exists():  # written last
            print(f"plans the rows of {self.store.name}, once: {name}", flush=True)
            parts, total = [p.with_suffix(f"{p.suffix}.{os.getpid()}.part") for p in paths], 0
            with open(parts[0], "wb") as pieces_file, open(parts[1], "wb") as ends_file:
                for pieces, counts in made:
                    pieces_file.write(pieces.tobytes())
                    ends_file.write((total + np.cumsum(counts)).tobytes())
                    total += len(pieces)
            for part, path in zip(parts, paths):
                os.replace(part, path)
        pieces, ends = (np.asarray(np.memmap(p, t, "r")) for p, t in zip(paths, (PIECES, np.int64)))
        if ends[-1] != len(pieces):
            raise ValueError(f"{paths[0]} and .ends do not fit each other: remove both, they are made again")
        return pieces, ends

    def __len__(self):
        return -(-self.targets // self.seq) if self.packing == "concat" else len(self.ends)

    def parts(self, index):
        """(start of each piece of rows `index`, its length, how many pieces each row has)."""
        if self.packing == "concat":
            start = self.first + index * self.seq
            return start, np.minimum(self.seq + 1, self.last - start), np.ones(len(index), np.int64)
        counts = self.ends[index] - np.where(index, self.ends[index - 1], 0)
        pieces = self.pieces[ranges(self.ends[index] - counts, counts)]
        return pieces["start"], pieces["length"].astype(np.int64), counts

    def examples(self, index):
        start, length, counts = self.parts(np.asarray(index))
        ids = self.store.read(start, start + length)
        if self.packing == "concat":
            i, j = np.searchsorted(self.starts, start, "right"), np.searchsorted(self.starts, start + length)
            return Rows(ids, self.starts[ranges(i, j - i)] - np.repeat(start, j - i), j - i)
        ends, begun = np.cumsum(length), np.cumsum(counts) - counts
        offset = ends - length - np.repeat((ends - length)[begun], counts)  # of a piece in its row
        inner = np.ones(len(start), bool)
        inner[begun] = False
        ids = iter(ids)
        joined = [next(ids) if n == 1 else np.concatenate([next(ids) for _ in range(n)]) for n in counts.tolist()]
        return Rows(joined, offset[inner], counts - 1)

    def example(self, i):
        rows = self.examples([i])
        return Row(rows.ids[0], rows.cuts)

    def where(self, i, column):
        """What a person looks for: file and offset of an id."""
        start, length, _ = self.parts(np.array([i]))
        piece = int(np.searchsorted(np.cumsum(length), column, "right"))
        return self.store.where(int(start[piece] + column - length[:piece].sum()))


def ranges(first, counts):
    """first[0], first[0] + 1, ... (counts[0] of them), then first[1], ..."""
    return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)


class Synthetic:
    """Source: Pax's SyntheticDataset, rows of nothing but ones."""

    def __init__(self, cfg):
        self.row = Row(np.ones(cfg.seq + 1, np.int32))

    def __len__(self):
        return 2**31

    def example(self, i):
        return self.row


def custom(cfg, data):
    """Source: the class of `FILE.py:CLASS`, made with cfg. Its example(i) is a Row, or ids alone."""
    path, _, name = data.rpartition(":")
    if not os.path.isfile(path):
        raise ValueError(f"data={data}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        source = getattr(module, name)(cfg)
        length = len(source)
        source.example
    except Exception as error:  # it is the user's code: anything may come
        raise ValueError(f"data={data}: a class with __init__(cfg), __len__() and example(i) is wanted; "
                         f"{error!r}") from error
    if length < 1:
        raise ValueError(f"data={data}: its length is {length}")
    return source


# ---- order: which example is the run's sequence number k -----------------------------------------------------------


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
    keys = [mix(key + np.uint64(turn)) for turn in range(4)]
    x, out = np.asarray(index, np.uint64), np.ones(len(index), bool)
    while out.any():
        left, right = x >> half, x & low
        for turn in keys:
            left, right = right, left ^ (mix(right ^ turn) & low)
        x = np.where(out, left << half | right, x)
        out = x >= n
    return x.astype(np.int64)


class Shuffled:
    """A source in the order of a run, without end: each epoch another permutation of its examples."""

    def __init__(self, source, seed, name):
        self.source, self.seed, self.name, self.kept = source, mix(seed), name, (0, ())

    def __len__(self):
        return len(self.source)

    def end(self, epochs):
        """How many sequences there are in so many epochs; 0 is no end."""
        return epochs * len(self.source)

    def index(self, numbers):
        """The source's examples that sequences `numbers` are. They come thousands at a time, which costs the same."""
        first, stop, (begin, kept) = int(numbers.min()), int(numbers.max()) + 1, self.kept
        if not begin <= first < stop <= begin + len(kept):
            n, begin = len(self.source), first
            number = np.arange(first, max(stop, first + 4096))
            kept = permute(number % n, n, mix(self.seed ^ (number // n).astype(np.uint64)))
            self.kept = begin, kept
        return kept[numbers - begin]

    def examples(self, numbers):
        return read(self.source, self.index(np.asarray(numbers)), self.name)

    def example(self, i):
        rows = self.examples([i])
        return Row(rows.ids[0], rows.cuts)

    def where(self, number, column):
        return place(self.source, self.name, int(self.index(np.array([number]))[0]), column)


class Mixture:
    """Shuffled sources by weight: of each BLOCK sequences the same share of each, in an order drawn for the block."""

    BLOCK = 10_000

    def __init__(self, parts, weights, seed):
        self.parts, self.key = parts, mix(mix(seed) ^ np.uint64(2**63))
        share = np.array(weights) / sum(weights) * self.BLOCK
        quota = np.floor(share).astype(np.int64)
        quota[np.argsort(quota - share, kind="stable")[:self.BLOCK - quota.sum()]] += 1
        if not quota.all():
            raise ValueError(f"data=: a weight of {min(weights):g} in {sum(weights):g} is below 1 in {self.BLOCK}")
        self.quota, self.block = quota, lru_cache(4)(self.block)

    def __len__(self):
        return self.end(1)

    def block(self, number):
        """(part, which of the part's in this block) of each sequence of block `number`."""
        slots = permute(np.arange(self.BLOCK), self.BLOCK, mix(self.key ^ np.uint64(number)))
        part = np.searchsorted(np.cumsum(self.quota), slots, "right")
        which = np.empty_like(part)
        which[np.argsort(part, kind="stable")] = ranges(np.zeros_like(self.quota), self.quota)
        return part, which

    def index(self, numbers):
        """(part, which of its sequences) of each of `numbers`."""
        block, slot = numbers // self.BLOCK, numbers % self.BLOCK
        part, which = np.zeros((2, len(numbers)), np.int64)
        for b in set(block.tolist()):
            mine = block == b
            part[mine], which[mine] = (x[slot[mine]] for x in self.block(b))
        return part, which + block * self.quota[part]

    def end(self, epochs):
        """Where the first of the sources has been seen so many times; 0 is no end."""
        if not epochs:
            return 0
        ends = np.array([part.end(epochs) for part in self.parts])
        block = min(ends // self.quota)
        part, which = self.index(block * self.BLOCK + np.arange(self.BLOCK))
        return int(block * self.BLOCK + np.argmax(which >= ends[part]))

    def examples(self, numbers):
        part, which = self.index(np.asarray(numbers))
        out = [None] * len(part)
        for p in set(part.tolist()):
            mine = np.flatnonzero(part == p)
            ids, cuts, counts = self.parts[p].examples(which[mine])
            for i, *row in zip(mine.tolist(), ids, np.split(cuts, np.cumsum(counts)[:-1])):
                out[i] = Row(*row)
        return columns(out)

    def example(self, i):
        rows = self.examples([i])
        return Row(rows.ids[0], rows.cuts)

    def where(self, number, column):
        [part], [which] = self.index(np.array([number]))
        return self.parts[part].where(which, column)


def columns(rows):
    """A list of Row as Rows."""
    cuts = [np.asarray(row.cuts, np.int64) for row in rows]
    flat, counts = np.concatenate([np.zeros(0, np.int64), *cuts]), np.array([*map(len, cuts)], int)
    return Rows([row.ids for row in rows], flat, counts)


def read(source, index, name):
    """The Rows of a source; a user's need not know `examples`."""
    if hasattr(source, "examples"):
        return source.examples(index)
    rows = []
    for i in index.tolist():
        try:
            row = source.example(i)
            row = row if isinstance(row, Row) else Row(np.asarray(row))
            if row.ids.ndim != 1 or row.ids.dtype.kind not in "iu":
                raise ValueError(f"ids are a flat array of whole numbers, not {row.ids.dtype} of shape {row.ids.shape}")
        except Exception as error:  # it may be the user's code
            raise ValueError(f"{name}, example({i}): {error!r}") from error
        rows.append(row)
    return columns(rows)


def place(source, name, i, column):
    return source.where(i, column) if hasattr(source, "where") else f"{name}, example {i}, column {column}"


# ---- what cfg.data and cfg.eval_data mean --------------------------------------------------------------------------


class Corpus(NamedTuple):
    """What a run reads."""

    train: Any           # Shuffled or Mixture: sequences in the order of the run
    valid: dict          # {name: source}, read from its beginning
    tokenizer: Tokenizer
    check: Callable      # raises what verifying files has found by now


def is_prepared(data):
    return "://" in data or any((Path(data) / name).exists() for name in ("index.json", "progress.json"))


def mixture(data):
    """[(data, weight)] of `A:0.7,B:0.3`; of anything else [(data, 1)]."""
    parts = [re.fullmatch(r"(.+):([\d.]+(?:e-?\d+)?)", part) for part in data.split(",")]
    if len(parts) == 1 or os.path.exists(data) or not all(parts):
        return [(data, 1.0)]
    pairs = [(m[1], float(m[2])) for m in parts if m[2].count(".") < 2 and float(m[2]) > 0]
    if len(pairs) < len(parts):
        raise ValueError(f"data={data}: each weight is a number above 0")
    return pairs


def vocabulary(cfg):
    """The ids of the tokenizer that cfg's data needs, where it is a file's; else 0."""
    names = [data for data, _ in mixture(cfg.data) if is_prepared(data)]
    known = [Shards(name, cfg.data_timeout).vocab for name in names]
    if not names and Path(cfg.tokenizer).suffix:
        known.append(open_tokenizer(cfg.tokenizer).vocab)
    return max(known, default=0)


def check_ids(cfg, data, tokenizer, stores):
    """Raises ValueError where data has ids beyond cfg.vocab."""
    if tokenizer.vocab <= cfg.vocab:
        return
    if tokenizer.name != "bytes":
        what = "characters" if tokenizer.name == "chars" else "ids in its tokenizer"
        raise ValueError(f"data={data} has {tokenizer.vocab} different {what}, more than vocab={cfg.vocab}; say "
                         f"vocab={tokenizer.vocab}")
    if any(s.tokens.max(initial=0) >= cfg.vocab for s in stores if isinstance(s, Memory)):
        for path in find(data).values():
            for offset, byte in enumerate(path.read_bytes()):
                if byte >= cfg.vocab:
                    raise ValueError(f"{path}: byte {byte} at offset {offset} is not in the vocabulary, "
                                     f"vocab={cfg.vocab}; say vocab=256")


def open_source(cfg, data, share):
    """(train, valid, tokenizer, check) of one data set, `share` of which validates; None where it has no such thing."""
    nothing = lambda: None
    if data == "synthetic":
        return Synthetic(cfg), None, None, nothing
    if re.search(r"\.py:\w+$", data):
        return custom(cfg, data), None, None, nothing
    if not is_prepared(data):
        *stores, tokenizer = text_stores(cfg, data, share)
        check_ids(cfg, data, tokenizer, stores)
        ranges = [(s, 0, len(s.tokens)) for s in stores if share or s is stores[0]]
    else:
        shards = Shards(data, cfg.data_timeout)
        tokenizer, total = shards.tokenizer(), shards.index["tokens"]
        if cfg.tokenizer and (wanted := open_tokenizer(cfg.tokenizer)).sha256 != shards.sha256:
            raise ValueError(f"data={data} was made by a tokenizer whose SHA-256 begins with {shards.sha256[:12]}, and "
                             f"tokenizer={cfg.tokenizer} is {wanted.sha256[:12]}: leave it out, or prepare the data "
                             f"again")
        check_ids(cfg, data, tokenizer, [shards])
        nothing = verify(shards)
        cut = total - int(min(share * total, VALID_TOKENS))
        whole = int(shards.starts[min(np.searchsorted(shards.starts, cut), len(shards.starts) - 1)])
        cut = whole if 0 < whole < total else cut  # between two documents, if it can
        ranges = [(shards, 0, cut), (shards, cut, total)][:1 + bool(share)]
    least_of_all = 2 * cfg.seq if cfg.packing == "concat" else 2
    for (_, a, b), name, least in zip(ranges, ("train", "valid"), (least_of_all, 2)):
        if b - a < least:
            raise ValueError(f"data={data}: its {name} part is {b - a} tokens, too few for seq={cfg.seq}: "
                             f"give more text or a smaller seq")
    train, *valid = [Documents(cfg, *part) for part in ranges]
    return train, valid[0] if valid else None, tokenizer, nothing


def load(cfg):
    """The Corpus of a run. Raises ValueError, with file, offset and remedy, for data that is not as it should be."""
    pairs = mixture(cfg.data)
    opened = [open_source(cfg, data, 0 if cfg.eval_data else VALID_SHARE) for data, _ in pairs]
    names = [re.sub(r"\W+", "_", Path(data).name) for data, _ in pairs] if len(pairs) > 1 else ["valid"]
    names = names if len({*names}) == len(names) else [f"{name}_{i}" for i, name in enumerate(names)]
    valid = {name: source for name, (_, source, *_) in zip(names, opened) if source}
    if cfg.eval_data:
        opened.append(open_source(cfg, cfg.eval_data, 0))
        valid = {"valid": opened[-1][0]}
    made_by = {tokenizer.sha256: tokenizer for *_, tokenizer, _ in opened if tokenizer}
    if len(made_by) > 1:
        raise ValueError(f"data={cfg.data} eval_data={cfg.eval_data}: their tokens come from different tokenizers, "
                         f"{', '.join(t.name for t in made_by.values())}")
    parts = [Shuffled(source, mix(cfg.seed) + np.uint64(i) if i else cfg.seed, data)
             for i, ((data, _), (source, *_)) in enumerate(zip(pairs, opened))]
    train = parts[0] if len(parts) == 1 else Mixture(parts, [weight for _, weight in pairs], cfg.seed)
    for name, source in valid.items():
        if cfg.eval_batches > (n := -(-len(source) // cfg.batch)) and cfg.eval_reset:
            raise ValueError(f"eval_batches={cfg.eval_batches}: {name} has {n} batches of {cfg.batch}; say "
                             f"eval_batches=all, or eval_reset=false to begin again where it ends")
    tokenizer = next(iter(made_by.values()), None) or open_tokenizer(cfg.tokenizer or str(cfg.vocab))
    checks = [check for *_, check in opened]
    return Corpus(train, valid, tokenizer, lambda: [check() for check in checks])


def last_step(cfg, corpus, step, sequences):
    """The step where data ends, for a run that has consumed `sequences` by `step`; infinity without an end."""
    end = corpus.train.end(cfg.epochs)
    return step + (end - sequences) // cfg.batch if end else math.inf


def describe(cfg, corpus, end, hosts):
    """What is read, for people: sizes, where data ends, who reads which rows."""
    parts = getattr(corpus.train, "parts", [corpus.train])
    lines = [f"data: {part.name}: {len(part):,} rows of {cfg.seq} + 1 tokens an epoch, {cfg.packing}" for part in parts]
    some = f"{'the first' if cfg.eval_reset else 'the next'} {cfg.eval_batches} batches"
    lines += [f"eval {name}: {len(source):,} rows, of which each evaluation reads {some if cfg.eval_batches else 'all'}"
              for name, source in corpus.valid.items()] or ["eval: none; eval_data=PATH names data"]
    lines.append(f"epochs={cfg.epochs}: data ends with step {end}" if end < math.inf else "epochs=inf: data has no end")
    told = [f"host {i} reads rows {spans(rows)} of {cfg.batch // cfg.accum}" for i, rows in list(hosts.items())[:16]]
    more = [f"{len(hosts) - 16} more hosts likewise"] if len(hosts) > 16 else []
    return "\n".join([*lines, "; ".join(told + more) + in_each(cfg)])


def in_each(cfg):
    return f" in each of {cfg.accum} micro-batches" if cfg.accum > 1 else ""


def spans(rows):
    """0-3, 8-11 of a sorted array."""
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    return ", ".join(f"{run[0]}-{run[-1]}" for run in runs)


# ---- batches -------------------------------------------------------------------------------------------------------


counting = lru_cache(4)(partial(np.arange, dtype=np.int32))


def assemble(cfg, source, numbers, real):
    """(ids, segments, positions), each (rows, seq + 1), of examples `numbers`; after the first `real` rows all is 0.

    Segments count a row's documents from 1; 0 is padding. Positions count from 0 in each, and at the row's start.
    """
    n, width = len(numbers), cfg.seq + 1
    text, rows = np.zeros((n, width), np.int32), source.examples(numbers[:real]) if real else columns([])
    lengths = np.zeros(n, np.int64)
    for r, ids in enumerate(rows.ids):
        lengths[r] = len(ids)
        if not 0 < len(ids) <= width:
            raise ValueError(f"{source.where(numbers[r], 0)}: the example has {len(ids)} ids; 1 to {width} (seq + 1) "
                             f"fit")
        text[r, :len(ids)] = ids
    if text.max(initial=0) >= cfg.vocab or text.min(initial=0) < 0:
        r, column = np.argwhere((text >= cfg.vocab) | (text < 0))[0]
        raise ValueError(f"{source.where(numbers[r], column)}: id {rows.ids[r][column]} is not in the vocabulary, "
                         f"vocab={cfg.vocab}; say a larger vocab, or prepare the data again")
    # Runs of equal segments begin at a row, at a cut, at padding.
    begin = np.arange(n) * width
    cuts = np.repeat(begin[:real], rows.counts) + rows.cuts
    runs = np.unique(np.concatenate([begin, cuts, (begin + lengths)[lengths < width]]))
    row = runs // width
    number = np.arange(len(runs)) - np.searchsorted(runs, begin)[row] + 1
    number[runs - begin[row] >= lengths[row]] = 0
    sizes = np.diff(runs, append=n * width)
    segments, positions = np.repeat(number.astype(np.int32), sizes), np.repeat(runs.astype(np.int32), sizes)
    np.subtract(counting(n * width), positions, out=positions)  # in place: fresh memory is what costs here
    return text, segments.reshape(n, width), positions.reshape(n, width)


def as_batch(text, segments, positions, rows, accum):
    """Arrays of (accum, rows / accum, seq). A target is the next id, where that is of the same document."""
    arrays = {
        "rows": np.asarray(rows, np.int32),
        "tokens": text[:, :-1],
        "targets": text[:, 1:],
        "weights": ((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)).astype(np.float32),
        "segments": segments[:, :-1],
        "positions": positions[:, :-1],
    }
    return {name: x.reshape(accum, len(x) // accum, *x.shape[1:]) for name, x in arrays.items()}


def blank(cfg):
    """A batch of nothing, for its shapes."""
    nothing = np.zeros((cfg.batch, cfg.seq + 1), np.int32)
    return as_batch(nothing, nothing, nothing, np.arange(cfg.batch), cfg.accum)


def hosts(cfg, mesh, spec):
    """{process: the rows of a micro-batch that its devices hold}, of arrays that lie as PartitionSpec `spec` says."""
    out, micro = collections.defaultdict(set), cfg.batch // cfg.accum
    for device, (where, *_) in NamedSharding(mesh, spec).devices_indices_map((micro,)).items():
        out[device.process_index] |= set(range(*where.indices(micro)))
    return {process: np.array(sorted(rows)) for process, rows in sorted(out.items())}


def build(cfg, source, first, own, end=math.inf):
    """The `own` rows (of each micro-batch) of the batch of sequences first, first + 1, ..., blank from `end` on."""
    rows = (np.arange(cfg.accum)[:, None] * (cfg.batch // cfg.accum) + own).ravel()
    real = int(np.searchsorted(first + rows, end))
    return as_batch(*assemble(cfg, source, first + rows, real), rows, cfg.accum)


def ahead(work, items, depth=2):
    """work(item) of each item in order, `depth` of them ahead in a thread. An error in one is raised at once."""
    pending = collections.deque()
    with ThreadPoolExecutor(1) as pool:
        try:
            for item in items:
                pending.append(pool.submit(work, item))
                for future in pending:
                    if future.done():
                        future.result()
                if len(pending) > depth:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def stream(cfg, corpus, first, own):
    """Batches without end, from sequence number `first` on: this host's rows of each."""
    def work(first):
        corpus.check()
        return build(cfg, corpus.train, first, own)
    return ahead(work, itertools.count(first, cfg.batch))


class Straight:
    """A source in its own order, again and again."""

    def __init__(self, source, name):
        self.source, self.name = source, name

    def examples(self, numbers):
        return read(self.source, numbers % len(self.source), self.name)

    def where(self, number, column):
        return place(self.source, self.name, int(number) % len(self.source), column)


def eval_batches(cfg, source, name, own, turn):
    """The batches of an evaluation, the run's number `turn` (0, 1, ...): as many on every host.

    All rows once, of the last batch the rest blank; or cfg.eval_batches of them: with eval_reset the first ones, else
    the ones after the last evaluation's, from the beginning again where the data ends.
    """
    n, straight = -(-len(source) // cfg.batch), Straight(source, name)
    rolling = bool(cfg.eval_batches and not cfg.eval_reset)
    first = turn * cfg.eval_batches if rolling else 0
    work = lambda i: build(cfg, straight, i * cfg.batch, own, math.inf if rolling else len(source))
    return ahead(work, range(first, first + (cfg.eval_batches or n)))


def put(mesh, specs, batch, own, micro):
    """The arrays (accum, own rows, ...) of this host as global ones (accum, micro, ...); a device gets its own part."""
    def one(x, spec):
        sharding = NamedSharding(mesh, P(None, *spec))
        if len(own) == micro:
            return jax.device_put(x, sharding)

        def part(where):
            rows = np.searchsorted(own, np.arange(*where[1].indices(micro)))  # neighbours here as there
            return x[(where[0], slice(rows[0], rows[-1] + 1), *where[2:])]
        return jax.make_array_from_callback((x.shape[0], micro, *x.shape[2:]), sharding, part)
    return {name: one(x, specs[name]) for name, x in batch.items()}


# ---- python data.py ------------------------------------------------------------------------------------------------


def show(cfg, step, host, of, rows):
    """Prints rows of the batch of a step as host `host` of `of` has them: text, and each target beneath its token."""
    corpus, micro = load(cfg), cfg.batch // cfg.accum
    if micro % of:
        raise ValueError(f"--host={host}/{of}: {micro} rows are not divisible by {of} hosts")
    own = np.arange(host * micro // of, (host + 1) * micro // of)
    decode, width = corpus.tokenizer.decode, 120
    first = (step - 1) * cfg.batch
    print(f"{cfg.data}, step {step}: sequences {first} to {first + cfg.batch - 1}, of which host {host} of {of} has "
          f"rows {spans(own)}{in_each(cfg)}")
    batch = build(cfg, corpus.train, first, own)
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in batch.items()}
    for r, number in enumerate(flat["rows"][:rows]):
        print(f"\nrow {number}: {corpus.train.where(first + number, 0)}")
        segments = flat["segments"][r]
        for segment in sorted(set(segments[segments > 0].tolist())):
            columns = np.flatnonzero(segments == segment)
            ids, weights = flat["tokens"][r, columns], flat["weights"][r, columns]
            print(f"  segment {segment}: columns {columns[0]} to {columns[-1]}, {weights.sum():g} targets: "
                  f"{decode(ids)!r}")
            shown = lambda i: repr(decode([i]))[1:-1]
            cells = [(str(p), shown(i), shown(t) if w else "-", f"{w:g}") for p, i, t, w in
                     zip(flat["positions"][r, columns], ids, flat["targets"][r, columns], weights)]
            while cells:
                sizes = [max(map(len, cell)) + 2 for cell in cells]
                n = max(1, int(np.searchsorted(np.cumsum(sizes), width - 14, "right")))
                for name, line in zip(("position", "token", "target", "weight"), zip(*cells[:n])):
                    print(f"    {name:8}  " + "".join(f"{word:{size}}" for word, size in zip(line, sizes)).rstrip())
                print()
                cells = cells[n:]
        if (segments == 0).any():
            print(f"  padding: columns {np.argmax(segments == 0)} to {len(segments) - 1}, weight 0")


USAGE = """python data.py prepare --input=GLOB --tokenizer=bytes|FILE.model|tokenizer.json|NUMBER --out=DIR
    [--workers=N] [--key=text] [--shard-tokens=N] [--train-tokenizer=NUMBER] [--bos=true|false] [--eos=true|false]
    [--dtype=uint16: of the ids in .bin files]
python data.py show --data=DIR [--step=S] [--host=i/n] [--rows=N] [--config=NAME] [field=value ...]
python data.py verify --data=DIR"""


def main(argv):
    import configs  # the command line alone needs it
    commands = {"prepare": PREPARE, "verify": {"data": ""},
                "show": {"data": "", "step": "1", "host": "0/1", "rows": "4", "config": "tiny"}}
    if not argv or argv[0] in ("-h", "--help"):
        return print(USAGE)
    if argv[0] not in commands:
        raise ValueError(f"{argv[0]!r}: did you mean {configs.nearest(argv[0], commands)}?\n{USAGE}")
    flags, words = configs.command_line(argv[1:], commands[argv[0]])
    if words and argv[0] != "show":
        raise ValueError(f"{words[0]!r}: {argv[0]} takes flags only, --name=value")
    if argv[0] == "prepare":
        try:
            return prepare(flags)
        except BrokenExecutor as error:
            raise ValueError(f"a worker was killed, perhaps for want of memory; the same command goes on where it was, "
                             f"and takes less with --workers={max(1, int(flags['workers']) // 2)}") from error
        except OSError as error:  # a full disk, a folder that cannot be written
            raise ValueError(f"--out={flags['out']}: {error}; with that mended, the same command goes on where it "
                             f"was") from error
    if not flags["data"]:
        raise ValueError("give --data=DIR")
    if argv[0] == "verify":
        shards = Shards(flags["data"], 60)
        shards.verify(shards.index["shards"])
        return print(f"{flags['data']}: {len(shards.counts)} files, {sum(shards.counts):,} tokens, as they were "
                     f"written")
    host = re.fullmatch(r"(\d+)/(\d+)", flags["host"])
    if not host or not int(host[1]) < int(host[2]):
        raise ValueError(f"--host={flags['host']}: as 0/2, the first of two")
    for flag in ("step", "rows"):
        if not flags[flag].isdigit() or flags[flag] == "0":
            raise ValueError(f"--{flag}={flags[flag]}: a whole number, 1 or more")
    if flags["config"] not in configs.CONFIGS:
        raise ValueError(f"--config={flags['config']}: did you mean "
                         f"{configs.nearest(flags['config'], configs.CONFIGS)}?")
    cfg = configs.override(configs.CONFIGS[flags["config"]](), [*words, f"data={flags['data']}"])
    cfg = cfg if any(word.startswith("vocab=") for word in words) else fitting(cfg)
    show(cfg, int(flags["step"]), int(host[1]), int(host[2]), int(flags["rows"]))


def fitting(cfg):
    """cfg with a vocabulary that is large enough for its data; for where nobody said how large."""
    import dataclasses
    return dataclasses.replace(cfg, vocab=max(cfg.vocab, vocabulary(cfg)))


if __name__ == "__main__":
    import data  # as a source of yours does: so that both mean one Row
    try:
        data.main(sys.argv[1:])
    except ValueError as problem:
        raise SystemExit(f"data.py: {problem}")
