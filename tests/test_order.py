"""Order of training: units shuffled and segments of varying length, from (seed, epoch), whatever happens beside."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.test_lanes import loader, read_back, same
from tests.tiny import Losses, StopAt, tiny_config
from txl_lightning import TextDataModule, TransformerXLModule
from txl_lightning.config import Config, load
from txl_lightning.data import order
from txl_lightning.data.lanes import LaneLoader
from txl_lightning.data.order import Shuffled, find_units, segment_borders, units_of
from txl_lightning.data.store import survey
from txl_lightning.data.vocab import SymbolVocab, WordVocab
from txl_lightning.errors import ConfigError
from txl_lightning.training.trainer import build_trainer
from txl_lightning.types import Batch, Position

END, NEWLINE = 256, 10
GOLDEN_ORDER = [0, 6, 7, 4, 2, 9, 1, 5, 8, 3]
GOLDEN_LENGTHS = [17, 35, 25, 34, 40, 36, 40, 35, 27, 40, 31, 40]


def borders(n_token: int, *, seed: int = 0) -> np.ndarray[Any, Any]:
    """Units of 1 to 9 tokens."""
    inner = np.cumsum(np.random.default_rng(seed).integers(1, 10, n_token))
    return np.concatenate(([0], inner[inner < n_token], [n_token])).astype(np.uint32)


def shuffled(n_token: int, **keys: Any) -> LaneLoader:
    return loader(n_token, **{"segment_len": 7, "lanes": 4, "units": borders(n_token), "seed": 5, **keys})


def order_read(batches: list[list[Batch]]) -> list[int]:
    """The tokens in the order of reading; each lane's targets are what the lane after it goes on from."""
    lanes = read_back(batches)
    pairs = [pair for lane in lanes for pair in lane]
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pairs))
    return [pairs[0][0], *(target for _, target in pairs)]


# units


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_units_end_behind_their_marks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "CHUNK", chunk)
    tokens = np.array([1, 10, 2, 10, 256, 10, 10, 3, 256, 4, 256, 5], dtype=np.uint16)
    assert find_units(tokens, ends=(END,)).tolist() == [0, 5, 9, 11, 12]
    # the separator behind a newline belongs to the line that ends there
    assert find_units(tokens, ends=(NEWLINE, END), joined=END).tolist() == [0, 2, 5, 6, 7, 9, 11, 12]
    assert find_units(tokens[:5], ends=(NEWLINE, END), joined=END).tolist() == [0, 2, 5]
    assert find_units(tokens[:2], ends=(END,)).tolist() == [0, 2]


def test_positions_of_a_shuffled_stream() -> None:
    units = borders(500)
    place = Shuffled(units, seed=3, epoch=2)
    found = place.locate(np.arange(500))
    assert sorted(found) == list(range(500))
    starts = set(units[:-1].tolist())
    jumps = [b for a, b in itertools.pairwise(found.tolist()) if b != a + 1]
    assert set(jumps) <= starts and len(jumps) > len(starts) // 2  # only whole units move, and nearly all do
    assert place.locate(np.array([[7, 8], [400, 499]])).tolist() == [[found[7], found[8]], [found[400], found[499]]]


def test_a_lone_mark_that_opens_the_stream_stays_first() -> None:
    """lm1b as the authors read it: <S> a b <S> c <S> ...; each sentence stays between two marks."""
    units = np.array([0, 1, 4, 6, 11], dtype=np.uint32)
    firsts = {int(Shuffled(units, seed=0, epoch=epoch).locate(np.array([0]))[0]) for epoch in range(12)}
    seconds = {int(Shuffled(units, seed=0, epoch=epoch).locate(np.array([1]))[0]) for epoch in range(12)}
    assert firsts == {0} and len(seconds) > 1


