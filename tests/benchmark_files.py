"""Small files in exactly the formats of the benchmarks, and their published tokenisation written out plainly."""

from __future__ import annotations

import io
import random
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

SPLITS = ("train", "valid", "test")


def write(root: Path, files: Mapping[str, bytes]) -> Path:
    """Files below a folder."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def zipped(path: Path, files: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def tarred(path: Path, files: Mapping[str, bytes], *, mode: str = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def wikitext(*, seed: int = 0, lines: int = 300) -> dict[str, str]:
    """Articles with headings, blank lines, number and hyphen marks, and white space that only `str` knows."""
    rng = random.Random(seed)
    words = [f"Wort{i}" for i in range(60)] + ["the", "The", "THE", "@-@", "@,@", "<unk>", "naïve", "東京"]
    train = [
        " \n",
        " = Robert Boulter = \n",
        " \n",
        " = = Career = = \n",
        " a\u00a0b c\u3000d\x85e\u2028f\x1cg \n",
        " 1 @,@ 500 @.@ 5 \n",
    ]
    train += [f" {word} \n" for word in words]
    while len(train) < lines:
        train.append(rng.choice([" \n", f" {' '.join(rng.choices(words, k=rng.randint(1, 30)))} . \n"]))
    parts = {"train": train}
    for split in ("valid", "test"):
        parts[split] = [" \n", " = Robert Boulter = \n", " \n", *rng.sample(train, 20)]
    return {split: "".join(part) for split, part in parts.items()}


def ptb() -> dict[str, str]:
    """Lines with a space at both ends, all lower-case but the number token."""
    rng = random.Random(1)
    words = [f"word{i}" for i in range(30)] + ["N", "$", "<unk>", "n't"]
    return {split: "".join(f" {' '.join(rng.choices(words, k=9))} \n" for _ in range(40)) for split in SPLITS}


def enwik8(n_byte: int = 4000) -> bytes:
    """Bytes of 205 values that begin as a dump does, newlines among them."""
    rng = random.Random(2)
    values = [*range(32, 127), *range(128, 235), 9, 10, 11]
    assert len(values) == 205
    head = b"<mediawiki xmlns='x'>\n  <siteinfo>\n"
    body = bytes(values * 2) + bytes(rng.choices(values, weights=[3 + (v in (10, 32)) * 40 for v in values], k=n_byte))
    return (head + body)[:n_byte]


def text8(n_char: int = 3000) -> bytes:
    """Letters and single spaces with a leading space; both cuts are beside or at a space."""
    rng = random.Random(3)
    text = bytearray(b" anarchism originated " + bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz   ", k=n_char)))[
        :n_char
    ]
    for cut in (n_char - 2 * (n_char // 20), n_char - n_char // 20):
        text[cut - 1 : cut + 1] = b"  "
    return bytes(text)


def lm1b_sentences(seed: int, count: int = 12) -> str:
    rng = random.Random(seed)
    words = ["the", "cat", "sat", "on", "mats", ".", "never_heard_of", f"rare{seed}"]
    return "".join(" ".join(rng.choices(words, k=rng.randint(1, 7))) + "\n" for _ in range(count))


LM1B_VOCAB = "<S> 3\n</S> 3\n<UNK> 9\nthe 8\n. 7\ncat 6\nsat 5\non 4\nmats 3\n"


def lm1b() -> dict[str, bytes]:
    """The distributed tree, training shards in no order."""
    root = "1-billion-word-language-modeling-benchmark-r13output"
    train = f"{root}/training-monolingual.tokenized.shuffled/news.en-{{:05}}-of-00100"
    held_out = f"{root}/heldout-monolingual.tokenized.shuffled/news.en.heldout-{{:05}}-of-00050"
    files = {train.format(i): lm1b_sentences(i).encode() for i in (3, 1, 2)}
    return files | {held_out.format(i): lm1b_sentences(100 + i, 5).encode() for i in (0, 1)}


def cut(content: bytes) -> dict[str, bytes]:
    """The preparation scripts' three parts, on a small file."""
    n = len(content) // 20
    return {"train": content[: -2 * n], "valid": content[-2 * n : -n], "test": content[-n:]}


# the authors' tokenisation, line by line


def tokenize(path: Path, *, lower: bool = False) -> list[list[str]]:
    """Words of each line, as their `Vocab.tokenize` on a file in text mode."""
    with path.open(encoding="utf-8") as file:
        return [(line.strip().lower() if lower else line.strip()).split() for line in file]


def vocabulary(files: Iterable[list[list[str]]], *, special: Iterable[str]) -> list[str]:
    """As their `Vocab.build_vocab`."""
    counter: Counter[str] = Counter()
    for lines in files:
        for words in lines:
            counter.update(words)
    found = list(special)
    for word, _ in counter.most_common():
        if word not in found:
            found.append(word)
    return found


def spelt_enwik8(part: bytes) -> str:
    """As prep_enwik8 writes a part."""
    return " ".join("\n" if byte == 10 else str(byte) for byte in part)


def spelt_text8(part: bytes) -> str:
    """As prep_text8 writes a part."""
    return " ".join("_" if letter == " " else letter for letter in part.decode().strip())
