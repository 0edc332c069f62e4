"""What `--log-kv` writes, replayed against plain lists, is what the pool, the tree and the sequences have then."""

from __future__ import annotations

import io
import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from radixlm.runtime.cache.page_pool import PagePool
from radixlm.runtime.cache.prefix_cache import PrefixCache
from radixlm.runtime.cache.radix_tree import RadixTree
from radixlm.runtime.cache.sequence import Sequence
from radixlm.runtime.cache.sparse_span import SparseSpan
from radixlm.runtime.engine.sampling_params import SamplingParams
from radixlm.runtime.engine.step.plan import SchedulerPolicy
from radixlm.runtime.errors import KVLogBroken, OutOfPages, SparseForkError
from radixlm.runtime.kv_log.log import KVLog
from radixlm.runtime.kv_log.replay import KVReplay
from radixlm.runtime.kv_log.replay import replay as replay_files

from ..fake_model import EOS, Bench


class Written(io.StringIO):
    """A file that outlives its end."""

    def close(self) -> None:
        pass


def lines_of(text: str) -> list[bytes]:
    return text.encode().splitlines(keepends=True)


def replay(written: Written, cache: PrefixCache) -> KVReplay:
    """The log, and that what it ends with is what the cache has."""
    replayed = KVReplay()
    replayed.run(lines_of(written.getvalue()))
    require_same(replayed, cache)
    return replayed


def require_same(replayed: KVReplay, cache: PrefixCache) -> None:
    assert replayed.owners.tree == set(cache.tree.page_ids())
    assert replayed.owners.num_free == cache.pool.num_free
    assert set(replayed.sequences) == {live.seq_id for live in cache.sequences}
    for seq_id, sequence in replayed.sequences.items():
        live = cache.sequences.get(seq_id)
        assert (sequence.length, sequence.computed, sequence.pages) == (
            len(live),
            live.num_computed,
            list(live.page_ids),
        )
        assert sequence.rows_of(sequence.computed) == live.num_rows
        assert sequence.is_private == (live.namespace is None)


@pytest.mark.parametrize("seed", range(2))
def test_the_log_of_an_engine_that_preempts_evicts_cancels_and_fails_replays(seed: int) -> None:
    chance, written = random.Random(seed), Written()
    policy = SchedulerPolicy(max_num_seqs=8, max_num_batched_tokens=40)
    bench = Bench(num_pages=18, policy=policy, kv_log=KVLog(written))

    def sometimes_fail(batch: object) -> None:
        if chance.random() < 0.02:
            raise ValueError("thrown on purpose")

    bench.model.before = sometimes_fail
    names = []
    for number in range(40):
        names.append(f"r{number}")
        ids = [*[chance.randrange(3)] * chance.randrange(40), *(chance.randrange(EOS) for _ in range(5))]
        params = SamplingParams(seed=number, max_tokens=chance.randrange(20, 60), ignore_eos=True)
        bench.add(names[-1], ids, params, None if chance.random() < 0.3 else b"")
        for _ in range(chance.randrange(6)):
            bench.step()
        if chance.random() < 0.2:
            bench.abort(chance.choice(names))
    replayed = replay(written, bench.cache)
    bench.run()
    replayed = replay(written, bench.cache)
    for event in ("open", "reserve", "commit", "drop", "append", "preempt", "resume", "close", "keep", "evict"):
        assert replayed.num_events[event] > 1, event


def test_pops_and_forks_replay() -> None:
    chance, written = random.Random(1), Written()
    cache = PrefixCache(PagePool(60), kv_log=KVLog(written))
    sequences = [cache.open(cache.match([1] * 40), context_length=100)]
    for _ in range(300):
        sequence = chance.choice(sequences)
        match chance.randrange(5):
            case 0 if sequence.num_uncomputed:
                with cache.begin() as transaction:
                    transaction.reserve(sequence, chance.randint(1, sequence.num_uncomputed))
                    if chance.random() < 0.8:
                        transaction.commit()
            case 1:
                sequence.append([chance.randrange(3)] * min(7, 100 - len(sequence)))
            case 2:
                sequence.pop(chance.randint(0, len(sequence)))
            case 3 if len(sequences) < 5:
                sequences.append(cache.fork(sequence, chance.randint(0, sequence.num_computed)))
            case 4 if len(sequences) > 1:
                sequences.remove(sequence)
                cache.close(sequence, keep=chance.random() < 0.5)
        cache.check()
    replayed = replay(written, cache)
    assert min(replayed.num_events[event] for event in ("pop", "fork", "append", "commit", "drop")) > 4