def test_the_order_is_that_of_the_seed_and_the_epoch() -> None:
    def read(seed: int, epoch: int) -> list[int]:
        return Shuffled(borders(40), seed=seed, epoch=epoch).locate(np.arange(40)).tolist()

    assert len({tuple(read(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9
    # the same on every machine and with every numpy: runs are resumed by it
    assert Shuffled(np.arange(11), seed=1111, epoch=3).locate(np.arange(10)).tolist() == GOLDEN_ORDER


# lanes of a shuffled stream


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("std", [0.0, 3.0])
def test_every_token_once_whatever_the_workers_and_ranks(num_workers: int, world_size: int, std: float) -> None:
    keys = {"world_size": world_size, "num_workers": num_workers, "segment_len_std": std}
    ranks = [shuffled(301, rank=rank, **keys) for rank in range(world_size)]
    passes = []
    for epoch in range(2):
        batches = [list(rank) for rank in ranks]
        assert all(batch.position.epoch == epoch for of_rank in batches for batch in of_rank)
        assert {len(of_rank) for of_rank in batches} == {len(ranks[0])}
        for step in zip(*batches, strict=True):
            real = sum(int(batch.segment.length.sum()) for batch in step)
            assert [batch.n_target for batch in step] == [real] * world_size and real > 0
        tokens = order_read(batches)
        assert sorted(tokens) == list(range(1, 302))
        passes.append(tokens)
    assert passes[0] != passes[1] and passes[0] != sorted(passes[0])
    expected = [Shuffled(borders(301), seed=5, epoch=epoch).locate(np.arange(301)) + 1 for epoch in range(2)]
    assert passes == [tokens.tolist() for tokens in expected]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("std", [0.0, 3.0])
def test_going_on_anywhere_gives_the_same_batches(num_workers: int, std: float) -> None:
    keys = {"num_workers": num_workers, "segment_len_std": std}
    whole = shuffled(200, **keys)
    expected = [*whole, *whole, *whole]
    count = len(whole)
    for stop in (1, count - 1, count, count + 3, 2 * count):
        again = shuffled(200, **keys)
        again.load_state_dict({"position": [stop // count, stop % count]})
        seen = [*again, *again][: 3 * count - stop]
        assert seen and all(same(a, b) for a, b in zip(seen, expected[stop:], strict=False))


def test_a_memory_mapped_file_is_shuffled_where_it_is(tmp_path: Path) -> None:
    np.arange(1, 1001, dtype="<u2").tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype="<u2", mode="r")
    keys: dict[str, Any] = {"segment_len": 7, "lanes": 4, "used_lanes": 4, "units": borders(1000), "seed": 5}
    for num_workers in (0, 2):
        batches = list(LaneLoader(mapped, num_workers=num_workers, **keys))
        assert all(same(a, b) for a, b in zip(batches, shuffled(1000), strict=True))


# segments of varying length


def test_lengths_are_spread_as_asked() -> None:
    lengths = np.diff(segment_borders(total=200_000, longest=100, std=5.0, seed=0, epoch=0))
    assert lengths.sum() == 200_000 and lengths.max() == 100
    assert np.sort(lengths)[1] >= 5  # one may be what was left
    halves = (lengths > 30) & (lengths < 70)
    assert 0.03 < halves.mean() < 0.07
    assert 45 < lengths[halves].mean() < 55 and 3 < lengths[halves].std() < 7
    assert 0.4 < (lengths[~halves] == 100).mean() < 0.6 and 96 < lengths[~halves].mean() < 99


def test_epochs_have_other_lengths_and_equally_many() -> None:
    def lengths(**keys: int) -> list[int]:
        return np.diff(segment_borders(total=3000, longest=40, std=8.0, **keys)).tolist()

    assert lengths(seed=1, epoch=0) != lengths(seed=1, epoch=1)
    assert sorted(lengths(seed=1, epoch=0)) == sorted(lengths(seed=1, epoch=1))
    assert sorted(lengths(seed=2, epoch=0)) != sorted(lengths(seed=1, epoch=0))
    assert lengths(seed=1111, epoch=3)[:12] == GOLDEN_LENGTHS


@pytest.mark.parametrize(("total", "longest", "std"), [(1, 1, 9.0), (3, 3, 1.0), (4, 64, 2.0), (501, 5, 100.0)])
def test_extreme_lengths_still_fill_the_lane(total: int, longest: int, std: float) -> None:
    lengths = np.diff(segment_borders(total=total, longest=longest, std=std, seed=0, epoch=0))
    assert lengths.sum() == total and lengths.min() >= 1 and lengths.max() <= longest


def test_varying_segments_keep_their_width_and_every_target() -> None:
    data = loader(500, segment_len=20, lanes=3, segment_len_std=4.0, seed=9)
    for epoch in range(2):
        batches = list(data)
        assert order_read([batches]) == list(range(1, 501))
        assert {batch.tokens_BT.shape for batch in batches} == {(3, 20)} and len(batches) == len(data)
        assert len({int(batch.segment.length.max()) for batch in batches}) > 3
        for index, batch in enumerate(batches):
            assert data.layout.lengths(index, epoch=epoch).tolist() == batch.segment.length.tolist()
    assert data.layout.lengths(len(data), epoch=0).tolist() == [0, 0, 0]
    assert data.next_position == Position(2, 0)


# from the configuration to the batches


def corpus(tmp_path: Path, *, files: int = 3) -> list[str]:
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(files):
        lines = [f"{number}: line {line} of {'many ' * (line % 7)}" for line in range(30)]
        (folder / f"{number}.txt").write_text("\n".join(lines) + "\n" * (number % 2))
    (tmp_path / "valid.txt").write_text("unseen\nlines\n" * 20)
    return ["data=text", f"data.train={folder}", f"data.valid={tmp_path / 'valid.txt'}"]


def read(config: Config) -> list[int]:
    batches = list(TextDataModule(config).train_dataloader())
    pairs = [pair for lane in read_back_bytes(batches) for pair in lane]
    return [pairs[0][0], *(target for _, target in pairs)]


def read_back_bytes(batches: list[Batch]) -> list[list[tuple[int, int]]]:
    """As `read_back`, where 0 may be a token."""
    lanes: list[list[tuple[int, int]]] = [[] for _ in batches[0].tokens_BT]
    for batch in batches:
        for lane, length in enumerate(batch.segment.length.tolist()):
            lanes[lane] += zip(batch.tokens_BT[lane, :length].tolist(), batch.targets_BT[lane].tolist(), strict=False)
    return lanes


def units(tokens: list[int], ends: set[int]) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[]]
    for token, following in itertools.zip_longest(tokens, tokens[1:]):
        found[-1].append(token)
        if token in ends and not (token == NEWLINE and following == END):
            found.append([])
    return [tuple(unit) for unit in found if unit]


@pytest.mark.parametrize(("unit", "ends"), [("document", {END}), ("line", {NEWLINE, END})])
def test_the_configured_unit_is_shuffled_in_training_only(unit: str, ends: set[int], tmp_path: Path) -> None:
    base = [*corpus(tmp_path), "data.batch_size=4", "data.segment_len=16"]
    ordered = load(base)
    mixed = load([*base, f"data.shuffle={unit}", "data.segment_len_std=3"])
    plain, first, second = read(ordered), read(mixed), read(dataclasses.replace(mixed, seed=2))
    assert sorted(units(plain, ends)) == sorted(units(first, ends)) == sorted(units(second, ends))
    assert not plain == first == second  # three documents may fall into place
    assert unit == "document" or (plain != first != second != plain)
    for split in ("valid", "train"):  # scores are of the text as it is
        loaders = [TextDataModule(config).eval_dataloader(split) for config in (ordered, mixed)]
        assert all(same(a, b) for a, b in zip(*loaders, strict=True))


@pytest.mark.parametrize(
    ("keys", "files", "rule"),
    [
        (["data.shuffle=document"], 1, "the training split is a single document: there is nothing to shuffle"),
        (["data.shuffle=lines"], 3, "no such choice"),
    ],
)
def test_what_cannot_be_shuffled_is_refused(keys: list[str], files: int, rule: str, tmp_path: Path) -> None:
    overrides = [*corpus(tmp_path, files=files), "data.batch_size=2", *keys]
    with pytest.raises(ConfigError) as caught:
        survey(load(overrides).data)
    assert caught.value.key == "data.shuffle" and caught.value.rule == rule


def test_vocabularies_say_where_units_end() -> None:
    words = WordVocab(["<eos>", "a", "b"], end="<eos>", unknown=None, lower=False, rule="")
    tokens = np.array([1, 0, 0, 2, 1, 0], dtype=np.uint8)
    assert units_of(tokens, words, unit="line").tolist() == [0, 2, 3, 6]
    some = SymbolVocab(b"\nab", unit="byte", rule="")
    assert units_of(tokens, some, unit="line").tolist() == [0, 2, 3, 6]
    for vocab, unit in [(words, "document"), (some, "document"), (SymbolVocab(b"ab", unit="char", rule=""), "line")]:
        with pytest.raises(ConfigError) as caught:
            units_of(tokens, vocab, unit=unit)
        rule = f"the vocabulary {vocab.name} of this corpus does not tell where a {unit} ends"
        assert (caught.value.key, caught.value.rule) == ("data.shuffle", rule)


@pytest.mark.parametrize(
    ("text", "borders"),
    [
        ("<S> a <S> <S> b b <S> <S> <S> <S> a <S>", [0, 3, 7, 9, 12]),  # markers on both sides, also of an empty one
        ("<S> a <S> b b <S> a <S>", [0, 1, 3, 6, 8]),  # shared by neighbours
        ("<S> a <S> <S> b b", [0, 3, 6]),
    ],
)
def test_sentences_keep_the_markers_on_both_sides(text: str, borders: list[int]) -> None:
    words = WordVocab(["<S>", "a", "b"], end="<S>", unknown=None, lower=False, rule="")
    tokens = np.array([words.ids[word] for word in text.split()], dtype=np.uint8)
    assert units_of(tokens, words, unit="line").tolist() == borders


def test_an_interrupted_run_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    keys = ["data.shuffle=line", "data.segment_len_std=4", "trainer.accumulate_grad_batches=2", "data.segment_len=64"]

    def run(steps: int, ckpt: Path | None, *more: str) -> list[float]:
        config, seen = tiny_config(tmp_path, *keys, *more), Losses()
        torch.manual_seed(0)
        trainer = build_trainer(config, callbacks=[seen, StopAt(steps)])
        trainer.fit(TransformerXLModule(config), TextDataModule(config), ckpt_path=ckpt, weights_only=True)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return seen.values

    whole = run(20, None)  # 20 optimizer steps of 2 segments; an epoch has about 16
    assert run(3, None) + run(11, tmp_path / "last.ckpt") + run(20, tmp_path / "last.ckpt") == whole
    assert run(20, None, "seed=5") != whole
