import random
import re

import pytest

from jaxloop.checkpoint import seal

ABOUT = {"author": {"name": "me", "likes": [1, 2.5, None]}}


@pytest.fixture
def directory(tmp_path):
    """A sealed directory with three files of random bytes, one of them empty, and a file that was left out."""
    for index, size in enumerate([1000, 0, 5_000_000]):  # The last is read in two chunks.
        path = tmp_path / f"{index}" / "deeper" / f"file{index}"
        path.parent.mkdir(parents=True)
        path.write_bytes(random.Random(index).randbytes(size))
    (tmp_path / "time.json").write_text("{}")
    seal.write(tmp_path, ABOUT, ["time.json"])
    (tmp_path / "time.json").write_text('{"time": 3}')
    return tmp_path


def test_an_unchanged_directory_has_no_problems(directory):
    (directory / "later").write_text("This came after the seal.")
    assert (directory / seal.NAME).exists() and seal.verify(directory) == (ABOUT, [])
    seal.write(directory)  # The old seal isn't part of the new one.
    assert seal.problems(directory) == []


def flip_a_bit(path, bit=None):
    data = bytearray(path.read_bytes())
    bit = len(data) * 4 if bit is None else bit
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "problem"),
    [
        ("0/deeper/file0", lambda path: path.unlink(), r"^0/deeper/file0 is missing$"),
        ("0/deeper/file0", lambda path: path.write_bytes(path.read_bytes()[:-1]), "has 999 bytes, but .* says 1000"),
        ("0/deeper/file0", lambda path: path.write_bytes(b""), "has 0 bytes, but the seal says 1000"),
        ("1/deeper/file1", lambda path: path.write_bytes(b"?"), "has 1 bytes, but the seal says 0"),
        ("2/deeper/file2", flip_a_bit, "has changed: its CRC-32 is [0-9a-f]{8}, but the seal says [0-9a-f]{8}"),
        ("0/deeper/file0", lambda path: [path.unlink(), path.mkdir()], "(has|can't be read)"),
        ("0/deeper/file0", lambda path: path.rename(path.parent / "a") and path.symlink_to("a"), "be read: .*link"),
        (seal.NAME, lambda path: path.unlink(), "SEAL, the file with the checksums, is missing"),
        (seal.NAME, lambda path: path.write_text("crc32 00000000\n" + "[" * 1_000_000), "its own checksum"),
        (seal.NAME, lambda path: path.write_bytes(b""), "SEAL, the file with the checksums, has changed"),
        (seal.NAME, lambda path: path.write_text(path.read_text().replace("1000", "1001")), "SEAL.* has changed"),
        (seal.NAME, lambda path: path.write_text(path.read_text().replace("2.5", "2.4")), "SEAL.* has changed"),
        (seal.NAME, lambda path: [path.unlink(), path.mkdir()], "SEAL.* can't be read"),
    ],
)
def test_each_damage_is_one_problem_that_names_the_file(directory, name, damage, problem):
    damage(directory / name)
    (found,) = seal.problems(directory)
    assert re.search(problem, found)


def test_problems_can_be_limited_to_a_path(directory):
    flip_a_bit(directory / "0/deeper/file0")
    flip_a_bit(directory / "2/deeper/file2")
    assert len(seal.problems(directory)) == 2
    assert [problem.split()[0] for problem in seal.problems(directory, "2")] == ["2/deeper/file2"]
    assert len(seal.problems(directory, "0/deeper/file0")) == 1
    assert seal.problems(directory, "1") == seal.problems(directory, "time.json") == []
    (directory / seal.NAME).unlink()
    assert len(seal.problems(directory, "1")) == 1  # The seal is always checked.