def test_pruned_sequences_replay() -> None:
    chance, written = random.Random(2), Written()
    cache = PrefixCache(PagePool(40), kv_log=KVLog(written))
    sequences: list[Sequence] = []
    num_popped = num_forked = 0
    for _ in range(1500):
        sequence = chance.choice(sequences) if sequences else None
        match chance.randrange(8):
            case 0 if len(sequences) < 5:
                match = cache.match([1] * chance.randint(2, 80))
                stop = chance.randint(1, len(match.prompt_ids) - 1)
                start = chance.randint(0, min(len(match.pages), (stop - 1) // 16)) * 16
                pruned = SparseSpan(start, chance.randint(1, stop - start), match.prompt_ids[:stop])
                with suppress(OutOfPages):
                    sequences.append(cache.open(match, sparse=pruned, context_length=120))
            case 1 if len(sequences) < 5:
                sequences.append(cache.open(cache.match([1] * chance.randint(2, 80)), context_length=120))
            case 2 | 3 if sequence is not None and sequence.num_uncomputed:
                with cache.begin() as transaction, suppress(OutOfPages):
                    transaction.reserve(sequence, chance.randint(1, sequence.num_uncomputed))
                    if chance.random() < 0.8:
                        transaction.commit()
            case 4 if sequence is not None:
                sequence.append([chance.randrange(2)] * min(7, 120 - len(sequence)))
            case 5 if sequence is not None:
                was_pruned = sequence.sparse is not None
                sequence.pop(chance.randint(0, min(40, len(sequence))))
                num_popped += was_pruned and sequence.sparse is None
            case 6 if sequence is not None and len(sequences) < 5:
                with suppress(SparseForkError):
                    sequences.append(cache.fork(sequence, chance.randint(0, sequence.num_computed)))
                    num_forked += sequences[-1].sparse is not None
            case 7 if sequence is not None and (kind := chance.random()) < 0.4:
                if kind < 0.2:
                    sequences.remove(sequence)
                    cache.close(sequence)
                else:
                    cache.preempt(sequence)
                    cache.resume(sequence)
        cache.check()
    replayed = replay(written, cache)
    assert min(replayed.num_events[event] for event in ("open_pruned", "commit", "drop", "preempt", "evict")) > 4
    assert min(num_popped, num_forked) > 2, (num_popped, num_forked)


def test_a_log_in_which_tainted_pages_are_shared_does_not_replay() -> None:
    written = Written()
    cache = PrefixCache(PagePool(8), kv_log=KVLog(written))
    match = cache.match([1] * 40)
    sequence = cache.open(match, sparse=SparseSpan(0, 10, (1,) * 30), context_length=64)
    with cache.begin() as transaction:
        transaction.reserve(sequence, 10)
        transaction.commit()
    replay(written, cache)
    lie = json.dumps({"event": "keep", "pages": [sequence.page_ids[0]]}).encode()
    with pytest.raises(KVLogBroken, match="computed over a pruned prefix can be found"):
        KVReplay().run([*lines_of(written.getvalue()), lie])


def test_a_log_in_which_private_pages_are_shared_does_not_replay() -> None:
    written = Written()
    bench = Bench(kv_log=KVLog(written))
    bench.add("off", [1] * 40, SamplingParams(seed=1, max_tokens=5), None)
    for _ in range(2):
        bench.step()
    replayed = replay(written, bench.cache)
    (sequence,) = replayed.sequences.values()
    assert sequence.is_private and len(sequence.pages) > 1
    lie = json.dumps({"event": "keep", "pages": sequence.pages[:1]}).encode()
    with pytest.raises(KVLogBroken, match="what is private can be found"):
        KVReplay().run([*lines_of(written.getvalue()), lie])


def test_a_log_that_lies_does_not_replay() -> None:
    """mlc-llm #2766 in one line: a length that the sequence does not have."""
    written = Written()
    bench = Bench(kv_log=KVLog(written))
    bench.add("a", [1] * 20, SamplingParams(seed=1, max_tokens=5))
    bench.run()
    for true, false in [('"length": [20, 21]', '"length": [19, 20]'), ('"computed": [0, 20]', '"computed": [0, 36]')]:
        lines = written.getvalue()
        assert true in lines
        number = lines[: lines.index(true)].count("\n") + 1
        with pytest.raises(KVLogBroken, match=rf"^log, line {number}: "):
            KVReplay().run(lines_of(lines.replace(true, false, 1)))


def test_starting_over_is_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    written = Written()
    bench = Bench(kv_log=KVLog(written))
    bench.add("a", [1] * 40, SamplingParams(seed=1, max_tokens=30, ignore_eos=True))
    insert = RadixTree.insert_after

    def broken(*args: Any, **kwargs: Any) -> None:
        insert(*args, **kwargs)
        monkeypatch.undo()
        raise ValueError("thrown on purpose")

    monkeypatch.setattr(RadixTree, "insert_after", broken)
    bench.run()
    bench.add("b", [1] * 40, SamplingParams(seed=1, max_tokens=3))
    bench.run()
    replay(written, bench.cache)


def test_a_log_that_cannot_be_written_ends_and_the_engine_does_not(tmp_path: Path) -> None:
    class Full(Written):
        def write(self, text: str) -> int:
            raise OSError("no space left on device")

    bench = Bench(kv_log=KVLog(Full()))
    bench.add("a", [1] * 20, SamplingParams(seed=1, max_tokens=5))
    bench.run()
    assert bench.tokens("a")
    with pytest.raises(OSError):
        KVLog.open(tmp_path / "nowhere" / "kv.jsonl")


def test_no_tokens_are_written(tmp_path: Path) -> None:
    log = KVLog.open(tmp_path / "kv.jsonl")
    bench = Bench(kv_log=log, vocab_size=5000)
    bench.add("a", [4321] * 20, SamplingParams(seed=1, max_tokens=2))
    bench.run()
    log.close()
    text = (tmp_path / "kv.jsonl").read_text()
    assert text.count("\n") > 5 and "4321" not in text


def test_every_line_has_a_time_and_those_of_a_sequence_the_request() -> None:
    written, now = Written(), 100.0
    bench = Bench(kv_log=KVLog(written, clock=lambda: now))
    for name, now in (("a", 101.5), ("b", 103.25)):  # noqa: B007 the clock's
        bench.add(name, [1] * 40, SamplingParams(seed=1, max_tokens=5, ignore_eos=True))
        bench.run()
    lines = [json.loads(line) for line in lines_of(written.getvalue())]
    assert all(line["time"] in (100.0, 101.5, 103.25) for line in lines)
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)
    assert {(line["request"], line["time"]) for line in lines if "seq" in line} == {("a", 101.5), ("b", 103.25)}
    assert {line["request"] for line in lines if "seq" not in line} == {None}


def talk(bench: Bench, seeds: range) -> None:
    for seed in seeds:
        params = SamplingParams(seed=seed, max_tokens=30, ignore_eos=True)
        bench.add(f"r{seed}", [seed % 3, *[1] * 40], params, None if seed % 5 == 0 else b"")
        for _ in range(20):
            bench.step()


def test_a_full_log_is_renamed_and_the_files_replay_in_order_and_the_last_one_alone(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    log = KVLog.open(path, max_bytes=8000)
    bench = Bench(num_pages=20, kv_log=log)
    talk(bench, range(6))
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names[:3] == ["kv.jsonl", "kv.jsonl.1", "kv.jsonl.2"]
    replayed = replay_files(path)
    assert replayed.num_files == len(names) and replayed.num_events["state"] > 1
    require_same(replayed, bench.cache)
    talk(bench, range(6, 30))
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["kv.jsonl", *(f"kv.jsonl.{number}" for number in range(1, 5))], "the oldest are gone"
    assert all(file.stat().st_size < 3 * 8000 for file in tmp_path.iterdir())
    require_same(replay_files(path), bench.cache)
    alone = path.rename(tmp_path / "alone")
    replayed = replay_files(alone)
    assert replayed.num_files == 1
    require_same(replayed, bench.cache)
    log.close()


def test_a_device_is_written_to_and_never_renamed(tmp_path: Path) -> None:
    """As /dev/stdout is: root could rename it, for every process of the machine."""
    path = tmp_path / "stdout"
    path.symlink_to("/dev/null")
    talk(Bench(num_pages=20, kv_log=KVLog.open(path, max_bytes=1000)), range(2))
    assert [file.name for file in tmp_path.iterdir()] == ["stdout"] and path.is_char_device()


def test_a_file_that_is_missing_between_two_others_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    bench = Bench(num_pages=20, kv_log=KVLog.open(path, max_bytes=8000))
    talk(bench, range(10))
    (tmp_path / "kv.jsonl.1").unlink()
    with pytest.raises(KVLogBroken, match=r"kv.jsonl, line 1: the (tree|sequences)"):
        replay_files(path)


def test_another_process_goes_on_in_the_file_behind_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    for number in range(2):
        bench = Bench(kv_log=KVLog.open(path))
        bench.add("a", [1] * 20, SamplingParams(seed=1, max_tokens=5))
        for _ in range(3):
            bench.step()
        with path.open("a") as file:
            file.write('{"time": 1, "eve')
        replayed = replay_files(path)
        assert replayed.num_events["begin"] == number + 1
        require_same(replayed, bench.cache)


def test_a_line_in_the_middle_that_cannot_be_read_is_the_first_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    log = KVLog.open(path)
    bench = Bench(kv_log=log)
    bench.add("a", [1] * 20, SamplingParams(seed=1, max_tokens=5))
    bench.run()
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    for number in (1, 4, len(lines)):
        for wrong in (b"\n", b"\xff\xfe\n", b'{"event": "leap"}\n', b'{"event": "pop", "seq": "x"}\n', b"[]\n"):
            path.write_bytes(b"".join([*lines[: number - 1], wrong, *lines[number:]]))
            with pytest.raises(KVLogBroken, match=rf"kv.jsonl, line {number}: "):
                replay_files(path)


def test_a_long_log_is_read_line_by_line() -> None:
    def lines() -> Iterator[bytes]:
        yield b'{"event": "begin", "num_pages": 100}\n'
        yield b'{"event": "open", "seq": 0, "length": [0, 9], "computed": [0, 0], "pages": []}\n'
        for number in range(20_000):
            event, before, after = ("append", 9, 10) if number % 2 == 0 else ("pop", 10, 9)
            line = {"event": event, "seq": 0, "length": [before, after], "computed": [0, 0], "request": f"r{number}"}
            yield json.dumps(line).encode() + b"\n"

    tracemalloc.start()
    try:
        replayed = KVReplay()
        replayed.run(lines())
        assert replayed.num_events.total() == 20_002
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "of the 2 MB that the lines have"
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("seed", range(3))
def test_a_number_that_is_changed_anywhere_is_never_a_mistake_of_the_replay(seed: int) -> None:
    """Whatever a log says, it replays or is broken: no other error comes."""
    chance, written = random.Random(seed), Written()
    bench = Bench(num_pages=18, kv_log=KVLog(written))
    talk(bench, range(4))
    text, num_broken = written.getvalue(), 0
    places = [place for place, letter in enumerate(text) if letter.isdigit()]
    for _ in range(60):
        place = chance.choice(places)
        try:
            KVReplay().run(lines_of(text[:place] + chance.choice("0123456789-") + text[place + 1 :]))
        except KVLogBroken:
            num_broken += 1
    assert num_broken > 10


def test_a_log_that_cannot_be_renamed_ends_and_the_engine_does_not(tmp_path: Path) -> None:
    path = tmp_path / "kv.jsonl"
    bench = Bench(kv_log=KVLog.open(path, max_bytes=2000))
    (tmp_path / "kv.jsonl.3").touch()
    (tmp_path / "kv.jsonl.4" / "in the way").mkdir(parents=True)
    talk(bench, range(3))
    assert bench.tokens("r1")
    assert replay_files(path).num_events["state"] == 0
